"""Pools of states for linear-attention layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES, CachedLayer
from attn_core.errors import UsageError


@dataclass(frozen=True, kw_only=True, eq=False)
class StateCache:
    """One linear layer's states [slots, Hv, V, K], and one intermediate state per draft."""

    state: Tensor
    intermediate: Tensor | None = None  # [slots, drafts, Hv, V, K]


class StatePool:
    """The states of a model's linear layers: one StateCache per layer, initialised to zeros.

    A layer's head_dim is K, its v_head_dim V and its num_kv_heads Hv.
    dtype: "fp32" or "bf16".
    num_drafts: if above 0, adds one intermediate state per slot and draft, for verify.
    """

    def __init__(
        self,
        layers: Iterable[CachedLayer],
        *,
        num_slots: int,
        dtype: str = "fp32",
        num_drafts: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype not in ("fp32", "bf16"):
            raise UsageError(f"linear-attention states of dtype {dtype!r} (supports fp32, bf16)")

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=TORCH_DTYPES[dtype], device=device)

        self._layers: dict[int, StateCache] = {}
        for x in layers:
            inner = (x.num_kv_heads, x.v_head_dim, x.head_dim)
            drafts = zeros(num_slots, num_drafts, *inner) if num_drafts else None
            state = zeros(num_slots, *inner)
            self._layers[x.layer_id] = StateCache(state=state, intermediate=drafts)

    def layer(self, layer_id: int) -> StateCache:
        """Return one layer's states. Raises UsageError for a layer that is not in the pool."""
        try:
            return self._layers[layer_id]
        except KeyError:
            known = sorted(self._layers)
            raise UsageError(f"layer {layer_id} has no state (layers: {known})") from None
