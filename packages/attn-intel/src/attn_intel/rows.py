"""The rows of intel_xpu, intel_amx and ipex: what Intel's kernels do, per device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from attn_core import ANY_TOPK, PLAIN_DTYPES, Capabilities, Phase

from attn_intel.cpu.build import KERNELS

HALF: Final = frozenset({"fp16", "bf16"})
FP8: Final = frozenset({"fp8_e4m3", "fp8_e5m2"})
ENCODE: Final = frozenset({Phase.ENCODE})
FEW: Final = frozenset(range(1, 9))  # query heads per KV head in one tile of the decode kernel


def xpu() -> Sequence[Capabilities]:
    """Return intel_xpu's rows: the combinations for which the library's wheel has kernels.

    The kernels take head dims, windows, sinks and log-sum-exps as compile-time constants, and the
    wheel of 0.1.16 has those of widely used models. For any other it computes in PyTorch, request
    by request. A soft cap is a parameter that no kernel receives. There are none for dg2 (Arc A).
    """
    plain = Capabilities(
        kind="mha",
        create="attn_intel.xpu.backend:IntelXPU",
        device="xpu",
        archs={"pvc", "bmg"},
        requires=["vllm-xpu-kernels>=0.1.16,<0.1.17"],
        dtypes=HALF,
        kv_dtypes=HALF | FP8,
        priority=30,
        page_sizes={64, 128},
        head_dims={128},
        cross_attention=True,
        encoder=True,
        max_verify_topk=1,
        lse=True,
        deterministic=True,
        cuda_graph="decode",
        requires_finite_padding=True,  # whole tiles of V are loaded, 0 · NaN would leak
        tensor_scales=True,
    )
    # 64 has no log-sum-exp without a cache, so it has one with a cache alone, or none
    small = replace(plain, head_dims=frozenset({64}), lse=False)
    cached = replace(small, lse=True, encoder=False)
    large = replace(plain, head_dims=frozenset({256}), cross_attention=False)
    few_groups = replace(large, head_dims=frozenset({96, 192, 512}), group_sizes=FEW, encoder=False)
    window = replace(plain, cross_attention=False, encoder=False, sliding_window=True, lse=False)
    windows = replace(window, head_dims=frozenset({64, 96, 256}), group_sizes=FEW)
    sinks = replace(window, group_sizes=FEW, sliding_window=False, sinks=True)
    windowed_sinks = replace(sinks, head_dims=frozenset({64}), sliding_window=True)  # gpt-oss
    vision = replace(
        plain,
        phases=ENCODE,
        page_sizes=frozenset(),
        cross_attention=False,
        head_dims=frozenset({64, 80, 96, 128, 256}),
        kv_dtypes=HALF,
        tensor_scales=False,
        max_verify_topk=0,
        lse=False,
        cuda_graph="never",
    )
    return [plain, small, cached, large, few_groups, window, windows, sinks, windowed_sinks, vision]


def amx() -> Sequence[Capabilities]:
    """Return intel_amx's rows: our own kernels in C, for any x86 CPU with AVX2 or better.

    They choose the instructions when they run: AMX, AVX-512 with or without bfloat16, or AVX2. The
    device says which of them the CPU has.
    """
    row = Capabilities(
        kind="mha",
        create="attn_intel.cpu.backend:IntelAMX",
        device="cpu",
        archs={"amx", "avx512", "avx2"},
        requires=[KERNELS],
        dtypes=PLAIN_DTYPES,
        kv_dtypes=PLAIN_DTYPES | FP8,
        priority=30,
        kv_dtype_may_differ=True,
        layouts={"NHD", "HND"},
        head_dim_pairs="any",
        sliding_window=True,
        logit_cap=True,
        sinks=True,
        cross_attention=True,
        encoder=True,
        max_verify_topk=ANY_TOPK,
        lse=True,
        deterministic=True,
        tensor_scales=True,
    )
    mla = replace(row, kind="mla", layouts=frozenset({"NHD"}), chunked_prefix=True)
    vision = replace(row, phases=ENCODE, kv_dtypes=PLAIN_DTYPES, tensor_scales=False)
    return [row, mla, vision]


def ipex() -> Sequence[Capabilities]:
    """Return the rows of ipex, the paged attention of intel-extension-for-pytorch on a CPU.

    Its kernels read pages as dense blocks of a KV head, and cut keys into parts of 128 tokens,
    which a page has to divide. The last version, 2.8.0, goes with torch 2.8 alone.
    """
    row = Capabilities(
        kind="mha",
        create="attn_intel.ipex.backend:IPEX",
        device="cpu",
        archs={"amx", "avx512", "avx2"},
        requires=["intel-extension-for-pytorch==2.8.*", "torch==2.8.*"],
        dtypes=PLAIN_DTYPES,
        kv_dtypes=PLAIN_DTYPES,
        priority=5,
        page_sizes={1, 2, 4, 8, 16, 32, 64, 128},
        max_page_size=128,
        preferred_page_size=16,
        preferred_page_reason="a prompt is multiplied page by page: with 1, key by key",
        layouts={"HND"},
        sliding_window=True,
        logit_cap=True,
        cross_attention=True,
        max_verify_topk=1,
        requires_finite_padding=True,  # hidden values are multiplied by 0, and 0 · NaN is NaN
        tensor_scales=True,
    )
    bf16 = frozenset({"bf16"})
    return [row, replace(row, dtypes=bf16, kv_dtypes=frozenset({"fp8_e5m2"}))]
