"""Launch Hopper's scores of a prompt's queries."""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_core.backends.triton.sparse.index_hopper import score_prompts_hopper
from attn_core.backends.triton.sparse.passes import SparsePass
from attn_core.backends.triton.sparse.scoring import IndexStrides, Scores
from attn_core.ops.triton.launcher import Launcher, MapOf

SCORED_KEYS = 256  # of a program
ROWS, MANY_ROWS = 64, 256  # queries that pass by them, where there are few programs and many
MANY_PROGRAMS = 1024
BYTES = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
PLAIN = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def scorer(
    keys: Tensor, scales: Tensor, strides: IndexStrides, heads: int, page_size: int, topk: int
) -> Launcher:
    """Return what scores over one cache."""
    last = (keys, scales, *strides, heads, page_size, topk)
    return Launcher(score_prompts_hopper, *last, num_warps=4)


def scores(inputs: SparsePass, scores: Tensor, first: int, count: int) -> Scores:
    """Return the launch of some queries."""
    columns = -(-inputs.longest // SCORED_KEYS)
    tiled = -(-count // MANY_ROWS) * columns >= MANY_PROGRAMS
    at_once = MANY_ROWS if tiled else ROWS
    numbers = (first, count, scores, scores.stride(0), at_once)
    return Scores((-(-count // at_once), columns, 1), inputs.arguments.between((), numbers))


def score(launcher: Launcher, launch: Scores, q_index: Tensor, weights: Tensor) -> None:
    """Launch it, for contiguous queries and weights."""
    tokens, heads, dim = q_index.shape
    of_q, of_w = (tokens * heads, dim), (tokens, heads)

    def tensors() -> tuple[TensorDescriptor, TensorDescriptor]:
        queries = q_index.view(tokens * heads, dim)
        return (
            TensorDescriptor(queries, [*of_q], [dim, 1], [heads, dim], BYTES),
            TensorDescriptor(weights, [*of_w], [heads, 1], [1, heads], PLAIN),
        )

    maps = (
        MapOf(q_index.data_ptr(), of_q, (dim, 1)),
        MapOf(weights.data_ptr(), of_w, (heads, 1)),
    )
    grid, arguments = launch
    launcher.launch(grid, (*maps, *arguments.addresses), tensors, arguments.values)
