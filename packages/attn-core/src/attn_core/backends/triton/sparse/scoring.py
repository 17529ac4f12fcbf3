"""What scores are computed from, and by which kernel and tiles."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_core.backends.triton.sparse.index import index_scores
from attn_core.backends.triton.sparse.passes import SparsePass
from attn_core.backends.triton.tuning import is_hopper, multiplies_e4m3, power_of_two
from attn_core.backends.triton.variants import has_gluon
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.launcher import (
    Arguments,
    Grid,
    Launcher,
    Pointers,
    alike,
    moved,
    numbered,
    pointers,
)

SPAN = 1024  # keys that pass by one query at most
PROGRAMS = 1024  # that score, at the least
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


class Scores(NamedTuple):
    """A launch of scores in a pass: its grid, and its arguments behind queries and weights."""

    grid: Grid
    arguments: Arguments


class Scoring(NamedTuple):
    """How queries of one form are scored over one cache.

    pointers: where its index keys lie. form: equal where `scores` returns the same.
    launcher: of index_scores, or of Hopper's own kernel for a prompt's queries.
    factor: the dtype that queries and keys are multiplied in, see factor_dtype.
    """

    launcher: Launcher
    pointers: Pointers
    constants: IndexConstants
    on_hopper: bool
    factor: torch.dtype
    form: int

    @classmethod
    def of(
        cls,
        q_index: Tensor,
        weights: Tensor,
        cache: LayerCache,
        inputs: SparsePass,
        scores: Tensor,
        topk: int,
        arch: str | None,
    ) -> tuple[tuple[str, int], Scoring]:
        """Return what is kept with the cache and its key, or choose kernel and tiles.

        scores: where they are written. arch: of the device, as in BackendConfig.
        """
        rows = next((n for n in TOKENS if n >= inputs.queries), TOKENS[-1])
        by_tma = rows == TOKENS[-1] and q_index.is_contiguous() and weights.is_contiguous()
        tiles = (inputs.queries > 1, rows, by_tma)
        form = (
            inputs.key, tiles, topk, arch, q_index.shape[1:], q_index.stride(), alike(q_index),
            weights.stride(0), alike(weights), alike(scores),
        )  # fmt: skip
        key = ("score", numbered(form))
        scoring: Scoring | None = cache.launchers.get(key)
        if scoring is None or moved(scoring.pointers):
            scoring = cls._choose(q_index, weights, cache, topk, arch, *tiles)
            cache.launchers[key] = scoring
        return key, scoring

    def scores(
        self,
        q_index: Tensor,
        weights: Tensor,
        inputs: SparsePass,
        scores: Tensor,
        first: int,
        count: int,
    ) -> Scores:
        """Return the launch for queries and weights like these, from `first` on."""
        columns = inputs.longest
        if self.on_hopper:
            launch: Scores = _hopper().scores(inputs, scores, first, count)
            return launch
        if q_index.dtype is not self.factor:
            q_index = q_index.to(self.factor)
        span = self.constants.BN
        if self.constants.BT == 1:  # as few as give every multiprocessor some programs
            span = max(span, min(SPAN, columns * count // PROGRAMS // span * span))
        grid = (-(-count // self.constants.BT), -(-columns // span), 1)
        strides = (*q_index.stride()[:2], weights.stride(0))
        numbers = (count, first, scores, scores.stride(0), span)
        return Scores(grid, inputs.arguments.between(strides, numbers))

    def run(self, launch: Scores, q_index: Tensor, weights: Tensor) -> None:
        """Launch it."""
        if q_index.dtype is not self.factor:
            q_index = q_index.to(self.factor)
        if self.on_hopper:
            _hopper().score(self.launcher, launch, q_index, weights)
            return
        grid, arguments = launch
        args = (q_index.data_ptr(), weights.data_ptr(), *arguments.addresses)
        self.launcher.launch(grid, args, (q_index, weights), arguments.values)

    @classmethod
    def _choose(
        cls,
        q_index: Tensor,
        weights: Tensor,
        cache: LayerCache,
        topk: int,
        arch: str | None,
        prompts: bool,
        rows: int,
        by_tma: bool,
    ) -> Scoring:
        keys, scales = cache.split_index()
        fp8, fp8_queries = scales is not None, q_index.dtype is torch.float8_e4m3fn
        native = fp8 and fp8_queries and multiplies_e4m3(arch)
        _, heads, dim = q_index.shape
        page, token, _ = keys.stride()
        strides = IndexStrides(page, token, 0 if scales is None else scales.stride(0))
        block_n, warps = (256, 8) if native and prompts else (128, 4)
        factor = q_index.dtype if native else factor_dtype(q_index.dtype, keys.dtype)
        if factor.itemsize == 4:
            block_n = 16
        constants = IndexConstants(
            *(heads, dim, cache.page_size, fp8, native, rows, block_n),
            *(power_of_two(heads), power_of_two(dim)),
        )
        aligned = all(x.data_ptr() % 16 == 0 for x in (q_index, weights))
        fits = heads in (32, 64) and dim == 128 and weights.dtype == torch.float32
        on_hopper = native and is_hopper(arch) and by_tma and aligned and not q_index.is_cpu
        on_hopper = on_hopper and fits and has_gluon()
        stored = keys.view(torch.uint8) if fp8 and not native else keys
        options = {"num_warps": warps, "num_stages": 1}
        if native:  # two programs share a multiprocessor: one weighs while the other multiplies
            options |= {"num_stages": 4}
            if is_hopper(arch):  # elsewhere some registers would spill
                options |= {"maxnreg": 128}
        if on_hopper:
            launcher = _hopper().scorer(keys, scales, strides, heads, cache.page_size, topk)
        else:
            of_keys = (stored, stored if scales is None else scales, strides)
            launcher = Launcher(index_scores, *of_keys, topk, constants, **options)
        form = numbered((constants, on_hopper, factor))
        return cls(launcher, pointers(cache.index), constants, on_hopper, factor, form)


def factor_dtype(queries: torch.dtype, keys: torch.dtype) -> torch.dtype:
    """Return the dtype that index queries and keys are multiplied in: one that holds both exactly.

    e4m3 is exact in 16 bits, which every chip multiplies. bf16 keys with fp16 queries are the
    exception: they are rounded to fp16, whose range an indexer's normalised keys do not leave.
    """
    e4m3 = torch.float8_e4m3fn
    if e4m3 in (queries, keys):
        other = keys if queries is e4m3 else queries
        return torch.bfloat16 if other is e4m3 else other
    if (queries, keys) == (torch.bfloat16, torch.float16):
        return torch.float32
    return keys if keys.itemsize > queries.itemsize else queries


def _hopper() -> Any:
    """Import what scores on Hopper: other chips may lack what it imports in turn."""
    return importlib.import_module("attn_core.backends.triton.sparse.index_launch")
