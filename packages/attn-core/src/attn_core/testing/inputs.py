"""The input tensors of a case, and the true contents of its cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.runtime.batch import CacheView, ForwardBatch, SpecInfo
from attn_core.runtime.graphs import without_host_lengths
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.kinds import LATENT_KINDS
from attn_core.testing.cases import Case, RaggedCase
from attn_core.testing.indexer import Indexer, draw_indexer
from attn_core.testing.oracle import tree_mask
from attn_core.testing.pools import (
    Placement,
    Side,
    fill,
    fill_latents,
    place,
    poison,
    poison_blocks,
    raw,
)
from attn_core.testing.strides import restrided

T = TypeVar("T")
MANY_KEYS = 1024


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a case is run: the dtype of its queries, its pages and their order and layout."""

    dtype: str
    page_size: int
    order: str = "shuffled"
    layout: str = "NHD"

    def __str__(self) -> str:
        extra = [x for x in (self.order, self.layout) if x not in ("shuffled", "NHD")]
        return "-".join([self.dtype, f"page{self.page_size}", *extra])


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What a backend gets, and per request the keys and values in its cache, in float64.

    k, v: the new tokens, None where there is nothing to write. after: what the cache must hold
    after the pass (`cache` itself, unless the kernel writes new tokens). indexer: of sparse MLA.
    """

    layer: AttentionLayer
    cache: LayerCache
    after: LayerCache
    batch: ForwardBatch
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    real_tokens: int  # the tokens after these are padding
    indexer: Indexer | None = None


def make_layer(
    case: Case | RaggedCase, rng: torch.Generator, *, scale_by: float = 1.0, cross: bool = False
) -> AttentionLayer:
    """Build the layer of a case; a chunk of a prefix is attended by a causal layer too."""
    (hq, hkv), (d, dv) = case.heads, case.dims
    causal = case.is_causal if isinstance(case, Case) else case.causal or case.kind in LATENT_KINDS
    keys = max(case.seq_lens if isinstance(case, Case) else case.key_lens, default=0)
    # beside so many keys a small sink is lost in the rounding to 16 bits
    weight = math.log(keys) if keys > MANY_KEYS else 0.0
    return AttentionLayer(
        layer_id=0,
        num_q_heads=hq,
        num_kv_heads=hkv,
        head_dim=d,
        v_head_dim=dv,
        scale=d**-0.5 * scale_by,
        view="cross" if cross else "full",
        logit_cap=case.logit_cap,
        sliding_window=case.window,
        sinks=torch.randn(hq, generator=rng) * 2 + weight if case.sinks else None,
        is_causal=causal,
        is_cross=cross,
        dual_chunk=case.dual_chunk if isinstance(case, Case) else None,
        vertical_slash=case.vertical_slash if isinstance(case, Case) else None,
        index_topk=case.index_topk or None if isinstance(case, Case) else None,
    )


def make_inputs(
    case: Case,
    point: Point,
    *,
    requires_finite_padding: bool = False,
    fused: bool = False,
    seed: int = 0,
) -> Inputs:
    """Draw the inputs of a case; every number of the pool that no query may read is poison.

    Where the pages lie is drawn apart, so that the numbers are the same on all of them.
    requires_finite_padding, fused (fused_kv_write): the row's flags. With `fused` the slots of new
    tokens hold poison until the backend writes them.
    """
    rng, places = (torch.Generator().manual_seed(seed + n) for n in (0, 1))
    dtype, page_size = TORCH_DTYPES[point.dtype], point.page_size
    cross = case.encoder_lens is not None
    owned = case.encoder_lens if case.encoder_lens is not None else case.seq_lens
    placed = place(owned, page_size, case.padding, point.order, places, seen_from=case.seen_from)
    stored = case.kv_dtype if case.kv_dtype != "auto" else point.dtype
    writes = fused and not cross and not case.shared_kv

    packed = case.kind == "dsa" and stored == "fp8_e4m3"

    def side(dim: int, scale: float) -> Side:
        if packed:
            return fill_latents(
                placed,
                page_size,
                case.dims,
                rng,
                requires_finite_padding=requires_finite_padding,
            )
        return fill(
            stored,
            placed,
            page_size,
            case.heads[1],
            dim,
            scale,
            rng,
            layout=point.layout,
            requires_finite_padding=requires_finite_padding,
            written_from=dtype if writes else None,
        )

    keys = side(case.dims[0], case.k_scale)
    values = side(case.dims[1], case.v_scale) if case.kind == "mha" else None
    of_v = case.tensor_scales and values is not None
    written = LayerCache(
        k=keys.pool,
        v=None if values is None else values.pool,
        k_scale=torch.tensor([case.k_scale]) if case.tensor_scales else case.k_scale,
        v_scale=torch.tensor([case.v_scale]) if of_v else case.v_scale,
        block_scales=None
        if keys.blocks is None
        else (keys.blocks, None if values is None else values.blocks),
        latent_dim=case.dims[1] if packed else 0,
        layout=point.layout,
    )
    indexer = None
    if case.index_topk:
        draw = torch.Generator().manual_seed(seed + 2)
        index, indexer = draw_indexer(case, placed, page_size, dtype, draw)
        written = dataclasses.replace(written, index=index)
    layer = make_layer(case, rng, scale_by=case.scale_by, cross=cross)
    batch = _batch(case, placed, page_size)
    truth_k = keys.truth
    truth_v = tuple(k[..., : case.dims[1]] for k in truth_k) if values is None else values.truth
    q = torch.randn(batch.num_tokens, *layer.query_shape, generator=rng).to(dtype)
    k = v = None
    if not cross and not case.shared_kv:
        k = _new_tokens(case, truth_k, batch.num_tokens, dtype)
        v = None if values is None else _new_tokens(case, truth_v, batch.num_tokens, dtype)
    rows = q.flatten(1, -2)  # the queries of dual chunk attention are heads of one projection
    rows, *others = restrided(case.strides, [x for x in (rows, k, v) if x is not None])
    q = rows.view(q.shape)
    k = None if k is None else others[0]
    v = None if v is None else others[1]
    return Inputs(
        layer=layer,
        cache=_before(written, stored, case, placed) if writes else written,
        after=written,
        batch=batch,
        q=q,
        k=k,
        v=v,
        keys=truth_k,
        values=truth_v,
        real_tokens=sum(case.query_lens),
        indexer=indexer,
    )


def _batch(case: Case, placed: Placement, page_size: int) -> ForwardBatch:
    n_pad = case.drafts or 1
    query_lens = [*case.query_lens, *[n_pad] * case.padding]
    seq_lens = [*case.seq_lens, *[n_pad] * case.padding]
    spec, full = None, placed.table
    if case.leftover_spec:
        spec = SpecInfo(topk=1, num_draft_tokens=4)
    views: dict[str, CacheView] = {}
    if case.drafts:
        mask = None
        if case.trees is not None:
            padded = [*case.trees, *[case.trees[0]] * case.padding]
            mask = torch.stack([tree_mask(parents) for parents in padded])
        spec = SpecInfo(topk=case.topk, num_draft_tokens=n_pad, tree_mask=mask)
    if case.encoder_lens is not None:
        none_new = [0] * len(case.encoder_lens)
        views["cross"] = CacheView.build(
            page_table=placed.table,
            page_size=page_size,
            seq_lens=case.encoder_lens,
            new_lens=none_new,
        )
        full = torch.zeros(len(seq_lens), -(-max(seq_lens) // page_size), dtype=torch.int32)
    batch = ForwardBatch.build(
        case.mode,
        query_lens=query_lens,
        seq_lens=seq_lens,
        page_table=full,
        page_size=page_size,
        spec=spec,
        views=views,
    )
    return without_host_lengths(batch) if case.device_lengths else batch


def _new_tokens(case: Case, truth: Sequence[Tensor], total: int, dtype: torch.dtype) -> Tensor:
    new = torch.cat([t[len(t) - n :] for t, n in zip(truth, case.query_lens, strict=True)])
    padding = new.new_zeros(total - new.shape[0], *new.shape[1:])
    return torch.cat([new, padding]).to(dtype)


def _before(written: LayerCache, stored: str, case: Case, placed: Placement) -> LayerCache:
    """Return the cache with poison where the new tokens of this pass belong."""
    unwritten = clone_cache(written)
    ends = [(p[-n:], o[-n:]) for (p, o), n in zip(placed.slots, case.query_lens, strict=True) if n]
    page, offset = (torch.cat(x) for x in zip(*ends, strict=True))
    for pool, blocks in (
        (unwritten.k, 0),
        (unwritten.v, 0),
        *((b, 1) for b in unwritten.block_scales or ()),
    ):
        if pool is None:
            continue
        tokens = pool.transpose(1, 2) if written.layout == "HND" else pool
        poison_value = (
            poison_blocks((1,), large=False) if blocks else poison(stored, (1,), large=False)
        )
        raw(tokens)[page, offset] = raw(poison_value)
    return unwritten


def clone_cache(cache: LayerCache) -> LayerCache:
    """Return a copy that a backend may write to."""
    return mapped(cache, torch.Tensor.clone)


def mapped(x: T, change: Any) -> T:
    """Return a dataclass, tuple or dict with every tensor in it, at any depth, changed."""
    new: Any = x
    if isinstance(x, Tensor):
        new = change(x)
    elif isinstance(x, tuple):
        new = tuple(mapped(y, change) for y in x)
    elif isinstance(x, dict):
        new = {k: mapped(y, change) for k, y in x.items()}
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = {f.name: mapped(getattr(x, f.name), change) for f in dataclasses.fields(x)}
        new = dataclasses.replace(x, **fields)
    typed: T = new
    return typed


def to_device(x: T, device: torch.device) -> T:
    """Return `x` with every tensor in it on the device; strides stay as they are."""
    return x if device.type == "cpu" else mapped(x, lambda t: _moved(t, device))


def _moved(t: Tensor, device: torch.device) -> Tensor:
    if t.is_contiguous():
        return t.to(device)
    elements = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    storage = torch.zeros(max(elements, 0), dtype=t.dtype, device=device)
    view = storage.as_strided(t.shape, t.stride())
    view.copy_(t)
    return view
