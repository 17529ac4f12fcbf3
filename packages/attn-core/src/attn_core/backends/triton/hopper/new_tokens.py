"""extend_hopper over a pass's own K and V, where no request has keys in the cache before.

A page that TMA cannot copy costs a thread's copies, and each page of a request a look into the
table. New tokens lie side by side instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attn_core.backends.triton.hopper.launch import DECODE, PREFILL, HopperPrefill, config_of
from attn_core.backends.triton.hopper.prefill import extend_hopper
from attn_core.backends.triton.hopper.stores import (
    SWIZZLE_ROWS,
    LayerArguments,
    rows_descriptor,
    rows_fit,
)
from attn_core.backends.triton.kernel import Call, Launchers, NewTokensKernel, Pass
from attn_core.backends.triton.schedule import Tiles
from attn_core.backends.triton.tuning import Launch
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.launcher import Launcher, MapOf
from attn_core.runtime.layer import AttentionLayer

__all__ = ["DECODE", "NEW_TOKENS", "PREFILL"]


class NewTokensCall(Call):
    """A call whose keys and values are k and v [T, Hkv, D], the new tokens of its requests."""

    __slots__ = ("block", "k", "rows", "v")

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        inputs: Pass,
        out: Tensor | None,
        lse: Tensor,
        block: int,
    ) -> None:
        super().__init__(q, layer, cache, inputs, out, lse)
        self.k, self.v, self.block = k, v, block
        self.rows = (_map_of(k), _map_of(v))

    def with_row_tensors(self, values: tuple[Any, ...]) -> Iterable[Any]:
        """Yield the arguments of a pass, then K and V as descriptors: made for a first launch."""
        yield from values
        for x in (self.k, self.v):
            yield rows_descriptor(x.unsqueeze(0), "NHD", self.block)

    def dense(self) -> NewTokensCall:
        """Return the same call with a contiguous copy of its queries."""
        q = self.q.clone(memory_format=torch.contiguous_format)
        fields = (self.layer, self.cache, self.inputs, self.out, self.lse, self.block)
        return NewTokensCall(q, self.k, self.v, *fields)


class HopperNewTokens(HopperPrefill, NewTokensKernel):
    """extend_hopper as HopperPrefill, over K and V that TMA can read."""

    def call(
        self, q: Tensor, k: Tensor, v: Tensor | None, layer: AttentionLayer, cache: LayerCache,
        inputs: Pass, out: Tensor | None, lse: Tensor, launch: Launch,
    ) -> Call | None:  # fmt: skip
        """Return a call over K and V [T, Hkv, D]; None where TMA cannot read them."""
        dtype = cache.k.dtype
        if v is None or k.shape[0] != inputs.tokens or v.shape[0] != inputs.tokens:
            return None
        if k.dtype is not dtype or v.dtype is not dtype or q.dtype is not dtype:
            return None
        if not all(rows_fit(x.unsqueeze(0), "NHD") for x in (k, v)):
            return None
        return NewTokensCall(q, k, v, layer, cache, inputs, out, lse, launch.block_n)

    def bind(self, layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype) -> LayerArguments:
        """Return the scales and sinks of a layer: the stores of its cache are not read."""
        return LayerArguments(layer, cache)

    def make_launchers(
        self, call: Call, bound: LayerArguments, launch: Launch, part: Tiles
    ) -> Launchers:
        """Return launchers for calls with this key: the rows of K and V are those of each call."""
        attend = Launcher(
            extend_hopper,
            *(bound.k, bound.v, bound.sinks, bound.scales, call.layer.sliding_window or 0),
            config_of(
                call, bound, launch, PAGE=0, GATHERS=False,
                SELDOM=call.cache.page_size >= SWIZZLE_ROWS,
            )._replace(HND=False),
            num_warps=4,
        )  # fmt: skip
        return self.launchers(call, attend)


NEW_TOKENS = HopperNewTokens()


def _map_of(x: Tensor) -> MapOf:
    tokens, heads, dim = x.shape
    return MapOf(x.data_ptr(), (tokens, heads * dim), (x.stride(0), 1))
