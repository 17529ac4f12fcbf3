"""SGLang's pool of states as a StatePool, with records of drafts in place of its snapshots."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_core.cache.state_pool import StateCache, StatePool
from attn_core.integrations.sglang.draft_kernels import fill_tree_mask, move_records
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.linear import LinearLayer
from attn_core.runtime.linear_routes import LinearPart, LinearRoutes


def states_of(requests: Any, layer: LinearLayer, drafts: int) -> StatePool:
    """Return SGLang's states, [layers, slots, Hv, V, K], without a copy.

    requests: SGLang's HybridReqToTokenPool. With drafts its snapshots, a state of each draft, are
    given back: no one reads them. Each draft leaves a record in the slot of its request instead.
    """
    pool = requests.mamba_pool
    state = pool.mamba_cache.temporal
    records: dict[str, Tensor] = {}
    if drafts:
        if pool.mamba_cache.intermediate_ssm is not None:
            pool.mamba_cache = dataclasses.replace(pool.mamba_cache, intermediate_ssm=None)
            pool._layer_cache_by_id.clear()  # views of the snapshots
        slots = (*state.shape[:2], drafts)
        shapes = {
            "u": (layer.num_v_heads, layer.head_v_dim),
            "k": (layer.num_k_heads, layer.head_k_dim),
            "g": layer.g_dims,
        }
        records = {
            name: torch.zeros(*slots, *dims, dtype=torch.float32, device=state.device)
            for name, dims in shapes.items()
        }
    return StatePool.of(list(requests.mamba_map), StateCache(state=state, **records))


class DraftTrees:
    """The masks of the drafts of verified passes, bool [requests, n, n], in static memory."""

    def __init__(self, max_bs: int, drafts: int, device: Any) -> None:
        self.masks = torch.zeros(max_bs, drafts, drafts, dtype=torch.bool, device=device)

    def fill(self, metadata: Any, requests: int) -> Tensor | None:
        """Write the trees that SGLang's metadata describes, and return them; None is a chain."""
        children, siblings = metadata.retrieve_next_token, metadata.retrieve_next_sibling
        if children is None:
            return None
        masks = self.masks[:requests]
        fill_tree_mask(children, siblings, masks[: len(children)])
        return masks


def commit(
    routes: LinearRoutes,
    batch: ForwardBatch,
    parts: tuple[LinearPart, ...],
    engine_states: Any,
    accepted: Tensor,
    checkpoint_slots: Tensor | None,
    checkpoints: Tensor | None,
) -> None:
    """Take in the accepted drafts of a verified pass, as LinearBackend.commit.

    engine_states: SGLang's SpeculativeState, whose convolution SGLang's own kernel brings up.
    """
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton as scatter

    assert batch.state_slots is not None
    requests, size = accepted.shape[0], batch.batch_size
    if not requests:
        return

    def padded(x: Tensor, value: int) -> Tensor:
        return x if requests == size else pad(x, (0, size - requests), value=value)

    if checkpoint_slots is not None and checkpoints is not None:
        slots = padded(checkpoint_slots.int(), -1)
        move_records(
            routes.states.states.records, batch.state_slots, slots, padded(checkpoints, -1)
        )
        copies = dataclasses.replace(batch, state_slots_out=slots)
        routes.commit(copies, routes.plan(copies), padded(checkpoints, -1))
    routes.commit(batch, parts, padded(accepted, -1))
    convolution = SimpleNamespace(
        temporal=accepted.new_empty(0),  # the states are ours
        intermediate_ssm=None,
        conv=engine_states.conv,
        intermediate_conv_window=engine_states.intermediate_conv_window,
    )
    scatter.scatter_mamba_states_after_mtp_verify(
        convolution, batch.state_slots[:requests], accepted, checkpoint_slots, checkpoints
    )
