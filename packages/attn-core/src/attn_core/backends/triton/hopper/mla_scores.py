"""The scores of absorbed MLA decode for Hopper: products of 576 columns, begun in two parts."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper


@gluon.jit
def begin_scores(queries, q_middle, latents, step, CONFIG: gl.constexpr):
    """Begin the products of the rotary and the middle columns of a block, when it is there."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    s = gl.full([64, 64], 0.0, gl.float32, S)
    latents.wait_full(step)
    if CONFIG.GATHERS:
        hopper.fence_async_shared()
    k_rope = latents.tile.rope.index(latents.stage(step)).permute((1, 0))
    k_middle = latents.tile.middle.index(latents.stage(step)).permute((1, 0))
    s = hopper.warpgroup_mma(queries.tile.rope.index(0), k_rope, s, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(q_middle, k_middle, s, is_async=True)


@gluon.jit
def add_scores(queries, q_low, latents, high, step, block, s, CONFIG: gl.constexpr):
    """Begin the products of the other columns; the high ones come last."""
    k_low = latents.tile.low.index(latents.stage(step)).permute((1, 0))
    s = hopper.warpgroup_mma(q_low, k_low, s, is_async=True)
    high.wait_full(block)
    if CONFIG.GATHERS:
        hopper.fence_async_shared()
    k_high = high.tile.index(high.stage(block)).permute((1, 0))
    return hopper.warpgroup_mma(queries.tile.high.index(0), k_high, s, is_async=True)
