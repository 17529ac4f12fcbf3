"""Choose backends for an SGLang server, alike on every rank."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.errors import UsageError
from attn_core.integrations import choice
from attn_core.integrations.sglang.server import NAME
from attn_core.plugins.registry import Registry
from attn_core.selection.result import Selection
from attn_core.spec.requirements import Requirements


def choose(
    requirements: Requirements, device: torch.device, *, locked: bool = True
) -> tuple[Selection, Registry]:
    """Select for this machine, as choice.choose. Raises UsageError where ranks disagree too."""
    selection, registry = choice.choose(requirements, device, locked=locked)
    check_ranks({role: chosen.backend for role, chosen in selection.roles.items()})
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
