"""Launch parameters of the kernels of linear attention: a pure function of head dims and device.

No tile depends on the batch, so a request's result does not either. No kernel here is autotuned: a
trial run would update the states. The parameters are reasoned: compiled (tests/compiled), they
spill nothing at head dims of 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

FROM_SHARED = ("sm90", "sm100", "sm103")  # their matrix units read operands from shared memory


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one kernel is launched. rows: of a tile of the state [V, K]. warps, stages: as Triton's.

    A tile has at most `rows` rows of V, a power of two that divides V.
    """

    rows: int
    warps: int
    stages: int = 1


def _tile(rows: int, v_dim: int, k_dim: int, least: int = 8) -> int:
    """Return the rows of a tile, fewer where a row has more than 128 numbers."""
    return min(max(rows * 128 // max(128, k_dim), least), v_dim & -v_dim)


@cache
def decode_launch(arch: str, v_dim: int, k_dim: int, itemsize: int) -> Launch:
    """Choose for decode_states: one warp, which needs no barrier, with a tile of 4 KiB.

    itemsize: bytes of a number of the state.
    """
    return Launch(rows=_tile(32 // itemsize, v_dim, k_dim), warps=1)


@cache
def verify_launch(arch: str, v_dim: int, k_dim: int, drafts: int, *, per_channel: bool) -> Launch:
    """Choose for verify_gdn, or verify_kda: there keys of drafts take registers, and decays."""
    if per_channel:
        return Launch(
            rows=_tile(8 if drafts > 4 else 16, v_dim, k_dim), warps=2 if k_dim > 128 else 1
        )
    return Launch(rows=_tile(128 if drafts <= 16 else 32, v_dim, k_dim, 16), warps=4)


@cache
def commit_launch(arch: str, v_dim: int, k_dim: int) -> Launch:
    """Choose for commit_drafts."""
    return Launch(rows=_tile(16, v_dim, k_dim), warps=1)


@cache
def prepare_launch(arch: str, k_dim: int, *, per_channel: bool, wide: bool) -> Launch:
    """Choose for prepare_gdn, or prepare_kda: there `rows` are the key channels at a time.

    wide: tokens of float32, which take twice the registers.
    """
    if not arch.startswith("sm"):
        return Launch(rows=min(32, k_dim), warps=4)
    new = arch in FROM_SHARED
    if not per_channel:
        return Launch(rows=k_dim, warps=4 if new and not wide else 8)
    return Launch(rows=min(32 if new and not wide else 16, k_dim), warps=8)


@cache
def scan_launch(arch: str, v_dim: int, k_dim: int, *, wide: bool, alone: bool) -> Launch:
    """Choose for scan_chunks. wide: tokens of float32, which take twice the memory.

    Tiles of 64 rows use wgmma on a Hopper, with the state as an operand in registers.
    alone: no two programs share a multiprocessor, so that more chunks are loaded ahead.
    """
    if not arch.startswith("sm"):
        return Launch(rows=_tile(32, v_dim, k_dim, 16), warps=4)
    if wide:
        return Launch(rows=_tile(16, v_dim, k_dim, 16), warps=8)
    if arch == "sm90" and k_dim <= 128:
        return Launch(rows=_tile(64, v_dim, k_dim, 16), warps=4, stages=3 if alone else 2)
    return Launch(rows=_tile(32, v_dim, k_dim, 16), warps=8, stages=2)


def prepares_ahead(arch: str, scans: int, longest: int, processors: int) -> bool:
    """Say whether GDN's chunks are prepared while `scans` programs scan them.

    Each of these has a multiprocessor to itself, and at least as many prepare. longest: chunks of
    the longest request; few are not worth the programs that take them in turn.
    """
    return arch == "sm90" and 0 < 2 * scans <= processors and longest >= 16


def fuses(arch: str, chunks: int, longest: int, processors: int) -> bool:
    """Say whether one kernel prepares GDN's chunks and carries the states, one a multiprocessor.

    chunks: of all states. longest: of the state with the most. It pays where states alone keep a
    device busy, a chunk after the other.
    """
    return arch == "sm90" and 0 < 3 * processors * longest <= 4 * chunks
