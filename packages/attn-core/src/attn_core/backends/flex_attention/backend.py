"""flex_attention: torch's compiled flexible attention over the pages of the pool, read in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attn_core.backends.flex_attention.kernel import Kernel, KernelShape, compiled_kernel
from attn_core.backends.flex_attention.plan import (
    Gather,
    LayerGroup,
    Tiles,
    cut,
    gather_tokens,
)
from attn_core.backends.plain_precision import plain_precision
from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.cache.page_table import split_pages
from attn_core.ops.kv import read_kv
from attn_core.runtime.backend import AttentionBackend, BackendConfig, Output
from attn_core.runtime.batch import CacheView, ForwardBatch
from attn_core.runtime.contract_checks import (
    refuse_call,
    refuse_drafts,
    refuse_layer,
    refuse_unplanned,
)
from attn_core.runtime.layer import AttentionLayer

Plan = tuple[Tiles, Gather | None]  # without a gather the pool is read in place
Plans = Mapping[LayerGroup, Plan]

_BLOCKS = (128, 64, 32, 16)  # keys that a kernel takes at once; fewer waste it
_CPU_ROWS = 48  # from 64 rows on the CPU kernel repacks the whole pool in every call
_ROWS = 128
_CPU_DIM, _GPU_DIM = 1, 16  # the least head dims of the kernels; smaller ones are padded
_COUNTED = (1 << 31) - 1  # numbers of a tensor that the kernels of a GPU can address


class FlexAttention(AttentionBackend):
    """One kernel per shape of layer, compiled when the backend is created and never in a pass.

    Pages that a kernel can take are read in place; quantised, mixed and smaller pages are gathered
    first. Queries are cut into tiles, so a ragged batch is not padded to its longest request.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        on_cpu = config.device.type == "cpu"
        self._rows = _CPU_ROWS if on_cpu else _ROWS
        self._most = math.inf if on_cpu else _COUNTED
        self._least_dim = _CPU_DIM if on_cpu else _GPU_DIM
        fitting = [b for b in _BLOCKS if config.page_size % b == 0]
        dims = [d for x in config.layers for d in (x.head_dim, x.v_head_dim)]
        as_stored = config.kv_cache_dtype == config.dtype and min(dims) >= self._least_dim
        self._in_place = bool(fitting) and as_stored
        self._block = fitting[0] if self._in_place else _BLOCKS[0]
        self._kernels = {self._shape(x): compiled_kernel(self._shape(x)) for x in config.layers}
        self._classes = {LayerGroup.of(layer) for layer in config.layers}

    def _shape(self, layer: AttentionLayer) -> KernelShape:
        return KernelShape(
            str(self.config.device),
            TORCH_DTYPES[self.config.dtype],
            layer.num_kv_heads,
            max(layer.head_dim, self._least_dim),
            max(layer.v_head_dim, self._least_dim),
            layer.scale,
            layer.logit_cap,
            self._block,
            max(self._rows, layer.num_q_heads // layer.num_kv_heads),
        )

    @property
    def kernels(self) -> Sequence[Kernel]:
        """The compiled kernels, one per shape of layer; each lists its compilations."""
        return tuple(self._kernels.values())

    @property
    def compilations(self) -> int:
        """How often the kernels of this backend were compiled so far, in this process."""
        return sum(len(k.compiled) for k in self._kernels.values())

    def init_forward_metadata(self, batch: ForwardBatch) -> Plans:
        """Plan every layer class of the model; without host lengths it asks the device."""
        refuse_drafts(self.config, batch)
        query_lens = batch.query_lens_host
        if query_lens is None:
            query_lens = tuple(batch.cu_seqlens_q.diff().tolist())
        with torch.inference_mode(False):  # what it makes is used in passes of either mode
            return {
                group: self._plan(group, query_lens, batch.views[group.view])
                for group in self._classes
                if group.view in batch.views and any(query_lens)
            }

    def _plan(self, group: LayerGroup, query_lens: Sequence[int], view: CacheView) -> Plan:
        key_lens: Sequence[int] | None = view.seq_lens_host
        if key_lens is None:
            key_lens = view.seq_lens.tolist()
        page_size, gather = self.config.page_size, None
        if self._in_place:
            table = split_pages(view.page_table, page_size, self._block)
        else:
            gather, table = gather_tokens(
                view.page_table, page_size, query_lens, key_lens, group.window, self._block
            )
        rows = max(self._rows, group.group)
        return cut(group, query_lens, key_lens, table, block=self._block, max_rows=rows), gather

    @plain_precision
    def forward(
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
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_q_heads, layer.v_head_dim)
        if not q.shape[0]:
            return out
        plan, compiled = metadata.get(LayerGroup.of(layer)), self._kernels.get(self._shape(layer))
        if plan is None or compiled is None:
            refuse_unplanned(layer, metadata)
        # Plain tensors in every grad and inference mode: any other kind would be compiled anew.
        with torch.inference_mode(False), torch.no_grad():
            done = self._attend(q, layer, cache, plan, compiled)
        out[: done.shape[0]].copy_(done)  # tokens behind the last request are padding
        return out

    def _attend(
        self, q: Tensor, layer: AttentionLayer, cache: LayerCache, plan: Plan, compiled: Kernel
    ) -> Tensor:
        tiles, gather = plan
        k, v = cache.k, cache.v
        if gather is not None:
            k, v = read_kv(cache, gather.slots, q.dtype)
            assert v is not None  # the row is of kind mha
            v = v.masked_fill(gather.dead[..., None, None], 0)  # 0 times NaN is NaN
            k, v = self._padded(k), self._padded(v)
        assert v is not None
        if max(k.numel(), v.numel()) > self._most:  # a larger pool: its blocks of this pass alone
            tiles, blocks = tiles.compact()
            per = k.shape[1] // self._block
            at = (blocks // per, blocks % per)
            k, v = (x.view(len(x), per, self._block, *x.shape[2:])[at] for x in (k, v))
        kv_heads, v_dim = layer.num_kv_heads, layer.v_head_dim
        (count, queries), group = tiles.tokens.shape, layer.num_q_heads // layer.num_kv_heads
        # copied, so that the strides are always those of the probe
        q = self._padded(q)
        dim = q.shape[-1]
        rows = q.new_empty(count, kv_heads, queries * group, dim)
        picked = q[tiles.tokens].view(count, queries, kv_heads, group, dim).transpose(1, 2)
        rows.view(count, kv_heads, queries, group, dim).copy_(picked)
        done = compiled(rows, k, v, tiles)[..., :v_dim]
        done = done.reshape(count, kv_heads, queries, group, v_dim).transpose(1, 2)
        return done.reshape(count * queries, kv_heads * group, v_dim)[tiles.picks]

    def _padded(self, x: Tensor) -> Tensor:
        lacking = self._least_dim - x.shape[-1]
        return torch.nn.functional.pad(x, (0, lacking)) if lacking > 0 else x
