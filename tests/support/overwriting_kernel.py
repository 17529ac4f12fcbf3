"""Compile kernels that overwrite what is still read; prints what is found.

Usage: python overwriting_kernel.py PLACE …, each one of square's or of copied's.
"""

import json
import sys

import shared_memory
import torch
from build_kernels import StandIn, target_of
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
SQUARE = ("scratch", "buffer", "kept")
S = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16))
B = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def square(x, y, PLACE: gl.constexpr):
    """Write x · xᵀ [64, 64] and the sums of x's columns, in fp16.

    PLACE: "scratch", a change of layout takes the place of a factor, "buffer", an allocation does,
    or "kept", the factors live until the wait.
    """
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    i = gl.arange(0, 64, gl.SliceLayout(1, B))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, B))[None, :]
    row = gl.load(x + i * 64 + j)
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], S)
    tile.store(row)
    hopper.fence_async_shared()
    barrier()
    zero = gl.zeros([64, 64], gl.float32, A)
    product = hopper.warpgroup_mma(tile, tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    if PLACE == "buffer":
        other = gl.allocate_shared_memory(gl.float16, [64, 64], S)
        other.store(row + 1)
        product = hopper.warpgroup_mma_wait(0, deps=[product])
        turned = other.load(A)
    else:
        turned = gl.convert_layout(row, A)
        product = hopper.warpgroup_mma_wait(0, deps=[product])
    barrier()
    if PLACE == "kept":
        tile._keep_alive()
    out = gl.convert_layout((product + turned).to(gl.float16), B)
    gl.store(y + i * 64 + j, out)


@gluon.jit
def fill(x_rows, tile, full, free, count):
    """Copy x into a tile `count` times, each time when it is free."""
    for step in range(count):
        mbarrier.wait(free, (step & 1) ^ 1)
        mbarrier.expect(full, 64 * 64 * 2)
        tma.async_copy_global_to_shared(x_rows, [0, 0], full, tile)


@gluon.jit
def read(y, tile, full, free, count, PLACE: gl.constexpr):
    """Write to y what each copy has brought."""
    i = gl.arange(0, 64, gl.SliceLayout(1, B))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, B))[None, :]
    for step in range(count):
        mbarrier.wait(full, step & 1)
        x = tile.load(B) * 2
        if PLACE == "stored":
            gl.store(y + i * 64 + j, x)
        if PLACE == "fenced" or (PLACE == "sometimes" and step > 0):
            hopper.fence_async_shared()
        mbarrier.arrive(free, count=1)
        if PLACE != "stored":
            gl.store(y + i * 64 + j, x)


@gluon.jit
def copied(x_rows, y, count, PLACE: gl.constexpr):
    """Write 2 · x [64, 64] in fp16, which TMA brings `count` times.

    PLACE: what is between a load and where its tile is given back, "nothing", "stored", a store
    that needs it, "fenced", a fence, or "sometimes", a fence that does not always run.
    """
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], S)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    gl.warp_specialize(
        [(read, (y, tile, full, free, count, PLACE)), (fill, (x_rows, tile, full, free, count))],
        [1],
        [40],
    )


def main(places):
    """Compile for sm90, one place after the other; print what is found in each."""
    driver.set_active(StandIn(target_of("sm90")))
    x, result = torch.empty(64, 64, dtype=torch.float16, device="meta"), {}
    x_rows = TensorDescriptor(x, [64, 64], [64, 1], [64, 64], S.value)
    for place in places:
        function, args = (square, (x, x)) if place in SQUARE else (copied, (x_rows, x, 9))
        kernel = function.run(*args, place, grid=(1,), warmup=True, num_warps=4)
        result[place] = shared_memory.findings(kernel.asm["ttgir"])
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
