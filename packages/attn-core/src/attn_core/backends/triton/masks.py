"""Which keys the queries of a layer see: the MASK of every kernel and its launcher."""

from __future__ import annotations

import triton.language as tl

from attn_core.runtime.batch import SpecInfo
from attn_core.runtime.layer import AttentionLayer

MASK_NONE = tl.constexpr(0)  # every query sees all keys
MASK_CAUSAL = tl.constexpr(1)  # a query sees the keys up to its own
MASK_TREE = tl.constexpr(2)  # a draft sees the prefix and what the tree's mask says of the drafts


def mask_mode(layer: AttentionLayer, spec: SpecInfo | None) -> int:
    """Return the MASK of a layer. spec: the drafts that a pass verifies."""
    if layer.is_cross or not layer.is_causal:
        return int(MASK_NONE.value)
    tree = spec is not None and spec.tree_mask is not None
    return int(MASK_TREE.value if tree else MASK_CAUSAL.value)
