"""Compile a kernel that overwrites what a product in flight reads; prints what is found.

Usage: python overwriting_kernel.py PLACE …, each "scratch": a change of layout takes the place of a
factor, "buffer": an allocation does, or "kept": the factors live until the wait.
"""

import json
import sys

import shared_memory
import torch
from build_kernels import StandIn, target_of
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime import driver

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def square(x, y, PLACE: gl.constexpr):
    """Write x · xᵀ [64, 64] and the sums of x's columns, in fp16."""
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    B: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
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


def main(places):
    """Compile for sm90, one place after the other; print what is found in each."""
    driver.set_active(StandIn(target_of("sm90")))
    x, result = torch.empty(64, 64, dtype=torch.float16, device="meta"), {}
    for place in places:
        kernel = square.run(x, x, place, grid=(1,), warmup=True, num_warps=4)
        result[place] = shared_memory.findings(kernel.asm["ttgir"])
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
