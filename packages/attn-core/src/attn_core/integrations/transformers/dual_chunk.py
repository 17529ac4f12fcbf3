"""Dual chunk attention of Qwen2.5-1M, for which transformers has no code: its rotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_core.errors import UnsupportedError
from attn_core.model_config import requirements_from_config
from attn_core.ops.dual_chunk import rotary_positions
from attn_core.runtime.batch import ForwardBatch
from attn_core.spec.dual_chunk import DualChunk


@dataclass(frozen=True, eq=False)
class ChunkRotary:
    """The rotations of a model: inv_freq float32 [D / 2] turns a pair of columns by a position.

    The model itself rotates queries and keys to their places in their chunks.
    """

    dual_chunk: DualChunk
    inv_freq: Tensor

    def refuse_parts(self, new: Sequence[int], lens: Sequence[int], *, drafts: bool) -> None:
        """Raise UnsupportedError for a pass that holds a part of a prompt, or drafts of tokens.

        Its queries are scaled by the length of the whole prompt, which a part of it does not tell.
        new: tokens that each row gets. lens: what it holds with these. drafts: the new ones may be
        taken back.
        """
        trained = self.dual_chunk.original_max_position_embeddings
        for n, length in zip(new, lens, strict=True):
            if trained and n > 1 and length > trained and (n < length or drafts):
                reason = "which may be drafts" if drafts else f"after {length - n} in the cache"
                raise UnsupportedError(
                    f"{n} tokens at once, {reason}, make {length} of dual chunk attention that was "
                    f"trained for {trained}: there queries are scaled by the length of the whole "
                    "prompt, so it cannot be cut (no prefill_chunk_size, no assisted generation); "
                    "give all of it in one pass over a new cache"
                )

    def of(self, batch: ForwardBatch) -> PassRotation:
        """Return the rotations of a pass, which all its layers share."""
        chunks, lens = self.dual_chunk, batch.query_lens_host
        seq_lens = batch.views["full"].seq_lens_host
        assert lens is not None  # Sequences gives both
        assert seq_lens is not None
        _, queries = rotary_positions(chunks, batch.positions)
        turns = queries.T - queries[0][:, None]  # [T, 3 or 5]: from where the model rotated them to
        angles = turns[..., None].float() * self.inv_freq.to(turns.device)
        of_request = [chunks.query_scale(n) for n in seq_lens]
        scales = torch.tensor(of_request, dtype=torch.float32, device="cpu")
        per_token = scales.repeat_interleave(torch.tensor(lens, device="cpu")).to(turns.device)
        factor = per_token[:, None, None, None]
        cos, sin = (
            torch.cat([x, x], -1)[:, :, None] * factor for x in (angles.cos(), angles.sin())
        )
        return PassRotation(queries[0], cos, sin)


@dataclass(frozen=True, eq=False)
class PassRotation:
    """The rotations of the T tokens of a pass.

    positions: int64 [T], the place of each token in its chunk, to which the model rotates. cos,
    sin: float32 [T, 3 or 5, 1, D], of what is left to rotate, times the scale of the queries.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor

    def queries(self, q: Tensor) -> Tensor:
        """Return the queries [T, 3 or 5, Hq, D] of tokens whose model has rotated q [T, Hq, D]."""
        x = q[:, None].float()
        a, b = x.chunk(2, -1)
        return (x * self.cos + torch.cat([-b, a], -1) * self.sin).to(q.dtype)


def read_rotary(model: Any) -> ChunkRotary | None:
    """Return the rotations of a model with dual chunk attention, None for any other.

    Raises UnsupportedError for a model of another family than qwen2, or with scaled rotations.
    """
    config: Mapping[str, object] = model.config.to_dict()
    if config.get("dual_chunk_attention_config") is None:
        return None
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    rope_type = getattr(rotary, "rope_type", None)
    if config.get("model_type") != "qwen2" or rope_type != "default":
        raise UnsupportedError(
            f"dual_chunk_attention_config in a {config.get('model_type')} model with rope_type "
            f"{rope_type!r} (supports qwen2 with 'default'); remove the key for plain attention"
        )
    (layer,) = requirements_from_config(config).layers
    assert layer.dual_chunk is not None
    return ChunkRotary(layer.dual_chunk, model.get_decoder().rotary_emb.inv_freq.float())
