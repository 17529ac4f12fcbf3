"""The attention of a vision tower: no cache, all images of a call at once, ragged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from attn_core.errors import UnsupportedError
from attn_core.integrations.transformers.architectures import ModelAttention
from attn_core.runtime.backend import Output
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.no_backward import no_backward

# With "flash" in the name transformers hands all images on in one call with their cu_seqlens;
# otherwise it calls once per image, per frame of a video.
NAME = "attn_core_flash_vision"
_Encode = Callable[[Tensor, Tensor, Tensor, Tensor, int], Output]
_ENCODE = "_attn_core_encode"  # on each module: the function of the engine that it runs on


def attach(
    attention: ModelAttention, dispatcher: HybridDispatcher, lock: AbstractContextManager[object]
) -> None:
    """Let the modules of the tower attend through the backend of role "encode".

    lock: held in each call, because the backends' workspaces are one for all threads. Raises
    UnsupportedError where the selection has none.
    """
    if attention.vision_layers:
        dispatcher.backend("encode")
    for module, layer in zip(attention.vision_modules, attention.vision_layers, strict=True):
        vars(module)[_ENCODE] = _encoder(dispatcher, layer, lock)


def _encoder(
    dispatcher: HybridDispatcher, layer: AttentionLayer, lock: AbstractContextManager[object]
) -> _Encode:
    # a function, because deep copies of a model share it
    def encode(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Output:
        lengths = (cu_seqlens, cu_seqlens, longest, longest)
        with lock:
            return dispatcher.forward_ragged(q, k, v, layer, *lengths, causal=False, role="encode")

    return encode


def detach(attention: ModelAttention) -> None:
    """Undo attach."""
    for module in attention.vision_modules:
        vars(module).pop(_ENCODE, None)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in both directions within each image: [1, H, T, D] → [1, T, H, D].

    cu_seq_lens_q: int32 [images + 1]. Raises UnsupportedError for anything else that is asked.
    """
    encode: _Encode | None = getattr(module, _ENCODE, None)
    if encode is None:
        raise UnsupportedError(f"{type(module).__name__} is no vision tower that attn-core runs")
    call = (query.shape[0], attention_mask is None, scaling, dropout, is_causal)
    expected = (1, True, module.scaling, 0.0, False)
    if call != expected or cu_seq_lens_q is None or cu_seq_lens_k is not cu_seq_lens_q:
        raise UnsupportedError(
            f"{type(module).__name__} was called with (rows, no mask, scale, dropout, causal) = "
            f"{call} (supports {expected}) and {'' if cu_seq_lens_q is not None else 'without '}"
            "cu_seq_lens, one for queries and keys"
        )
    longest = int(cu_seq_lens_q.diff().max()) if max_length_q is None else max_length_q
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    with torch.no_grad():
        out = encode(q, k, v, cu_seq_lens_q.int(), longest)
    assert isinstance(out, Tensor)  # no LSE was asked for
    return no_backward(out[None], query), None
