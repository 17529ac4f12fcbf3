"""Choose backends for an SGLang server, alike on every rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attn_core.cache.pool import CachePool
from attn_core.integrations import choice
from attn_core.integrations.metrics import export
from attn_core.integrations.ranks import united
from attn_core.integrations.sglang.server import NAME
from attn_core.plugins.registry import Registry
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.selection.result import Selection
from attn_core.spec.requirements import Requirements


def choose(
    requirements: Requirements, device: torch.device, *, locked: bool = True
) -> tuple[Selection, Registry]:
    """Select for this machine, as choice.choose; ranks that share a layer choose alike.

    locked: it is the model that a lock names; the passes of another, a draft model, are not picked.
    """
    selection, registry = choice.choose(requirements, device, locked=locked, ranks=ranks())
    return (selection if locked else replace(selection, alternatives={})), registry


def create_dispatcher(
    runner: Any,
    selection: Selection,
    registry: Registry,
    layers: tuple[AttentionLayer, ...],
    pool: CachePool,
    max_bs: int,
    max_seq_len: int,
) -> HybridDispatcher:
    """Create the dispatcher of a model runner; its passes are counted where SGLang has metrics."""
    dispatcher = HybridDispatcher.from_selection(
        selection,
        registry,
        layers,
        pool,
        max_bs=max_bs,
        max_seq_len=max_seq_len,
        adaptive=True,
        agree=partial(united, group=ranks()),
    )
    args, parallel = runner.server_args, getattr(runner, "ps", None)
    first = getattr(parallel, "attn_tp_rank", 0) == 0  # of ranks that run the same passes
    every = getattr(args, "enable_metrics_for_all_schedulers", False)
    if getattr(args, "enable_metrics", False) and (first or every):
        export(dispatcher, "draft model" if runner.is_draft_worker else "model")
    return dispatcher


def publish(selection: Selection, args: Any) -> None:
    """Put role → backend where /server_info prints it: among a scheduler's server arguments.

    "decode by pass" names those that take single passes of decode.
    """
    names: dict[str, str] = {role: choice.backend for role, choice in selection.roles.items()}
    for role, others in selection.alternatives.items():
        names[f"{role} by pass"] = ", ".join(choice.backend for choice in others)
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
