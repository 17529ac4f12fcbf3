"""What a backend can do, what a model needs and where they run: plain data, torch-free."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from attn_core.errors import UsageError

Kind = Literal["mha", "mla", "dsa", "gdn", "kda"]
Family = Literal["softmax", "linear"]
GraphLevel = Literal["none", "decode", "full"]
VerifyMode = Literal["prefill", "decode"]

LINEAR_KINDS: frozenset[str] = frozenset({"gdn", "kda"})
PLAIN_DTYPES: frozenset[str] = frozenset({"fp32", "fp16", "bf16"})
TREES = 1 << 30  # a max_topk that means: any tree of draft tokens


def _collect(record: object, name: str, make: Callable[[Any], object], expected: str) -> None:
    """Freeze a field that holds a collection; text would be taken apart letter by letter."""
    value = getattr(record, name)
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        object.__setattr__(record, name, make(value))
    except (TypeError, ValueError):
        raise TypeError(f"{name} {value!r} (expected {expected})") from None


class Phase(enum.Enum):
    """A half of serving, or ENCODE: attention that has no cache (the vision tower of a model)."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


SERVING: frozenset[Phase] = frozenset({Phase.PREFILL, Phase.DECODE})


@dataclass(frozen=True)
class Device:
    """Where attention runs: `cuda:sm90` with runtime "12.8", `cpu:amx`.

    `runtime` is the version of CUDA, ROCm or CANN; None is unknown and counts as the newest.
    """

    type: str
    arch: str | None = None
    runtime: str | None = None

    def __str__(self) -> str:
        return f"{self.type}:{self.arch}" if self.arch else self.type


def check_layer(layer: Any, name: str) -> None:
    """Check the fields that LayerNeeds and AttentionLayer share; None passes.

    Raises UsageError for a head count or dim below 1, a window below 1 and a cap that is not above
    0. Engines spell "no window" as 0 or -1 and "no cap" as 0.0; here both are None.
    """
    for what in ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim"):
        value = getattr(layer, what)
        if value is not None and not value >= 1:
            raise UsageError(f"{name}: {what} {value!r} (expected 1 or more)")
    window, cap = layer.sliding_window, layer.logit_cap
    if window is not None and not window >= 1:
        raise UsageError(f"{name}: sliding_window {window!r} (expected 1 or more; None is off)")
    if cap is not None and not 0 < cap < math.inf:
        raise UsageError(f"{name}: logit_cap {cap!r} (expected a number above 0; None is off)")


