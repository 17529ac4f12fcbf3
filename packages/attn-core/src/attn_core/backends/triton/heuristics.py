"""Launch parameters of the attention kernels: a pure function of shape and device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one kernel is launched.

    block_m: lines of a program, (query, head of the group) pairs. block_n: keys a step. warps,
    stages: of a program and of its loads. programs: how many run on one multiprocessor, of the
    kernels whose grid is the device's.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs: int = 1


def power_of_two(n: int, least: int = 16) -> int:
    """Return the smallest power of two that is no less than `n` and `least`."""
    return max(least, 1 << (n - 1).bit_length())


def head_parts(dim: int) -> tuple[int, int]:
    """Cut a head dim into two tiles, powers of two: 128 → (128, 0), 192 → (128, 64), 80 → (64, 16).

    A dim below 16, the least that a matrix instruction takes, is padded.
    """
    first = max(16, 1 << (dim.bit_length() - 1))
    return first, power_of_two(dim - first) if dim > first else 0


FEW_LINES = 128  # up to so many lines of a request, queries · group, its keys are split


def few(queries: int, group: int, *, latent: bool) -> bool:
    """Say whether `queries` of the longest request count as few: then its keys are split."""
    return queries <= 16 if latent else queries * group <= FEW_LINES


def decode_launch(arch: str, lines: int, head_dim: int, v_dim: int, store_bytes: int) -> Launch:
    """Choose for `decode_splits`: `lines` is queries · group of the longest request."""
    if v_dim > 256:  # the latent of MLA: its accumulator fills the registers
        if lines <= 16:
            return Launch(block_m=16, block_n=32, warps=4, stages=2, programs=2)
        return Launch(block_m=min(64, power_of_two(lines)), block_n=32, warps=8, stages=2)
    block_m = power_of_two(lines)
    if block_m >= 64:
        small = head_dim > 128
        return Launch(block_m=64, block_n=32 if small else 64, warps=4, stages=2, programs=2)
    if head_dim > 128:
        return Launch(block_m=block_m, block_n=32, warps=4, stages=2, programs=2)
    return Launch(block_m=block_m, block_n=64, warps=4, stages=3, programs=2)


def extend_launch(arch: str, head_dim: int, v_dim: int, store_bytes: int) -> Launch:
    """Choose for `extend_tiles`."""
    if v_dim > 256:
        return Launch(block_m=64, block_n=32, warps=8, stages=2)
    if max(head_dim, v_dim) > 128:
        return Launch(block_m=128, block_n=32, warps=8, stages=2)
    return Launch(block_m=128, block_n=64, warps=8, stages=3)
