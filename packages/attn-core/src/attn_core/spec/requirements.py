"""What a model and its workload need, as plain, torch-free data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, NamedTuple, get_args

from attn_core.errors import UsageError
from attn_core.spec.dual_chunk import DualChunk
from attn_core.spec.kinds import LINEAR_KINDS, Family, Kind, VerifyMode

FLOAT32_MIN, FLOAT32_MAX = 1.1754943508222875e-38, 3.4028234663852886e38


def is_count(value: Any) -> bool:
    """Say whether a value is an integer of 1 or more."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def check_type(name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise UsageError unless `value` is of a type."""
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {value!r:.200} (expected {expected})")


def check_layer(layer: Any, name: str) -> None:
    """Check the fields that LayerRequirements and AttentionLayer share; None passes.

    Raises UsageError for a head count, a dim or a window that is no integer of 1 or more, or a
    cap of 0 or less or beyond float32.
    Some engines write "no window" as 0 or -1 and "no cap" as 0.0; here both are None.
    """
    for what in ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "num_layers"):
        value = getattr(layer, what, None)
        if value is not None and not is_count(value):
            raise UsageError(f"{name}: {what} {value!r} (expected an integer of 1 or more)")
    window, cap = layer.sliding_window, layer.logit_cap
    if window is not None and not is_count(window):
        raise UsageError(
            f"{name}: sliding_window {window!r} (expected an integer of 1 or more; None is off)"
        )
    if cap is not None and not (isinstance(cap, Real) and FLOAT32_MIN <= float(cap) <= FLOAT32_MAX):
        raise UsageError(
            f"{name}: logit_cap {cap!r} (expected a number above 0 that float32 holds; None is off)"
        )


class StateBytes(NamedTuple):
    """What a request takes in one linear layer, in bytes.

    state: in float32. conv: the last inputs of the short convolution. records: what drafts leave.
    """

    state: int
    conv: int
    records: int


