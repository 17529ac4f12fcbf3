"""Prefill's first kernel while the second runs: each finished chunk is announced to who waits.

The second kernel is a programmatic dependent launch, which begins when all programs of the first
one have begun. A program that waits thus waits for programs that run or are complete, and these
wait for nothing: there is no deadlock, however busy the device is.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_core.backends.triton.linear.hopper.prepare_gdn import prepare_item
from attn_core.backends.triton.linear.hopper.solve import barrier


@gluon.jit
def announce(ready, WAITING: gl.constexpr):
    """Say that what this program has written can be read, in `WAITING` numbers side by side."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, L)
    barrier()  # the writes of all warps come before
    one = gl.full([128], 1, gl.int32, L)
    gl.atomic_xchg(ready + i, one, mask=i < WAITING, sem="release", scope="gpu")


@gluon.jit
def acquired(ready):
    """Return a number; what was written before it was can be read from here on, also by TMA."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1]; fence.proxy.async.global;", "=r,l", [ready],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_ready(ready):
    """Wait until a chunk was announced."""
    announced = acquired(ready)
    while announced == 0:
        announced = acquired(ready)


@gluon.jit
def forget(work, ready, STRIDE: gl.constexpr, count):
    """Leave the numbers of all chunks of a request as the next layer wants to find them."""
    tl.extra.cuda.gdc_wait()  # all are announced: not each was waited for
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, L)
    zero = gl.full([128], 0, gl.int32, L)
    for j in range(0, count, 128):
        gl.store(ready + (j + i) * STRIDE, zero, mask=j + i < count)
    gl.store(work.taken, 0)


@gluon.jit(noinline=True)
def prepare_apart(c, hv, inputs, weights, numbers, chunks, work, C: gl.constexpr):
    """Do what prepare_item does: a loop around it would keep its addresses in registers."""
    prepare_item(c, hv, inputs, weights, numbers, chunks, work, C)


@gluon.jit
def stays(scans, processors):
    """Say whether a program prepares chunks, or leaves its multiprocessor to one that scans.

    The first program stays wherever it is, so that all chunks are prepared in any case.
    """
    here = gl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    taken = (here + 1) * scans // processors - here * scans // processors
    return (taken == 0) | (gl.program_id(0) == 0)


@gluon.jit(do_not_specialize=["num_chunks", "scans", "processors"])
def prepare_gdn_ahead(
    inputs, weights, numbers, chunks, work, num_chunks, scans, processors,
    WAITING: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Do what prepare_gdn_hopper does, the first chunks of all requests and heads first.

    Grid: as many programs as fit the device. scans: the programs of the scan. WAITING: of
    these, how many wait for a chunk and value head.
    """
    tl.extra.cuda.gdc_launch_dependents()
    num_items = num_chunks * C.HV
    item = num_items
    if stays(scans, processors):
        item = gl.atomic_add(work.taken, 1, sem="relaxed")
    while item < num_items:
        c = gl.load(chunks.turn + item // C.HV)
        hv = item % C.HV
        prepare_apart(c, hv, inputs, weights, numbers, chunks, work, C)
        announce(work.ready + (c * C.HV + hv) * WAITING, WAITING)
        item = gl.atomic_add(work.taken, 1, sem="relaxed")
