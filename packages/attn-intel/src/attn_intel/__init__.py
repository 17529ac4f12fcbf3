"""Intel CPU and XPU attention backends for attn-core: their specs; the module rows has the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attn_core import BackendSpec, hookimpl

from attn_intel import rows
from attn_intel.versions import attn_register_libraries, attn_register_pins

__all__ = ["attn_register_backends", "attn_register_libraries", "attn_register_pins"]

ADDS: Final = "the documented matrix says no, our own kernels do it: "
BY_OPTION: Final = "the documented matrix says no, while its option --mm-attention-backend takes "


@hookimpl
def attn_register_backends() -> Sequence[BackendSpec]:
    """Return intel_xpu, the default on Intel GPUs, intel_amx, that on x86 CPUs, and ipex."""
    return [
        BackendSpec(
            name="intel_xpu",
            capabilities=rows.xpu(),
            aliases=["xpu_attn"],
            matrix_deviations={
                "mha.page_sizes": "the documented matrix says any, its backend takes 64 and 128",
                "mha.fp8_kv": "the documented matrix says no, flash_attn_varlen_func of "
                "vllm-xpu-kernels dequantises both FP8 formats in the kernel",
                "mha.spec_topk1": "the documented matrix says no, the kernel takes several queries "
                "of each request in causal order",
                "mha.multimodal": BY_OPTION + "xpu_attn",
            },
        ),
        BackendSpec(
            name="intel_amx",
            capabilities=rows.amx(),
            aliases=["amx_attn"],
            matrix_deviations={
                "mha.fp8_kv": ADDS + "both FP8 formats are exact in bfloat16 and float32",
                "mha.spec_topk1": ADDS + "a chain of drafts is in causal order",
                "mha.spec_topk_gt1": ADDS + "a tree of drafts is a mask of the newest keys",
                "mha.sliding_window": ADDS + "keys before the window are not read",
                "mha.multimodal": BY_OPTION + "amx_attn",
                "mla.backend": "the documented MLA matrix has no row for intel_amx, its automatic "
                "choice on a CPU is intel_amx for every model",
            },
        ),
        BackendSpec(
            name="ipex",
            capabilities=rows.ipex(),
            matrix_deviations={
                "mha.backend": "the documented matrix has no row for intel-extension-for-pytorch, "
                "an archived library of CPU kernels for torch 2.8; it is taken by name",
            },
        ),
    ]
