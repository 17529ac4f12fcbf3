"""The forward and the cache layer that connect linear layers of a model to their states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from attn_core.errors import UnsupportedError
from attn_core.integrations.transformers import compiled
from attn_core.integrations.transformers.forwards import (
    replace_forward,
    restore_forward,
    take_cache,
)
from attn_core.integrations.transformers.linear_modules import project, to_hidden
from attn_core.integrations.transformers.sequences import Sequences
from attn_core.runtime.linear import LinearLayer


def attach(modules: Iterable[nn.Module]) -> None:
    """Let linear layers run through the cache layer of their pass."""
    replace_forward(modules, _forward)


detach = restore_forward


def _forward(
    self: Any,
    hidden_states: Tensor,
    **kwargs: Any,
) -> Tensor:
    """Run a layer as its own forward does: [B, T, hidden] → the same, zeros in padded rows.

    An attention_mask is not read, the pass knows what is padding.
    """
    cache = take_cache(kwargs)
    states = None if cache is None else cache.layers[self.layer_idx]
    if not isinstance(states, StateLayer):
        raise UnsupportedError(
            f"{type(self).__name__} runs without a paged cache; call the model, not its layers"
        )
    new = project(self, hidden_states)
    return to_hidden(self, states.attend(new.qkv, new.f, new.b, self.conv1d), new.z)


class StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]  # transformers ships no types
    """One linear layer of a transformers cache whose states lie in a StatePool.

    The requests own the states of all layers; their PagedLayer passes on what transformers asks.
    """

    record_past = False
    number_of_states = 1

    def __init__(self, requests: Sequences, layer: LinearLayer) -> None:
        self.requests, self.layer = requests, layer

    @property
    def is_croppable(self) -> bool:
        """Whether a crop can put the states back."""
        return self.requests.can_crop

    def attend(self, qkv: Tensor, f: Tensor, b: Tensor, conv: nn.Conv1d) -> Tensor:
        """Run the layer in the current pass, as Pass.attend_linear; in one operator if compiled."""
        current = self.requests.current
        if torch.compiler.is_compiling():
            return compiled.attend_linear(qkv, f, b, self.layer, self.requests.pool)
        return current.attend_linear(qkv, f, b, self.layer, conv)

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Return whether the state holds tokens, as transformers asks."""
        return {0: self.requests.columns > 0}

    @property
    def conv_states(self) -> dict[int, Tensor]:
        """Refuse: only the enabled model reads states, and where they are."""
        raise UnsupportedError(
            "the states of a paged cache outside the model that it was made for, or after "
            "disable(); start a new cache (past_key_values=None)"
        )

    recurrent_states = conv_states

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the pool is there already."""

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse, as conv_states."""
        return self.conv_states[0]

    update_recurrent_state = update_conv_state

    def _left_to_the_requests(self, *args: Any) -> None:
        """Do nothing: a PagedLayer of the same requests does it for all layers."""

    reset = crop = reorder_cache = activate_past_recording = _left_to_the_requests
    batch_select_indices = batch_repeat_interleave = _left_to_the_requests

    def offload(self) -> None:
        """Refuse: states stay where the pool is."""
        raise UnsupportedError("a paged cache cannot be offloaded; use cache_implementation=None")

    prefetch = offload
