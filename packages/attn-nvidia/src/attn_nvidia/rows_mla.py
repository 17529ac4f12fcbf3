"""The rows of NVIDIA's backends for latent attention: MLA, and sparse MLA (DSA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from attn_core import ANY_TOPK, Capabilities, Phase

from attn_nvidia.rows_mha import (
    AMPERE,
    BLACKWELL,
    E4M3,
    FLASHINFER,
    FP4,
    HALF,
    HOPPER,
    ROUNDED,
    SGL_KERNEL,
)

LATENT: Final = 512 + 64  # latent + rope: every kernel here is built for DeepSeek's dims
LATENT_PAIR: Final = (LATENT, 512)
RAGGED_PAIR: Final = (192, 128)  # its heads before absorption, in prefill without a cache
PREFILL: Final = frozenset({Phase.PREFILL})
COPIED: Final = (
    "its kernels read no such cache: each layer of a pass dequantises the latents of its pages, "
    "1,152 bytes a KV token that live as long as the call"
)
# CUTLASS's latent decode left this library between 0.4.5 and 0.4.10.
SGL_KERNEL_CUTLASS: Final = "sglang-kernel>=0.4,<=0.4.5"


def _dequantized(row: Capabilities, name: str) -> Capabilities:
    """Return a row over an FP4 cache: the backend runs over copies of the pages of its pass."""
    return replace(
        row,
        create=f"attn_nvidia.dequantized:{name}",
        kv_dtypes=FP4,
        needs_host_lengths=True,
        tensor_scales=True,
        cuda_graph="never",
        note=COPIED,
    )


def flashinfer() -> Sequence[Capabilities]:
    """Return FlashInfer's MLA rows: pages of any size, chains of drafts, an FP8 cache on Hopper."""
    row = Capabilities(
        kind="mla",
        create="attn_nvidia.flashinfer.mla:FlashInferMLA",
        device="cuda",
        archs=AMPERE | {"sm120"},
        requires=[FLASHINFER],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=5,
        head_dims={LATENT},
        head_dim_pairs={LATENT_PAIR, RAGGED_PAIR},
        chunked_prefix=True,
        max_verify_topk=1,
        max_session_topk=1,
        lse=True,
        deterministic=True,
        cuda_graph="uniform",
        needs_host_lengths=True,
    )
    # its ragged kernel loads V by TMA
    hopper = replace(row, archs=HOPPER, requires_finite_padding=True)
    fp8 = replace(hopper, dtypes=frozenset({"bf16"}), kv_dtypes=E4M3)
    plain = [row, hopper, replace(row, archs=BLACKWELL, with_linear_layers=False)]
    return [*plain, fp8, *(_dequantized(r, "flashinfer_mla") for r in plain)]


def flashmla() -> Sequence[Capabilities]:
    """Return FlashMLA's rows: dense decode on Hopper; its prefill is FlashInfer's."""
    row = replace(
        flashinfer()[0],
        create="attn_nvidia.mla.flashmla:FlashMLA",
        archs=HOPPER,
        requires_finite_padding=True,  # FlashInfer's ragged kernel loads V by TMA
        requires=(f"sgl-flash-mla or {SGL_KERNEL}", FLASHINFER),
        page_sizes=frozenset({64}),
        deterministic=False,
        needs_host_lengths=False,  # its decode does not, and prefill can wait for them
    )
    fp8 = replace(
        row,
        dtypes=frozenset({"bf16"}),  # what its FP8 kernels write
        kv_dtypes=E4M3,
        quantizes_q_to_fp8=True,
        note=f"{ROUNDED} in decode and verification, not in prefill",
    )
    return [row, fp8, _dequantized(row, "flashmla")]


