"""One layer's pages of the KV cache with their scales, and the supported storage formats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_core.dtypes import LATENT_BLOCK
from attn_core.errors import UnsupportedError, UsageError

SCALE_BYTES = 4  # of a float32 scale
Scale = float | Tensor  # a tensor: float32, one element, on the device of the pages

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp4_e2m1": torch.uint8,  # two codes a byte
}


class CachedLayer(Protocol):
    """The attributes of a layer that a pool reads: AttentionLayer or an engine's own class."""

    @property
    def layer_id(self) -> int: ...
    @property
    def view(self) -> str: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCache:
    """One layer's pages and their scales.

    MHA: k [pages, page_size, Hkv, D], v [pages, page_size, Hkv, Dv] (layout "NHD"; "HND" is
    [pages, Hkv, page_size, D]).
    MLA: k is the latent [pages, page_size, 1, 576], and v is None: V is the first v_head_dim of k.
    FP8: float8, value = stored · scale, one scale per tensor.
    FP4 (e2m1): uint8 [..., D / 2], low nibble first, value = e2m1 · block · scale, block_scales =
    (k, v) e4m3 [..., D / 16]. Other formats have no scales.
    Sparse MLA (DSA) in FP8, latent_dim > 0: k is uint8 [pages, page_size, 1, bytes]. A token is its
    latent_dim values in e4m3, a float32 scale per 128 of them, and its rope part in bf16: 656 bytes
    for 512 + 64, which split_latents takes apart.
    index: index keys of sparse MLA (DSA), bf16, fp16 or fp32 [pages, page_size, dim]; in FP8, where
    a key has a scale of its own, uint8 [pages, page_size · (dim + 4)]: first the page's values,
    e4m3 [page_size, dim], then its scales, float32 [page_size].
    k_scale, v_scale: a number, or a float32 tensor of one element on the device of the pages. A
    tensor is read in each pass and never on the host, so it may be calibrated, or written by a
    graph, after the cache was created. Rows with tensor_scales accept it.
    """

    k: Tensor
    v: Tensor | None
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0
    block_scales: tuple[Tensor, Tensor | None] | None = None
    latent_dim: int = 0
    index: Tensor | None = None
    layout: str = "NHD"

    def __post_init__(self) -> None:
        if self.layout not in ("NHD", "HND"):
            raise UsageError(f"layout {self.layout!r} (expected 'NHD' or 'HND')")
        check_scales(
            self.k, self.k_scale, self.v_scale, latent=self.v is None, packed=self.latent_dim > 0
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: the fields, and no views or addresses of this one."""
        return {x.name: getattr(self, x.name) for x in fields(self)}

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        return self.k.shape[2 if self.layout == "HND" else 1]

    @cached_property
    def launchers(self) -> dict[Any, Any]:
        """What the operations keep of these pages to be fast; it goes when the cache goes."""
        return {}

    @cached_property
    def latents(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of FP8 latents of sparse MLA: their values, scales and rope parts."""
        return split_latents(self.k, self.latent_dim)

    @cached_property
    def index_keys(self) -> tuple[Tensor, Tensor | None]:
        """Views of the index keys [pages, page_size, dim] and, in FP8, their scales.

        Scales are float32 [pages, page_size]. Raises UnsupportedError without index keys.
        """
        return self.split_index()

    def split_index(self) -> tuple[Tensor, Tensor | None]:
        """Return what index_keys are, where the pool lies now. Raises as these."""
        index, size = self.index, self.page_size
        if index is None:
            raise UnsupportedError(
                "this cache has no index keys: create the KVPool with index_dim, and name the "
                "layer in index_layers where only some layers have an indexer"
            )
        if index.dtype != torch.uint8:
            return index, None
        dim = index.shape[1] // size - SCALE_BYTES
        values = index[:, : size * dim].view(torch.float8_e4m3fn)
        return torch.unflatten(values, 1, (size, dim)), index[:, size * dim :].view(torch.float32)

    def parts(self) -> list[tuple[Tensor, str]]:
        """Every tensor that holds tokens, with its layout."""
        stores = (self.k, self.v, *(self.block_scales or ()))
        index = () if self.index is None else self.index_keys
        return [(t, self.layout) for t in stores if t is not None] + [
            (t, "NHD") for t in index if t is not None
        ]


def split_latents(tokens: Tensor, latent_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """View FP8 latents of sparse MLA, uint8 [..., bytes], as their values, scales and rope parts.

    Values are e4m3 [..., latent_dim], scales float32 [..., latent_dim / 128], rope bf16.
    """
    scales = latent_dim + latent_dim // LATENT_BLOCK * SCALE_BYTES
    return (
        tokens[..., :latent_dim].view(torch.float8_e4m3fn),
        tokens[..., latent_dim:scales].view(torch.float32),
        tokens[..., scales:].view(torch.bfloat16),
    )


def latent_bytes(head_dim: int, latent_dim: int) -> int:
    """Return the bytes of a token in FP8 latents of sparse MLA: 656 for 576 and 512."""
    rope = (head_dim - latent_dim) * torch.bfloat16.itemsize
    return latent_dim + latent_dim // LATENT_BLOCK * SCALE_BYTES + rope


def check_scales(
    k: Tensor, k_scale: Scale, v_scale: Scale, *, latent: bool, packed: bool = False
) -> None:
    """Raise UsageError for a scale that LayerCache does not take, or that the format lacks.

    k: the pool. Only FP8 and FP4 have scales; other formats hold the numbers themselves, and
    backends read them without a scale.
    latent: the values are part of the keys. packed: each token has scales of its own.
    The number in a tensor is not read.
    """
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(scale, Tensor):
            form = (scale.dtype, scale.numel(), scale.device)
            if form != (torch.float32, 1, k.device) or scale.dim() > 3:  # it scales [T, H, D]
                raise UsageError(
                    f"{name} {scale.dtype} {list(scale.shape)} on {scale.device} (expected a "
                    f"number, or float32 [1] on {k.device})"
                )
        elif not isinstance(scale, Real) or not 0 < scale < math.inf:
            raise UsageError(f"{name} {scale!r} (expected a finite number above 0)")
    if k.dtype.itemsize > 1 and not (_is_one(k_scale) and _is_one(v_scale)):
        raise UsageError(
            f"k_scale {k_scale} and v_scale {v_scale} for a cache in {k.dtype}: only FP8 and FP4 "
            "have scales; leave them out, or store fp8_e4m3, fp8_e5m2 or fp4_e2m1"
        )
    if packed and not (_is_one(k_scale) and _is_one(v_scale)):
        raise UsageError(
            f"k_scale {k_scale} and v_scale {v_scale} for FP8 latents of sparse MLA: each token "
            "carries the scales of its own values; leave them out"
        )
    if latent and not _is_one(v_scale):
        raise UsageError(
            f"v_scale {v_scale} for a latent cache, which stores no V (supports 1.0): its values "
            "are read with k_scale"
        )


def _is_one(scale: Scale) -> bool:
    return not isinstance(scale, Tensor) and scale == 1.0
