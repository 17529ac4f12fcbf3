"""Choose backends for an SGLang server, alike on every rank."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.integrations import choice
from attn_core.integrations.sglang.server import NAME
from attn_core.plugins.registry import Registry
from attn_core.selection.result import Selection
from attn_core.spec.requirements import Requirements


def choose(
    requirements: Requirements, device: torch.device, *, locked: bool = True
) -> tuple[Selection, Registry]:
    """Select for this machine, as choice.choose; ranks that share a layer choose alike."""
    return choice.choose(requirements, device, locked=locked, ranks=ranks())


def publish(selection: Selection, args: Any) -> None:
    """Put role → backend where /server_info prints it: among a scheduler's server arguments."""
    names = {role: choice.backend for role, choice in selection.roles.items()}
    if hasattr(args, "override"):  # the way to change resolved arguments, since 0.5.16
        args.override(NAME, **{NAME: names})
    else:
        setattr(args, NAME, names)


def ranks() -> Any:
    """Return the group of the ranks that share each layer, None where a rank has it alone.

    The stages of a pipeline have other layers, and choose for themselves.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    return group.cpu_group if group.world_size > 1 else None
