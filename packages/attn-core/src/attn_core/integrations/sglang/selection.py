"""Choose backends for an SGLang server, alike on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_core.costs import store
from attn_core.errors import UsageError
from attn_core.integrations.sglang.server import (
    BACKEND_ARGUMENTS,
    LINEAR_ARGUMENTS,
    NAME,
    SPARSE_ARGUMENTS,
    overrides,
)
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.result import Selection
from attn_core.selection.solver import select
from attn_core.spec.device import parse_device, probe_device
from attn_core.spec.requirements import Requirements


def choose(requirements: Requirements, device: torch.device) -> tuple[Selection, Registry]:
    """Select for this machine. Raises NoBackendError, and UsageError where ranks disagree."""
    registry = load_plugins()
    here = parse_device("cpu") if device.type == "cpu" else probe_device()
    # each is chosen for what is there: a name of others would find no such layers
    others = [] if requirements.vision else ["mm_attention_backend"]
    others += [] if requirements.softmax_layers else BACKEND_ARGUMENTS
    others += [] if requirements.linear_layers else LINEAR_ARGUMENTS
    sparse = any(x.kind == "dsa" for x in requirements.softmax_layers)
    others += [] if sparse else SPARSE_ARGUMENTS
    unused: dict[str, Any] = dict.fromkeys(others)
    names = replace(overrides(), **unused)
    profile = store.tuned_profile(registry, here)
    libraries = registry.installed_libraries()
    selection = select(requirements, here, registry, libraries, names, profile)
    check_ranks({role: choice.backend for role, choice in selection.roles.items()})
    return selection, registry


def publish(selection: Selection, args: Any) -> None:
    """Put role → backend where /server_info prints it: among a scheduler's server arguments."""
    names = {role: choice.backend for role, choice in selection.roles.items()}
    if hasattr(args, "override"):  # the way to change resolved arguments, since 0.5.16
        args.override(NAME, **{NAME: names})
    else:
        setattr(args, NAME, names)


def check_ranks(names: dict[str, str]) -> None:
    """Raise UsageError where rank 0 chose other backends: their partial results would not fit."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    from sglang.srt.distributed import get_world_group

    first = get_world_group().broadcast_object(names, src=0)
    if first != names:
        raise UsageError(
            f"rank 0 chose {first}, this rank {names}: give all ranks the same libraries and "
            "ATTN_* variables"
        )
