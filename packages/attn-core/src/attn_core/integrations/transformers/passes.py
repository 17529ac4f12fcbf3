"""One forward pass over the requests of a cache: how the tokens of a layer go through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from attn_core.errors import UnsupportedError
from attn_core.integrations.transformers.dual_chunk import ChunkRotary, PassRotation
from attn_core.ops.conv import ConvPlan, conv_decode, conv_extend, conv_verify
from attn_core.runtime.backend import Metadata
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.linear import LinearLayer
from attn_core.runtime.sparse import dense_pass

_CONVOLUTIONS: Mapping[ForwardMode, Callable[..., Tensor]] = {
    ForwardMode.EXTEND: conv_extend,
    ForwardMode.DECODE: conv_decode,
    ForwardMode.TARGET_VERIFY: conv_verify,
}


@dataclass(frozen=True, eq=False)
class Part:
    """Tokens of a pass that linear layers run as one batch.

    conv: of the convolutions in front of them.
    index: int64 [N], which of the B · T tokens they are; None means all of them.
    """

    batch: ForwardBatch
    metadata: Metadata
    conv: ConvPlan
    index: Tensor | None


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass: planned once, used by every layer.

    batch: what softmax layers run; None if there is nothing but padding.
    real: int64 [N], which of the B · T tokens are no padding; None means all of them.
    parts: what linear layers run, one part after another.
    lens, seen: what the requests hold after the pass, as in Sequences.
    rotary: of a model with dual chunk attention.
    """

    dispatcher: HybridDispatcher
    batch: ForwardBatch | None
    metadata: Metadata
    real: Tensor | None
    parts: tuple[Part, ...]
    lens: list[int]
    seen: Tensor
    rotary: ChunkRotary | None = None

    @cached_property
    def _rotation(self) -> PassRotation:
        assert self.rotary is not None
        assert self.batch is not None
        return self.rotary.of(self.batch)

    def chunk_positions(self, shape: tuple[int, int], position_ids: Tensor | None) -> Tensor:
        """Return the place of each token in its chunk, int64 [B, T], 0 for padding.

        position_ids: [B or 1, T], those of the call. Raises UnsupportedError where they do not
        number the tokens of each row from 0: places in chunks do.
        """
        assert self.batch is not None
        if position_ids is not None:
            own = self._ragged(position_ids.expand(shape)).to(self.batch.positions.device)
            if not torch.equal(own, self.batch.positions.to(own.dtype)):
                raise UnsupportedError(
                    "position_ids that do not count the tokens of each row from 0, in a model with "
                    "dual chunk attention; leave them out"
                )
        positions = self._rotation.positions
        if self.real is None:
            return positions.view(shape)
        flat = positions.new_zeros(shape[0] * shape[1])
        return flat.index_copy_(0, self.real, positions).view(shape)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor | None, layer: AttentionLayer
    ) -> Tensor:
        """Write and attend for one layer: [B, H, T, D] each → [B, T, Hq, Dv], padding 0.

        value None: MLA, whose values are part of the keys. Of sparse MLA it is what `choose`
        returned, int32 [B, T, K].
        """
        b, hq, t, _ = query.shape
        if self.batch is None:
            return query.new_zeros(b, t, hq, layer.v_head_dim)
        q, k = (self._ragged(x.transpose(1, 2)) for x in (query, key))
        v, forward = None, self.dispatcher.forward
        if layer.index_topk is not None:
            assert value is not None
            if not dense_pass(layer, self.batch):
                forward = partial(forward, topk_indices=self._ragged(value))
        elif value is not None:
            v = self._ragged(value.transpose(1, 2))
        if layer.dual_chunk is not None:
            q = self._rotation.queries(q)
        out = forward(q, k, v, layer, self.batch, self.metadata)
        assert isinstance(out, Tensor)  # no LSE was asked for
        return self._padded(out, (b, t), 0)

    def choose(
        self, q_index: Tensor, k_index: Tensor, weights: Tensor, layer: AttentionLayer
    ) -> Tensor:
        """Write index keys and select for one layer of sparse MLA: int32 [B, T, K], padding -1.

        q_index [B, T, Hi, Di], k_index [B, T, Di], weights float32 [B, T, Hi]. The selection holds
        token slots, as HybridDispatcher.index_topk; a pass that attends to all keys reads none.
        """
        shape, chosen = (q_index.shape[0], q_index.shape[1]), None
        if self.batch is not None:
            q, k, w = (self._ragged(x) for x in (q_index, k_index, weights))
            chosen = self.dispatcher.index_topk(q, k, w, layer, self.batch, self.metadata)
        if chosen is None:
            assert layer.index_topk is not None
            return q_index.new_full((1,), -1, dtype=torch.int32).expand(*shape, layer.index_topk)
        return self._padded(chosen, shape, -1)

    def _ragged(self, x: Tensor) -> Tensor:
        """Return the real tokens [N, ...] of [B, T, ...]."""
        x = x.flatten(0, 1)
        return x if self.real is None else x[self.real]

    def _padded(self, x: Tensor, shape: tuple[int, int], fill: int) -> Tensor:
        """Undo `_ragged`: [N, ...] → [B, T, ...]."""
        if self.real is not None:
            rows = x.new_full((shape[0] * shape[1], *x.shape[1:]), fill)
            x = rows.index_copy_(0, self.real, x)
        return x.view(*shape, *x.shape[1:])

    def attend_linear(
        self, qkv: Tensor, f: Tensor, b: Tensor, layer: LinearLayer, conv: nn.Conv1d
    ) -> Tensor:
        """Convolve qkv [B, T, channels] and run one linear layer → [B, T, Hv, V], padding 0.

        f [B, T, Hv] or [B, T, Hv, K] and b [B, T, Hv] are the raw gates. All are taken in the dtype
        of the weights: under autocast they come in others.
        """
        qkv, f, b = (x.to(conv.weight.dtype) for x in (qkv, f, b))
        with torch.autocast(qkv.device.type, enabled=False):
            return self._attend_linear(qkv, f, b, layer, conv)

    def _attend_linear(
        self, qkv: Tensor, f: Tensor, b: Tensor, layer: LinearLayer, conv: nn.Conv1d
    ) -> Tensor:
        shape = (*qkv.shape[:2], layer.num_v_heads, layer.head_v_dim)
        out: Tensor | None = None
        for part in self.parts:
            x, raw_g, raw_beta = (
                y.flatten(0, 1) if part.index is None else y.flatten(0, 1)[part.index]
                for y in (qkv, f, b)
            )
            q, k, v = self._convolved(x, layer, conv, part)
            result = self.dispatcher.forward_linear(
                q, k, v, raw_g, raw_beta, layer, part.batch, part.metadata
            )
            if part.index is None:  # it is the only part
                return result.view(shape)
            out = result.new_zeros(shape) if out is None else out
            out.flatten(0, 1).index_copy_(0, part.index, result)
        return qkv.new_zeros(shape) if out is None else out

    def _convolved(
        self, x: Tensor, layer: LinearLayer, conv: nn.Conv1d, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k [N, Hk, K] and v [N, Hv, V] of x [N, channels]."""
        assert self.dispatcher.linear is not None
        states, weight = self.dispatcher.linear.states, conv.weight.squeeze(1)
        convolve = _CONVOLUTIONS[part.batch.forward_mode]
        x = convolve(x, weight, conv.bias, states.layer(layer.layer_id), part.conv)
        heads, dim = layer.num_k_heads, layer.head_k_dim
        keys, values = 2 * heads * dim, (layer.num_v_heads, layer.head_v_dim)
        q, k = torch.unflatten(x[:, :keys], 1, (2, heads, dim)).unbind(1)
        return q, k, torch.unflatten(x[:, keys:], 1, values)
