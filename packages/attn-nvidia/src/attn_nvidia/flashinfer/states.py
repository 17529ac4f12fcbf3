"""Move states between a pool's slots and the dense tensors of kernels that take no slots."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # numbers of a program; a state [Hv, 128, 128] is a multiple


@triton.jit
def _copy(
    src, dst, reads, writes, fresh, src_stride, dst_stride,
    READS: tl.constexpr, WRITES: tl.constexpr, FRESH: tl.constexpr, CLEAR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read = tl.load(reads + row).to(tl.int64) if READS else row
    write = tl.load(writes + row).to(tl.int64) if WRITES else row
    wanted = (read >= 0) & (write >= 0)
    known = numbers >= 0
    if FRESH:
        new = tl.load(fresh + row) != 0
        known = known & (new == 0)
        if CLEAR:
            wanted = wanted & new
    if wanted:
        state = tl.load(src + read * src_stride + numbers, mask=known, other=0.0)
        tl.store(dst + write * dst_stride + numbers, state.to(dst.dtype.element_ty))


def _launch(
    src: Tensor, dst: Tensor, reads: Tensor | None, writes: Tensor | None, fresh: Tensor | None,
    *, clear: bool = False,
) -> None:  # fmt: skip
    """Copy states src[reads] to dst[writes], all in order where there are no slots.

    Where one of the slots is -1, nothing is read or written. clear: only fresh states are written.
    """
    rows = next(len(x) for x in (reads, writes, src) if x is not None)
    if not rows:
        return
    _copy[(rows, dst[0].numel() // _BLOCK)](
        src, dst, *(dst if x is None else x for x in (reads, writes, fresh)),
        src.stride(0), dst.stride(0),
        READS=reads is not None, WRITES=writes is not None, FRESH=fresh is not None, CLEAR=clear,
        BLOCK=_BLOCK,
    )  # fmt: skip


def load_states(pool: Tensor, slots: Tensor, fresh: Tensor | None) -> Tensor:
    """Return the states of slots, float32 [B, Hv, V, K]: 0 if fresh, any number if the slot is -1.

    pool: [slots, Hv, V, K]. slots: int32 [B]. fresh: bool [B] or None. Never syncs.
    """
    states = torch.empty(len(slots), *pool.shape[1:], dtype=torch.float32, device=pool.device)
    _launch(pool, states, slots, None, fresh)
    return states


def store_states(states: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Write states float32 [B, Hv, V, K] into slots, but for those of -1. Never syncs."""
    _launch(states, pool, None, slots, None)


def move_states(pool: Tensor, reads: Tensor, writes: Tensor, fresh: Tensor | None) -> None:
    """Copy states from slot to slot, int32 [B] each; fresh ones are cleared. Never syncs.

    No slot is written by one request and read by another.
    """
    _launch(pool, pool, reads, writes, fresh)


def clear_states(pool: Tensor, slots: Tensor, fresh: Tensor) -> None:
    """Clear the slots of fresh requests, and leave the others as they are. Never syncs."""
    _launch(pool, pool, slots, slots, fresh, clear=True)
