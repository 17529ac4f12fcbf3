"""flashmla: FlashMLA's dense decode on Hopper; FlashInfer's prefill."""

from __future__ import annotations

import importlib
from typing import Any, Final, NamedTuple

import torch
from attn_core import (
    AttentionLayer,
    BackendConfig,
    LayerGroup,
    Output,
    ScaleTensors,
    align16,
    chosen_distribution,
    copy_to_out,
    to_e4m3_saturating,
)
from torch import Tensor

from attn_nvidia.flashinfer.mla import LATENT
from attn_nvidia.mla.decode import DecodePlan, MlaDecode

# distribution → module; both carry the same kernels of sm90
_MODULES = {"sgl-flash-mla": "flash_mla", "sglang-kernel": "sgl_kernel.flash_mla"}
SPARSE_HEADS: Final = 64  # the sparse kernels have 64 query heads or 128
SPARSE_KEYS: Final = 128  # they take the keys of a query in steps of so many


def load(name: str, group: str) -> tuple[Any, dict[str, bool]]:
    """Import the FlashMLA of an any-of group that the backend `name` uses.

    Returns the module and the arguments that select its kernels of sm90: the current kernels of the
    fork have none. Raises BackendError where none is installed.
    """
    module = _MODULES[chosen_distribution(name, group)]
    return importlib.import_module(module), {"use_legacy": True} if module == "flash_mla" else {}


def padded(q: Tensor, topk_indices: Tensor) -> tuple[Tensor, Tensor]:
    """Pad heads with zeros and selections with -1 to what FlashMLA's kernels take."""
    heads, topk = q.shape[1], topk_indices.shape[1]
    if heads % SPARSE_HEADS:
        q = torch.nn.functional.pad(q, (0, 0, 0, -heads % SPARSE_HEADS))
    if topk % SPARSE_KEYS:
        topk_indices = torch.nn.functional.pad(topk_indices, (0, -topk % SPARSE_KEYS), value=-1)
    return q, topk_indices


class _Schedule(NamedTuple):
    """Which tiles a multiprocessor takes: as the call takes it, and the tensors behind it."""

    metadata: Any
    splits: Tensor | None
    tensors: tuple[Tensor, Tensor]


class FlashMLA(MlaDecode):
    """Decode and chains over pages of 64, scheduled on the device once per pass.

    Over an FP8 cache the queries are rounded to e4m3 as well: its kernels take no others. Of its
    libraries the first that is installed is taken, in the order of the row's `requires`.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._library, self._legacy = load(config.name, config.row.requires[0])
        self._fp8 = config.kv_cache_dtype == "fp8_e4m3"
        self._kernels: dict[str, Any] = self._legacy | (
            {"is_fp8_kvcache": True} if self._fp8 else {}
        )
        self._scales = ScaleTensors(config.device)

    def plan(self, group: LayerGroup, table: Tensor, seq_lens: Tensor, queries: int) -> _Schedule:
        """Schedule the tiles on the device."""
        library, rows = self._library, queries * group.num_q_heads
        if not self._legacy:
            tiles, splits = library.get_mla_metadata(seq_lens, rows, 1, **self._kernels)
            return _Schedule(tiles, splits, (tiles, splits))
        tiles, splits = library.get_mla_decoding_metadata(seq_lens, rows, 1, **self._kernels)
        metadata, _ = library.get_mla_metadata()
        metadata.tile_scheduler_metadata, metadata.num_splits = tiles, splits
        return _Schedule(metadata, None, (tiles, splits))

    def refill(self, group: LayerGroup, plan: DecodePlan) -> None:
        """Schedule a replay; a schedule has the same shape for all lengths."""
        new_plan = self.plan(group, plan.table, plan.seq_lens, plan.queries)
        for old, new in zip(plan.extra.tensors, new_plan.tensors, strict=True):
            old.copy_(new)

    def attend(
        self,
        q: Tensor,
        pages: Tensor,
        layer: AttentionLayer,
        plan: DecodePlan,
        k_scale: float | Tensor,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        """Call the kernel, whose LSE is natural, [B, H, queries]."""
        tokens, heads, dim = q.shape
        q = to_e4m3_saturating(q) if self._fp8 else align16(q)
        result, lse = self._library.flash_mla_with_kvcache(
            q.view(-1, plan.queries, heads, dim),
            pages,
            plan.table,
            plan.seq_lens,
            LATENT,
            plan.extra.metadata,
            plan.extra.splits,
            softmax_scale=layer.scale,
            causal=plan.queries > 1,
            **self._arguments(k_scale),
        )
        result = copy_to_out(result.view(tokens, heads, LATENT), out)
        return (result, lse.transpose(1, 2).reshape(tokens, heads)) if return_lse else result

    def _arguments(self, k_scale: float | Tensor) -> dict[str, Any]:
        """Return what selects the kernels and, for FP8's, how queries and keys were scaled."""
        if not self._fp8:
            return self._kernels
        scale_tensor = self._scales.of
        return {**self._kernels, "descale_q": scale_tensor(1.0), "descale_k": scale_tensor(k_scale)}
