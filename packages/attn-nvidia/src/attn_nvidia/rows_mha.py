"""The rows of NVIDIA's backends for standard attention (MHA, GQA, MQA) and vision towers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from attn_core.capabilities import TREES, Capabilities, Phase

HALF: Final = frozenset({"fp16", "bf16"})
E4M3: Final = frozenset({"fp8_e4m3"})
FP4: Final = frozenset({"fp4_e2m1"})
ENCODE: Final = frozenset({Phase.ENCODE})
EIGHTS: Final = frozenset(range(8, 257, 8))  # head dims of the CUTLASS-based kernels

AMPERE: Final = frozenset({"sm80", "sm86", "sm89"})  # Ada (sm89) runs Ampere's kernels
HOPPER: Final = frozenset({"sm90"})
# sm120 is no data-centre Blackwell: it has other instructions and other kernels, and lumping the
# two was filed as a bug of the documented system (SGLang issue 24633).
BLACKWELL: Final = frozenset({"sm100", "sm103", "sm110"})

FLASHINFER: Final = "flashinfer-python>=0.6.14"
SGL_KERNEL: Final = "sglang-kernel>=0.4"
# The sparse kernels of dual chunk attention left this library between 0.4.5 and 0.4.10.
SGL_KERNEL_SPARSE: Final = "sglang-kernel>=0.4,<=0.4.5"


def flashinfer() -> Sequence[Capabilities]:
    """Return FlashInfer's rows: the tuned backend of every CUDA architecture from sm80."""
    row = Capabilities(
        kind="mha",
        device="cuda",
        archs=AMPERE | HOPPER | {"sm120"},
        requires=[FLASHINFER],
        dtypes=HALF,
        kv_dtypes=HALF | {"fp8_e4m3", "fp8_e5m2"},
        priority=20,
        layouts={"NHD", "HND"},
        head_dims={64, 128, 256},
        sliding_window=True,
        logit_cap=True,
        encoder=True,
        max_topk=TREES,  # packed masks: trees at any page size
        lse=True,
        deterministic=True,
        cuda_graph="full",
        needs_host_lengths=True,
    )
    blackwell = replace(row, archs=BLACKWELL, beside_linear=False)
    # Windows and cross attention exclude each other: each needs the second wrapper.
    cross = [
        replace(r, sliding_window=False, cross_attention=True, priority=20)
        for r in (row, blackwell)
    ]
    vision = replace(  # cuDNN's attention, --mm-attention-backend flashinfer_cudnn
        row,
        archs=AMPERE | HOPPER | BLACKWELL | {"sm120"},
        requires=(FLASHINFER, "nvidia-cudnn-frontend"),
        phases=ENCODE,
        priority=5,
        head_dims=frozenset(range(8, 129, 8)),
    )
    return [row, blackwell, *cross, vision]


def fa3() -> Sequence[Capabilities]:
    """Return FlashAttention-3's rows: the default on Hopper, by name on Ampere and Ada."""
    row = Capabilities(
        kind="mha",
        device="cuda",
        archs=HOPPER,
        min_runtime="12.3",
        requires=[f"{SGL_KERNEL} or flash-attn-3"],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=30,
        head_dims=EIGHTS,
        head_dim_pairs={(192, 128)},
        sliding_window=True,
        logit_cap=True,
        cross_attention=True,
        encoder=True,
        max_topk=1,
        lse=True,
        deterministic=True,
        cuda_graph="full",
    )
    fp8 = replace(row, kv_dtypes=E4M3, head_dims=frozenset(range(16, 257, 16)))
    ampere = replace(
        row, archs=AMPERE, priority=5, head_dim_pairs=frozenset()
    )  # neither FP8 nor unequal head dims below sm90
    plain = (row, fp8, ampere)
    sinks = [replace(r, requires=(SGL_KERNEL,), sinks=True) for r in plain]  # only that build
    chains = [*plain, *sinks]
    trees = [replace(r, max_topk=TREES, max_page_size=1) for r in chains]
    vision = [replace(r, phases=ENCODE) for r in (row, ampere)]
    return [*chains, *trees, *vision]