@dataclass(frozen=True, kw_only=True)
class LayerRequirements:
    """The needs of one group of equal attention layers; None means unknown and constrains nothing.

    Head counts are those of one tensor-parallel rank. For "mla" and "dsa", `head_dim` is latent +
    rope (512 + 64) and `v_head_dim` the latent. A layer of kind "dsa" selects `index_topk` keys by
    the `index_heads` heads of `index_dim` dims of its indexer; with `shares_topk` it has none, and
    takes the selection of the layer before it. For linear kinds, `head_dim` is K and `v_head_dim`
    V, and `conv_width` the taps of the short convolution in front. `sliding_window` W: a token sees
    itself and the W-1 tokens before it. None means no window and no cap. `num_layers`, how many
    layers the group has, weighs costs; groups that differ in it alone are equal.
    Raises UsageError for a window of 0 or -1, for counts, dims, taps and selected keys below 1, if
    the query heads of a softmax kind are not a multiple of its KV heads, for an indexer of another
    kind than "dsa" or of a layer that shares, and for dual chunk attention of layers that are not
    plain causal self-attention.
    """

    kind: Kind = "mha"
    head_dim: int | None = None
    v_head_dim: int | None = None
    num_q_heads: int | None = None
    num_kv_heads: int | None = None
    sliding_window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False
    cross: bool = False
    encoder: bool = False
    conv_width: int | None = None
    dual_chunk: DualChunk | None = None
    index_topk: int | None = None
    index_heads: int | None = None
    index_dim: int | None = None
    shares_topk: bool = False
    num_layers: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_layer(self, f"layers of kind {self.kind}")
        for name in ("conv_width", "index_topk", "index_heads", "index_dim"):
            value = getattr(self, name)
            if value is not None and not is_count(value):
                raise UsageError(
                    f"layers of kind {self.kind}: {name} {value!r} (expected an integer of 1 or "
                    "more)"
                )
        if self.kind not in get_args(Kind):
            raise UsageError(f"kind {self.kind!r} (expected {', '.join(get_args(Kind))})")
        for name in ("sinks", "cross", "encoder", "shares_topk"):
            check_type(f"layers of kind {self.kind}: {name}", getattr(self, name), bool, "a bool")
        chunks = self.dual_chunk
        if chunks is not None:
            check_type("dual_chunk", chunks, DualChunk, "a DualChunk, or None")
        self._check_indexer()
        q, kv = self.num_q_heads, self.num_kv_heads
        if self.family == "softmax" and q and kv and q % kv:
            raise UsageError(f"{q} query heads are no multiple of {kv} KV heads")
        if self.dual_chunk is not None:
            others = ("sliding_window", "sinks", "cross", "encoder")
            beside = [name for name in others if getattr(self, name)]
            beside += [f"kind {self.kind}"] * (self.kind != "mha")
            if self.logit_cap is not None and self.dual_chunk.sparse_threshold is not None:
                beside.append("sparse prompts and logit_cap")
            if beside:
                raise UsageError(
                    f"dual chunk attention with {', '.join(beside)} (expected causal "
                    "self-attention of kind mha, without a window or sinks; where it is sparse, "
                    "without a logit cap)"
                )

    def _check_indexer(self) -> None:
        none: tuple[str, ...] = ("index_heads", "index_dim") if self.shares_topk else ()
        if self.kind != "dsa":
            none = ("index_topk", "index_heads", "index_dim", "shares_topk")
        if beside := [name for name in none if getattr(self, name)]:
            expected = "kind dsa" if self.kind != "dsa" else "none with shares_topk"
            raise UsageError(
                f"layers of kind {self.kind} with {', '.join(beside)} (expected {expected})"
            )

    @classmethod
    def of(cls, layer: Any, kind: Kind = "mha") -> LayerRequirements:
        """Return what an AttentionLayer needs; its kind is the one thing that it does not say."""
        return cls(
            kind=kind,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            num_q_heads=layer.num_q_heads,
            num_kv_heads=layer.num_kv_heads,
            sliding_window=layer.sliding_window,
            logit_cap=layer.logit_cap,
            sinks=layer.sinks is not None,
            cross=bool(layer.is_cross),
            encoder=not (layer.is_causal or layer.is_cross),
            dual_chunk=layer.dual_chunk,
            index_topk=layer.index_topk if kind == "dsa" else None,
        )

    @classmethod
    def counted(cls, layers: Iterable[Any], kind: Kind = "mha") -> tuple[LayerRequirements, ...]:
        """Return the groups of equal AttentionLayers, first seen first, with their numbers."""
        counts = Counter(cls.of(layer, kind) for layer in layers)
        return tuple(replace(group, num_layers=n) for group, n in counts.items())

    @property
    def family(self) -> Family:
        return "linear" if self.kind in LINEAR_KINDS else "softmax"

    def state_bytes(self, num_drafts: int = 0, *, dtype: str = "bf16") -> StateBytes | None:
        """Return what a request and its drafts take in a linear layer of a model in `dtype`.

        None for a softmax layer, and where a dim or a head count is unknown.
        """
        k, v = self.head_dim, self.v_head_dim or self.head_dim
        hk, hv = self.num_q_heads, self.num_kv_heads
        if self.family == "softmax" or not (k and v and hk and hv):
            return None
        g = hv * k if self.kind == "kda" else hv
        inputs = (2 * hk * k + hv * v) * (4 if dtype == "fp32" else 2) if self.conv_width else 0
        return StateBytes(
            state=4 * hv * v * k,
            conv=((self.conv_width or 1) - 1) * inputs,
            records=num_drafts * (4 * (hv * v + hk * k + g) + inputs),
        )


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding with `topk` draft tokens per step; `mode` is the phase that verifies.

    Raises UsageError for a number below 1 or an unknown mode.
    """

    topk: int = 1
    num_draft_tokens: int = 4
    mode: VerifyMode = "prefill"

    def __post_init__(self) -> None:
        for name in ("topk", "num_draft_tokens"):
            value = getattr(self, name)
            if not is_count(value):
                raise UsageError(f"speculation with {name} {value!r} (expected 1 or more)")
        if self.mode not in get_args(VerifyMode):
            known = " or ".join(get_args(VerifyMode))
            raise UsageError(f"speculation with mode {self.mode!r} (expected {known})")


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a model and its workload need from attention.

    layers: the distinct layers, softmax and linear.
    vision: the vision tower, if any.
    dtype: "bf16", "fp16" or "fp32".
    kv_cache_dtype: "auto" (the model's dtype) or a name in KV_DTYPES.
    page_size: tokens per page; with None the selection decides.
    lse, deterministic: every serving backend must support it.
    shared_prefix: backends that decode or verify read keys that neighbouring requests share once.
    finite_padding: whether unused pages and the tails of last pages hold finite numbers. They do
    not where an engine gives the memory of its cache back for a while.
    graphs: every role that is captured in CUDA graphs must support them, decode at level "decode",
    verify and draft at level "uniform".
    assumptions: sentences about unknown values and what was assumed for them.
    Raises UsageError for a value of another type.
    """

    layers: tuple[LayerRequirements, ...] = (LayerRequirements(),)
    vision: LayerRequirements | None = None
    dtype: str = "bf16"
    kv_cache_dtype: str = "auto"
    page_size: int | None = None
    speculation: Speculation | None = None
    lse: bool = False
    deterministic: bool = False
    shared_prefix: bool = False
    finite_padding: bool = True
    graphs: bool = False
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one, several = "a LayerRequirements", "a tuple of LayerRequirements"
        check_type("layers", self.layers, (tuple, list), several)
        for x in self.layers:
            check_type("one of layers", x, LayerRequirements, f"{one}; LayerRequirements.of(layer)")
        if self.vision is not None:
            check_type("vision", self.vision, LayerRequirements, f"{one}, or None")
        if self.speculation is not None:
            check_type("speculation", self.speculation, Speculation, "a Speculation, or None")
        for name in ("dtype", "kv_cache_dtype"):
            check_type(name, getattr(self, name), str, "a name, such as 'bf16'")
        for name in ("lse", "deterministic", "shared_prefix", "finite_padding", "graphs"):
            check_type(name, getattr(self, name), bool, "a bool")

    @property
    def softmax_layers(self) -> tuple[LayerRequirements, ...]:
        return tuple(x for x in self.layers if x.family == "softmax")

    @property
    def linear_layers(self) -> tuple[LayerRequirements, ...]:
        return tuple(x for x in self.layers if x.family == "linear")

    @property
    def store_dtype(self) -> str:
        """The dtype of the KV cache: `dtype` if kv_cache_dtype is "auto"."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
