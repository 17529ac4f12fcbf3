"""Run every kind of pass once on a dummy batch, so that no request waits for a compiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import cast

import torch

from attn_core.cache.pool import IndexDtype, KVPool
from attn_core.errors import UsageError
from attn_core.ops.index import write_latents_and_index
from attn_core.plugins.registry import Registry
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.routes import ROLE_OF_MODE
from attn_core.runtime.warmup_linear import create_states, linear_passes, no_slots
from attn_core.runtime.warmup_ragged import MORE, distinct, ragged_passes, zeros
from attn_core.selection.result import Selection
from attn_core.spec.requirements import LayerRequirements, Requirements

# Every page of a dummy batch is page 0: it is nobody's, whatever is written there.
_LONGEST = 128  # tokens of the longest dummy request


@dataclass(frozen=True)
class Warmed:
    """One pass that was run: by which backend, what it was, and the seconds of its first run."""

    backend: str
    what: str
    seconds: float


@dataclass(frozen=True, eq=False)
class _Pass:
    backend: str
    what: str
    run: Callable[[], None]


def warmup(
    dispatcher: HybridDispatcher,
    *,
    max_bs: int = 1,
    index_heads: int | None = None,
    step: Callable[[str, str, int], None] = lambda backend, what, passes: None,
) -> list[Warmed]:
    """Run and time the passes that serving will run, so that their kernels are compiled.

    These are prefill with and without a prefix, a mixed batch, and decode of 1, 2, 4 … and max_bs
    requests, because plans and kernels are compiled by such sizes; verify and drafts if the
    dispatcher has backends for them; and attention without a cache for encoders, MLA and the vision
    tower. All except causal passes without a cache run at three lengths, because backends choose
    kernels by length. Linear layers run their prefill, decode, verify and commit. Layers of sparse
    MLA select and attend to what they selected. Passes over the cache run on the alternatives of
    the chosen backends, too. Layers that share a plan and its options run once. Only page 0 of the
    pool is written, and no state.
    index_heads: of the indexers of sparse MLA.
    step(backend, pass, number of passes) is called before each pass.
    Raises UsageError for sparse MLA without index_heads, and what the dispatcher raises;
    BackendRunError names the backend and the pass.
    """
    warmed = []
    selects = any(x.index_topk for x in dispatcher.routes["prefill"].config.layers)
    if selects and index_heads is None:
        raise UsageError("layers of sparse MLA select keys: give index_heads, of their indexers")
    first, *others = _fixed(dispatcher)
    passes = list(_passes(first, max_bs, index_heads or 0))
    for other in others:
        paged = partial(_paged, other, index_heads or 0)
        passes += _over_the_cache(other, paged, max_bs)
    with torch.no_grad():
        for one in passes:
            step(one.backend, one.what, len(passes))
            start = time.perf_counter()
            one.run()
            _wait(dispatcher.caches.device)
            warmed.append(Warmed(one.backend, one.what, time.perf_counter() - start))
    return warmed


def create(
    selection: Selection,
    requirements: Requirements,
    registry: Registry,
    device: torch.device,
    *,
    max_bs: int = 1,
) -> HybridDispatcher:
    """Create the selected backends over pools of a few pages and slots, only for a warm-up.

    Index keys are stored in the model's dtype. Raises UsageError if head dims, head counts or the
    indexer of sparse MLA are unknown, and what HybridDispatcher.from_selection raises.
    """
    needs = requirements.softmax_layers
    layers = [_layer(i, x, device) for i, x in enumerate(needs)]
    vision = [] if requirements.vision is None else [_layer(0, requirements.vision, device)]
    kind = needs[0].kind if needs else "mha"
    assert kind in ("mha", "mla", "dsa")  # the softmax kinds
    pool = KVPool(
        layers,
        num_pages={x.view: 2 for x in layers},
        page_size=selection.page_size or 1,
        kv_cache_dtype=selection.kv_cache_dtype,
        device=device,
        kind=kind,
        layout=selection.layout,
        index_dim=max((x.index_dim or 0 for x in needs), default=0),
        index_dtype=cast(IndexDtype, requirements.dtype),
        index_layers=[i for i, x in enumerate(needs) if not x.shares_topk],
    )
    linear, states = create_states(requirements, device)
    return HybridDispatcher.from_selection(
        selection,
        registry,
        layers,
        pool,
        vision_layers=vision,
        linear_layers=linear,
        states=states,
        max_bs=max_bs,
    )


def _layer(layer_id: int, needs: LayerRequirements, device: torch.device) -> AttentionLayer:
    d, heads, kv_heads = needs.head_dim, needs.num_q_heads, needs.num_kv_heads
    if d is None or heads is None:
        raise UsageError(
            f"head_dim {d}, num_q_heads {heads}: a warm-up runs kernels and must know both; name "
            "a model, or give --head-dim, --num-q-heads and --num-kv-heads"
        )
    indexer = (needs.index_topk, needs.index_heads, needs.index_dim)
    if needs.kind == "dsa" and not needs.shares_topk and None in indexer:
        raise UsageError(
            "index_topk {}, index_heads {}, index_dim {}: a warm-up of sparse MLA must know all "
            "three; name a model".format(*indexer)
        )
    return AttentionLayer(
        layer_id=layer_id,
        num_q_heads=heads,
        num_kv_heads=kv_heads or (1 if needs.kind in ("mla", "dsa") else heads),
        head_dim=d,
        v_head_dim=needs.v_head_dim or d,
        scale=d**-0.5,
        view="cross" if needs.cross else "full",
        logit_cap=needs.logit_cap,
        sliding_window=needs.sliding_window,
        sinks=torch.zeros(heads, dtype=torch.float32, device=device) if needs.sinks else None,
        is_causal=not needs.encoder,
        is_cross=needs.cross,
        dual_chunk=needs.dual_chunk,
        vertical_slash=None if not _sparse(needs) else ((1000, 1000),) * heads,
        index_topk=needs.index_topk,
    )


def _sparse(needs: LayerRequirements) -> bool:
    return needs.dual_chunk is not None and needs.dual_chunk.sparse_threshold is not None


def _fixed(dispatcher: HybridDispatcher) -> list[HybridDispatcher]:
    """Return dispatchers that pick nothing: of the chosen backends, then of the alternatives."""
    by_role = dispatcher.pickers.by_role
    most = max((len(p.backends) for p in by_role.values()), default=1)
    picked = [
        {role: p.backends[i] for role, p in by_role.items() if i < len(p.backends)}
        for i in range(1, most)
    ]
    return [
        HybridDispatcher(dispatcher.routes | routes, dispatcher.caches, dispatcher.linear)
        for routes in ({}, *picked)
    ]


def _passes(dispatcher: HybridDispatcher, max_bs: int, index_heads: int) -> Iterator[_Pass]:
    """Yield every pass, each by the mode that decides its backend."""
    if _cached(dispatcher.routes["prefill"].config.layers):
        paged = partial(_paged, dispatcher, index_heads)
        yield from _over_the_cache(dispatcher, paged, max_bs)
    yield from starmap(_Pass, ragged_passes(dispatcher, "prefill"))
    if "encode" in dispatcher.routes:
        yield from starmap(_Pass, ragged_passes(dispatcher, "encode"))
    if dispatcher.linear is not None:
        yield from starmap(_Pass, linear_passes(dispatcher.linear, max_bs))


def _over_the_cache(
    dispatcher: HybridDispatcher, paged: Callable[..., _Pass], max_bs: int
) -> Iterator[_Pass]:
    modes = ForwardMode
    if dispatcher.routes["prefill"].config.row.absorbed:
        yield paged("prefill", modes.EXTEND, (1, 100), (1, 100))
        yield paged("prefill over a prefix", modes.EXTEND, (3, 150), (90, 151))
        yield paged("mixed", modes.MIXED, (9, 1, 1), (9, 20, _LONGEST))
    for size in sorted({*(1 << i for i in range(max_bs.bit_length())), max_bs}):
        what = f"decode, batch size {size}"
        yield paged(what, modes.DECODE, (1,) * size, (_LONGEST,) * size)
    if "verify" in dispatcher.routes:
        config = dispatcher.routes["verify"].config
        n, topk = config.num_draft_tokens or 4, max(config.topk, 1)
        # a tree of topk branches, one level deep
        mask = torch.eye(n, dtype=torch.bool, device="cpu") | (torch.arange(n, device="cpu") == 0)
        device = dispatcher.caches.device
        tree = mask.expand(1, n, n).contiguous().to(device) if topk > 1 else None
        spec = SpecInfo(topk=topk, num_draft_tokens=n, tree_mask=tree)
        what = f"verify, {n} drafts"
        yield paged(what, modes.TARGET_VERIFY, (n,), (n + 60,), spec)
        yield paged("draft decode", modes.DRAFT_DECODE, (1,) * topk, (61,) * topk)
        yield paged("draft extend", modes.DRAFT_EXTEND, (1, 3), (18, 33))


def _paged(
    dispatcher: HybridDispatcher,
    index_heads: int,
    what: str,
    mode: ForwardMode,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    spec: SpecInfo | None = None,
) -> _Pass:
    """Return a pass over the cache, of every class of layers that has one, at several lengths."""
    backend, pool = dispatcher.backend(ROLE_OF_MODE[mode]), dispatcher.caches
    slots = None if dispatcher.linear is None else no_slots(len(query_lens), pool.device)

    def run() -> None:
        for extra in MORE:
            run_at([n + extra for n in seq_lens])

    def run_at(seq_lens: Sequence[int]) -> None:
        layers = _cached(backend.config.layers)
        columns = -(-max(*seq_lens, _LONGEST) // pool.page_size)
        table = torch.zeros(len(seq_lens), columns, dtype=torch.int32, device=pool.device)
        new = {"cross": [0] * len(seq_lens)}
        views = {
            x.view: CacheView.build(
                page_table=table,
                page_size=pool.page_size,
                seq_lens=seq_lens,
                new_lens=new.get(x.view, query_lens),
            )
            for x in layers
        }
        batch = ForwardBatch.build(
            mode,
            query_lens=query_lens,
            seq_lens=seq_lens,
            page_table=table,
            page_size=pool.page_size,
            spec=spec,
            views=views,
            state_slots=slots,
        )
        metadata = dispatcher.init_forward_metadata(batch)
        for layer in layers:
            tokens = batch.num_tokens, backend.config.dtype, pool.device
            q = zeros(*tokens, *layer.query_shape)
            k = v = None
            if not layer.is_cross:
                k = zeros(*tokens, layer.num_kv_heads, layer.head_dim)
            if k is not None and pool.layer(layer.layer_id).v is not None:
                v = zeros(*tokens, layer.num_kv_heads, layer.v_head_dim)
            chosen = None
            if layer.index_topk is not None:
                dim = pool.layer(layer.layer_id).index_keys[0].shape[-1]
                queries = zeros(*tokens, index_heads, dim)
                index = queries, zeros(*tokens, dim), queries[..., 0].float()
                chosen = dispatcher.index_topk(*index, layer, batch, metadata)
                at = batch.views[layer.view].out_cache_loc
                if k is not None and at is not None:  # as where index_topk is given both
                    write_latents_and_index(pool.layer(layer.layer_id), index[1], k, at)
            dispatcher.forward(q, k, v, layer, batch, metadata, topk_indices=chosen)

    return _Pass(backend.config.name, what, run)


def _cached(layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    return [x for x in distinct(layers) if x.is_causal or x.is_cross]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
