"""How a kernel is launched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one kernel is launched.

    block_m: rows of a tile, (query, head of the group) pairs.
    block_n: keys of a step.
    warps: of a program.
    stages: of the pipeline of its loads.
    ctas_per_sm: programs per multiprocessor, of kernels whose grid is the device's.
    min_blocks: the fewest blocks of keys that one of these programs takes.
    max_registers: of a thread; 0 leaves it to the compiler.
    ptx: whether the device has NVIDIA's instructions.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    ctas_per_sm: int = 1
    min_blocks: int = 1
    max_registers: int = 0
    ptx: bool = False
