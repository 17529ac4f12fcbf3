"""Which layers share a plan."""

from __future__ import annotations

from typing import NamedTuple

from attn_core.forward import AttentionLayer


class LayerClass(NamedTuple):
    """What of a layer decides its plan; layers that agree share one."""

    view: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None
    causal: bool

    @classmethod
    def of(cls, layer: AttentionLayer, *, causal: bool | None = None) -> LayerClass:
        """Return the class of a layer; `causal` overrides the layer's own."""
        if causal is None:
            causal = layer.is_causal and not layer.is_cross
        return cls(
            layer.view,
            layer.num_q_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.v_head_dim,
            layer.sliding_window,
            causal,
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads
