"""A backend under test: its row, its device and how to create it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.pool import KVPool
from attn_core.runtime.backend import (
    AttentionBackend,
    BackendConfig,
    LinearAttentionBackend,
    create_backend,
)
from attn_core.runtime.contract_checks import refuse_layer
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.linear import LinearLayer
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.kinds import Role


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One row of a backend, the torch device that its tensors lie on, and how it is created."""

    spec: BackendSpec
    row: Capabilities
    torch_device: torch.device
    arch: str | None = None
    multiprocessors: int = 0
    deterministic: bool = False
    shared_prefix: bool = False

    def rounds(self, kv_dtype: str) -> torch.dtype | None:
        """Return the float8 dtype that this row multiplies in, over a store of `kv_dtype`."""
        return (
            TORCH_DTYPES[kv_dtype]
            if self.row.quantizes_q_to_fp8 and kv_dtype.startswith("fp8")
            else None
        )

    def create(
        self,
        layers: Sequence[AttentionLayer],
        *,
        dtype: str,
        page_size: int = 1,
        kv_dtype: str = "auto",
        max_bs: int = 0,
        max_num_tokens: int = 0,
        max_seq_len: int = 0,
        topk: int = 0,
        num_draft_tokens: int = 0,
    ) -> AttentionBackend:
        """Create the backend for these layers, as the dispatcher would."""
        config = BackendConfig(
            name=self.spec.name,
            row=self.row,
            layers=tuple(layers),
            page_size=page_size,
            dtype=dtype,
            kv_cache_dtype=dtype if kv_dtype == "auto" else kv_dtype,
            device=self.torch_device,
            arch=self.arch,
            multiprocessors=self.multiprocessors,
            max_bs=max_bs,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
            deterministic=self.deterministic,
            shared_prefix=self.shared_prefix,
        )
        for layer in layers:
            refuse_layer(config, layer)
        return create_backend(self.spec, config)

    def create_linear(
        self,
        layers: Sequence[LinearLayer],
        *,
        dtype: str,
        state_dtype: str,
        max_bs: int,
        max_num_tokens: int,
        topk: int,
        num_draft_tokens: int,
    ) -> LinearAttentionBackend:
        """Create the linear backend for these layers, as the dispatcher would."""
        config = BackendConfig(
            name=self.spec.name,
            row=self.row,
            layers=(),
            linear_layers=tuple(layers),
            page_size=1,
            dtype=dtype,
            kv_cache_dtype=state_dtype,
            device=self.torch_device,
            arch=self.arch,
            multiprocessors=self.multiprocessors,
            max_bs=max_bs,
            max_num_tokens=max_num_tokens,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
            deterministic=self.deterministic,
        )
        return create_backend(self.spec, config, "linear")

    def dispatcher(
        self,
        layers: Sequence[AttentionLayer],
        pool: KVPool,
        *,
        dtype: str,
        max_bs: int,
        max_num_tokens: int,
        max_seq_len: int,
        topk: int,
        num_draft_tokens: int,
    ) -> HybridDispatcher:
        """Serve these layers over a pool, every role by this one backend."""
        backend = self.create(
            layers,
            dtype=dtype,
            page_size=pool.page_size,
            kv_dtype=pool.kv_cache_dtype,
            max_bs=max_bs,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
        )
        roles: tuple[Role, ...] = ("prefill", "decode", "verify", "draft")
        return HybridDispatcher(dict.fromkeys(roles, backend), pool)
