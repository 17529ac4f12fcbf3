"""Random rows, plugins, devices and requirements for the properties of the selection."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from attn_core.plugins.hookspecs import hookimpl
from attn_core.spec.capabilities import ANY_TOPK, BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.spec.dual_chunk import DualChunk
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from hypothesis import strategies as st

DTYPES = ("bf16", "fp16")
TORCH_DTYPES = ("bf16", "fp16", "fp8_e4m3")
PAGES = (1, 16, 32, 64, 48)
LIBS = ("liba", "libb")


@dataclass
class FakePoint:
    """An entry point that hands out what it was given."""

    name: str
    plugin: Any
    dist: Any = None
    value: str = "fake"

    def load(self) -> Any:
        if isinstance(self.plugin, BaseException):
            raise self.plugin
        return self.plugin


@dataclass
class FakeDist:
    name: str
    version: str = "1.0"
    requires: list[str] | None = field(default_factory=lambda: ["attn-core==0.1.*"])


def plugin(specs: Any) -> Any:
    def attn_register_backends() -> Any:
        if isinstance(specs, BaseException):
            raise specs
        return specs

    return SimpleNamespace(attn_register_backends=hookimpl(attn_register_backends))


def point(name: str, specs: Any, requires: tuple[str, ...] = ("attn-core==0.1.*",)) -> FakePoint:
    return FakePoint(name, plugin(specs), FakeDist(name, requires=list(requires)))


def subsets(values: tuple[Any, ...], *, empty: bool = True) -> st.SearchStrategy[frozenset[Any]]:
    return st.frozensets(st.sampled_from(values), min_size=0 if empty else 1)


@st.composite
def rows(draw: st.DrawFn) -> Capabilities:
    store = draw(subsets(TORCH_DTYPES, empty=False))
    return Capabilities(
        kind=draw(st.sampled_from(("mha", "mha", "mla"))),
        device=draw(st.sampled_from(("any", "cuda", "acme"))),
        archs=draw(st.sampled_from((frozenset(), {"x1"}, {"x1", "x2"}))),
        min_runtime=draw(st.sampled_from((None, None, "2.0"))),
        requires=draw(st.sampled_from(((), (), ("liba>=2",), ("liba or libb>=1",)))),
        phases=draw(
            st.sampled_from(
                (
                    {Phase.PREFILL, Phase.DECODE},
                    {Phase.PREFILL, Phase.DECODE},
                    {Phase.PREFILL},
                    {Phase.DECODE},
                )
            )
        ),
        dtypes=draw(subsets(DTYPES, empty=False)),
        kv_dtypes=store,
        kv_dtype_may_differ=draw(st.booleans()),
        page_sizes=draw(subsets(PAGES)),
        max_page_size=draw(st.sampled_from((None, None, 1, 64))),
        layouts=draw(st.sampled_from(({"NHD"}, {"NHD", "HND"}, {"HND"}))),
        head_dims=draw(st.sampled_from((frozenset(), frozenset(), {64, 128}))),
        head_dim_pairs=draw(st.sampled_from((frozenset(), "any", {(192, 128)}))),
        q_heads=draw(st.sampled_from((frozenset(), frozenset(), {128}))),
        group_sizes=draw(st.sampled_from((frozenset(), frozenset(), {1, 4}))),
        sliding_window=draw(st.booleans()),
        logit_cap=draw(st.booleans()),
        sinks=draw(st.booleans()),
        cross_attention=draw(st.booleans()),
        encoder=draw(st.booleans()),
        dual_chunk=draw(st.sampled_from((False, None, True))),
        max_verify_topk=draw(st.sampled_from((0, 1, 4, ANY_TOPK))),
        max_session_topk=draw(st.sampled_from((None, None, 0, 1))),
        lse=draw(st.booleans()),
        deterministic=draw(st.booleans()),
        cuda_graph=draw(st.sampled_from(("never", "decode", "uniform", "always"))),
        with_linear_layers=draw(st.sampled_from((None, None, True, False))),
        bans=draw(st.sampled_from(({}, {}, {"b0": "they disagree"}))),
        priority=draw(st.integers(0, 3)) * 10,
    )


@st.composite
def linear_rows(draw: st.DrawFn) -> Capabilities:
    return Capabilities(
        kind="gdn",
        device=draw(st.sampled_from(("any", "cuda"))),
        dtypes=draw(subsets(DTYPES, empty=False)),
        kv_dtypes={"fp32"},
        phases=draw(st.sampled_from(({Phase.PREFILL, Phase.DECODE}, {Phase.DECODE}))),
        head_dims=draw(st.sampled_from((frozenset(), {128}))),
        max_verify_topk=draw(st.sampled_from((0, 1, ANY_TOPK))),
        priority=draw(st.integers(0, 3)) * 10,
    )


@st.composite
def specs(draw: st.DrawFn, name: str) -> BackendSpec:
    family = draw(st.sampled_from((rows(), rows(), rows(), linear_rows())))
    return BackendSpec(
        name=name,
        capabilities=draw(st.lists(family, min_size=1, max_size=3)),
        create=draw(st.sampled_from(("nowhere:Nothing",) * 3 + (None,))),
    )


@st.composite
def plugins(draw: st.DrawFn, minimum: int = 1) -> list[FakePoint]:
    count = draw(st.integers(minimum, 4))
    return [point(f"dist-{i}", [draw(specs(f"b{i}"))]) for i in range(count)]


layers = st.builds(
    LayerRequirements,
    kind=st.sampled_from(("mha", "mha", "mla")),
    head_dim=st.sampled_from((None, 64, 192)),
    v_head_dim=st.sampled_from((None, 64, 128)),
    num_q_heads=st.sampled_from((None, 32, 128)),
    num_kv_heads=st.sampled_from((None, 8, 32)),
    sliding_window=st.sampled_from((None, None, 128)),
    logit_cap=st.sampled_from((None, None, 30.0)),
    sinks=st.sampled_from((False, False, True)),
    cross=st.sampled_from((False, False, True)),
    encoder=st.sampled_from((False, False, True)),
)

chunked = st.builds(
    LayerRequirements,
    head_dim=st.sampled_from((None, 64)),
    dual_chunk=st.builds(DualChunk, st.sampled_from((40, 72)), st.just(8)),
)

requirements = st.builds(
    Requirements,
    layers=st.tuples(layers)
    | st.tuples(chunked)
    | st.tuples(layers, st.builds(LayerRequirements, kind=st.just("gdn"), head_dim=st.just(128)))
    | st.tuples(st.builds(LayerRequirements, kind=st.just("gdn"))),
    dtype=st.sampled_from(DTYPES),
    kv_cache_dtype=st.sampled_from(("auto", "auto", *TORCH_DTYPES)),
    page_size=st.sampled_from((None, None, *PAGES)),
    speculation=st.none()
    | st.builds(
        Speculation, topk=st.sampled_from((1, 4)), mode=st.sampled_from(("prefill", "decode"))
    ),
    lse=st.sampled_from((False, False, True)),
    deterministic=st.sampled_from((False, False, True)),
    graphs=st.sampled_from((False, False, True)),
)

devices = st.builds(
    Device,
    type=st.sampled_from(("cuda", "acme", "cpu")),
    arch=st.sampled_from(("x1", "x2")),
    runtime=st.sampled_from((None, "1.5", "2.5")),
)

libraries = st.dictionaries(st.sampled_from(LIBS), st.sampled_from((None, "1.0", "2.0")))
