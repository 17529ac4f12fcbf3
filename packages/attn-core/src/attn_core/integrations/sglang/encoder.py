"""Encoder-decoder models: SGLang keeps an encoder's keys in front of a request's own tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_core.errors import UnsupportedError
from attn_core.integrations.sglang.page_tables import fill_page_table
from attn_core.runtime.batch import CacheView, ForwardBatch
from attn_core.runtime.layer import AttentionLayer


class EncoderViews:
    """Adds the view "cross" to the batches of a model, and moves "full" behind the encoder's keys.

    req_to_token: int32 [requests, context]; a row is the encoder's slots, then the text's. The text
    begins anywhere, so a page holds one token.
    host_lengths: some chosen row plans on the host.
    """

    def __init__(self, req_to_token: Tensor, *, host_lengths: bool) -> None:
        self.req_to_token = req_to_token
        self.host_lengths = host_lengths
        self._page_table: Tensor | None = None
        self._lengths: Tensor | None = None

    def create_static(self, max_bs: int) -> None:
        """Create the buffers of captured passes of up to `max_bs` requests."""
        self._page_table, self._lengths = self._tables(max_bs, self.req_to_token.shape[1])

    def _tables(self, requests: int, longest: int) -> tuple[Tensor, Tensor]:
        device = self.req_to_token.device
        page_table = torch.zeros(requests, longest, dtype=torch.int32, device=device)
        return page_table, torch.zeros(requests, dtype=torch.int32, device=device)

    def add(self, engine_batch: Any, batch: ForwardBatch, *, captured: bool) -> ForwardBatch:
        """Return a batch with the encoder's view. A captured one is in the static buffers."""
        encoder_lens = engine_batch.encoder_lens
        if encoder_lens is None:
            return batch  # no request of this pass has an encoder's output
        if getattr(engine_batch, "cross_attention_custom_mask", None) is not None:
            raise UnsupportedError(
                "cross attention with a mask of the model on attn_core (every query sees all of "
                "its encoder's keys); choose --prefill-attention-backend flashinfer"
            )
        known = getattr(engine_batch, "encoder_lens_cpu", None)
        if captured:
            assert self._page_table is not None  # SGLang calls init_cuda_graph_state first
            assert self._lengths is not None
            page_table = self._page_table[: batch.batch_size]
            lengths = self._lengths[: batch.batch_size]
        else:
            longest = self.req_to_token.shape[1] if known is None else max(known, default=0)
            page_table, lengths = self._tables(batch.batch_size, max(longest, 1))
        host = None
        if self.host_lengths:
            host = tuple(encoder_lens.tolist() if known is None else known)
        slots = getattr(engine_batch, "encoder_out_cache_loc", None)
        if slots is None:
            slots = torch.zeros(0, dtype=torch.int64, device=page_table.device)
        cross = CacheView(
            page_table=page_table,
            seq_lens=lengths,
            out_cache_loc=slots.long(),
            max_seq_len=page_table.shape[1],
            seq_lens_host=host,
        )
        batch = replace(batch, views={**batch.views, "cross": cross})
        self.fill(engine_batch, batch)
        return batch

    def refill(self, engine_batch: Any, batch: ForwardBatch) -> ForwardBatch:
        """Fill a captured batch for a replay; return it with the lengths that the host knows."""
        if self.host_lengths:
            return self.add(engine_batch, batch, captured=True)
        self.fill(engine_batch, batch)
        return batch

    def fill(self, engine_batch: Any, batch: ForwardBatch) -> None:
        """Fill the tables and lengths of both views for this pass."""
        full, cross = batch.views["full"], batch.views.get("cross")
        if cross is None:
            return
        rows, encoder_lens = engine_batch.req_pool_indices, engine_batch.encoder_lens
        tables = self.req_to_token
        fill_page_table(tables, rows, encoder_lens, 0, 1, cross.page_table, cross.seq_lens)
        seq_lens = engine_batch.seq_lens
        fill_page_table(
            tables, rows, seq_lens, 0, 1, full.page_table, full.seq_lens, starts=encoder_lens
        )


def check_cross_attention(
    layers: Iterable[AttentionLayer], page_size: int, speculates: bool
) -> bool:
    """Say whether a model has cross attention. Raises UnsupportedError where it is not served."""
    layers = tuple(layers)
    if not any(layer.is_cross for layer in layers):
        return False
    refused = {
        f"--page-size {page_size} (supports 1)": page_size > 1,
        "speculation; leave out --speculative-algorithm": speculates,
        "a pool for windowed layers; add --disable-hybrid-swa-memory": any(
            layer.view == "window" for layer in layers
        ),
    }
    for what, present in refused.items():
        if present:
            raise UnsupportedError(f"cross attention on attn_core with {what}")
    return True
