"""Launch the kernels of sparse MLA; nothing is read to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attn_core.backends.triton.sparse.attend import attend_selected
from attn_core.backends.triton.sparse.index import index_scores
from attn_core.backends.triton.sparse.topk import select_topk
from attn_core.backends.triton.tuning import power_of_two
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.merge import merge_states
from attn_core.runtime.batch import CacheView
from attn_core.runtime.layer import AttentionLayer

MOST_SCORES = 1 << 26  # float32 numbers that exist at once: 256 MiB
FEWEST_KEYS = 128  # of a query that a program attends to, where they are cut
KEYS, TOKENS = 128, 8  # that a program scores: keys, and queries of a prompt
_ROW = 4096  # scores of a row that a program looks at in turn


class IndexConstants(NamedTuple):
    """What index_scores is compiled for; names with B are padded, BT are tokens, BN keys."""

    HEADS: int
    D: int
    PAGE: int
    FP8: bool
    BT: int
    BN: int
    BH: int
    BD: int


class IndexStrides(NamedTuple):
    """Where the index keys of a page and of a token lie, and a page's scales."""

    page: int
    token: int
    scales_page: int


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
) -> Tensor:
    """Score and select, some queries at a time; see AttentionBackend.index_topk.

    requests: int32 [T], the request of each token. queries: the most that a request has.
    """
    if q_index.dtype is torch.float8_e4m3fn:
        q_index = q_index.to(torch.bfloat16)  # exact, and every chip multiplies it
    tokens, heads, dim = q_index.shape
    chosen = torch.empty(tokens, topk, dtype=torch.int32, device=q_index.device)
    keys, scales = cache.index_keys
    fp8, size, longest = scales is not None, cache.page_size, view.max_seq_len
    stored = keys.view(torch.uint8) if fp8 else keys
    page, token, _ = keys.stride()
    strides = IndexStrides(page, token, 0 if scales is None else scales.stride(0))
    block_n = KEYS if q_index.dtype.itemsize == 2 else KEYS // 8
    constants = IndexConstants(
        *(heads, dim, size, fp8, min(TOKENS, queries), block_n),
        *(power_of_two(heads), power_of_two(dim)),
    )
    table = view.page_table
    lengths = (view.seq_lens, cu_seqlens_q, requests)
    columns = max(1, longest)
    rows = max(1, min(tokens, MOST_SCORES // columns))
    scores = torch.empty(
        (rows, columns) if longest > topk else (1, 1), dtype=torch.float32, device=q_index.device
    )
    for first in range(0, tokens, rows):
        count = min(rows, tokens - first)
        if longest > topk:
            grid = (triton.cdiv(count, constants.BT), triton.cdiv(longest, block_n))
            index_scores[grid](
                q_index, *q_index.stride()[:2], weights, weights.stride(0), stored,
                stored if scales is None else scales, strides, table, table.stride(0), *lengths,
                count, first, scores, scores.stride(0), topk, constants,
                num_warps=4, num_stages=1,
            )  # fmt: skip
        select(scores, first, count, view, cu_seqlens_q, requests, chosen, page_size=size)
    return chosen


def select(
    scores: Tensor,
    first: int,
    count: int,
    view: CacheView,
    cu_seqlens_q: Tensor,
    requests: Tensor,
    chosen: Tensor,
    *,
    page_size: int,
) -> None:
    """Write the slots of the greatest scores of some queries into chosen int32 [T, K].

    scores: float32 [count, L], of the queries from `first` on; column t is the key at position t.
    What a query does not see is not read.
    """
    table, topk = view.page_table, chosen.shape[1]
    select_topk[(count,)](
        scores, scores.stride(0), table, table.stride(0), view.seq_lens, cu_seqlens_q, requests,
        first, chosen, topk, page_size, _ROW,
        min(1024, power_of_two(topk)), num_warps=8,
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
    block_m, block_n, warps = _tile(heads, q.dtype, arch, fp8=fp8)
    blocks = triton.cdiv(heads, block_m)
    values, scales, rope = cache.latents if fp8 else (cache.k, cache.k, cache.k[..., v_dim:])
    constants = AttendConstants(
        *(heads, v_dim, dim - v_dim, cache.page_size, topk, block_m, block_n),
        *(power_of_two(v_dim), power_of_two(dim - v_dim), fp8),
        *(x.stride(axis) for x in (values, rope, scales) for axis in (0, 1)),
    )
    most = max(1, topk // FEWEST_KEYS)
    wanted = most if not processors else min(most, -(-2 * processors // max(1, tokens * blocks)))
    keys = triton.cdiv(triton.cdiv(topk, wanted), block_n) * block_n
    parts = triton.cdiv(topk, keys)
    partial, states = out[None], lse[None]
    if parts > 1:
        partial = torch.empty(parts, *out.shape, dtype=torch.float32, device=q.device)
        states = torch.empty(parts, *lse.shape, dtype=torch.float32, device=q.device)
    attend_selected[(tokens, blocks, parts)](
        q, *q.stride()[:2], values.view(torch.uint8) if fp8 else values, rope, scales,
        topk_indices, topk_indices.stride(0), keys, layer.scale,
        partial, *partial.stride()[:3], states, *states.stride()[:2], constants,
        num_warps=warps, num_stages=1 if q.dtype == torch.float32 else 2,
    )  # fmt: skip
    if parts > 1:
        merge_states(partial, states, into=(out, lse))


def _tile(heads: int, dtype: torch.dtype, arch: str | None, *, fp8: bool) -> tuple[int, int, int]:
    """Return heads and keys of a tile, and its warps."""
    if fp8 or dtype == torch.float32:  # FP8's values too are float32 before they are multiplied
        return 16, 16, 4
    # 32 heads halve what is gathered; on sm80 and gfx942 their sums do not fit the registers
    return (32, 32, 8) if heads > 16 and arch == "sm90" else (16, 32, 4)
