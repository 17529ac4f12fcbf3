"""The rows of the support matrix: what a backend can do, as plain, torch-free data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from attn_core.spec.device import Device
from attn_core.spec.kinds import LINEAR_KINDS, SERVING, Family, GraphLevel, Kind, Phase

ANY_TOPK = 1 << 30  # a max_verify_topk that means: any tree of draft tokens


def _collect(record: object, name: str, make: Callable[[Any], object], expected: str) -> None:
    """Freeze a field that holds a collection; text would be taken apart letter by letter."""
    value = getattr(record, name)
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        object.__setattr__(record, name, make(value))
    except (TypeError, ValueError):
        raise TypeError(f"{name} {value!r} (expected {expected})") from None


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """One row of the support matrix. Everything in it holds at the same time.

    A limit that depends on another value (draft trees only with page size 1) is a second row. An
    empty set of archs, page_sizes, head_dims, q_heads or group_sizes means any. Sets may be passed
    as any iterable except text, which raises TypeError.

    requires_finite_padding: the kernels load whole tiles and multiply masked keys by 0, but 0 · NaN
    is NaN. The tails of last pages and the pages before the window must then hold finite numbers,
    and so must the next request's keys and values in a pass without a cache.
    """

    kind: Kind
    device: str  # a Device.type, or "any"
    dtypes: AbstractSet[str]
    kv_dtypes: AbstractSet[str]  # what the cache may store; for linear kinds the dtype of the state
    priority: int  # 30 default on this arch, 20 tuned, 10 portable, 5 by name or last, 0 reference
    archs: AbstractSet[str] = frozenset()
    min_runtime: str | None = None
    requires: Sequence[str] = ()  # distributions: "flash-attn-3 or sglang-kernel>=0.4"
    phases: AbstractSet[Phase] = SERVING
    kv_dtype_may_differ: bool = False  # a plain kv dtype may differ from the model's dtype
    page_sizes: AbstractSet[int] = frozenset()  # the kernel's; a pool page is a multiple
    max_page_size: int | None = None  # the largest pool page this row runs on
    preferred_page_size: int | None = None  # with its measured reason
    preferred_page_reason: str = ""
    layouts: AbstractSet[str] = frozenset({"NHD"})
    head_dims: AbstractSet[int] = frozenset()
    head_dim_pairs: AbstractSet[tuple[int, int]] | Literal["any"] = (
        frozenset()  # unequal (D, Dv); any: two of head_dims
    )
    q_heads: AbstractSet[int] = frozenset()
    group_sizes: AbstractSet[int] = frozenset()  # q heads per kv head
    sliding_window: bool = False  # of causal self-attention: no row windows another
    logit_cap: bool = False
    sinks: bool = False
    cross_attention: bool = False
    encoder: bool = False  # bidirectional layers without a cache, ragged
    dual_chunk: bool | None = False  # True only layers of dual chunk attention, None either
    sparse_prefill: bool = False  # dual chunk attention's prompts beyond its sparse_threshold
    absorbed: bool = True  # MLA over its latent cache; False: ragged prefill and its chunks alone
    chunked_prefix: bool = False  # MLA: prefix in chunks, merged by LSE
    max_verify_topk: int = 0  # verifies and drafts: 0 no, 1 chains, ANY_TOPK any tree
    max_session_topk: int | None = None  # largest topk of a run in which this row serves any phase
    lse: bool = False
    deterministic: bool = False
    shared_prefix: bool = False  # decode and verify read keys that neighbouring requests share once
    cuda_graph: GraphLevel = "never"
    with_linear_layers: bool | None = (
        None  # True only beside linear layers, False never, None either
    )
    needs_host_lengths: bool = False
    requires_finite_padding: bool = (
        False  # what lies beside a request's keys and values must be finite
    )
    fused_kv_write: bool = False  # the kernel writes new K/V itself
    quantizes_q_to_fp8: bool = (
        False  # with an FP8 store, queries and probabilities are rounded to it too
    )
    tensor_scales: bool = False  # k_scale and v_scale of the cache may be tensors on the device
    separate_write_slots: bool = False  # linear: reads a state in one slot, writes it into another
    checkpoints: bool = False  # linear: extend also stores the state after chunks of 64 tokens
    bans: Mapping[str, str] = field(default_factory=dict, hash=False)  # other phase's name → why
    sub_backend: str = ""  # sparse MLA: the kernel that this row runs, by which a caller names it
    note: str = ""
    create: str | None = None  # "module:Class" that runs this row, None: the spec's

    def __post_init__(self) -> None:
        for name in _SETS:
            value = getattr(self, name)
            if type(value) is frozenset or (name == "head_dim_pairs" and value == "any"):
                continue
            _collect(self, name, frozenset, "a set")
        _collect(self, "requires", tuple, "a list")
        _collect(self, "bans", dict, "a mapping")

    @property
    def family(self) -> Family:
        return "linear" if self.kind in LINEAR_KINDS else "softmax"


_SETS = tuple(f.name for f in fields(Capabilities) if str(f.type).startswith("AbstractSet"))


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """A combination that rows declare, and that is known to fail or to answer wrongly.

    why: what goes wrong. source: where that is on record. The combination is met where all of the
    others hold; an empty one always does. libraries: distributions in bad versions
    ("acme-kernels>=2,<2.3"); a row that runs with another one of an any-of group is not meant.
    kinds, phases, archs, head_dims: as in rows; head_dims are those of Q and K.
    """

    why: str
    source: str
    libraries: Sequence[str] = ()
    kinds: AbstractSet[Kind] = frozenset()
    phases: AbstractSet[Phase] = frozenset(Phase)
    archs: AbstractSet[str] = frozenset()
    head_dims: AbstractSet[int] = frozenset()

    def __post_init__(self) -> None:
        _collect(self, "libraries", tuple, "a list")
        for name in ("kinds", "phases", "archs", "head_dims"):
            _collect(self, name, frozenset, "a set")


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """A declared backend: its name, its rows and the name of the class that runs it.

    create: "module:Class". It is imported when a backend is created, and called with a
    BackendConfig. A row may name its own class. A row without a class is declared but not
    implemented: it can be selected for a simulated device, and creating it raises
    BackendNotImplementedError.
    aliases: other documented names of the backend (for --mm-attention-backend).
    matrix_deviations: cell ("mha.fp8_kv") → why it differs from the documented matrix.
    refused_sub_backends: documented sub-backends of sparse MLA that no row runs → what to do.
    known_bad: combinations within its rows that are never selected.
    optional: distributions that it uses where they are installed, and no row requires.
    """

    name: str
    capabilities: Sequence[Capabilities]
    create: str | None = None
    aliases: Sequence[str] = ()
    matrix_deviations: Mapping[str, str] = field(default_factory=dict, hash=False)
    refused_sub_backends: Mapping[str, str] = field(default_factory=dict, hash=False)
    known_bad: Sequence[KnownBad] = ()
    optional: Sequence[str] = ()

    def __post_init__(self) -> None:
        _collect(self, "capabilities", tuple, "a list")
        _collect(self, "aliases", tuple, "a list")
        _collect(self, "known_bad", tuple, "a list")
        _collect(self, "optional", tuple, "a list")
        _collect(self, "matrix_deviations", dict, "a mapping")
        _collect(self, "refused_sub_backends", dict, "a mapping")

    def creator(self, row: Capabilities) -> str | None:
        """Return the "module:Class" that runs a row, or None if the row is not implemented."""
        return row.create or self.create

    @property
    def implemented(self) -> bool:
        """Whether any row can be created."""
        return any(self.creator(row) for row in self.capabilities)

    @property
    def family(self) -> Family:
        """ "softmax" or "linear": the two families of names."""
        return self.capabilities[0].family


def places(rows: Iterable[Capabilities]) -> str:
    """Name the devices that rows run on: "cuda:sm80, cuda:sm90"."""
    devices = {Device(r.device, arch) for r in rows for arch in r.archs or {""}}
    order = sorted(devices, key=lambda d: (d.type, len(d.arch or ""), d.arch or ""))
    return ", ".join(map(str, order))
