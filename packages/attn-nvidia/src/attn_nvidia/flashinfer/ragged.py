"""Attention without a cache by FlashInfer's ragged wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from attn_core import (
    TORCH_DTYPES,
    AttentionLayer,
    BackendConfig,
    LayerGroup,
    UnsupportedError,
    workspace,
)
from torch import Tensor

from attn_nvidia.common import workspace_bytes
from attn_nvidia.common.jit_log import building
from attn_nvidia.flashinfer.kernels import FA3_DIMS, faster_prefill
from attn_nvidia.flashinfer.wrappers import PinnedCopy


class UnchangedTensors:
    """Tells whether lengths are the unchanged tensors of the last call, without reading them."""

    def __init__(self) -> None:
        self._seen: tuple[tuple[Tensor, int], ...] = ()

    def same(self, *lengths: Tensor) -> bool:
        """Say whether these were given last time and nothing was written to them since."""
        if any(x.is_inference() for x in lengths):  # they count no changes
            self._seen = ()
            return False
        versions = tuple((x, x._version) for x in lengths)
        same = len(versions) == len(self._seen) and all(
            a is b and m == n for (a, m), (b, n) in zip(versions, self._seen, strict=True)
        )
        self._seen = versions
        return same


class _Key(NamedTuple):
    kernel: str
    group: LayerGroup
    cap: float
    scale: float
    workspace: int


class PlannedWrapper:
    """A wrapper, and the lengths that it was planned for last."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper, self.empty = wrapper, False
        self.copy = PinnedCopy(wrapper.device)


class Ragged:
    """Keeps one wrapper per class of layers; the layers of a tower share the plan of the first."""

    def __init__(self, config: BackendConfig, library: Any, processors: int, nbytes: int) -> None:
        self._config, self._library = config, library
        self._processors, self._bytes = processors, nbytes
        self._wrappers: dict[_Key, PlannedWrapper] = {}
        self._recent = UnchangedTensors()
        self._lengths: tuple[Tensor, Tensor] = (torch.empty(0, device="cpu"),) * 2
        self._of_last: set[_Key] = set()

    def plan(
        self, group: LayerGroup, layer: AttentionLayer, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
    ) -> tuple[Callable[..., Any], bool]:
        """Return what runs layers of this class, and whether some query has no key.

        cu_seqlens int32 [B + 1]. Reads them on the host, unless they are those of the last call.
        Raises UnsupportedError for a causal request with fewer keys than queries.
        """
        self._read(cu_seqlens_q, cu_seqlens_k)
        qo_indptr, kv_indptr = self._lengths
        queries, keys = (x.diff().numpy() for x in self._lengths)
        plain = (group.head_dim, group.v_head_dim) in FA3_DIMS and group.window is None
        kernel = "fa2"
        if self._config.arch == "sm90" and plain:
            kernel = "fa3"
            if not self._config.deterministic:
                kernel = faster_prefill(group, queries, keys, self._processors)
        # the layer may be one that the config does not list, with more heads than those it lists
        heads = (group.num_q_heads, group.num_kv_heads)
        need = workspace_bytes.flashinfer(self._processors, *heads, group.v_head_dim)
        scratch = workspace(self._config.device, "flashinfer", max(self._bytes, need))
        cap = layer.logit_cap or 0.0
        key = _Key(kernel, group, cap, layer.scale, scratch.data_ptr())
        planned = self._wrappers.get(key)
        if planned is not None and key in self._of_last:
            return planned.wrapper.run, planned.empty
        if group.causal:
            refuse_fewer_keys(layer, qo_indptr, kv_indptr)
        if planned is None:
            wrap = self._library.BatchPrefillWithRaggedKVCacheWrapper
            planned = self._wrappers[key] = PlannedWrapper(wrap(scratch, "NHD", backend=kernel))
        planned.copy.wait()
        dtype = TORCH_DTYPES[self._config.dtype]
        with building(f"flashinfer {kernel}, ragged, {dtype}, head dim {group.head_dim}"):
            planned.wrapper.plan(
                qo_indptr,
                kv_indptr,
                group.num_q_heads,
                group.num_kv_heads,
                group.head_dim,
                head_dim_vo=group.v_head_dim,
                causal=group.causal,
                window_left=-1 if group.window is None else group.window - 1,
                logits_soft_cap=cap,
                sm_scale=layer.scale,
                q_data_type=dtype,
                disable_split_kv=self._config.deterministic,
            )
        planned.copy.begun()
        planned.empty = not keys.all()
        self._of_last.add(key)
        return planned.wrapper.run, planned.empty

    def _read(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
        """Copy both to the host, unless they are those of the last call."""
        if not self._recent.same(cu_seqlens_q, cu_seqlens_k):
            self._lengths, self._of_last = on_host(cu_seqlens_q, cu_seqlens_k), set()


def on_host(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Return both on the host, in one copy."""
    q, k = torch.cat((cu_seqlens_q, cu_seqlens_k)).cpu().chunk(2)
    return q, k


def refuse_fewer_keys(layer: AttentionLayer, qo_indptr: Tensor, kv_indptr: Tensor) -> None:
    """Raise UnsupportedError for a causal request with fewer keys than queries.

    qo_indptr, kv_indptr: int32 [B + 1], on the host.
    """
    if bool((kv_indptr.diff() < qo_indptr.diff()).any()):
        raise UnsupportedError(
            f"layer {layer.layer_id}: causal attention with fewer keys than queries, the first "
            "queries see nothing; flashinfer gives them a mean of all values: cut them off"
        )
