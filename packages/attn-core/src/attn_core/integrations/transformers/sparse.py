"""Let the indexers of a model select over the paged index keys of their layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attn_core.errors import UnsupportedError
from attn_core.integrations.transformers import compiled
from attn_core.integrations.transformers.attention import PagedLayer
from attn_core.integrations.transformers.forwards import (
    replace_forward,
    restore_forward,
    take_cache,
)
from attn_core.integrations.transformers.indexers import project


def attach(indexers: Iterable[nn.Module]) -> None:
    """Let indexers write and select through the cache layer of their pass."""
    replace_forward(indexers, _forward)


detach = restore_forward


def _forward(
    self: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Select as Pass.choose, int32 [B, T, K]; the model hands it on to the attention.

    The model's mask and positions are not read, the pass knows what is visible.
    """
    cache = take_cache(kwargs)
    paged = None if cache is None else cache.layers[self.layer_idx]
    if not isinstance(paged, PagedLayer):
        raise UnsupportedError(
            f"{type(self).__name__} runs without a paged cache; call the model, not its layers"
        )
    layer = paged.layer
    if self.index_topk != layer.index_topk:
        raise UnsupportedError(
            f"layer {layer.layer_id} selects {self.index_topk} keys, attn-core was enabled for "
            f"{layer.index_topk}; disable() it and enable() it again"
        )
    new = project(self, hidden_states, q_resid, position_embeddings)
    if torch.compiler.is_compiling():
        return compiled.choose(*new, layer, paged.requests.pool)
    return paged.requests.current.choose(*new, layer)