def cutlass_mla() -> Sequence[Capabilities]:
    """Return the rows of CUTLASS's MLA decode: sm100 exactly, 128 query heads; FlashInfer's else.

    Its decode has no log-sum-exp.
    """
    prefill = replace(
        flashinfer()[0],
        archs=frozenset({"sm100"}),
        min_runtime="12.8",
        page_sizes=frozenset({128}),  # its decode's
        phases=PREFILL,
        with_linear_layers=False,
    )
    decode = replace(
        prefill,
        create="attn_nvidia.mla.cutlass_mla:CutlassMLA",
        phases=frozenset({Phase.DECODE}),
        requires=(SGL_KERNEL_CUTLASS, FLASHINFER),
        q_heads=frozenset({128}),
        chunked_prefix=False,
        lse=False,
        deterministic=False,
        needs_host_lengths=False,
    )
    copied = [_dequantized(prefill, "flashinfer_mla"), _dequantized(decode, "cutlass_mla")]
    fp8 = [replace(r, kv_dtypes=E4M3, priority=4) for r in copied]  # triton copies nothing
    return [prefill, decode, *copied, *fp8]


def trtllm_mla() -> Sequence[Capabilities]:
    """Return the rows of TensorRT-LLM's MLA kernels: the default on sm100 and sm103."""
    row = Capabilities(
        kind="mla",
        create="attn_nvidia.trtllm.mla:TrtllmMLA",
        device="cuda",
        archs={"sm100", "sm103"},
        min_runtime="12.8",
        requires=[FLASHINFER],
        dtypes={"bf16"},
        kv_dtypes={"bf16"},
        priority=30,
        page_sizes={32, 64},
        head_dims={LATENT},
        head_dim_pairs={LATENT_PAIR, RAGGED_PAIR},
        chunked_prefix=True,
        max_verify_topk=1,
        max_session_topk=1,
        lse=True,
        cuda_graph="uniform",
        with_linear_layers=False,
        requires_finite_padding=True,  # its ragged kernel loads V by TMA
    )
    # Absorbed prefill is FlashInfer's, which reads FP8 latents on Hopper alone.
    prefill = replace(
        row, kv_dtypes=E4M3, phases=PREFILL, absorbed=False, max_verify_topk=0, cuda_graph="never"
    )
    decode = replace(
        row,
        kv_dtypes=E4M3,
        phases=frozenset({Phase.DECODE}),
        chunked_prefix=False,
        lse=False,  # ragged queries, those of a draft's extension, come without
        quantizes_q_to_fp8=True,
        note=ROUNDED,
    )
    return [row, prefill, decode, _dequantized(row, "trtllm_mla")]


def fa3() -> Sequence[Capabilities]:
    """Return FlashAttention-3's MLA row: the default on Hopper."""
    return [
        Capabilities(
            kind="mla",
            create="attn_nvidia.fa3.mla:FA3MLA",
            device="cuda",
            archs=HOPPER,
            min_runtime="12.3",
            requires=[f"flash-attn-3 or {SGL_KERNEL}"],
            dtypes=HALF,
            kv_dtypes=HALF,
            priority=30,
            head_dims={LATENT},
            head_dim_pairs={LATENT_PAIR, RAGGED_PAIR},
            logit_cap=True,
            encoder=True,  # ragged, without causal order
            chunked_prefix=True,
            max_verify_topk=ANY_TOPK,
            lse=True,
            deterministic=True,
            cuda_graph="uniform",
            requires_finite_padding=True,  # pages come by TMA, so 0 · NaN would leak from the tail
        )
    ]


