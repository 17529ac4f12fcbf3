"""Attention over a paged cache, one request at a time, in float32."""

import torch
from attn_core import (
    AttentionBackend,
    AttentionLayer,
    ForwardBatch,
    LayerCache,
    Output,
    read_kv,
    slot_table,
)
from torch import Tensor

Slots = dict[str, Tensor]  # view → token slots int64 [B, max_len]


class Acme(AttentionBackend):
    def init_forward_metadata(self, batch: ForwardBatch) -> Slots:
        """Expand the page tables of this pass to token slots, once for all layers."""
        page_size = self.config.page_size
        return {name: slot_table(v.page_table, page_size) for name, v in batch.views.items()}

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Slots,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend. The new k and v are already in the cache."""
        slots, new_lens = metadata[layer.view], batch.query_lens_host
        lengths = batch.views[layer.view].seq_lens_host
        assert new_lens is not None  # the row needs lengths on the host
        assert lengths is not None
        out = q.new_empty(len(q), layer.num_q_heads, layer.v_head_dim) if out is None else out
        lse = q.new_empty(len(q), layer.num_q_heads, dtype=torch.float32)
        start = 0
        for request, (new, length) in enumerate(zip(new_lens, lengths, strict=True)):
            rows = slice(start, start + new)
            first = first_seen(length - new, layer.sliding_window)
            keys, values = read_kv(cache, slots[request, first:length], torch.float32)
            assert values is not None  # an MLA cache has none, but the row is for MHA
            out[rows], lse[rows] = attend(q[rows].float(), keys, values, layer)
            start += new
        return (out, lse) if return_lse else out


def first_seen(position: int, window: int | None) -> int:
    """Return the first key that a query at `position` sees: itself and the window - 1 before it.

    Earlier keys may have been freed, so they are not read.
    """
    return 0 if window is None else max(0, position + 1 - window)


def attend(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
    """Attend from the last tokens of one request to the keys that some of them see.

    q [n, Hq, D], k and v [keys, Hkv, D]. Returns out [n, Hq, D] and the log-sum-exp [n, Hq].
    """
    group = layer.num_q_heads // layer.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->qhk", q, k) * layer.scale
    key = torch.arange(len(k))
    query = key[len(k) - len(q) :, None]  # the queries are the last tokens
    seen = key <= query
    if layer.sliding_window is not None:
        seen &= key > query - layer.sliding_window
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return torch.einsum("qhk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)
