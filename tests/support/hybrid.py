"""Pairs of backends over one shared cache: what is selected for them, and what is asked of it."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.errors import AttnError
from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.graphs import GraphRunner
from attn_core.selection.result import Overrides, Selection
from attn_core.selection.solver import select
from attn_core.spec.capabilities import ANY_TOPK
from attn_core.spec.device import Device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from attn_core.testing.case_catalog import random_tree
from attn_core.testing.cases import Case
from attn_core.testing.fuzz_session import DRAFTS, run_session
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.oracle import attend_request, yardstick
from attn_core.testing.server import WINDOW, Server
from attn_core.testing.tolerance import within_budget

VENDORS = ("flashinfer", "fa3", "fa4", "trtllm_mha")
PAIRS = {  # device type → kind, prefill, decode
    "cuda": (
        ("mha", "fa3", "flashinfer"),
        ("mha", "flashinfer", "fa3"),
        ("mha", "fa4", "trtllm_mha"),
        *(("mha", "triton", name) for name in VENDORS),
        *(("mha", name, "triton") for name in VENDORS),
        ("mla", "fa3", "flashmla"),
        ("mla", "triton", "flashmla"),
        ("mla", "flashmla", "triton"),
    ),
    "rocm": (
        ("mha", "aiter", "torch_native"),
        ("mha", "torch_native", "aiter"),
        ("mha", "wave", "aiter"),
        ("mha", "aiter", "triton"),
        ("mha", "triton", "aiter"),
        ("mla", "torch_native", "aiter"),
        ("mla", "triton", "aiter"),
    ),
    "npu": (
        ("mha", "ascend", "torch_native"),
        ("mha", "torch_native", "ascend"),
        ("mla", "torch_native", "ascend"),
    ),
    "xpu": (("mha", "intel_xpu", "torch_native"), ("mha", "torch_native", "intel_xpu")),
    "cpu": (("mha", "torch_native", "flex_attention"), ("mha", "flex_attention", "torch_native")),
}
SPECULATIONS = ("plain", *itertools.product(("chain", "tree"), ("prefill", "decode")))
FEATURES = ("sliding_window", "logit_cap", "sinks")
SHAPES = {"mha": ((8, 2), (128, 128)), "mla": ((16, 1), (576, 512))}
DTYPE, PAGE = "bf16", 64
_CASES = {
    kind: Case(
        feature="hybrid",
        kind=kind,
        heads=heads,
        dims=dims,
        query_lens=(1,),
        seq_lens=(1,),
        mode=ForwardMode.DECODE,
    )
    for kind, (heads, dims) in SHAPES.items()
}


@dataclass(frozen=True, kw_only=True)
class Hybrid(Bench):
    """What a pair was selected to: `row` is what both can do, the dispatcher the selection's.

    Where a check asks a Bench for its dispatcher, both backends serve one pool.
    """

    selection: Selection

    def dispatcher(self, layers, pool, **limits) -> HybridDispatcher:
        """Create the selected backends over a pool."""
        registry = load_plugins()
        for requested in ("dtype", "topk", "num_draft_tokens"):  # of the selection
            limits.pop(requested)
        made = HybridDispatcher.from_selection(self.selection, registry, layers, pool, **limits)
        names = {role: backend.config.name for role, backend in made.routes.items()}
        chosen = self.selection
        assert (names["prefill"], names["decode"]) == (
            chosen.backend("prefill"),
            chosen.backend("decode"),
        )
        return made

    @property
    def point(self) -> Point:
        """Where the pair runs: the pages and the layout that both take."""
        chosen = self.selection
        return Point(dtype=DTYPE, page_size=chosen.page_size, layout=chosen.layout or "NHD")

    @property
    def case(self) -> Case:
        return _CASES[self.row.kind]


def hybrids(device: Device, libraries: Libraries, on: torch.device) -> Iterator[object]:
    """Yield a pytest parameter per pair and speculation, those that nothing serves skipped.

    The id says what a case came to: the page size, and the features that both backends have.
    """
    registry = load_plugins()
    for (kind, prefill, decode), how in itertools.product(PAIRS[device.type], SPECULATIONS):
        name = f"{kind}-{prefill}-{decode}-{how if how == 'plain' else '-'.join(how)}"
        try:
            result = _selected(registry, device, libraries, on, kind, prefill, decode, how)
        except AttnError as error:
            why = str(error).splitlines()[0]
            yield pytest.param(None, id=name, marks=pytest.mark.skip(reason=f"{name}: {why}"))
            continue
        has = [f.split("_")[-1] for f in FEATURES if getattr(result.row, f)]
        yield pytest.param(result, id="-".join([name, f"page{result.point.page_size}", *has]))


def _selected(registry, device, libraries, on, kind, prefill, decode, how) -> Hybrid:
    """Select a pair on pages of PAGE where both take them, with the features that both have."""
    names = Overrides(prefill_attention_backend=prefill, decode_attention_backend=decode)
    two = {k: spec for k, spec in registry.backends.items() if spec.name in (prefill, decode)}
    registry = replace(registry, backends=two)

    def selection(features, page):
        needs = _needs(kind, features, page, how)
        return select(needs, device, registry, libraries, names, advise=False)

    features, page = set(), PAGE
    try:
        chosen = selection(features, page)
    except AttnError:
        chosen, page = selection(features, None), None
    for feature in FEATURES:
        with contextlib.suppress(AttnError):
            chosen = selection(features | {feature}, page)
            features.add(feature)
    rows = [choice.row for choice in chosen.roles.values()]
    speculates = {"plain": 0, "chain": 1, "tree": ANY_TOPK}[how if how == "plain" else how[0]]
    row = replace(
        chosen.roles["decode"].row,
        phases=frozenset({Phase.PREFILL, Phase.DECODE}),
        lse=all(r.lse for r in rows),
        requires_finite_padding=any(r.requires_finite_padding for r in rows),
        max_verify_topk=speculates,
        max_session_topk=None,
        **{f: f in features for f in FEATURES},
    )
    spec = registry.get(decode)
    return Hybrid(spec=spec, row=row, torch_device=on, arch=device.arch, selection=chosen)


def _needs(kind, features, page, how) -> Requirements:
    (hq, hkv), (d, dv) = SHAPES[kind]
    plain = LayerRequirements(
        kind=kind, head_dim=d, v_head_dim=dv, num_q_heads=hq, num_kv_heads=hkv
    )
    rich = replace(
        plain,
        sliding_window=WINDOW if "sliding_window" in features else None,
        logit_cap=8.0 if "logit_cap" in features else None,
        sinks="sinks" in features,
    )
    spec = None
    if how != "plain":
        topk = 2 if how[0] == "tree" else 1
        spec = Speculation(topk=topk, num_draft_tokens=DRAFTS, mode=how[1])
    return Requirements(layers=(plain, rich), dtype=DTYPE, page_size=page, speculation=spec)


def run_mixed_passes(hybrid: Hybrid, *, passes: int, seed: int = 0) -> None:
    """Drive a random session of mixed passes over the shared cache; each is the oracle's."""
    run_session(hybrid, hybrid.case, hybrid.point, DTYPE, passes=passes, seed=seed)


