"""The rows of NVIDIA's backends for latent attention: MLA, and sparse MLA (DSA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from attn_core.capabilities import TREES, Capabilities, Phase

from attn_nvidia.rows_mha import (
    AMPERE,
    BLACKWELL,
    E4M3,
    FLASHINFER,
    FP4,
    HALF,
    HOPPER,
    SGL_KERNEL,
)

LATENT: Final = 512 + 64  # latent + rope: every kernel here is built for DeepSeek's dims
LATENT_PAIR: Final = (LATENT, 512)


def flashinfer() -> Sequence[Capabilities]:
    """Return FlashInfer's MLA rows: token slots, chains of drafts."""
    row = Capabilities(
        kind="mla",
        device="cuda",
        archs=AMPERE | HOPPER | {"sm120"},
        requires=[FLASHINFER],
        dtypes=HALF,
        kv_dtypes=HALF | FP4,
        priority=5,
        page_sizes={1},
        head_dims={LATENT},
        head_dim_pairs={LATENT_PAIR},
        chunked_prefix=True,
        max_topk=1,
        run_topk=1,
        lse=True,
        deterministic=True,
        cuda_graph="full",
        needs_host_lengths=True,
    )
    return [row, replace(row, archs=BLACKWELL, beside_linear=False)]


def flashmla() -> Sequence[Capabilities]:
    """Return FlashMLA's row: dense decode on Hopper; its prefill is FlashInfer's."""
    return [
        replace(
            flashinfer()[0],
            archs=HOPPER,
            requires=(f"sgl-flash-mla or {SGL_KERNEL}", FLASHINFER),
            kv_dtypes=HALF | E4M3 | FP4,
            page_sizes=frozenset({64}),
            deterministic=False,
        )
    ]


def cutlass_mla() -> Sequence[Capabilities]:
    """Return the row of FlashInfer's CUTLASS kernels: sm100 exactly, 128 query heads."""
    return [
        replace(
            flashinfer()[0],
            archs=frozenset({"sm100"}),
            min_runtime="12.8",
            kv_dtypes=HALF | E4M3 | FP4,
            page_sizes=frozenset({128}),
            q_heads=frozenset({128}),
            deterministic=False,
            beside_linear=False,
        )
    ]


def trtllm_mla() -> Sequence[Capabilities]:
    """Return the row of TensorRT-LLM's MLA kernels: the default on sm100 and sm103."""
    return [
        Capabilities(
            kind="mla",
            device="cuda",
            archs={"sm100", "sm103"},
            min_runtime="12.8",
            requires=[FLASHINFER],
            dtypes={"bf16"},
            kv_dtypes={"bf16"} | E4M3 | FP4,
            priority=30,
            page_sizes={32, 64},
            head_dims={LATENT},
            head_dim_pairs={LATENT_PAIR},
            chunked_prefix=True,
            max_topk=1,
            run_topk=1,
            lse=True,
            cuda_graph="full",
            beside_linear=False,
        )
    ]


def fa3() -> Sequence[Capabilities]:
    """Return FlashAttention-3's MLA rows: the default on Hopper; trees at page size 1 only."""
    chain = Capabilities(
        kind="mla",
        device="cuda",
        archs=HOPPER,
        min_runtime="12.3",
        requires=[f"{SGL_KERNEL} or flash-attn-3"],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=30,
        head_dims={LATENT},
        head_dim_pairs={LATENT_PAIR},
        logit_cap=True,
        chunked_prefix=True,
        max_topk=1,
        lse=True,
        deterministic=True,
        cuda_graph="full",
    )
    return [chain, replace(chain, max_topk=TREES, max_page_size=1)]


def fa4() -> Sequence[Capabilities]:
    """Return FlashAttention-4's MLA rows: absorbed on Blackwell, ragged prefill on Hopper."""
    blackwell = Capabilities(
        kind="mla",
        device="cuda",
        archs=BLACKWELL,
        requires=["flash-attn-4>=4.0.0b18"],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=5,
        page_sizes={1},
        head_dims={LATENT},
        head_dim_pairs={LATENT_PAIR},
        chunked_prefix=True,
        lse=True,
        cuda_graph="full",
        finite_tail=True,
    )
    prefill = frozenset({Phase.PREFILL})
    hopper = replace(
        blackwell,
        archs=HOPPER,
        phases=prefill,
        note="fa4 has no absorbed MLA on Hopper: name another decode backend",
    )
    fp4 = replace(
        blackwell,
        archs=BLACKWELL | HOPPER,
        kv_dtypes=FP4,
        phases=prefill,
        note="fa4 reads an FP4 cache in prefill only: name another decode backend",
    )
    return [blackwell, hopper, fp4]


def nsa() -> Sequence[Capabilities]:
    """Return the rows of sparse MLA (DeepSeek V3.2); attn_nvidia.dsa has its kernels' rules."""
    fp8 = Capabilities(
        kind="dsa",
        device="cuda",
        archs={"sm90", "sm100", "sm103"},
        requires=[f"sgl-flash-mla or {SGL_KERNEL}"],
        dtypes={"bf16"},
        kv_dtypes={"bf16"} | E4M3,
        priority=30,
        page_sizes={64},
        head_dims={LATENT},
        head_dim_pairs={LATENT_PAIR},
        max_topk=1,
        run_topk=1,
        cuda_graph="full",
    )
    sinks = replace(fp8, kv_dtypes=frozenset({"bf16"}), sinks=True)  # sinks need a bf16 cache
    return [fp8, sinks]
