"""ascend over pages of 128 tokens: prefill, decode, mixed passes, chains of drafts, encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from attn_core import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    ForwardBatch,
    LayerCache,
    Output,
    UnsupportedError,
    kernel_pages,
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    refuse_window,
    split_pages,
)
from torch import Tensor

from attn_ascend.calls import PACKED_DIMS, PAGE, Call, paged_calls
from attn_ascend.fused import LARGEST, Fused
from attn_ascend.library import operator
from attn_ascend.ragged import Ragged

SCATTER: Final = ("key", "value", "key_cache", "value_cache", "slot_mapping", "cache_mode")
WIDEST: Final = 65535  # columns of a token in the cache, all heads together

Group = tuple[str, int | None, bool]  # a view, a window, and whether its calls are packed


class AscendPaged(AttentionBackend):
    """Requests with as many queries each share a call; others do where the operator packs them.

    New keys and values are written by the vendor's own operator, not by attn-core.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
            width = layer.num_kv_heads * layer.head_dim
            if width > WIDEST:
                raise UnsupportedError(
                    f"layer {layer.layer_id}: {layer.num_kv_heads} KV heads of {layer.head_dim} "
                    f"are {width} numbers a token (npu_fused_infer_attention_score takes {WIDEST}"
                    "); split the heads over more devices"
                )
        self._attend = Fused()
        self._write = operator("npu_scatter_pa_kv_cache", SCATTER)
        self._ragged = Ragged(self._attend)
        self._groups = {self._group(x) for x in config.layers}
        self._caches: dict[int, tuple[LayerCache, Tensor, Tensor]] = {}

    def _group(self, layer: AttentionLayer) -> Group:
        return layer.view, layer.sliding_window, packs(self.config, layer)

    def init_forward_metadata(self, batch: ForwardBatch) -> Mapping[Group, Sequence[Call]]:
        """Share the requests out among calls, per view, window and kind of call."""
        if not batch.num_tokens:
            return {}
        query_lens = batch.query_lens_host
        if query_lens is None:
            query_lens = tuple(batch.cu_seqlens_q.diff().tolist())
        plans = {}
        for name, window, packed in self._groups:
            if name not in batch.views:
                continue
            view = batch.views[name]
            table = split_pages(view.page_table, self.config.page_size, PAGE).contiguous()
            calls = paged_calls(query_lens, view, table, window, packs=packed)
            plans[name, window, packed] = calls
        return plans

    def init_forward_metadata_capture_cuda_graph(
        self, batch: ForwardBatch
    ) -> Mapping[Group, Sequence[Call]]:
        """Plan a pass in whose graph the calls are tasks."""
        plans = self.init_forward_metadata(batch)
        for call in chain.from_iterable(plans.values()):
            call.tasks = []
        return plans

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Mapping[Group, Sequence[Call]]
    ) -> None:
        """Plan again, into the captured calls, and update their lengths. See tasks.update."""
        for group, calls in self.init_forward_metadata(batch).items():
            for old, new in zip(metadata[group], calls, strict=True):
                old.refill(new)
            self._attend.update(metadata[group])

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Mapping[Group, Sequence[Call]],
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Write the new keys and values into their slots and attend to the cache."""
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        calls = metadata.get(self._group(layer))
        if calls is None:
            if batch.num_tokens:
                refuse_unplanned(layer, metadata)
            calls = ()
        keys, values = self._paged(layer, cache)
        slots = batch.views[layer.view].out_cache_loc if calls else None
        if k is not None and v is not None and slots is not None:
            self._write(
                key=k.contiguous(),
                value=v.contiguous(),
                key_cache=cache.k,
                value_cache=cache.v,
                slot_mapping=slots,
                cache_mode="Norm",  # the default has another layout
            )
        causal = layer.group.causal
        return self._attend(
            q, keys, values, layer, calls, causal=causal, out=out, return_lse=return_lse
        )

    def _paged(self, layer: AttentionLayer, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """View a layer's pages as the operator's, [P, 128, Hkv · D]; made once per layer."""
        assert cache.v is not None
        views = self._caches.get(layer.layer_id)
        lies = [cache.k.data_ptr(), cache.v.data_ptr()]
        if views is None or views[0] is not cache or [x.data_ptr() for x in views[1:]] != lies:
            if cache.k.numel() > LARGEST:
                raise UnsupportedError(
                    f"layer {layer.layer_id}: a pool of {cache.k.numel()} numbers "
                    f"(npu_fused_infer_attention_score addresses {LARGEST}); create a smaller pool "
                    "or split the heads over more devices"
                )
            k, v = (kernel_pages(x, PAGE, dense=True).flatten(2) for x in (cache.k, cache.v))
            views = cache, k, v
            self._caches[layer.layer_id] = views
        return views[1:]

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
        """Attend without a cache."""
        refuse_call(self.config, return_lse=return_lse)
        refuse_window(self.config.name, layer, causal=causal)
        lengths = (cu_seqlens_q, cu_seqlens_k)
        return self._ragged(q, k, v, layer, *lengths, causal=causal, out=out, return_lse=return_lse)


def packs(config: BackendConfig, layer: AttentionLayer) -> bool:
    """Say whether requests of unequal lengths can share a call for this layer."""
    return config.dtype == "bf16" and (layer.head_dim, layer.v_head_dim) in PACKED_DIMS
