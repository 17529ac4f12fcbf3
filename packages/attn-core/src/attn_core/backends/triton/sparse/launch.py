"""Launch the kernels of sparse MLA; nothing is read to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_core.backends.triton.sparse.attend import attend_selected
from attn_core.backends.triton.sparse.passes import SparsePass
from attn_core.backends.triton.sparse.scoring import Scoring
from attn_core.backends.triton.sparse.selecting import VECTOR, select, selecting
from attn_core.backends.triton.tuning import is_hopper, multiplies_e4m3, power_of_two
from attn_core.cache.layer_cache import LayerCache, split_latents
from attn_core.ops.triton.launcher import Launcher, Pointers, alike, moved, pointers
from attn_core.ops.triton.merge import merge_states
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
    inputs: SparsePass,
    topk: int,
    *,
    arch: str | None = None,
) -> Tensor:
    """Score and select, some queries at a time; see AttentionBackend.index_topk.

    arch: of the device, as in BackendConfig.
    """
    tokens, longest, device = q_index.shape[0], inputs.longest, q_index.device
    chosen = torch.empty(tokens, topk, dtype=torch.int32, device=device)
    columns = -(-max(1, longest) // 64) * 64  # whole cache lines
    rows = max(1, min(tokens, MOST_SCORES // columns))
    shape = (rows, columns) if longest > topk else (1, VECTOR)
    scores = torch.empty(shape, dtype=torch.float32, device=device)
    how, page_size = selecting(inputs.queries), cache.page_size
    for first in range(0, tokens, rows):
        count = min(rows, tokens - first)
        if longest > topk:
            score(q_index, weights, cache, inputs, scores, first, count, topk, arch=arch)
        select(scores, first, count, inputs, chosen, how, page_size=page_size)
    return chosen


def score(
    q_index: Tensor,
    weights: Tensor,
    cache: LayerCache,
    inputs: SparsePass,
    scores: Tensor,
    first: int,
    count: int,
    topk: int,
    *,
    arch: str | None = None,
) -> None:
    """Write the scores of some queries from `first` on into scores float32 [count, L].

    Of queries that see at most topk keys there are none.
    """
    x = Scoring.of(q_index, weights, cache, inputs, scores, topk, arch)
    if x.bf16:
        q_index = q_index.to(torch.bfloat16)
    if x.on_hopper:
        from attn_core.backends.triton.sparse import hopper  # other chips may lack what it imports

        hopper.score(x, q_index, weights, inputs, scores, first, count)
        return
    span, columns = x.constants.BN, inputs.longest
    if x.constants.BT == 1:  # as few as give every multiprocessor some programs
        span = max(span, min(SPAN, columns * count // PROGRAMS // span * span))
    strides, shared = (*q_index.stride()[:2], weights.stride(0)), inputs.arguments
    row = scores.stride(0)
    x.launcher.launch(
        (-(-count // x.constants.BT), -(-columns // span), 1),
        (
            q_index.data_ptr(), *strides[:2], weights.data_ptr(), strides[2], *x.addresses,
            *shared.addresses, count, first, scores.data_ptr(), row, span,
        ),
        lambda: (
            q_index, *strides[:2], weights, strides[2], *x.keys,
            *shared.values, count, first, scores, row, span,
        ),
    )  # fmt: skip


class _Attending(NamedTuple):
    """attend_selected for queries and outputs of one form, over one cache at these pointers.

    latents: what it is given of these, their rope parts and scales; addresses: by address.
    """

    launcher: Launcher
    pointers: Pointers
    latents: tuple[Tensor, Tensor, Tensor]
    addresses: tuple[int, int, int]


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
    (tokens, heads, dim), v_dim = q.shape, layer.v_head_dim
    topk, row = topk_indices.shape[1], topk_indices.stride(0)
    block_m, block_n, _ = tile = _tile(heads, q.dtype, arch, fp8=cache.latent_dim > 0)
    blocks, most = -(-heads // block_m), max(1, topk // FEWEST_KEYS)
    wanted = most if not processors else min(most, -(-2 * processors // max(1, tokens * blocks)))
    keys = (topk + wanted - 1) // wanted
    keys = -(-keys // block_n) * block_n
    parts = -(-topk // keys)
    partial, states = out, lse
    of_out, of_states = (0, *out.stride()), (0, *lse.stride())
    if parts > 1:
        partial = torch.empty(parts, *out.shape, dtype=torch.float32, device=q.device)
        states = torch.empty(parts, *lse.shape, dtype=torch.float32, device=q.device)
        of_out, of_states = partial.stride(), states.stride()
    tensors = (q, topk_indices, partial, states)
    at_q, at_slots, at_out, at_states = places = [x.data_ptr() for x in tensors]
    token, head, _ = q.stride()
    key = (
        "attend", dim, v_dim, heads, topk, arch, token, head, row >> 31, of_out[0] >> 31,
        of_out[1:3], of_states[0] >> 31, of_states[1], *map(alike, tensors, places),
    )  # fmt: skip
    x = cache.launchers.get(key)
    if x is None or moved(x.pointers):
        x = cache.launchers[key] = _attending(q, layer, cache, topk, arch, tile)
    x.launcher.launch(
        (tokens, blocks, parts),
        (
            at_q, token, head, *x.addresses, at_slots, row, keys, layer.scale,
            at_out, *of_out[:3], at_states, *of_states[:2],
        ),
        lambda: (
            q, token, head, *x.latents, topk_indices, row, keys, layer.scale,
            partial, *of_out[:3], states, *of_states[:2],
        ),
    )  # fmt: skip
    if parts > 1:
        merge_states(partial, states, into=(out, lse))


def _attending(
    q: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    topk: int,
    arch: str | None,
    tile: tuple[int, int, int],
) -> _Attending:
    (_, heads, dim), v_dim = q.shape, layer.v_head_dim
    block_m, block_n, warps = tile
    fp8 = cache.latent_dim > 0
    native = fp8 and multiplies_e4m3(arch)
    if fp8:
        values, scales, rope = split_latents(cache.k, cache.latent_dim)
    else:
        values, scales, rope = cache.k, cache.k, cache.k[..., v_dim:]
    constants = AttendConstants(
        *(heads, v_dim, dim - v_dim, cache.page_size, topk, block_m, block_n),
        *(power_of_two(v_dim), power_of_two(dim - v_dim), fp8, native),
        *(x.stride(axis) for x in (values, rope, scales) for axis in (0, 1)),
    )
    stored = values.view(torch.uint8) if fp8 and not native else values
    stages = 1 if q.dtype == torch.float32 else 2
    launcher = Launcher(attend_selected, constants, num_warps=warps, num_stages=stages)
    addresses = (stored.data_ptr(), rope.data_ptr(), scales.data_ptr())
    return _Attending(launcher, pointers(cache.k), (stored, rope, scales), addresses)


def _tile(heads: int, dtype: torch.dtype, arch: str | None, *, fp8: bool) -> tuple[int, int, int]:
    """Return heads and keys of a tile, and its warps."""
    if is_hopper(arch) and heads > 16 and dtype != torch.float32:  # fills its shared memory
        return 64, 64, 8
    wide = fp8 or dtype == torch.float32  # FP8's values too are float32 before they are multiplied
    return 16, 16 if wide else 32, 4
