"""Select backends for a transformers model on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.dtypes import PLAIN_DTYPES
from attn_core.errors import UnsupportedError
from attn_core.integrations.transformers.architectures import check_supported
from attn_core.model_config import requirements_from_config
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.result import Overrides, Selection
from attn_core.selection.solver import select
from attn_core.spec.device import Device, probe_device

DTYPES: Mapping[torch.dtype, str] = {TORCH_DTYPES[name]: name for name in PLAIN_DTYPES}
_OWN_LINEAR = "the linear attention layers run in the model's own code, not on a selected backend"


def select_for(
    config: Mapping[str, object],
    *,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int | None = None,
    kv_cache_dtype: str = "auto",
    overrides: Overrides | None = None,
    registry: Registry | None = None,
) -> Selection:
    """Select backends for the keys of a model's config.json on this machine.

    dtype, device: those of the model's weights.
    Linear attention layers stay the model's own: linear is None, and the assumptions say so. Raises
    UnsupportedError for an unsupported architecture or device or a linear backend requested by
    name, and what select() raises.
    """
    check_supported(config)
    if dtype not in DTYPES:
        possible = ", ".join(sorted(str(d) for d in DTYPES))
        raise UnsupportedError(f"a model in {dtype} (supports {possible}); use model.to(dtype)")
    needs = requirements_from_config(
        config,
        dtype=DTYPES[dtype],
        kv_cache_dtype=kv_cache_dtype,
        page_size=page_size,
    )
    registry = registry or load_plugins()
    here = _device(device)
    chosen = select(needs, here, registry, registry.installed_libraries(), overrides)
    o = overrides or Overrides()
    named = o.linear_attn_backend or o.linear_attn_prefill_backend or o.linear_attn_decode_backend
    if named is not None:
        raise UnsupportedError(f"--linear-attn-backend {named}: {_OWN_LINEAR}; leave it out")
    softmax = {role: c for role, c in chosen.roles.items() if not role.startswith("linear")}
    if len(softmax) == len(chosen.roles):
        return chosen
    return replace(chosen, roles=softmax, assumptions=(*chosen.assumptions, _OWN_LINEAR))


def _device(device: torch.device) -> Device:
    here = probe_device()
    if device.type == ("cuda" if here.type == "rocm" else here.type):
        return here
    if device.type == "cpu":
        return Device("cpu")  # this machine has an accelerator, the model does not use it
    raise UnsupportedError(f"the model is on {device}, this machine has {here}; use model.to(...)")
