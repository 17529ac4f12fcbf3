"""flashmla: FlashMLA's dense decode on Hopper; FlashInfer's prefill."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from attn_core.backend import BackendConfig, Output
from attn_core.backends.layer_class import LayerClass
from attn_core.errors import BackendError
from attn_core.forward import AttentionLayer
from attn_core.libraries import alternatives, installed, satisfies
from torch import Tensor

from attn_nvidia.flashinfer.mla import LATENT, aligned
from attn_nvidia.mla_decode import DecodePlan, MlaDecode, as_asked

# distribution → module; both carry the same kernels of sm90
_MODULES = {"sgl-flash-mla": "flash_mla", "sglang-kernel": "sgl_kernel.flash_mla"}


class _Schedule(NamedTuple):
    """Which tiles a multiprocessor takes: as the call takes it, and the tensors behind it."""

    metadata: Any
    splits: Tensor | None
    tensors: tuple[Tensor, Tensor]


class FlashMLA(MlaDecode):
    """Decode and chains over pages of 64, scheduled on the device once per pass.

    Of its libraries the first that is installed is taken, in the order of the row's `requires`.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        module = _MODULES[_library(config.row.requires[0])]
        self._library: Any = importlib.import_module(module)
        # the current kernels of the fork have neither dense decode nor sm90
        self._legacy = {"use_legacy": True} if module == "flash_mla" else {}

    def plan(self, which: LayerClass, table: Tensor, seq_lens: Tensor, queries: int) -> _Schedule:
        """Schedule the tiles on the device."""
        library, rows = self._library, queries * which.num_q_heads
        if not self._legacy:
            tiles, splits = library.get_mla_metadata(seq_lens, rows, 1)
            return _Schedule(tiles, splits, (tiles, splits))
        tiles, splits = library.get_mla_decoding_metadata(seq_lens, rows, 1, **self._legacy)
        metadata, _ = library.get_mla_metadata()
        metadata.tile_scheduler_metadata, metadata.num_splits = tiles, splits
        return _Schedule(metadata, None, (tiles, splits))

    def refill(self, which: LayerClass, plan: DecodePlan) -> None:
        """Schedule a replay; a schedule has the same shape for all lengths."""
        fresh = self.plan(which, plan.table, plan.seq_lens, plan.queries)
        for old, new in zip(plan.extra.tensors, fresh.tensors, strict=True):
            old.copy_(new)

    def attend(
        self,
        q: Tensor,
        pages: Tensor,
        layer: AttentionLayer,
        plan: DecodePlan,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        """Call the kernel, whose LSE is natural, [B, H, queries]."""
        tokens, heads, dim = q.shape
        result, lse = self._library.flash_mla_with_kvcache(
            aligned(q).view(-1, plan.queries, heads, dim),
            pages,
            plan.table,
            plan.seq_lens,
            LATENT,
            plan.extra.metadata,
            plan.extra.splits,
            softmax_scale=layer.scale,
            causal=plan.queries > 1,
            **self._legacy,
        )
        result = as_asked(result.view(tokens, heads, LATENT), out)
        return (result, lse.transpose(1, 2).reshape(tokens, heads)) if return_lse else result


def _library(group: str) -> str:
    """Return the first distribution of an any-of group that is installed."""
    found = installed([group])
    for wanted in alternatives(group):
        if satisfies(wanted, found):
            return wanted.name
    raise BackendError(f"flashmla needs {group}; install the one that `attn doctor` names")
