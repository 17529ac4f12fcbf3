"""Intel CPU and XPU attention backends for attn-core: rows; the kernels are declared, not built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from attn_core import BackendSpec, Capabilities, Phase, hookimpl

from attn_intel.versions import attn_register_pins

__all__ = ["attn_register_backends", "attn_register_pins"]

HALF: Final = frozenset({"fp16", "bf16"})
ENCODE: Final = frozenset({Phase.ENCODE})
BY_OPTION: Final = "the documented matrix says no, while its option --mm-attention-backend takes "


def _intel_xpu() -> BackendSpec:
    row = Capabilities(
        kind="mha",
        device="xpu",
        archs={"pvc", "bmg", "dg2"},
        requires=["vllm-xpu-kernels>=0.1.16"],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=30,
        page_sizes={64, 128},
        head_dims=set(range(16, 257, 16)),
        sliding_window=True,
        logit_cap=True,
        sinks=True,
        cross_attention=True,
        encoder=True,
        lse=True,
        deterministic=True,
        cuda_graph="decode",
    )
    vision = replace(
        row,
        phases=ENCODE,
        page_sizes=frozenset(),
        head_dims=frozenset(range(8, 257, 8)),
    )
    return BackendSpec(
        name="intel_xpu",
        capabilities=[row, vision],
        aliases=["xpu_attn"],
        matrix_deviations={
            "mha.page_sizes": "the documented matrix says any, its backend takes 64 and 128",
            "mha.multimodal": BY_OPTION + "xpu_attn",
        },
    )


def _intel_amx() -> BackendSpec:
    # SGLang's CPU operators; the distribution is built from its source tree, there is no wheel.
    row = Capabilities(
        kind="mha",
        device="cpu",
        archs={"amx"},
        requires=["sglang-kernel-cpu>=0.4"],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=30,
        sliding_window=True,
        logit_cap=True,
        sinks=True,
        cross_attention=True,
        encoder=True,
        needs_host_lengths=True,
    )
    # Intel's archived extension has no sinks, no cross attention and keeps heads before tokens.
    ipex = replace(
        row,
        requires=("intel-extension-for-pytorch>=2.8",),
        layouts=frozenset({"HND"}),
        sinks=False,
        cross_attention=False,
        encoder=False,
    )
    mla = replace(
        row,
        kind="mla",
        head_dims=frozenset({576}),
        head_dim_pairs=frozenset({(576, 512)}),
        sliding_window=False,
        sinks=False,
        cross_attention=False,
        encoder=False,
    )
    return BackendSpec(
        name="intel_amx",
        capabilities=[row, ipex, mla, replace(row, phases=ENCODE)],
        aliases=["amx_attn"],
        matrix_deviations={
            "mha.sliding_window": "the CPU operators take a window, and the documented system "
            "runs gpt-oss, which has windowed layers, on them",
            "mha.multimodal": BY_OPTION + "amx_attn",
            "mla.backend": "the documented MLA matrix has no row for intel_amx, its automatic "
            "choice on a CPU is intel_amx for every model",
        },
    )


@hookimpl
def attn_register_backends() -> Sequence[BackendSpec]:
    """Return intel_xpu, the default on Intel GPUs, and intel_amx, on CPUs with AMX."""
    return [_intel_xpu(), _intel_amx()]
