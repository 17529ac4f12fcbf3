"""Launch parameters of decode over FP4 stores."""

from __future__ import annotations

from dataclasses import replace

from attn_core.backends.triton.launch import Launch


def of_fp4(launch: Launch, arch: str, head_dim: int, v_dim: int, *, tree: bool) -> Launch:
    """Change the launch of 8-bit keys for FP4, which takes more registers: fewer programs fit.

    Those of sm90 are the fastest of 14 that were tried on an NVIDIA H100, each request on its own.
    tree: a block is masked by what is loaded.
    """
    if launch.block_m == launch.block_n:
        launch = replace(launch, block_n=64)  # of a square of scores each warp would read all keys
    if v_dim > 256:
        return replace(launch, ctas_per_sm=1)
    if arch == "sm90" and not tree and launch.block_m == 16 and head_dim == v_dim:
        if head_dim == 64:  # one warp takes all values of its keys, and waits for no other
            return replace(launch, block_n=64, warps=1, stages=3, ctas_per_sm=8)
        if head_dim in (128, 256):
            warps, programs = (2, 6) if head_dim == 128 else (4, 3)
            launch = replace(launch, block_n=64, warps=warps, stages=3)
            return replace(launch, ctas_per_sm=programs, max_registers=168)
    return replace(launch, ctas_per_sm=min(2, launch.ctas_per_sm))
