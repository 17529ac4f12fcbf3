"""What vLLM's configuration means for attention, and what attn-core does not serve."""

from __future__ import annotations

from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.errors import UnsupportedError
from attn_core.spec.requirements import Speculation

NAME = "CUSTOM"  # of --attention-backend, the one that vLLM leaves to plugins
TESTED = SpecifierSet("==0.26.*")
SPECS = ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec")
KV_DTYPE = {dtype: name for name, dtype in TORCH_DTYPES.items() if name != "fp4_e2m1"}
STORED = {  # vLLM's --kv-cache-dtype, "auto" apart
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]  # of models
CACHE_DTYPES = ["auto", *STORED]


def check_version(version: str | None = None) -> None:
    """Raise UnsupportedError for a release of vLLM that the adapter was not tested with."""
    if version is None:
        import vllm

        version = vllm.__version__
    if not TESTED.contains(version, prereleases=True):
        raise UnsupportedError(
            f"vLLM {version} with --attention-backend {NAME} of attn_core (tested with {TESTED}); "
            "install a tested release or a newer attn-core"
        )


def check_config(config: Any, kv_cache_spec: Any) -> None:
    """Raise UnsupportedError for what the adapter does not serve, with what to change.

    config: vLLM's VllmConfig. kv_cache_spec: of the layers to be served.
    """
    parallel, cache = config.parallel_config, config.cache_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            flag = "--" + name.replace("_", "-")
            raise UnsupportedError(
                f"{flag} {size} with --attention-backend {NAME} (supports 1: a request's keys stay "
                "together); leave it out, or name a backend that splits them"
            )
    refused = {
        "enable_dbo": (parallel, "leave out --enable-dbo"),
        "calculate_kv_scales": (cache, "leave out --calculate-kv-scales"),
        "kv_sharing_fast_prefill": (cache, "leave out --kv-sharing-fast-prefill"),
        "rswa_window": (config.model_config, "use another --attention-backend for this model"),
    }
    for name, (owner, remedy) in refused.items():
        if getattr(owner, name, None):
            raise UnsupportedError(f"vLLM's {name} with --attention-backend {NAME}; {remedy}")
    kind = type(kv_cache_spec).__name__
    if kind not in SPECS:
        raise UnsupportedError(
            f"a cache of vLLM's {kind} (attn_core reads {', '.join(SPECS)}); use another "
            "--attention-backend for these layers, by backend_per_kind of --attention-config"
        )
    keys, values = (getattr(kv_cache_spec, name, 0) for name in ("head_size", "head_size_v"))
    if kind != "MLAAttentionSpec" and values != keys:
        raise UnsupportedError(
            f"a cache of vLLM with keys of {keys} and values of {values} (attn_core reads equal "
            "ones); use another --attention-backend for this model"
        )


def captures(config: Any) -> bool:
    """Say whether decode, or verification, is captured whole in CUDA graphs."""
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and bool(mode.has_full_cudagraphs())


def stays_finite(config: Any, stored: str) -> bool:
    """Say whether every page of a cache holds finite numbers at any time.

    stored: the name of its dtype. vLLM creates caches of zeros, and clears pages that a hybrid
    model's states leave to attention (vllm-project/vllm#35219). In sleep mode it gives their memory
    back, and clears what it gets in its place only where a cache is quantised.
    """
    sleeps = getattr(config.model_config, "enable_sleep_mode", False)
    return not sleeps or stored.startswith("fp8")


def speculation(config: Any) -> Speculation | None:
    """Return the chain of a server's drafts: vLLM verifies them beside the token before them."""
    drafts = getattr(config.speculative_config, "num_speculative_tokens", None)
    if not drafts:
        return None
    return Speculation(topk=1, num_draft_tokens=drafts + 1, mode="decode")


def stored_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> str:
    """Return what a cache stores by vLLM's name for it; "auto" stores the model's dtype."""
    if kv_cache_dtype == "auto":
        return KV_DTYPE[dtype]
    if kv_cache_dtype not in STORED:
        raise UnsupportedError(
            f"--kv-cache-dtype {kv_cache_dtype} (attn_core reads auto, {', '.join(STORED)})"
        )
    return STORED[kv_cache_dtype]


def ranks() -> Any:
    """Return the group of the ranks that share each layer, None where a rank has it alone."""
    if not torch.distributed.is_initialized():
        return None
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return group.cpu_group if group.world_size > 1 else None
