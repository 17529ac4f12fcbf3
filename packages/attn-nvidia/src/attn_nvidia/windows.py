"""Windows that the FlashAttention backends refuse."""

from __future__ import annotations

from attn_core.errors import UnsupportedError
from attn_core.forward import AttentionLayer


def refuse_window(name: str, layer: AttentionLayer, *, causal: bool | None = None) -> None:
    """Raise UnsupportedError for a sliding window without causal order."""
    causal = layer.is_causal if causal is None else causal
    if layer.sliding_window is not None and (layer.is_cross or not causal):
        raise UnsupportedError(
            f"layer {layer.layer_id}: a sliding window of {layer.sliding_window} without causal "
            f"order; {name} windows only causal self-attention: unset the one or the other"
        )