def fa4() -> Sequence[Capabilities]:
    """Return FlashAttention-4's rows: by name on Hopper and Blackwell."""
    hopper = Capabilities(
        kind="mha",
        device="cuda",
        archs=HOPPER,
        requires=["flash-attn-4>=4.0.0b18"],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=5,
        page_sizes={128},
        head_dims=EIGHTS,
        head_dim_pairs={(192, 128)},
        sliding_window=True,
        logit_cap=True,
        sinks=True,
        cross_attention=True,
        encoder=True,
        lse=True,
        deterministic=True,
        cuda_graph="full",
        finite_tail=True,  # pages come by TMA, so 0 · NaN would leak from the tail
    )
    hopper_prefill = replace(hopper, phases=frozenset({Phase.PREFILL}))
    hopper_decode = replace(
        hopper,
        phases=frozenset({Phase.DECODE}),
        note="FA4 decode on Hopper has no split-KV: at batch 1 against fa3 -10 % at 2k tokens, "
        "-18 % at 4k, -31 % at 8k, -49 % at 16k",
    )
    blackwell = replace(hopper, archs=BLACKWELL, head_dims=frozenset({*range(8, 129, 8), 256}))
    fp4 = [
        replace(
            row,
            kv_dtypes=FP4,
            phases=frozenset({Phase.PREFILL}),
            bans={"trtllm_mha": "an fa4 prefill over an FP4 cache cannot pair with trtllm_mha"},
            note="fa4 reads an FP4 cache in prefill only: name another decode backend",
        )
        for row in (hopper, blackwell)
    ]
    vision = [
        replace(hopper, phases=ENCODE, page_sizes=frozenset()),
        replace(blackwell, phases=ENCODE, page_sizes=frozenset(), archs=frozenset({"sm110"})),
        replace(  # the documented automatic choice on compute capability 10
            blackwell,
            phases=ENCODE,
            page_sizes=frozenset(),
            archs=frozenset({"sm100", "sm103"}),
            priority=30,
        ),
    ]
    return [hopper_prefill, hopper_decode, blackwell, *fp4, *vision]


def trtllm_mha() -> Sequence[Capabilities]:
    """Return the rows of TensorRT-LLM's kernels: default on Blackwell, decode by name elsewhere."""
    gen = Capabilities(
        kind="mha",
        device="cuda",
        archs=BLACKWELL,
        min_runtime="12.8",
        requires=[FLASHINFER],
        dtypes=HALF,
        kv_dtypes=HALF | E4M3 | FP4,
        priority=30,
        page_sizes={16, 32, 64},
        layouts={"NHD", "HND"},
        head_dims={64, 128, 256},
        sliding_window=True,
        sinks=True,
        max_topk=1,  # verifies by causal masking only
        run_topk=1,
        lse=True,
        cuda_graph="full",
    )
    xqa = replace(
        gen,
        archs=HOPPER,
        min_runtime=None,
        kv_dtypes=HALF | E4M3,
        priority=5,
        phases=frozenset({Phase.DECODE}),
        preferred_page_size=64,
        preferred_page_reason="XQA is 1.17 times slower at page 16 than at 64 (H200)",
        head_dims=frozenset(range(16, 257, 16)),
        lse=False,
    )
    # XQA reads an FP4 cache on sm120 only.
    sm120 = replace(
        xqa, archs=frozenset({"sm120"}), min_runtime="12.8", kv_dtypes=HALF | E4M3 | FP4
    )
    return [gen, xqa, sm120]


def dual_chunk_flash_attn() -> Sequence[Capabilities]:
    """Return the row of dual chunk attention: for models that make five queries per head."""
    return [
        Capabilities(
            kind="mha",
            device="cuda",
            archs=AMPERE | HOPPER,
            requires=[SGL_KERNEL_SPARSE],
            dtypes=HALF,
            kv_dtypes=HALF,
            priority=-1,  # below the reference: wrong for any other model, so only by name
            head_dims={128},
            run_topk=0,
            note="for models trained with dual chunk attention, such as Qwen2.5-1M, only",
        )
    ]
