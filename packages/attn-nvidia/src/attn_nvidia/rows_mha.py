"""The rows of NVIDIA's backends for standard attention (MHA, GQA, MQA) and vision towers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from attn_core import ANY_TOPK, Capabilities, Phase

HALF: Final = frozenset({"fp16", "bf16"})
E4M3: Final = frozenset({"fp8_e4m3"})
FP4: Final = frozenset({"fp4_e2m1"})
ENCODE: Final = frozenset({Phase.ENCODE})
EIGHTS: Final = frozenset(range(8, 257, 8))  # head dims of the CUTLASS-based kernels
SIXTEENS: Final = frozenset(range(16, 129, 16))

AMPERE: Final = frozenset({"sm80", "sm86", "sm89"})  # Ada (sm89) runs Ampere's kernels
HOPPER: Final = frozenset({"sm90"})
# sm120 is no data-centre Blackwell: it has other instructions and other kernels, and lumping the
# two was filed as a bug of the documented system (SGLang issue 24633).
BLACKWELL: Final = frozenset({"sm100", "sm103", "sm110"})

ROUNDED: Final = "over an FP8 cache its kernels take FP8 queries: they are rounded to e4m3"
# Its wrappers are planned again by fields that they keep inside, which 0.7 may name otherwise, and
# XQA is called beneath its public function; no row was tried with 0.7.
FLASHINFER: Final = "flashinfer-python>=0.6.14,<0.7"
SGL_KERNEL: Final = "sglang-kernel>=0.4"


def flashinfer() -> Sequence[Capabilities]:
    """Return FlashInfer's rows: the tuned backend of every CUDA architecture from sm80."""
    row = Capabilities(
        kind="mha",
        create="attn_nvidia.flashinfer.mha:FlashInfer",
        device="cuda",
        archs=AMPERE | {"sm120"},
        requires=[FLASHINFER],
        dtypes=HALF,
        kv_dtypes=HALF | {"fp8_e4m3", "fp8_e5m2"},
        priority=20,
        layouts={"NHD", "HND"},
        head_dims={64, 128, 256},
        sliding_window=True,
        logit_cap=True,
        cross_attention=True,
        encoder=True,
        max_verify_topk=ANY_TOPK,  # packed masks: trees at any page size
        lse=True,
        deterministic=True,
        cuda_graph="uniform",
        needs_host_lengths=True,  # plans are made on the host
    )
    # its ragged kernel loads V by TMA
    hopper = replace(row, archs=HOPPER, requires_finite_padding=True)
    blackwell = replace(row, archs=BLACKWELL, with_linear_layers=False)
    vision = Capabilities(  # cuDNN's attention, --mm-attention-backend flashinfer_cudnn
        kind="mha",
        create="attn_nvidia.flashinfer.vision:Cudnn",
        device="cuda",
        archs=AMPERE | HOPPER | BLACKWELL | {"sm120"},
        requires=(FLASHINFER, "nvidia-cudnn-frontend"),
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=5,
        phases=ENCODE,
        head_dims=frozenset(range(8, 129, 8)),
        encoder=True,
        requires_finite_padding=True,  # cuDNN masks the weights alone, not the tile of V
    )
    return [row, hopper, blackwell, vision]


def fa3() -> Sequence[Capabilities]:
    """Return FlashAttention-3's rows: the default on Hopper, by name on Ampere and Ada."""
    row = Capabilities(
        kind="mha",
        create="attn_nvidia.fa3.backend:FA3",
        device="cuda",
        archs=HOPPER,
        min_runtime="12.3",
        requires=[f"flash-attn-3 or {SGL_KERNEL}"],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=30,
        head_dims=EIGHTS,
        head_dim_pairs={(192, 128)},
        sliding_window=True,
        logit_cap=True,
        cross_attention=True,
        encoder=True,
        max_verify_topk=ANY_TOPK,  # the drafts of a tree are a second call, over pages of one token
        lse=True,
        deterministic=True,
        cuda_graph="uniform",
        requires_finite_padding=True,  # TMA reads whole pages: 0 · NaN would leak
    )
    # no unequal head dims below sm90
    ampere = replace(row, archs=AMPERE, priority=5, head_dim_pairs=frozenset())
    bf16 = frozenset({"bf16"})
    fp8 = replace(
        row,
        dtypes=bf16,  # what its FP8 kernels write
        kv_dtypes=E4M3,
        head_dims=frozenset(range(16, 257, 16)),
        quantizes_q_to_fp8=True,
        tensor_scales=True,
        note=ROUNDED,
    )
    # Only that build has sinks, as bf16 numbers, in shared memory for 64 heads; its kernels for
    # Ampere take them and do not read them.
    sinks = [
        replace(
            r,
            requires=(SGL_KERNEL,),
            dtypes=bf16,
            kv_dtypes=stores,
            sinks=True,
            q_heads=frozenset({1, 2, 4, 8, 16, 32, 64}),
        )
        for r, stores in ((row, bf16), (fp8, E4M3))
    ]
    vision = [replace(r, phases=ENCODE) for r in (row, ampere)]
    return [row, fp8, ampere, *sinks, *vision]


