"""FlashAttention 3."""
