"""MLA's heads before absorption: prefill over the tokens of a pass and over a cached prefix.

SGLang unfolds the latents into keys and values and says on its batch which of them a call brings:
the tokens of the pass, a chunk of the prefix, or all tokens of each request. Where it merges calls
by their log-sum-exp it asks for that too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_core.errors import UnsupportedError
from attn_core.integrations.sglang.server import NAME
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer


class Keys(NamedTuple):
    """The keys of one call.

    cu_seqlens: int32 [B + 1].
    longest: keys of the longest request.
    own: they are the tokens of the pass and no others.
    causal: the last of them are the queries' own.
    """

    cu_seqlens: Tensor
    longest: int
    own: bool
    causal: bool


def attend(
    dispatcher: HybridDispatcher,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: AttentionLayer,
    engine_batch: Any,
    batch: ForwardBatch,
    out: Tensor,
) -> Tensor | None:
    """Attend to unfolded keys; return the log-sum-exp where SGLang asks for it.

    q: [T, Hq, D] without padding. k, v: [N, Hkv, D] and [N, Hkv, Dv], perhaps with padding.
    out: [T, Hq, Dv], filled. Returns natural logarithms, float32 [T, Hq], or None.
    """
    keys = keys_of(engine_batch, batch, layer)
    if keys.own:
        k, v = k[: len(q)], v[: len(q)]
    lse = bool(engine_batch.mha_return_lse)
    result = dispatcher.forward_ragged(
        q,
        k,
        v,
        layer,
        batch.cu_seqlens_q,
        keys.cu_seqlens,
        batch.max_q_len,
        keys.longest,
        causal=keys.causal,
        out=out,
        return_lse=lse,
    )
    # SGLang's merge of chunks takes contiguous ones; fa3 lays out heads first
    return result[1].contiguous() if isinstance(result, tuple) else None


def padded(lse: Tensor, tokens: int) -> Tensor:
    """Return an LSE [T, Hq] with rows for padding; SGLang merges zeros with zeros there."""
    return pad(lse, (0, 0, 0, tokens - len(lse))) if len(lse) < tokens else lse


def keys_of(engine_batch: Any, batch: ForwardBatch, layer: AttentionLayer) -> Keys:
    """Say which keys a call of SGLang brings. Raises UnsupportedError if it does not say."""
    if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
        raise UnsupportedError(
            f"layer {layer.layer_id}: unfolded MLA in a {batch.forward_mode.value} pass (supports "
            "prefill); use another --attention-backend"
        )
    if engine_batch.attn_attend_prefix_cache:
        chunk = engine_batch.prefix_chunk_idx
        cu_seqlens = engine_batch.prefix_chunk_cu_seq_lens[chunk]
        longest = engine_batch.prefix_chunk_max_seq_lens[chunk]
        return Keys(cu_seqlens, longest, own=False, causal=False)
    prefix = engine_batch.extend_prefix_lens_cpu
    if (prefix is not None and not any(prefix)) or engine_batch.mha_return_lse:
        return Keys(batch.cu_seqlens_q, batch.max_q_len, own=True, causal=True)
    if not engine_batch.mha_one_shot:
        raise UnsupportedError(
            f"layer {layer.layer_id}: unfolded MLA over a cached prefix whose keys SGLang does not "
            "name (reads one call for all tokens, or chunks); use another --attention-backend"
        )
    return _all_keys(batch)


@lru_cache(maxsize=1)  # the layers of a pass ask one after another
def _all_keys(batch: ForwardBatch) -> Keys:
    view = batch.views["full"]
    cu_seqlens = pad(view.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return Keys(cu_seqlens, view.max_seq_len, own=False, causal=True)


def unfold_long_prefixes() -> None:
    """Let SGLang unfold the latents of long prefixes too, under the rules that it has for FA3."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register(NAME, handlers.handle_attention_fa3)
