"""The function of vllm-xpu-kernels that we call, held to the parameters that we pass."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Final

from attn_core import BackendError

MODULE: Final = "vllm_xpu_kernels.flash_attn_interface"
PARAMETERS: Final = (
    *("q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "cu_seqlens_k", "seqused_k"),
    *("softmax_scale", "causal", "window_size", "block_table", "return_softmax_lse", "out"),
    *("k_descale", "v_descale", "s_aux", "num_splits_kv", "is_mix_batch"),
)


def load() -> Callable[..., Any]:
    """Return flash_attn_varlen_func; every parameter is passed by keyword.

    Raises BackendError where its compiled part does not load, which the library says only when it
    is called, or where its parameters are others.
    """
    module: Any = importlib.import_module(MODULE)
    if not module.FA2_AVAILABLE:
        raise BackendError(
            "intel_xpu: vllm-xpu-kernels is installed and its compiled part does not load: "
            f"{module.FA2_UNAVAILABLE_REASON}; each version is built for one torch and needs "
            "Intel's driver: attn doctor names the version that goes with the installed torch"
        )
    accepted = inspect.signature(module.flash_attn_varlen_func).parameters
    missing = [p for p in PARAMETERS if p not in accepted]
    if missing:
        raise BackendError(
            "intel_xpu: flash_attn_varlen_func of the installed vllm-xpu-kernels has no parameter "
            f"{', '.join(missing)} (it has {', '.join(accepted)}); install vllm-xpu-kernels 0.1.16"
        )
    attend: Callable[..., Any] = module.flash_attn_varlen_func
    return attend