ROWS, LONGEST = 4, 200


def run_replays(hybrid: Hybrid) -> None:
    """Fill the cache by prefill, then decode eagerly and from one captured graph.

    With speculation the passes verify instead. Every pass runs both ways, and both are the
    oracle's. Rows of the batch come and go as padding.
    """
    verifies = hybrid.row.max_verify_topk > 0
    mode = ForwardMode.TARGET_VERIFY if verifies else ForwardMode.DECODE
    rng = random.Random(0)
    server = Server(
        hybrid,
        hybrid.case,
        hybrid.point,
        drafts=DRAFTS,
        max_bs=ROWS,
        longest=LONGEST,
        rng=rng,
    )
    serve = server.dispatcher
    backend = serve.routes["verify" if verifies else "decode"]
    if backend not in serve.captured or (verifies and backend.config.row.cuda_graph == "decode"):
        pytest.skip(f"{mode.value} passes of this pair are not captured")
    new = DRAFTS if verifies else 1
    requests = [server.begin() for _ in range(ROWS)]
    step = server.prepare(ForwardMode.EXTEND, requests, [37, 64, 1, 100], trees=None, padding=0)
    _eager(server, step)
    runner = GraphRunner(serve, batch_sizes=[1, ROWS], max_seq_len=LONGEST)

    def step_of(batch, metadata, *new):
        kwargs, outs = iter(new), []
        for layer in server.layers:
            q, k = next(kwargs), next(kwargs)
            v = None if latent else next(kwargs)
            outs.append(serve.forward(q, k, v, layer, batch, metadata))
        return outs

    latent = hybrid.row.kind == "mla"
    runner.capture(mode, step_of, inputs=_inputs(step))
    for number in (ROWS, ROWS - 1, 1, ROWS):
        some, trees = requests[-number:], None
        if verifies and hybrid.row.max_verify_topk > 1:
            trees = [random_tree(new, rng.randrange(1 << 30)) for _ in some]
        step = server.prepare(mode, some, [new] * number, trees=trees, padding=0)
        eager = _eager(server, step)
        for i, (plain, replayed) in enumerate(
            zip(eager, runner.replay(step.batch, *_inputs(step)), strict=True)
        ):
            truth, near = _right(server, step, i)
            for what, actual in (("eager", plain), ("replayed", replayed)):
                within_budget(
                    f"{what}, {number} requests, layer {i}", actual.cpu(),
                    truth, near, TORCH_DTYPES[DTYPE],
                )  # fmt: skip
        if verifies:
            for request in some:
                server.keep(request, new, [0])


def _inputs(step) -> list[torch.Tensor]:
    """Return what a step reads, layer by layer."""
    layers = zip(step.q, step.k, step.v, strict=True)
    return [x for layer in layers for x in layer if x is not None]


def _eager(server, step) -> list[torch.Tensor]:
    metadata = server.dispatcher.init_forward_metadata(step.batch)
    outs = []
    for i, layer in enumerate(server.layers):
        outs.append(
            server.dispatcher.forward(step.q[i], step.k[i], step.v[i], layer, step.batch, metadata)
        )
        server.record(step, i)
    return outs


def _right(server, step, index):
    """Return the oracle's output of the real tokens of a layer, and the yardstick beside it."""
    layer = server.layers[index]

    def solve(dtype, order=0):
        at, outs, lses = 0, [], []
        for b, (request, n) in enumerate(zip(step.requests, step.news, strict=True)):
            out, lse = attend_request(
                step.q[index][at : at + n].cpu(),
                request.keys[index],
                request.values[index],
                dtype=dtype,
                causal=True,
                scale=layer.scale,
                window=layer.sliding_window,
                parents=step.trees[b] if step.trees else None,
                logit_cap=layer.logit_cap,
                sinks=None if layer.sinks is None else layer.sinks.cpu(),
                order=order,
            )
            outs.append(out)
            lses.append(lse)
            at += n
        return torch.cat(outs), torch.cat(lses)

    truth = solve(torch.float64)
    return truth[0], yardstick(solve, TORCH_DTYPES[DTYPE], truth)[0]
