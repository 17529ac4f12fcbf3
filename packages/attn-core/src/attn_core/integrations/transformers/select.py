"""Select backends for a transformers model on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.dtypes import PLAIN_DTYPES
from attn_core.errors import UnsupportedError
from attn_core.integrations.choice import check_lock, measured, picking
from attn_core.integrations.transformers.architectures import check_supported
from attn_core.model_config import requirements_from_config
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.result import Choice, NoBackendError, Overrides, Selection
from attn_core.selection.solver import select
from attn_core.spec.device import Device, probe_cpu, probe_device
from attn_core.spec.kinds import Role
from attn_core.spec.requirements import Speculation
from attn_core.tools.probes import probed

DTYPES: Mapping[torch.dtype, str] = {TORCH_DTYPES[name]: name for name in PLAIN_DTYPES}


def select_for(
    config: Mapping[str, object],
    *,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int | None = None,
    kv_cache_dtype: str = "auto",
    shared_prefix: bool = False,
    overrides: Overrides | None = None,
    locked: str | None = None,
    adaptive: bool | None = None,
    registry: Registry | None = None,
) -> Selection:
    """Select backends for the keys of a model's config.json on this machine.

    dtype, device: those of the model's weights. shared_prefix: as in Requirements. locked: a file
    of `attn lock`, by default what ATTN_LOCKED says. What `attn tune` measured here decides first,
    or the profile of ATTN_PROFILE; requests are as in ATTN_WORKLOAD. adaptive: other backends may
    take the passes in which they were measured faster; by default what ATTN_ADAPTIVE says, and yes.
    With linear layers, linear_verify takes tokens back in assisted generation; it is absent if no
    backend can. Raises UnsupportedError for an unsupported architecture or device, what select()
    raises, and LockError where the choice differs from the lock.
    """
    check_supported(config)
    if dtype not in DTYPES:
        supported = ", ".join(sorted(str(d) for d in DTYPES))
        raise UnsupportedError(f"a model in {dtype} (supports {supported}); use model.to(dtype)")
    needs = requirements_from_config(
        config,
        dtype=DTYPES[dtype],
        kv_cache_dtype=kv_cache_dtype,
        page_size=page_size,
    )
    needs = replace(needs, shared_prefix=shared_prefix)
    local = _device(device)
    registry = probed(registry or load_plugins(), local)
    libraries = registry.installed_libraries()
    profile, workload = measured(registry, local)
    chosen = select(needs, local, registry, libraries, overrides, profile, workload=workload)
    same = check_lock(chosen, registry, local, profile, locked)
    chosen = picking(chosen, adaptive if same else False)
    if "linear_decode" not in chosen.roles:
        return chosen
    # Softmax layers run drafts as an extend, so that only the linear ones need a verifier.
    linear = replace(needs, layers=needs.linear_layers, vision=None, speculation=Speculation())
    o = overrides or Overrides()
    explicit = Overrides(
        linear_attn_backend=o.linear_attn_backend,
        linear_attn_prefill_backend=o.linear_attn_prefill_backend,
        linear_attn_decode_backend=o.linear_attn_decode_backend,
        prefer=o.prefer,
        allow=o.allow,
        deny=o.deny,
    )
    try:
        verifier = select(linear, local, registry, libraries, explicit, advise=False)
    except NoBackendError:
        return chosen
    roles: dict[Role, Choice] = {**chosen.roles, "linear_verify": verifier.roles["linear_verify"]}
    return replace(chosen, roles=roles)


def _device(device: torch.device) -> Device:
    detected = probe_device()
    if device.type == ("cuda" if detected.type == "rocm" else detected.type):
        return detected
    if device.type == "cpu":
        return probe_cpu()  # this machine has an accelerator, the model does not use it
    raise UnsupportedError(
        f"the model is on {device}, this machine has {detected}; use model.to(...)"
    )