def fa4() -> Sequence[Capabilities]:
    """Return FlashAttention-4's rows: by name on Hopper and Blackwell.

    On Hopper a page is one tile of keys, loaded by TMA: 128 tokens, but 144 for head dims 80 and 96
    without causal order, and fewer for head dims above 128 and for 192/128 with a window. Head dims
    that are no multiple of 16 do not compile for every group of query heads.
    """
    row = Capabilities(
        kind="mha",
        create="attn_nvidia.fa4:FA4",
        device="cuda",
        archs=HOPPER,
        requires=["flash-attn-4==4.0.0b18"],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=5,
        page_sizes={128},
        head_dims=SIXTEENS,
        sliding_window=True,
        logit_cap=True,
        encoder=True,
        max_verify_topk=1,
        lse=True,
        deterministic=True,
        cuda_graph="uniform",
        requires_finite_padding=True,  # pages come by TMA, so 0 · NaN would leak from the tail
    )
    bf16 = frozenset({"bf16"})  # the one dtype that its sinks have
    hopper = [
        row,
        replace(row, dtypes=bf16, kv_dtypes=bf16, sinks=True),
        replace(
            row,
            head_dims=SIXTEENS - {80, 96},
            head_dim_pairs=frozenset({(192, 128)}),
            sliding_window=False,
            cross_attention=True,
        ),
    ]
    decode_note = (
        "FA4 decode on Hopper has no split-KV: at batch 1 against fa3 -10 % at 2k tokens, "
        "-18 % at 4k, -31 % at 8k, -49 % at 16k"
    )
    phases = [
        replace(r, phases=frozenset({phase}), note=note)
        for phase, note in ((Phase.PREFILL, ""), (Phase.DECODE, decode_note))
        for r in hopper
    ]
    blackwell = replace(
        row,
        archs=BLACKWELL,
        head_dim_pairs=frozenset({(192, 128)}),
        cross_attention=True,
    )
    blackwell_sinks = replace(blackwell, dtypes=bf16, kv_dtypes=bf16, sinks=True)
    vision = replace(row, phases=ENCODE, page_sizes=frozenset())
    encoders = []
    for archs, dims, priority in (
        (HOPPER, frozenset(range(16, 257, 16)), row.priority),
        ({"sm110"}, SIXTEENS, row.priority),
        ({"sm100", "sm103"}, SIXTEENS, 30),  # the documented automatic choice there
    ):
        fa4_vision = replace(vision, archs=frozenset(archs), priority=priority)
        eights = frozenset(range(8, 129, 8))
        encoders += [
            replace(fa4_vision, head_dims=dims),
            replace(fa4_vision, head_dims=eights, group_sizes=frozenset({1})),
        ]
    over_fp4 = [
        replace(
            r,
            create="attn_nvidia.dequantized:fa4",
            phases=frozenset({Phase.PREFILL}),
            kv_dtypes=FP4,
            needs_host_lengths=True,
            tensor_scales=True,
            cuda_graph="never",
            max_verify_topk=0,
            note="FA4 has no FP4 kernel: each layer of a prefill dequantises the pages of its pass",
        )
        for r in (*hopper, blackwell, blackwell_sinks)
    ]
    return [*phases, blackwell, blackwell_sinks, *over_fp4, *encoders]


def trtllm_mha() -> Sequence[Capabilities]:
    """Return the rows of TensorRT-LLM's kernels: default on Blackwell, decode by name elsewhere."""
    gen = Capabilities(
        kind="mha",
        create="attn_nvidia.trtllm.gen:TrtllmGen",
        device="cuda",
        archs=BLACKWELL,
        min_runtime="12.8",
        requires=[FLASHINFER],
        dtypes=HALF,
        kv_dtypes=HALF | E4M3,  # of FP4 it wants V's block scales interleaved by four tokens
        priority=30,
        page_sizes={16, 32, 64},
        layouts={"NHD", "HND"},
        head_dims={64, 128, 256},
        sliding_window=True,
        sinks=True,
        max_verify_topk=1,  # verifies by causal masking only
        max_session_topk=1,
        lse=True,
        cuda_graph="uniform",
        requires_finite_padding=True,  # pages come by TMA, so 0 · NaN would leak from the tail
    )
    hopper = replace(
        gen,
        create="attn_nvidia.trtllm.xqa:Xqa",
        archs=HOPPER,
        min_runtime=None,
        kv_dtypes=HALF,
        priority=5,
        phases=frozenset({Phase.DECODE}),
        preferred_page_size=64,
        preferred_page_reason="XQA is 1.17 times slower at page 16 than at 64 (H200)",
        sliding_window=False,
        lse=False,
        requires_finite_padding=False,
    )
    sm120 = replace(hopper, archs=frozenset({"sm120"}), min_runtime="12.8", kv_dtypes=HALF | E4M3)
    # on Hopper by the module beneath the public function (xqa.py)
    fp8 = replace(hopper, kv_dtypes=E4M3)
    xqa = [hopper, fp8, sm120]
    # keys in the tile that a window begins in are read with weight 0, before the window too
    windows = [replace(row, sliding_window=True, requires_finite_padding=True) for row in xqa]
    fp4 = replace(windows[-1], kv_dtypes=FP4)  # block scales of whole tiles are read, too
    return [gen, *xqa, *windows, fp4]


def dual_chunk_flash_attn() -> Sequence[Capabilities]:
    """Return the rows of dual chunk attention: FlashAttention-3, for layers that have it alone."""
    hopper, _, ampere, *_ = fa3()
    return [
        replace(
            row,
            create="attn_nvidia.dual_chunk:DualChunkFlashAttn",
            priority=30,
            dual_chunk=True,
            sparse_prefill=True,
            head_dims=frozenset({64, 128}),
            head_dim_pairs=frozenset(),
            sliding_window=False,
            cross_attention=False,
            encoder=False,
            max_verify_topk=0,
            max_session_topk=0,
        )
        for row in (hopper, ampere)
    ]
