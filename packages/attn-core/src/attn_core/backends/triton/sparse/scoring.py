"""What scores are computed from, and by which kernel and tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_core.backends.triton.tuning import is_hopper, multiplies_e4m3, power_of_two
from attn_core.backends.triton.variants import has_gluon
from attn_core.cache.layer_cache import LayerCache

TOKENS = (1, 4, 16, 64)  # that pass by the keys which a program scores; compiled for each


class IndexConstants(NamedTuple):
    """What index_scores is compiled for; names with B are padded, BT are tokens, BN keys.

    NATIVE: e4m3 keys are multiplied as they are.
    """

    HEADS: int
    D: int
    PAGE: int
    FP8: bool
    NATIVE: bool
    BT: int
    BN: int
    BH: int
    BD: int


class IndexStrides(NamedTuple):
    """Where the index keys of a page and of a token lie, and a page's scales."""

    page: int
    token: int
    scales_page: int


class Scoring(NamedTuple):
    """The indexer's queries and keys as index_scores takes them."""

    q_index: Tensor
    weights: Tensor
    keys: Tensor
    scales: Tensor | None
    strides: IndexStrides
    constants: IndexConstants
    options: dict[str, int]
    on_hopper: bool  # whether Hopper's own kernel scores a prompt's queries

    @classmethod
    def of(
        cls, q_index: Tensor, weights: Tensor, cache: LayerCache, queries: int, arch: str | None
    ) -> Scoring:
        """Choose tiles. queries: the most that a request has. arch: as in BackendConfig."""
        keys, scales = cache.index_keys
        fp8, fp8_queries = scales is not None, q_index.dtype is torch.float8_e4m3fn
        native = fp8 and fp8_queries and multiplies_e4m3(arch)
        if fp8_queries and not native:
            q_index = q_index.to(torch.bfloat16)  # exact, and every chip multiplies it
        _, heads, dim = q_index.shape
        page, token, _ = keys.stride()
        strides = IndexStrides(page, token, 0 if scales is None else scales.stride(0))
        prompts = queries > 1
        block_n, warps = (256, 8) if native and prompts else (128, 4)
        if q_index.dtype.itemsize == 4:
            block_n = 16
        rows = next((n for n in TOKENS if n >= queries), TOKENS[-1])
        constants = IndexConstants(
            *(heads, dim, cache.page_size, fp8, native, rows, block_n),
            *(power_of_two(heads), power_of_two(dim)),
        )
        by_tma = all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q_index, weights))
        fits = heads in (32, 64) and dim == 128 and by_tma and weights.dtype == torch.float32
        on_hopper = native and is_hopper(arch) and rows == TOKENS[-1] and not q_index.is_cpu
        on_hopper = on_hopper and fits and has_gluon()
        keys = keys.view(torch.uint8) if fp8 and not native else keys
        options = {"num_warps": warps, "num_stages": 1}
        if native:  # two programs share a multiprocessor: one weighs while the other multiplies
            options |= {"num_stages": 4}
            if is_hopper(arch):  # elsewhere some registers would spill
                options |= {"maxnreg": 128}
        return cls(q_index, weights, keys, scales, strides, constants, options, on_hopper)
