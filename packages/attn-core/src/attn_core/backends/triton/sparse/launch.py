"""Launch the kernels of sparse MLA; nothing is read to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attn_core.backends.triton.sparse.attend import attend_selected
from attn_core.backends.triton.sparse.index import index_scores
from attn_core.backends.triton.sparse.scoring import Scoring
from attn_core.backends.triton.sparse.selecting import VECTOR, select, selecting
from attn_core.backends.triton.tuning import is_hopper, multiplies_e4m3, power_of_two
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.merge import merge_states
from attn_core.runtime.batch import CacheView
from attn_core.runtime.layer import AttentionLayer

MOST_SCORES = 1 << 26  # float32 numbers that exist at once: 256 MiB
FEWEST_KEYS = 128  # of a query that a program attends to, where they are cut
SPAN = 1024  # keys that pass by one query at most
PROGRAMS = 1024  # that score, at the least


class AttendConstants(NamedTuple):
    """What attend_selected is compiled for: latents of DV + DR columns, BM heads by BN keys.

    The strides are those of latents, of their rope parts and of FP8's scales. Compiled in, an odd
    one is known to be a multiple of what a load takes at once.
    """

    HEADS: int
    DV: int
    DR: int
    PAGE: int
    TOPK: int
    BM: int
    BN: int
    BDV: int
    BDR: int
    FP8: bool
    NATIVE: bool
    PAGE_STRIDE: int
    TOKEN_STRIDE: int
    ROPE_PAGE: int
    ROPE_TOKEN: int
    SCALES_PAGE: int
    SCALES_TOKEN: int


def index_topk(
    q_index: Tensor,
    weights: Tensor,
    cache: LayerCache,
    view: CacheView,
    cu_seqlens_q: Tensor,
    requests: Tensor,
    topk: int,
    *,
    queries: int,
    arch: str | None = None,
) -> Tensor:
    """Score and select, some queries at a time; see AttentionBackend.index_topk.

    requests: int32 [T], the request of each token. queries: the most that a request has. arch: of
    the device, as in BackendConfig.
    """
    tokens = q_index.shape[0]
    chosen = torch.empty(tokens, topk, dtype=torch.int32, device=q_index.device)
    scoring = Scoring.of(q_index, weights, cache, queries, arch)
    longest = view.max_seq_len
    columns = triton.cdiv(max(1, longest), 64) * 64  # whole cache lines
    rows = max(1, min(tokens, MOST_SCORES // columns))
    scores = torch.empty(
        (rows, columns) if longest > topk else (1, VECTOR),
        dtype=torch.float32,
        device=q_index.device,
    )
    passes = (view, cu_seqlens_q, requests)
    for first in range(0, tokens, rows):
        count = min(rows, tokens - first)
        if longest > topk:
            score(scoring, *passes, scores, first, count, topk)
        select(
            *(scores, first, count, *passes, chosen, selecting(queries)), page_size=cache.page_size
        )
    return chosen


def score(
    scoring: Scoring,
    view: CacheView,
    cu_seqlens_q: Tensor,
    requests: Tensor,
    scores: Tensor,
    first: int,
    count: int,
    topk: int,
) -> None:
    """Write the scores of some queries from `first` on into scores float32 [count, L].

    Of queries that see at most topk keys there are none.
    """
    x, constants = scoring, scoring.constants
    if x.on_hopper:
        from attn_core.backends.triton.sparse import hopper  # other chips may lack what it imports

        hopper.score(x, view, cu_seqlens_q, requests, scores, first, count, topk)
        return
    span = constants.BN
    if constants.BT == 1:  # as few as give every multiprocessor some programs
        span = max(span, min(SPAN, view.max_seq_len * count // PROGRAMS // span * span))
    table = view.page_table
    grid = (triton.cdiv(count, constants.BT), triton.cdiv(view.max_seq_len, span))
    index_scores[grid](
        x.q_index, *x.q_index.stride()[:2], x.weights, x.weights.stride(0), x.keys,
        x.keys if x.scales is None else x.scales, x.strides, table, table.stride(0),
        view.seq_lens, cu_seqlens_q, requests, count, first, scores, scores.stride(0), span,
        topk, constants, **x.options,
    )  # fmt: skip


def attend(
    q: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    topk_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    processors: int,
    arch: str | None = None,
) -> None:
    """Attend to the selected slots, into out [T, H, Dv] and lse float32 [T, H].

    processors: programs that run at once; the keys of a query are cut until there are as many. 0
    cuts in the same way for every number of queries. arch: of the device, as in BackendConfig.
    """
    tokens, heads, dim = q.shape
    v_dim, topk = layer.v_head_dim, topk_indices.shape[1]
    fp8 = cache.latent_dim > 0
    native = fp8 and multiplies_e4m3(arch)
    block_m, block_n, warps = _tile(heads, q.dtype, arch, fp8=fp8)
    blocks = triton.cdiv(heads, block_m)
    values, scales, rope = cache.latents if fp8 else (cache.k, cache.k, cache.k[..., v_dim:])
    constants = AttendConstants(
        *(heads, v_dim, dim - v_dim, cache.page_size, topk, block_m, block_n),
        *(power_of_two(v_dim), power_of_two(dim - v_dim), fp8, native),
        *(x.stride(axis) for x in (values, rope, scales) for axis in (0, 1)),
    )
    stored = values.view(torch.uint8) if fp8 and not native else values
    most = max(1, topk // FEWEST_KEYS)
    wanted = most if not processors else min(most, -(-2 * processors // max(1, tokens * blocks)))
    keys = triton.cdiv(triton.cdiv(topk, wanted), block_n) * block_n
    parts = triton.cdiv(topk, keys)
    partial, states = out[None], lse[None]
    if parts > 1:
        partial = torch.empty(parts, *out.shape, dtype=torch.float32, device=q.device)
        states = torch.empty(parts, *lse.shape, dtype=torch.float32, device=q.device)
    attend_selected[(tokens, blocks, parts)](
        q, *q.stride()[:2], stored, rope, scales,
        topk_indices, topk_indices.stride(0), keys, layer.scale,
        partial, *partial.stride()[:3], states, *states.stride()[:2], constants,
        num_warps=warps, num_stages=1 if q.dtype == torch.float32 else 2,
    )  # fmt: skip
    if parts > 1:
        merge_states(partial, states, into=(out, lse))


def _tile(heads: int, dtype: torch.dtype, arch: str | None, *, fp8: bool) -> tuple[int, int, int]:
    """Return heads and keys of a tile, and its warps."""
    if is_hopper(arch) and heads > 16 and dtype != torch.float32:  # fills its shared memory
        return 64, 64, 8
    wide = fp8 or dtype == torch.float32  # FP8's values too are float32 before they are multiplied
    return 16, 16 if wide else 32, 4
