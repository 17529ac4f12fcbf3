"""The indexers of sparse MLA (DSA) of each family: what they compute before keys are scored."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_core.errors import UnsupportedError

# The class of an indexer → the rotary embedding of its own module: half-split in DeepSeek-V3.2,
# interleaved in GLM-5.
_ROTATIONS: Mapping[str, str] = {
    "DeepseekV32Indexer": "apply_rotary_pos_emb",
    "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave",
}


class Projected(NamedTuple):
    """What an indexer makes of its inputs, as HybridDispatcher.index_topk takes it.

    q_index: [B, T, Hi, Di]. k_index: [B, T, Di]. weights: float32 [B, T, Hi], with every scale.
    """

    q_index: Tensor
    k_index: Tensor
    weights: Tensor


def read_indexers(modules: Mapping[int, Any]) -> dict[int, Any]:
    """Return the indexers of attention modules, by layer; a layer that shares has none.

    Raises UnsupportedError for an indexer of another class than those of SUPPORTED models.
    """
    by_layer = {i: getattr(m, "indexer", None) for i, m in modules.items()}
    indexers = {i: x for i, x in by_layer.items() if x is not None}
    for i, x in indexers.items():
        if not hasattr(sys.modules[type(x).__module__], _ROTATIONS.get(type(x).__name__, "")):
            raise UnsupportedError(
                f"layer {i} selects keys by a {type(x).__name__} of {type(x).__module__} "
                f"(supports {', '.join(_ROTATIONS)} of transformers)"
            )
    if not indexers or min(indexers) != min(modules):
        raise UnsupportedError(
            f"layers {sorted(indexers)} of {sorted(modules)} have an indexer; the first layer of "
            "sparse MLA needs one"
        )
    return indexers


def project(
    indexer: Any, hidden: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> Projected:
    """Return the queries, keys and weights of hidden states [B, T, hidden].

    q_resid: [B, T, q_lora_rank], the normed latent of the queries. The rotary dims are the first of
    a head. No Hadamard transform is applied, to queries and keys alike.
    Source: DeepSeek-V3.2, section 2.1, equation 1; the head's scales are part of the weights.
    """
    heads, dim, rope = indexer.n_heads, indexer.head_dim, indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid).unflatten(-1, (heads, dim))
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    rotate = getattr(sys.modules[type(indexer).__module__], _ROTATIONS[type(indexer).__name__])
    rotated = rotate(q[..., :rope], k[..., :rope], *position_embeddings, unsqueeze_dim=2)
    q, k = (torch.cat([x, y[..., rope:]], -1) for x, y in zip(rotated, (q, k), strict=True))
    gate = indexer.weights_proj
    weights = gate(hidden.to(gate.weight.dtype)).float() * (heads * dim) ** -0.5
    return Projected(q, k.squeeze(2), weights)
