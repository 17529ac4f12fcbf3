"""One case of the suite as data: a pass over a paged cache, or attention without a cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from attn_core.cache.pool import IndexDtype
from attn_core.runtime.batch import DECODE_MODES, ForwardMode
from attn_core.spec.dual_chunk import DualChunk
from attn_core.spec.kinds import LATENT_KINDS, Kind, Phase
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from attn_core.testing.strides import Strides

DRAFT_MODES = frozenset({ForwardMode.DRAFT_DECODE, ForwardMode.DRAFT_EXTEND})
FINEST_FIRST = ("fp32", "fp16", "bf16")
Parents = tuple[int, ...]  # of each draft; -1 hangs on the prefix


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pass: B requests with query_lens new tokens that end seq_lens tokens.

    heads = (q, kv), dims = (D, Dv): a row that lacks them gets its own, unless `fixed` names them.
    kv_dtype "auto" is the dtype of the queries; k_scale and v_scale apply to FP8 and FP4, and are
    tensors with tensor_scales. window, logit_cap, sinks, is_causal, dual_chunk, vertical_slash:
    the layer's; scale_by multiplies its scale of 1 / sqrt(D). encoder_lens: cross attention to as
    many keys.
    trees: parents per request. padding: rows appended to the batch, on page 0. strides: of q, k
    and v. leftover_spec: a draft model's batch carries the spec of the verify pass before it.
    shared_kv: nothing new to write, k and v are None. device_lengths: no lengths on the host.
    all_dtypes: run in every dtype, not in the finest and the coarsest alone. sweep: run on every
    page size and order of pages, not on one page size alone.
    index_topk: the keys that a query of sparse MLA attends to, 0 = all. index_shape: heads and dim
    of its indexer. index_dtype: how index keys are stored; fp8_queries: its queries are e4m3 too.
    exact_index: they and the queries are
    small integers, so that scores are exact and many are equal.
    """

    feature: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    mode: ForwardMode = ForwardMode.EXTEND
    kind: Kind = "mha"
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    fixed: frozenset[str] = frozenset()
    kv_dtype: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0
    tensor_scales: bool = False
    window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False
    is_causal: bool = True
    scale_by: float = 1.0
    dual_chunk: DualChunk | None = None
    vertical_slash: tuple[tuple[int, int], ...] | None = None
    encoder_lens: tuple[int, ...] | None = None
    trees: tuple[Parents, ...] | None = None
    padding: int = 0
    strides: Strides = "packed"
    leftover_spec: bool = False
    shared_kv: bool = False
    index_topk: int = 0
    index_shape: tuple[int, int] = (8, 32)
    index_dtype: IndexDtype = "bf16"
    fp8_queries: bool = False
    exact_index: bool = False
    device_lengths: bool = False
    all_dtypes: bool = False
    sweep: bool = True

    @property
    def drafts(self) -> int:
        """Draft tokens per request of a verify pass, else 0."""
        return self.query_lens[0] if self.mode is ForwardMode.TARGET_VERIFY else 0

    @property
    def seen_from(self) -> tuple[int, ...]:
        """Per request the first token that a query sees: pages before it may be given back."""
        if self.window is None:
            return (0,) * len(self.seq_lens)
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        return tuple(max(0, s - n - self.window + 1) for n, s in pairs)

    @property
    def topk(self) -> int:
        """The speculation that this pass needs: 0 none, 1 a chain, more a tree of drafts."""
        if self.trees is not None:  # a mask is a tree, even where it spells a chain
            return max(2, *(max(Counter(t).values()) for t in self.trees))
        return 1 if self.drafts or self.mode in DRAFT_MODES else 0

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases whose backend runs this pass; drafts go to either."""
        if self.topk:
            return (Phase.PREFILL, Phase.DECODE)
        return (Phase.DECODE,) if self.mode in DECODE_MODES else (Phase.PREFILL,)

    @property
    def cells(self) -> frozenset[str]:
        """The cells of the support matrix that this case is evidence for."""
        covers = {
            "page_sizes": True,
            "fp8_kv": self.kv_dtype.startswith("fp8"),
            "fp4_kv": self.kv_dtype.startswith("fp4"),
            "spec_topk1": self.topk == 1,
            "spec_topk_gt1": self.topk > 1,
            "sliding_window": self.window is not None,
            "logit_cap": self.logit_cap is not None,
            "sinks": self.sinks,
            "cross_attention": self.encoder_lens is not None,
        }
        return frozenset(cell for cell, is_it in covers.items() if is_it)

    def needs(self, dtype: str, page_size: int) -> Requirements:
        """Return what a row must declare to be asked for this case."""
        layer = LayerRequirements(
            kind=self.kind,
            head_dim=self.dims[0],
            v_head_dim=self.dims[1],
            num_q_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            sliding_window=self.window,
            logit_cap=self.logit_cap,
            sinks=self.sinks,
            cross=self.encoder_lens is not None,
            encoder=not self.is_causal,
            dual_chunk=self.dual_chunk,
        )
        spec = Speculation(topk=self.topk, num_draft_tokens=self.drafts or 1) if self.topk else None
        return Requirements(
            layers=(layer,),
            dtype=dtype,
            kv_cache_dtype=self.kv_dtype,
            page_size=page_size,
            speculation=spec,
        )


@dataclass(frozen=True, kw_only=True)
class RaggedCase:
    """Attention without a cache: query_lens and key_lens per request, heads = (q, kv).

    phase: ENCODE is a vision tower, PREFILL an encoder layer, or MLA's prefill (a latent kind).
    """

    feature: str
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    causal: bool = False
    kind: Kind = "mha"
    phase: Phase = Phase.PREFILL
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    fixed: frozenset[str] = frozenset()
    window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False
    strides: Strides = "packed"

    @property
    def cells(self) -> frozenset[str]:
        """The cells of the support matrix that this case is evidence for."""
        if self.kind in LATENT_KINDS:
            return frozenset({"chunked_prefix_cache"})
        return frozenset({"multimodal" if self.phase is Phase.ENCODE else "encoder"})

    def needs(self, dtype: str) -> Requirements:
        """Return what a row must declare to be asked for this case."""
        latent = self.kind in LATENT_KINDS  # ragged heads (192/128) are no dims of the cache
        layer = LayerRequirements(
            kind=self.kind,
            head_dim=None if latent else self.dims[0],
            v_head_dim=None if latent else self.dims[1],
            num_q_heads=self.heads[0],
            num_kv_heads=None if latent else self.heads[1],
            sliding_window=self.window,
            logit_cap=self.logit_cap,
            sinks=self.sinks,
            encoder=not (self.causal or latent),  # a chunk of a prefix has no causal order
        )
        if self.phase is Phase.ENCODE:
            return Requirements(layers=(), vision=layer, dtype=dtype)
        return Requirements(layers=(layer,), dtype=dtype)
