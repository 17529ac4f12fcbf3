"""torch_native: attention with torch alone, the embedded default on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from attn_core.backend import AttentionBackend, BackendConfig, Output
from attn_core.backends.torch_native.gather import Scratch, gather
from attn_core.backends.torch_native.kernels import attend
from attn_core.backends.torch_native.plan import (
    LayerClass,
    Limits,
    PagesOf,
    Piece,
    Planner,
    Where,
)
from attn_core.errors import BackendError, UnsupportedError
from attn_core.forward import AttentionLayer, ForwardBatch, ForwardMode
from attn_core.kv_cache import STORES, LayerCache
from attn_core.merge import merge_states

Plans = Mapping[LayerClass, tuple[Piece, ...]]

_CPU_TILE = 2 << 20  # bytes of K and V that a core gathers at once, and reads while in its cache
_GATHER = 256 << 20  # the same on a device, where few large calls win
_MOST_PARTS = 8  # partial results kept before they are merged


class TorchNative(AttentionBackend):
    """Scaled dot product attention per bucket of equal lengths, over tiles of gathered pages.

    Each tile of keys is gathered, attended and merged into the result by its log-sum-exp.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            _refuse(layer)
        self._dtype = STORES[config.dtype]
        self._scratch = Scratch()
        classes = {LayerClass.of(layer) for layer in config.layers}
        self._limits = {c: self._limits_of(c, config.device) for c in classes}

    def _limits_of(self, layer: LayerClass, device: torch.device) -> Limits:
        latent = self.config.row.kind != "mha"  # the values are part of the keys
        width = layer.head_dim if latent else layer.head_dim + layer.v_head_dim
        token = layer.num_kv_heads * width * self._dtype.itemsize
        if device.type != "cpu":
            return Limits(tile=None, gather=max(1, _GATHER // token), fold=512, splits=1)
        cores = torch.get_num_threads()
        tile = max(64, _CPU_TILE // token) * cores
        return Limits(tile=tile, gather=tile, fold=64, splits=cores)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plans:
        """Plan every layer class of the model; without host lengths it asks the device."""
        device = batch.positions.device
        query_lens = batch.query_lens_host
        if query_lens is None:
            query_lens = tuple(batch.cu_seqlens_q.diff().tolist())
        verify = batch.forward_mode is ForwardMode.TARGET_VERIFY
        planner = Planner(
            query_lens,
            self.config.page_size,
            self._dtype,
            device,
            batch.spec if verify else None,
            batch.positions,
        )
        key_lens: dict[str, Sequence[int]] = {}
        for name, view in batch.views.items():
            known = view.seq_lens_host
            key_lens[name] = view.seq_lens.tolist() if known is None else known
        return {
            c: planner.plan(c, key_lens[c.view], _paged(batch.views[c.view].page_table), limits)
            for c, limits in self._limits.items()
            if c.view in batch.views
        }

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Plans,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the cache, which holds the new tokens already; k and v are not read."""
        if topk_indices is not None:
            raise UnsupportedError("torch_native attends to all keys; topk_indices needs dsa")
        pieces = metadata.get(LayerClass.of(layer))
        if pieces is None:
            raise BackendError(
                f"layer {layer.layer_id} (view {layer.view!r}) was not planned: its class is not "
                f"in BackendConfig.layers or the batch has no such view; planned: {list(metadata)}"
            )
        return self._attend(q, layer, cache, pieces, out, return_lse)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Plans,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend with one token per request: the same as extend, by another plan."""
        return self.forward_extend(
            q,
            k,
            v,
            layer,
            cache,
            batch,
            metadata,
            out=out,
            return_lse=return_lse,
            topk_indices=topk_indices,
        )

    def forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        causal: bool,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Output:
        """Attend without a cache; plans on every call, so it reads the lengths on the host."""
        _refuse(layer, causal=causal)
        query_lens = cu_seqlens_q.diff().tolist()
        starts = cu_seqlens_k.tolist()
        key_lens = [b - a for a, b in pairwise(starts)]
        planner = Planner(query_lens, 1, q.dtype, q.device)
        which = LayerClass.of(layer, causal=causal)
        limits = self._limits_of(which, q.device)
        pieces = planner.plan(which, key_lens, _ragged(starts, q.device), limits)
        tokens = LayerCache(k=k.unsqueeze(1), v=v.unsqueeze(1))  # a pool of pages of one token
        return self._attend(q, layer, tokens, pieces, out, return_lse)

    def _attend(
        self,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        pieces: Sequence[Piece],
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        tokens, heads, v_dim = q.shape[0], layer.num_q_heads, layer.v_head_dim
        if out is None:
            out = q.new_empty(tokens, heads, v_dim)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        v_scale = cache.k_scale if cache.v is None else cache.v_scale
        sinks = None if layer.sinks is None else layer.sinks.float()
        need_lse = return_lse or sinks is not None
        for piece in pieces:
            part, total = self._piece(q, layer, cache, piece, need_lse)
            if v_scale != 1.0:
                part = part * v_scale
            if sinks is not None and total is not None:
                with_sink = torch.logaddexp(total, sinks)
                part, total = part * (total - with_sink).exp()[..., None], with_sink
            out[piece.rows] = part.to(out.dtype)
            if return_lse and total is not None:
                lse[piece.rows] = total
        return (out, lse) if return_lse else out

    def _piece(
        self, q: Tensor, layer: AttentionLayer, cache: LayerCache, piece: Piece, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The result of one piece, [rows, Hq, Dv] and, where needed, its LSE [rows, Hq]."""
        r, n, heads, kv_heads = piece.requests, piece.queries, layer.num_q_heads, layer.num_kv_heads
        mine = q[piece.rows].view(r, n, heads, -1)
        if not piece.tiles:
            empty = torch.full((r * n, heads), -torch.inf, device=q.device)
            return q.new_zeros(r * n, heads, layer.v_head_dim), empty
        if piece.fold:
            mine = mine.view(r, n, kv_heads, heads // kv_heads, -1).transpose(1, 2).flatten(2, 3)
        else:
            mine = mine.transpose(1, 2).contiguous()
        need_lse = need_lse or len(piece.tiles) > 1 or piece.tiles[0].splits > 1
        parts: list[tuple[Tensor, Tensor | None]] = []  # [P, R, …] each
        for tile in piece.tiles:
            k, v = gather(cache, tile, r, q.dtype, self._scratch)
            part, total = attend(
                mine.expand(r * tile.splits, -1, -1, -1) if tile.splits > 1 else mine,
                k,
                v,
                tile,
                v_dim=layer.v_head_dim,
                scale=layer.scale * cache.k_scale,
                logit_cap=layer.logit_cap,
                need_lse=need_lse,
            )
            side = (tile.splits, r)
            states = None if total is None else total.view(*side, *total.shape[1:])
            parts.append((part.view(*side, *part.shape[1:]), states))
            if len(parts) == _MOST_PARTS:
                parts = [_merge(parts)]
        out, lse = _merge(parts)
        return _unfold(out[0], piece, heads), None if lse is None else _unfold(lse[0], piece, heads)


def _unfold(x: Tensor, piece: Piece, heads: int) -> Tensor:
    """[R, Hkv, n · group, …] or [R, Hq, n, …] → [R · n, Hq, …]."""
    r, n = piece.requests, piece.queries
    if piece.fold:
        x = x.view(r, x.shape[1], n, -1, *x.shape[3:])
    return x.transpose(1, 2).reshape(r * n, heads, *x.shape[4 if piece.fold else 3 :])


def _merge(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Merge along the first dimension, which is kept."""
    if len(parts) == 1 and parts[0][0].shape[0] == 1:
        return parts[0]
    states = [lse for _, lse in parts if lse is not None]
    out, lse = merge_states(torch.cat([out for out, _ in parts]), torch.cat(states))
    return out.unsqueeze(0), lse.unsqueeze(0)


def _refuse(layer: AttentionLayer, *, causal: bool | None = None) -> None:
    causal = layer.is_causal if causal is None else causal
    if layer.sliding_window is not None and (layer.is_cross or not causal):
        raise UnsupportedError(
            f"layer {layer.layer_id}: a sliding window of {layer.sliding_window} without causal "
            "order; torch_native windows only causal self-attention: unset the one or the other"
        )


def _consecutive(ids: Tensor) -> bool:
    first, last = int(ids[0]), int(ids[-1])
    return last - first == ids.numel() - 1 and bool((ids.diff() == 1).all())


def _paged(table: Tensor) -> PagesOf:
    def pages_of(requests: Sequence[int], first: int, end: int) -> Where:
        a, b = requests[0], requests[-1]
        rows = table[a : b + 1] if b - a == len(requests) - 1 else table[list(requests)]
        ids = rows[:, first:end].reshape(-1)
        # only a table on the host can be looked at without a sync
        if ids.device.type == "cpu" and _consecutive(ids):
            return slice(int(ids[0]), int(ids[0]) + ids.numel())
        return ids

    return pages_of


def _ragged(starts: Sequence[int], device: torch.device) -> PagesOf:
    def pages_of(requests: Sequence[int], first: int, end: int) -> Where:
        at = torch.tensor([starts[b] for b in requests])
        ids = (at[:, None] + torch.arange(first, end)).reshape(-1)
        if _consecutive(ids):
            return slice(int(ids[0]), int(ids[0]) + ids.numel())
        return ids.to(device)

    return pages_of
