"""Attention layers, and the groups of layers that share a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import NamedTuple

from torch import Tensor

from attn_core.errors import UsageError
from attn_core.ops.forms import numbered
from attn_core.spec.dual_chunk import DualChunk
from attn_core.spec.requirements import check_layer, check_type

LONGEST_WINDOW = 1 << 30  # tokens: no request has as many


class LayerGroup(NamedTuple):
    """The layer attributes that determine its plan; layers with equal attributes share one."""

    view: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None
    causal: bool
    dual_chunk: DualChunk | None = None

    @classmethod
    def of(cls, layer: AttentionLayer, *, causal: bool | None = None) -> LayerGroup:
        """Return the group of a layer; `causal` overrides the layer's own."""
        if causal is None:
            causal = layer.is_causal and not layer.is_cross
        return cls(
            layer.view,
            layer.num_q_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.v_head_dim,
            layer.sliding_window,
            causal,
            layer.dual_chunk,
        )

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionLayer:
    """One attention layer, with this rank's heads. A field that a row does not support is refused.

    scale multiplies q·k.
    logit_cap c: c · tanh(s / c), before the mask.
    sliding_window W: a token sees itself and the W-1 tokens before it. Kernels count in 32 bits, so
    that more than 2**30 are taken as 2**30.
    sinks: float [num_q_heads], contiguous; one more logit per head in the softmax denominator,
    without a value.
    view: the CacheView that holds its K/V.
    dual_chunk: each token has three queries, [T, 3, Hq, D], intra, succ and inter, and each key one
    rotation; where it has a sparse_threshold five, and the last two only choose lines.
    vertical_slash: of these prompts, how many verticals and slashes each query head attends to.
    Absorbed MLA: head_dim 576, v_head_dim 512, one KV head.
    index_topk: the keys that a query of sparse MLA (DSA) attends to, at most.
    None turns a feature off; a window of 0 raises UsageError.
    """

    layer_id: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    view: str = "full"
    logit_cap: float | None = None
    sliding_window: int | None = None
    sinks: Tensor | None = None
    is_causal: bool = True
    is_cross: bool = False
    dual_chunk: DualChunk | None = None
    vertical_slash: tuple[tuple[int, int], ...] | None = None
    index_topk: int | None = None

    @cached_property
    def query_shape(self) -> tuple[int, ...]:
        """The shape of a token's queries: [Hq, D], with dual chunk attention [3, Hq, D].

        Where its prompts are sparse, [5, Hq, D].
        """
        per_token = (self.num_q_heads, self.head_dim)
        return per_token if self.dual_chunk is None else (self.dual_chunk.rotations, *per_token)

    @cached_property
    def group(self) -> LayerGroup:
        """The group whose plan it shares."""
        return LayerGroup.of(self)

    @cached_property
    def form(self) -> int:
        """A number of the layers whose tensors have equal shapes, but for the number of tokens."""
        return numbered((self.group, self.is_cross, self.index_topk))

    def __post_init__(self) -> None:
        name, q, kv = f"layer {self.layer_id}", self.num_q_heads, self.num_kv_heads
        check_layer(self, name)
        if self.sliding_window is not None:
            object.__setattr__(self, "sliding_window", min(self.sliding_window, LONGEST_WINDOW))
        if q % kv and kv % q:  # linear layers have more value heads than query heads
            raise UsageError(f"{name}: {q} query heads are no multiple of {kv} KV heads")
        if not isinstance(self.scale, Real) or not 0 < self.scale < math.inf:
            raise UsageError(f"{name}: scale {self.scale!r} (expected a finite number above 0)")
        check_type(f"{name}: view", self.view, str, "the name of a CacheView")
        check_type("layer_id", self.layer_id, Integral, "an integer")
        if self.dual_chunk is not None:
            check_type(f"{name}: dual_chunk", self.dual_chunk, DualChunk, "a DualChunk, or None")
        topk = self.index_topk
        if topk is not None and not (isinstance(topk, Integral) and int(topk) >= 1):
            raise UsageError(f"{name}: index_topk {topk!r} (expected an integer of 1 or more)")
        for field_name in ("is_causal", "is_cross"):
            if getattr(self, field_name) not in (True, False):
                raise UsageError(
                    f"{name}: {field_name} {getattr(self, field_name)!r} (expected a bool)"
                )
        self._check_lines(name)
        x = self.sinks
        if x is not None and not isinstance(x, Tensor):
            raise UsageError(
                f"{name}: sinks {type(x).__name__} (expected a tensor of [{q}] floats)"
            )
        if x is not None and (x.shape != (q,) or not x.is_floating_point() or x.stride() != (1,)):
            raise UsageError(
                f"{name}: sinks {x.dtype} {x.shape}, strides {x.stride()} (expected [{q}] floats)"
            )

    def _check_lines(self, name: str) -> None:
        sparse = self.dual_chunk is not None and self.dual_chunk.sparse_threshold is not None
        sizes = self.vertical_slash
        if sizes is None:
            if sparse:
                raise UsageError(
                    f"{name}: sparse dual chunk attention without vertical_slash (expected the "
                    "verticals and slashes of each query head; read_vertical_slash has them)"
                )
            return
        check_type(f"{name}: vertical_slash", sizes, (tuple, list), "pairs of integers, per head")
        valid = len(sizes) == self.num_q_heads and all(min(size) >= 1 for size in sizes)
        if not sparse or not valid:
            raise UsageError(
                f"{name}: vertical_slash of {len(sizes)} heads (expected 1 vertical and 1 slash or "
                f"more for each of {self.num_q_heads} heads, of dual chunk attention with a "
                "sparse_threshold)"
            )