@dataclass(frozen=True, kw_only=True)
class LayerNeeds:
    """What one class of attention layers of a model needs; None is unknown and constrains nothing.

    Heads are those of one tensor-parallel rank. For "mla" and "dsa" `head_dim` is latent + rope
    (512 + 64) and `v_head_dim` the latent. For linear kinds `head_dim` is K and `v_head_dim` V.
    `sliding_window` W: a token sees itself and the W-1 before it. No window and no cap are None:
    UsageError for 0 or -1, for heads and dims below 1, and for query heads of a softmax kind that
    are no multiple of the KV heads.
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

    def __post_init__(self) -> None:
        check_layer(self, f"layers of kind {self.kind}")
        q, kv = self.num_q_heads, self.num_kv_heads
        if self.family == "softmax" and q and kv and q % kv:
            raise UsageError(f"{q} query heads are no multiple of {kv} KV heads")

    @property
    def family(self) -> Family:
        return "linear" if self.kind in LINEAR_KINDS else "softmax"


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding: `topk` draft tokens a step; `mode` is the phase that verifies.

    Raises UsageError for a number below 1 or another mode.
    """

    topk: int = 1
    num_draft_tokens: int = 4
    mode: VerifyMode = "prefill"

    def __post_init__(self) -> None:
        for name in ("topk", "num_draft_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"speculation with {name} {value!r} (expected 1 or more)")
        if self.mode not in get_args(VerifyMode):
            known = " or ".join(get_args(VerifyMode))
            raise UsageError(f"speculation with mode {self.mode!r} (expected {known})")


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a model and its workload need.

    layers: distinct layer classes, softmax and linear. vision: the vision tower, if any.
    dtype: "bf16", "fp16" or "fp32"; kv_cache_dtype: "auto" (the model's) or a store.
    page_size: tokens a page, None lets the selection choose.
    lse / deterministic: True asks every serving backend for it. graphs: True asks the roles that
    are captured in CUDA graphs, decode at level "decode" and verify and draft at level "full".
    assumptions: sentences about what was not known and how it was taken.
    """

    layers: tuple[LayerNeeds, ...] = (LayerNeeds(),)
    vision: LayerNeeds | None = None
    dtype: str = "bf16"
    kv_cache_dtype: str = "auto"
    page_size: int | None = None
    speculation: Speculation | None = None
    lse: bool = False
    deterministic: bool = False
    graphs: bool = False
    assumptions: tuple[str, ...] = ()

    @property
    def softmax_layers(self) -> tuple[LayerNeeds, ...]:
        return tuple(x for x in self.layers if x.family == "softmax")

    @property
    def linear_layers(self) -> tuple[LayerNeeds, ...]:
        return tuple(x for x in self.layers if x.family == "linear")

    @property
    def store_dtype(self) -> str:
        """The dtype that the KV cache stores: `dtype` where kv_cache_dtype is "auto"."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """One row of the support matrix: everything in it holds at the same time.

    A conditional limit (a tree only with page size 1) is a second row. An empty set of archs,
    page_sizes, head_dims, q_heads or group_sizes means any. Sets may be given as any iterable
    but text, which raises TypeError.

    finite_tail: the kernels load whole tiles and multiply what no query sees by 0, and 0 · NaN is
    NaN. Then the tails of last pages and the pages behind a window must hold finite numbers, and,
    in a pass without a cache, the keys and values of the next request.
    """

    kind: Kind
    device: str  # a Device.type, or "any"
    dtypes: AbstractSet[str]
    kv_dtypes: AbstractSet[str]  # what the cache may store; for linear kinds the dtype of the state
    priority: int  # 30 default on this arch, 20 tuned, 10 portable, 5 by name or last, 0 reference
    archs: AbstractSet[str] = frozenset()
    min_runtime: str | None = None
    requires: Sequence[str] = ()  # distributions: "flash-attn-3 or sglang-kernel>=0.4"
    phases: AbstractSet[Phase] = SERVING
    mixed_kv: bool = False  # a plain kv dtype may differ from the model's dtype
    page_sizes: AbstractSet[int] = frozenset()  # the kernel's; a pool page is a multiple
    max_page_size: int | None = None  # the largest pool page this row runs on
    preferred_page_size: int | None = None  # with its measured reason
    preferred_page_reason: str = ""
    layouts: AbstractSet[str] = frozenset({"NHD"})
    head_dims: AbstractSet[int] = frozenset()
    head_dim_pairs: AbstractSet[tuple[int, int]] | Literal["any"] = frozenset()  # unequal (D, Dv)
    q_heads: AbstractSet[int] = frozenset()
    group_sizes: AbstractSet[int] = frozenset()  # q heads per kv head
    sliding_window: bool = False
    logit_cap: bool = False
    sinks: bool = False
    cross_attention: bool = False
    encoder: bool = False  # bidirectional layers without a cache, ragged
    absorbed: bool = True  # MLA over its latent cache; False: ragged prefill and its chunks alone
    chunked_prefix: bool = False  # MLA: prefix in chunks, merged by LSE
    max_topk: int = 0  # verifies and drafts: 0 no, 1 chains, TREES any tree
    run_topk: int | None = None  # largest topk of a run in which this row serves any phase
    lse: bool = False
    deterministic: bool = False
    cuda_graph: GraphLevel = "none"
    beside_linear: bool | None = None  # True only beside linear layers, False never, None either
    needs_host_lengths: bool = False
    finite_tail: bool = False  # what lies beside a request's keys and values must be finite
    fused_kv_write: bool = False  # the kernel writes new K/V itself
    fp8_products: bool = False  # with an FP8 store, queries and probabilities are rounded to it too
    bans: Mapping[str, str] = field(default_factory=dict, hash=False)  # other phase's name → why
    note: str = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            if str(f.type).startswith("AbstractSet"):
                if f.name == "head_dim_pairs" and self.head_dim_pairs == "any":
                    continue
                _collect(self, f.name, frozenset, "a set")
        _collect(self, "requires", tuple, "a list")
        _collect(self, "bans", dict, "a mapping")

    @property
    def family(self) -> Family:
        return "linear" if self.kind in LINEAR_KINDS else "softmax"


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """A declared backend: its name, its rows and, as text, the class that runs it.

    `create` is "module:Class", or a function that chooses one, called with a BackendConfig; it is
    imported only then.
    `implemented` False: declared, selectable on a simulated device, but creation raises.
    `aliases` are other documented names of it (for --mm-attention-backend).
    `departures` says, per matrix cell ("mha.fp8_kv"), why it differs from the documented matrix.
    """

    name: str
    capabilities: Sequence[Capabilities]
    create: str
    implemented: bool = True
    aliases: Sequence[str] = ()
    departures: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _collect(self, "capabilities", tuple, "a list")
        _collect(self, "aliases", tuple, "a list")
        _collect(self, "departures", dict, "a mapping")

    @property
    def family(self) -> Family:
        """ "softmax" or "linear": the two families of names."""
        return self.capabilities[0].family
