"""flashinfer, MLA: the absorbed wrapper over the latent cache, and the ragged one for prefill."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from attn_core import (
    DECODE_MODES,
    TORCH_DTYPES,
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    ForwardBatch,
    LayerCache,
    LayerGroup,
    Output,
    align16,
    copy_to_out,
    empty_attention,
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    workspace,
)
from torch import Tensor

from attn_nvidia.common import workspace_bytes
from attn_nvidia.common.jit_log import building
from attn_nvidia.common.workspace_bytes import multiprocessors
from attn_nvidia.flashinfer.csr import adjacent, key_lengths, page_list, refuse_moved
from attn_nvidia.flashinfer.lse import natural
from attn_nvidia.flashinfer.mla_plan import (
    PerPassCache,
    Plan,
    Wrapper,
    Wrappers,
    host_lengths,
    kernel_heads,
    plan_absorbed,
    plan_ragged,
    refuse_too_many,
)
from attn_nvidia.flashinfer.ragged import on_host, refuse_fewer_keys

LATENT, ROPE = 512, 64

PlanKey = tuple[LayerGroup, float]  # what layers share a plan: their scale is part of it
Plans = Mapping[PlanKey, Plan | Wrapper]  # a captured pass has wrappers of its own
Lists = tuple[Tensor, Tensor, Tensor, Tensor]


class FlashInferMLA(AttentionBackend):
    """Latent attention by FlashInfer: fa3's kernels on Hopper, fa2's elsewhere, pages of any size.

    Lengths are scheduled on the host, once per pass; wrappers are kept and planned anew.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        mla: Any = importlib.import_module("flashinfer.mla")
        prefill: Any = importlib.import_module("flashinfer.prefill")
        self._family = {"sm90": "fa3", None: "auto"}.get(config.arch, "fa2")
        self._new = mla.BatchMLAPagedAttentionWrapper
        ragged = prefill.BatchPrefillWithRaggedKVCacheWrapper
        family = self._family
        self._wrappers = Wrappers(partial(self._new, backend=family), plan_absorbed)
        self._ragged_wrappers = Wrappers(partial(ragged, backend=family), plan_ragged)
        self._ragged: PerPassCache[Plan] = PerPassCache()
        absorbed = [x for x in config.layers if x.head_dim == LATENT + ROPE]
        self._keys = tuple(dict.fromkeys((LayerGroup.of(x), x.scale) for x in absorbed))
        self._processors = multiprocessors(config)
        self._fp8 = config.kv_cache_dtype == "fp8_e4m3"

    def init_forward_metadata(self, batch: ForwardBatch) -> Plans:
        """Plan every class of layers on the host; without host lengths it asks the device."""
        self._ragged.clear()
        plans: dict[PlanKey, Plan] = {}
        if not batch.num_tokens:
            return plans
        scratch = self._scratch()
        for key, arguments in self._arguments(batch, captured=False):
            with building("flashinfer's MLA kernels"):
                plans[key] = self._wrappers.plan(scratch, *arguments)
        return plans

    def _scratch(self) -> Tensor:
        nbytes = workspace_bytes.flashinfer_mla(self._processors)
        return workspace(self.config.device, "flashinfer", nbytes)

    def _arguments(
        self, batch: ForwardBatch, *, captured: bool
    ) -> Iterator[tuple[PlanKey, tuple[object, ...]]]:
        """Yield, for the planned layers, what BatchMLAPagedAttentionWrapper.plan takes in order."""
        causal = batch.forward_mode not in DECODE_MODES  # one query sees all keys anyway
        dtypes = TORCH_DTYPES[self.config.dtype], TORCH_DTYPES[self.config.kv_cache_dtype]
        lists_by_view: dict[str, Lists] = {}
        for group, scale in self._keys:
            view = batch.views.get(group.view)
            if view is None:
                continue
            heads = kernel_heads(batch, group.num_q_heads)
            if group.view not in lists_by_view:
                keys, size = key_lengths(view), self.config.page_size
                table = adjacent(view.page_table, keys, size, captured=captured)
                qo_indptr, kv_indptr, kv_len = host_lengths(batch, keys, table)
                lists_by_view[group.view] = (qo_indptr, kv_indptr, page_list(table), kv_len)
            refuse_too_many(batch.num_tokens, len(lists_by_view[group.view][-1]), heads)
            shape = (heads, LATENT, ROPE, self.config.page_size)
            yield (group, scale), (*lists_by_view[group.view], *shape, causal, scale, *dtypes)

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
        """Attend to the latent cache, which holds the new tokens already; k is not read."""
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        plan = metadata.get((layer.group, layer.scale))
        if plan is None:
            if not batch.num_tokens:
                return empty_attention(q, layer, out, return_lse)
            refuse_unplanned(layer, metadata)
        heads = layer.num_q_heads
        padding_heads = kernel_heads(batch, heads) - heads
        q = torch.nn.functional.pad(q, (0, 0, 0, padding_heads)) if padding_heads else align16(q)
        q_latent, q_rope = q.split_with_sizes((LATENT, ROPE), -1)
        latent, rope = _pages(cache)
        scale = cache.k_scale if self._fp8 else None
        result: Output = plan.library.run(
            q_latent,
            q_rope,
            latent,
            rope,
            out=None if padding_heads else out,
            return_lse=return_lse,
            return_lse_base_on_e=True,
            ckv_scale=scale,
            kpe_scale=scale,
        )
        if not padding_heads:
            return result
        padded, *lse = result if isinstance(result, tuple) else (result,)
        padded = copy_to_out(padded[:, :heads], out)
        return (padded, lse[0][:, :heads]) if lse else padded

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
        """Attend without a cache, heads of 192/128; planned once for all layers of a pass.

        cu_seqlens are read on the host then, and must not be written to before the next pass is
        planned. Raises UnsupportedError for a causal request with fewer keys than queries.
        """
        refuse_call(self.config, return_lse=return_lse)
        if not q.shape[0] or not k.shape[0]:  # nothing to plan
            return empty_attention(q, layer, out, return_lse)
        shape = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])

        def plan() -> Plan:
            indptr = on_host(cu_seqlens_q, cu_seqlens_k)
            if causal:
                refuse_fewer_keys(layer, *indptr)
            with building("flashinfer's ragged prefill kernels"):
                return self._ragged_wrappers.plan(
                    self._scratch(),
                    *indptr,
                    *shape,
                    causal=causal,
                    sm_scale=layer.scale,
                    q_data_type=q.dtype,
                    kv_data_type=k.dtype,
                )

        parameters = (*shape, causal, layer.scale, q.dtype)
        planned = self._ragged.get((cu_seqlens_q, cu_seqlens_k), parameters, plan)
        q, k, v = align16(q), align16(k), align16(v)
        result: Output = planned.library.run(q, k, v, out=out, return_lse=return_lse)
        if isinstance(result, tuple):
            # without causal order, a request whose prefix has no more chunks sees no key
            natural(result[1], empty=not causal)
        return result

    # CUDA graphs: a wrapper of its own per captured pass, whose kernels read the batch's pages
    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> Plans:
        """Plan into static buffers; a graph serves every length that its page table has room for.

        Lengths that are on the device alone are copied to the host.
        """
        plans, scratch, size = {}, self._scratch(), batch.batch_size
        for key, arguments in self._arguments(batch, captured=True):
            pages: Any = arguments[2]
            buffers = [pages.new_empty(size + n) for n in (1, 1, 0)]
            library = self._new(
                scratch,
                use_cuda_graph=True,
                qo_indptr=buffers[0],
                kv_indptr=buffers[1],
                kv_indices=pages,
                kv_len_arr=buffers[2],
                backend=self._family,
            )
            plans[key] = Wrapper(library, scratch.device)
            # the list is in place already, so plan is given none to copy
            with building("flashinfer's MLA kernels"):
                plans[key].plan(plan_absorbed, *arguments[:2], pages[:0], *arguments[3:])
        return plans

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Mapping[PlanKey, Wrapper]
    ) -> None:
        """Schedule anew: the one call of plan() whose result a kernel reads."""
        for key, arguments in self._arguments(batch, captured=True):
            pages: Any = arguments[2]
            if pages.data_ptr() != metadata[key].library._kv_indices_buf.data_ptr():
                refuse_moved(key[0].view)
            metadata[key].plan(plan_absorbed, *arguments)


def _pages(cache: LayerCache) -> tuple[Tensor, ...]:
    """Return the latents and the ropes of a layer's pages, [pages, page_size, 512 or 64].

    They are kept with the cache, and made again where its pages have moved.
    """
    views: tuple[Tensor, ...] | None = cache.launchers.get("flashinfer")
    if views is None or views[0].data_ptr() != cache.k.data_ptr():
        views = cache.k.squeeze(2).split_with_sizes((LATENT, ROPE), -1)
        cache.launchers["flashinfer"] = views
    return views