def fa4() -> Sequence[Capabilities]:
    """Return FlashAttention-4's MLA rows: absorbed on Blackwell, ragged prefill on Hopper."""
    row = Capabilities(
        kind="mla",
        create="attn_nvidia.fa4:FA4",
        device="cuda",
        archs=BLACKWELL,
        requires=["flash-attn-4==4.0.0b18"],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=5,
        page_sizes={1},
        head_dims={LATENT},
        head_dim_pairs={LATENT_PAIR, RAGGED_PAIR},
        encoder=True,  # ragged, without causal order
        chunked_prefix=True,
        lse=True,
        cuda_graph="uniform",
        requires_finite_padding=True,  # V comes by TMA, so 0 · NaN would leak from the tail
    )
    hopper = replace(
        row,
        archs=HOPPER,
        phases=PREFILL,
        absorbed=False,  # its kernels of sm90 refuse qv, by which the latent joins the logits
        cuda_graph="never",
    )
    fp4 = replace(_dequantized(row, "fa4"), phases=PREFILL)  # documented: another one decodes
    return [row, hopper, fp4, replace(hopper, kv_dtypes=FP4)]


def nsa() -> Sequence[Capabilities]:
    """Return the rows of sparse MLA (DeepSeek V3.2); attn_nvidia.dsa has its kernels' rules.

    A row with a sub_backend runs that kernel; those without run the documented one of each phase.
    """
    row = Capabilities(
        kind="dsa",
        create="attn_nvidia.nsa:NSA",
        device="cuda",
        archs=HOPPER,
        min_runtime="12.3",
        requires=[
            f"flash-attn-3 or {SGL_KERNEL}",
            "sgl-flash-mla or sglang-kernel>=0.4.5",  # sinks, and an LSE that is natural
            "triton>=3.4",  # selects the keys
        ],
        dtypes={"bf16"},
        kv_dtypes={"bf16"},
        priority=30,
        page_sizes={64},
        head_dims={LATENT},
        head_dim_pairs={LATENT_PAIR, RAGGED_PAIR},
        chunked_prefix=True,
        max_verify_topk=1,
        max_session_topk=1,
        lse=True,
        deterministic=True,
        cuda_graph="uniform",
        requires_finite_padding=True,  # dense passes load pages by TMA
    )
    sinks = replace(
        row,
        sinks=True,
        head_dim_pairs=frozenset({LATENT_PAIR}),  # before absorption fa3 runs, which has none here
        chunked_prefix=False,
        requires_finite_padding=False,
    )
    fp8 = replace(
        row,
        kv_dtypes=E4M3,
        deterministic=False,  # FlashMLA's decode cuts the keys by the batch
        requires_finite_padding=False,  # every pass over the cache is a selection
        sub_backend="flashmla_kv",
    )
    # a row of its own kernel stands before that with sinks, whose tails may be anything
    flashmla_rows = [replace(r, sub_backend="flashmla_sparse") for r in (row, sinks)]
    gathers = replace(fp8, deterministic=True, sub_backend="flashmla_sparse")
    prefill = [gathers, *(replace(r, sub_backend="flashmla_auto") for r in (row, sinks, fp8))]
    flashmla_rows += [
        replace(row, sub_backend="fa3"),
        *(replace(r, phases=PREFILL) for r in prefill),
    ]
    trtllm = replace(
        row,
        create="attn_nvidia.trtllm.sparse:TrtllmSparse",
        archs={"sm100", "sm103"},
        min_runtime="12.8",
        requires=[FLASHINFER, "triton>=3.4"],
        page_sizes={32, 64},
        head_dims=frozenset(),
        head_dim_pairs={LATENT_PAIR},
        chunked_prefix=False,
        lse=False,  # its kernel would take 256 rows of scratch for each query
        deterministic=False,
        requires_finite_padding=False,
        with_linear_layers=False,
        sub_backend="trtllm",
    )
    return [row, sinks, fp8, *(replace(r, priority=5) for r in (*flashmla_rows, trtllm))]


NSA_REFUSED: Final = {
    "tilelang": "its kernels are written in TileLang, which no row here runs; take flashmla_sparse "
    "over a bf16 cache, or the backend triton by --attention-backend triton",
    "aiter": "it is AMD's; on ROCm triton runs sparse MLA by --attention-backend triton",
    "flashmla_q8": "no row here runs it; take flashmla_kv, which reads the same FP8 cache",
}
