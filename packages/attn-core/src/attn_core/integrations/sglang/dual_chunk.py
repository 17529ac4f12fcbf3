"""Dual chunk attention of SGLang's models of Qwen2.5-1M: their layers and their queries.

SGLang's rotary embedding makes five queries of each token and rotates a key to its place in its
chunk, as attn-core takes both.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from attn_core.errors import UnsupportedError
from attn_core.integrations.sglang.server import CHUNKED, NAME, captures_prefill, has_version
from attn_core.model_config import read_vertical_slash
from attn_core.model_config.dual_chunk import dual_chunk
from attn_core.model_config.keys import Keys
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.dual_chunk import DualChunk

ROTATIONS = 5  # of SGLang's queries; the last two choose the lines of sparse prompts


class DualChunkModel:
    """The dual chunk attention of a model runner.

    config: of transformers, as a mapping. context_len: tokens that a request can have. rank: of the
    ranks that share a layer's heads.
    """

    def __init__(
        self, chunks: DualChunk, config: Mapping[str, object], context_len: int, rank: int = 0
    ) -> None:
        self.chunks = chunks
        self._config = config
        self._rank = rank
        self._is_scaled = 0 < chunks.original_max_position_embeddings < context_len
        self._first: int | None = None
        self._factors: Tensor | None = None

    def layer(self, layer: AttentionLayer) -> AttentionLayer:
        """Return a layer with its chunks, and the lines of this rank's heads."""
        self._first = layer.layer_id if self._first is None else min(self._first, layer.layer_id)
        lines = None
        if self.chunks.sparse_threshold is not None:
            (heads,) = Keys(self._config, "the model").need("num_attention_heads")
            tp = heads // layer.num_q_heads
            lines = read_vertical_slash(self._config, layer.layer_id, tp=tp, rank=self._rank)
        return replace(layer, dual_chunk=self.chunks, vertical_slash=lines)

    def queries(
        self, q: Tensor, layer: AttentionLayer, engine_batch: Any, batch: ForwardBatch
    ) -> Tensor:
        """Return the queries [T, 3 or 5, Hq, D] of a pass, of SGLang's [tokens, 5 · Hq · D].

        They are multiplied by the scale of their request where one can be longer than the model's
        trained length. The first layer of a pass computes it, inside of a graph too.
        """
        heads = q.view(len(q), ROTATIONS, layer.num_q_heads, layer.head_dim)
        heads = heads[: batch.num_tokens, : self.chunks.rotations]
        if not self._is_scaled:
            return heads
        if self._factors is None or layer.layer_id == self._first:
            self._factors = self._scales(engine_batch, batch)
        return (heads * self._factors).to(q.dtype)

    def _scales(self, engine_batch: Any, batch: ForwardBatch) -> Tensor:
        """Return DualChunk.query_scale of every token, float32 [T, 1, 1, 1], from the device."""
        decodes = batch.forward_mode is ForwardMode.DECODE
        lengths = batch.views["full"].seq_lens if decodes else engine_batch.orig_seq_lens
        ratio = lengths[: batch.batch_size] / self.chunks.original_max_position_embeddings
        scale = (0.1 * ratio.clamp(min=1).log() + 1) ** 2
        if not decodes:
            counts = batch.cu_seqlens_q.diff().long()
            scale = scale.repeat_interleave(counts, output_size=batch.num_tokens)
        return scale[:, None, None, None]


def read_dual_chunk(runner: Any) -> DualChunkModel | None:
    """Return the dual chunk attention of a model runner, None for a model without.

    Raises UnsupportedError for what is not served beside it.
    """
    config = runner.model_config.hf_config
    if getattr(config, "dual_chunk_attention_config", None) is None:
        return None
    mapping = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    chunks = dual_chunk(Keys(mapping, " ".join(config.architectures)))
    assert chunks is not None  # the config has the key
    check_dual_chunk(runner.server_args, config, chunks)
    rank = getattr(getattr(runner, "ps", None), "tp_rank", 0)
    return DualChunkModel(chunks, mapping, runner.model_config.context_len, rank)


def check_dual_chunk(args: Any, config: Any, chunks: DualChunk) -> None:
    """Raise UnsupportedError for what is not served beside dual chunk attention."""
    refused = {
        f"SGLang {importlib.metadata.version('sglang')} (tested with {CHUNKED})": not has_version(
            CHUNKED
        ),
        "another backend for one phase": set(args.get_attention_backends()) != {NAME},
        "speculation": args.speculative_algorithm is not None,
        "--dcp-size": getattr(args, "dcp_size", 1) > 1,
        "CUDA graphs of prefill (--cuda-graph-backend-prefill disabled leaves them out)": (
            captures_prefill(args)
        ),
    }
    model = f"{' '.join(config.architectures)} has dual chunk attention {chunks}"
    for what, present in refused.items():
        if present:
            raise UnsupportedError(
                f"{model}, which {NAME} does not serve with {what}; use --attention-backend "
                "dual_chunk_flash_attn"
            )
    cuts = {
        "--disable-radix-cache": not getattr(args, "disable_radix_cache", False),
        "--chunked-prefill-size -1": (getattr(args, "chunked_prefill_size", None) or 0) > 0,
    }
    missing = [flag for flag, present in cuts.items() if present]
    if chunks.sparse_threshold is not None and missing:
        raise UnsupportedError(
            f"{model}: what they attend to depends on how a prompt is cut; serve them whole, with "
            f"{' '.join(missing)}, or let every prompt attend to all tokens: --json-model-override-"
            "args with the model's dual_chunk_attention_config and sparse_attention_enabled false"
        )
