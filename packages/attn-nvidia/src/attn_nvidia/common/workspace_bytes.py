"""How much scratch memory each kernel library needs, in bytes: one formula each, with its source.

`processors` are the device's multiprocessors, heads those of this rank.
"""

from __future__ import annotations

from typing import Final

from attn_core import BackendConfig

MIB: Final = 1 << 20
SEMAPHORES: Final = 8 * MIB  # of XQA, at the front of its workspace
RECOMMENDED: Final = 128 * MIB  # what FlashInfer's documentation recommends for its wrappers


def multiprocessors(config: BackendConfig) -> int:
    """Return the multiprocessors of the device; off CUDA those of an H200, for emulations."""
    return config.multiprocessors or 132


def flashinfer(
    processors: int, num_q_heads: int, num_kv_heads: int, v_head_dim: int, *, tile: int = 128
) -> int:
    """Return the float workspace of FlashInfer's fa2 wrappers, at least what it recommends.

    tile: query rows of a block, 16 where only decode is planned. Splitting KV takes an output and
    an LSE in float32 per query head, row of a tile and part; a plan that splits fills at most one
    wave of 2 · processors / num_kv_heads parts (PrefillPlan and DecodePlan in
    attention/scheduler.cuh of flashinfer 0.6.14). It does not bound a fixed split size, whose
    parts grow with the lengths.
    """
    parts = 2 * processors // num_kv_heads
    return max(RECOMMENDED, num_q_heads * tile * parts * (v_head_dim + 1) * 4 + 2 * 16)


def flashinfer_mla(processors: int) -> int:
    """Return the float workspace of FlashInfer's MLA wrapper, at least what it recommends.

    Twice per processor and 64 rows: a partial output of 512 values in 16 bits and its LSE in
    float32 (MLAPlan in attention/scheduler.cuh of flashinfer 0.6.14).
    """
    return max(RECOMMENDED, 2 * processors * 64 * (512 * 2 + 4) + 2 * 16)


def xqa(processors: int, group: int, head_dim: int, q_len: int = 1) -> int:
    """Return XQA's workspace: its semaphores, then the partial results of one wave.

    A wave is at most one block per processor and tile of 32 rows; there are q_len · group rows. A
    row holds its output in 16 bits, head_dim padded to 64, 128 or 256, its maximum and its sum in
    float32. Two tiles more are room for alignment (launchMHAFlashInfer and the segments of
    csrc/xqa/mha.cu, ScratchMem of csrc/xqa/mha_sm90.cu in flashinfer 0.6.14).
    """
    tiles = -(-q_len * group // 32) + 2
    padded = next(d for d in (64, 128, 256) if d >= head_dim)
    return SEMAPHORES + processors * tiles * 32 * (2 * padded + 16)


def trtllm_gen(processors: int, num_q_heads: int, v_head_dim: int, lse_rows: int = 0) -> int:
    """Return the workspace of trtllm-gen's attention: counters, LSE and one wave of partials.

    lse_rows: requests · longest query, rounded up to 256, where the LSE is asked for. 8 MiB of
    counters; 8 bytes per head and LSE row and a guard of 1 MiB; for one block of at most 128 rows
    per processor its output in 16 bits, maximum and sum in float32
    (csrc/trtllm_fmha_kernel_launcher.cu, trtllm/fmha/kernelParams.h in flashinfer 0.6.14).
    """
    lse = lse_rows * num_q_heads * 8 + MIB if lse_rows else 0
    return 8 * MIB + lse + processors * 128 * (v_head_dim * 2 + 8) + 3 * 16
