"""The indexers of sparse MLA (DSA) of SGLang's models, which select over SGLang's index keys."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor

from attn_core.errors import UnsupportedError
from attn_core.integrations.sglang.server import NAME


def serve_indexers(model: Any) -> None:
    """Let the indexers of a model select through attn-core, and its layers attend absorbed.

    Absorbed heads are for every pass: unfolded ones would attend to all keys of a long prompt.
    """
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    for module in model.modules():
        if isinstance(module, Indexer):
            vars(module)["forward"] = MethodType(_forward, module)
    absorbed = handlers.AttnForwardMethod.MLA
    handlers.AttentionBackendRegistry.register(NAME, lambda attn, batch: absorbed)


def _forward(
    self: Any,
    x: Tensor,
    q_lora: Tensor,
    positions: Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
) -> Tensor | None:
    """Select as `select`; the model hands it on to the attention of its layers.

    Queries, keys and the gates of the heads are SGLang's own, with its Hadamard transform. Queries
    are not quantised, so that the weights have the scales of heads and dims alone.
    """
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = get_attn_backend()
    if not hasattr(backend, "planned"):  # of AttnCoreBackend
        raise UnsupportedError(
            f"layer {layer_id} selects keys in a pass of {type(backend).__name__}; use one "
            "--attention-backend for all passes"
        )
    q, k, gates = self._get_q_k_bf16(q_lora, x, positions, False, forward_batch)
    if gates is None:
        gates = self._weights_proj_bf16_in_fp32_out(x)
    weights = gates.float() * (self.n_heads * self.head_dim) ** -0.5
    return select(backend, q, k, weights, layer_id)


def select(backend: Any, q: Tensor, k: Tensor, weights: Tensor, layer_id: int) -> Tensor | None:
    """Write index keys and select in the pass of an AttnCoreBackend, whose rows may be padded.

    The operands are those of HybridDispatcher.index_topk. Returns int32 [T, K] without padding, or
    None for all keys.
    """
    if backend.planned is None:
        return None
    batch, metadata = backend.planned
    real = batch.num_tokens
    index = (x[:real] for x in (q, k, weights))
    return backend.dispatcher.index_topk(*index, backend.layers[layer_id], batch, metadata)  # type: ignore[no-any-return]
