"""What the backends of vision towers share: they have no cache, and plan no passes over one."""

from __future__ import annotations

from abc import abstractmethod
from typing import NoReturn

from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import UnsupportedError
from attn_core.runtime.backend import AttentionBackend, BackendConfig, Output
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.contract_checks import refuse_layer
from attn_core.runtime.layer import AttentionLayer


class VisionBackend(AttentionBackend):
    """Attention of a vision tower, which has no cache; a subclass implements forward_ragged.

    Creating it raises UnsupportedError for a layer that the row does not support.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Raise UnsupportedError: a vision tower has no passes over a cache."""
        self._refuse()

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer,
        cache: LayerCache, batch: ForwardBatch, metadata: None, *,
        out: Tensor | None = None, return_lse: bool = False, topk_indices: Tensor | None = None,
    ) -> Output:  # fmt: skip
        """Raise UnsupportedError, as init_forward_metadata does."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.config.name} was created for a vision tower, which has no cache; its layers "
            "go through forward_ragged"
        )

    @abstractmethod
    def forward_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer,
        cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int, *,
        causal: bool, out: Tensor | None = None, return_lse: bool = False,
    ) -> Output:  # fmt: skip
        """Attend without a cache, as AttentionBackend.forward_ragged says."""
