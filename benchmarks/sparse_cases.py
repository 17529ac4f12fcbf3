"""Cases of sparse MLA (DSA) in DeepSeek-V3.2's shape: inputs, and what is right in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from attn_core import AttentionBackend, AttentionLayer, BackendConfig, LayerCache
from attn_core.cache.pool import KVPool
from attn_core.ops.index import read_index, to_fp8_queries, write_index
from attn_core.ops.kv import read_kv, write_kv
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import create_backend
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode
from torch import Tensor

HEADS, LATENT, DIM = 128, 512, 576
INDEX_HEADS, INDEX_DIM, TOPK, PAGE = 64, 128, 2048, 64
Store = Literal["bf16", "fp8_e4m3"]
STORES: tuple[Store, ...] = ("bf16", "fp8_e4m3")
Part = Literal["write", "score", "select", "index_topk", "attend", "chain"]
_AT_ONCE = 1 << 18  # tokens that are drawn at once
_LATENT_BYTES = {"bf16": 2 * DIM, "fp8_e4m3": LATENT + 4 * 4 + 2 * (DIM - LATENT)}
_INDEX_BYTES = INDEX_DIM + 4


@dataclass(frozen=True, kw_only=True)
class SparseCase:
    """A pass over `batch` requests of `length` tokens, `new` of each are queries."""

    phase: Literal["prefill", "decode"]
    batch: int
    new: int
    length: int

    @property
    def name(self) -> str:
        """Say phase and shape."""
        return f"{self.phase} {self.batch}x{self.new} of {self.length}"

    @property
    def tokens(self) -> int:
        """Return the number of queries."""
        return self.batch * self.new

    @property
    def pairs(self) -> int:
        """Return how many keys all queries see."""
        return self.tokens * (2 * self.length - self.new + 1) // 2

    def floor_us(self, part: Part, store: Store, copy_gbs: float, matmul_tflops: float) -> float:
        """Return the least microseconds of a part by the traffic and the work that it must do.

        FP8 products count as twice as fast as bf16's; a selection reads each score once; attention
        reads each selected latent once, but not more than there are.
        """
        t, keys, chosen = self.tokens, self.batch * self.length, min(TOPK, self.length)
        queries = t * (INDEX_HEADS * (INDEX_DIM + 4))
        latents = min(t * chosen, keys) * _LATENT_BYTES[store]
        scores = 4 * self.pairs
        index_flops = self.pairs * 2 * INDEX_HEADS * INDEX_DIM / 2  # in bf16's time
        attend_flops = t * chosen * 2 * HEADS * (DIM + LATENT)
        traffic, work = {
            "write": (t * (2 * INDEX_DIM + _INDEX_BYTES), 0.0),
            "score": (queries + keys * _INDEX_BYTES + scores, index_flops),
            "select": (scores + 4 * t * chosen, 0.0),
            "attend": (t * HEADS * 2 * (DIM + LATENT) + latents + 4 * t * chosen, attend_flops),
        }.get(part, (0, 0.0))
        if not traffic:
            parts: tuple[Part, ...] = ("score", "select")
            parts = parts if part == "index_topk" else ("write", *parts, "attend")
            return sum(self.floor_us(x, store, copy_gbs, matmul_tflops) for x in parts)
        return max(traffic / copy_gbs / 1e3, work / matmul_tflops / 1e6)


CASES: tuple[SparseCase, ...] = (
    SparseCase(phase="prefill", batch=1, new=4096, length=32768),
    *(SparseCase(phase="decode", batch=b, new=1, length=65536) for b in (1, 16, 64)),
)


@dataclass(frozen=True, eq=False)
class SparseInputs:
    """Drawn tensors of a case. What some contestants need besides is derived once, untimed.

    caches: by store; both hold the same index keys. q: bf16 [T, 128, 576]. q_index: e4m3
    [T, 64, 128]; weights: float32 [T, 64] with its scales.
    k_index: bf16 [T, 128], those of the new tokens.
    """

    case: SparseCase
    layer: AttentionLayer
    caches: Mapping[Store, LayerCache]
    batch: ForwardBatch
    q: Tensor
    q_index: Tensor
    weights: Tensor
    k_index: Tensor

    @property
    def view(self) -> CacheView:
        """The one view of the batch."""
        return self.batch.views[self.layer.view]

    @cached_property
    def request(self) -> Tensor:
        """int64 [T]: the request of each query."""
        new = torch.arange(self.case.batch, device=self.q.device)
        return new.repeat_interleave(self.case.new)

    @cached_property
    def visible(self) -> Tensor:
        """int32 [T]: how many keys each query sees."""
        own = torch.arange(1, self.case.new + 1, device=self.q.device, dtype=torch.int32)
        return (own + (self.case.length - self.case.new)).repeat(self.case.batch)

    @cached_property
    def slot_table(self) -> Tensor:
        """int32 [B, length]: the slot of each token."""
        inner = torch.arange(PAGE, device=self.q.device, dtype=torch.int32)
        return (self.view.page_table[:, :, None] * PAGE + inner).flatten(1)

    def scores(self, token: int) -> Tensor:
        """Return the right scores float64 of the keys that a query sees."""
        slots = self.slot_table[self.request[token], : int(self.visible[token])]
        keys = read_index(self.caches["bf16"], slots.long(), torch.float32).double()
        products = (self.q_index[token].double() @ keys.T).clamp(min=0)
        return (self.weights[token].double()[:, None] * products).sum(0)

    @cached_property
    def chosen(self) -> Tensor:
        """int32 [T, K]: random slots that each query sees, what is attended to in "attend"."""
        generator = torch.Generator(self.q.device).manual_seed(1)
        seen = self.visible[:, None]
        steps = torch.rand(self.case.tokens, TOPK, generator=generator, device=self.q.device)
        # one of each of K stretches, so that no slot comes twice
        at = ((torch.arange(TOPK, device=self.q.device) + steps) * seen / TOPK).long()
        at = torch.minimum(at, seen.long() - 1)
        return self.slot_table[self.request[:, None], at].int().contiguous()

    @cached_property
    def drawn_scores(self) -> Tensor:
        """float32 [T, length]: scores to select from, relu of normal numbers."""
        generator = torch.Generator(self.q.device).manual_seed(2)
        shape = (self.case.tokens, self.case.length)
        scores = torch.randn(shape, generator=generator, device=self.q.device)
        return scores.add_(0.5).clamp_(min=0)

    def attended(self, token: int, chosen: Tensor, store: Store) -> Tensor:
        """Return the right output float64 [128, 512] of a query and the slots int32 [K] it has."""
        latents, _ = read_kv(self.caches[store], chosen[chosen >= 0].long(), torch.float32)
        keys = latents[:, 0].double()
        scores = self.q[token].double() @ keys.T * self.layer.scale
        return scores.softmax(-1) @ keys[:, :LATENT]


def build(case: SparseCase, device: torch.device) -> SparseInputs:
    """Draw the inputs of a case, the same ones each time, over shuffled pages of 64."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    layer = AttentionLayer(
        layer_id=0, num_q_heads=HEADS, num_kv_heads=1, head_dim=DIM, v_head_dim=LATENT,
        scale=192**-0.5, index_topk=TOPK,
    )  # fmt: skip
    pages = case.length // PAGE
    total = case.batch * pages
    caches = {
        store: KVPool(
            [layer], num_pages=total + 1, page_size=PAGE, kv_cache_dtype=store, device=device,
            kind="dsa", index_dim=INDEX_DIM, index_dtype="fp8_e4m3",
        ).layer(0)
        for store in STORES
    }  # fmt: skip
    for first in range(PAGE, (total + 1) * PAGE, _AT_ONCE):
        slots = torch.arange(first, min(first + _AT_ONCE, (total + 1) * PAGE), device=device)
        latents, keys = randn(len(slots), 1, DIM), randn(len(slots), INDEX_DIM)
        for cache in caches.values():
            write_kv(cache, latents, None, slots)
            write_index(cache, keys, slots)
    order = torch.randperm(total, generator=generator, device=device) + 1
    table = order.view(case.batch, pages).int()
    new = torch.arange(case.length - case.new, case.length, device=device)
    out_slots = (table[:, new // PAGE].long() * PAGE + new % PAGE).flatten()
    decodes = case.phase == "decode"
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
        cu_seqlens_q=torch.arange(case.batch + 1, device=device, dtype=torch.int32) * case.new,
        positions=new.repeat(case.batch),
        max_q_len=case.new,
        query_lens_host=(case.new,) * case.batch,
        views={
            layer.view: CacheView(
                page_table=table,
                seq_lens=torch.full((case.batch,), case.length, dtype=torch.int32, device=device),
                seq_lens_host=(case.length,) * case.batch,
                out_cache_loc=out_slots,
                max_seq_len=case.length,
            )
        },
    )
    # as a model has them: some heads count more, and those of a query are alike
    weights = torch.rand(case.tokens, INDEX_HEADS, generator=generator, device=device)
    queries = randn(case.tokens, INDEX_HEADS, INDEX_DIM)
    q_index, weights = to_fp8_queries(queries, weights * (INDEX_HEADS * INDEX_DIM) ** -0.5)
    k_index = randn(case.tokens, INDEX_DIM)
    for cache in caches.values():
        write_index(cache, k_index, out_slots)
    q = randn(case.tokens, HEADS, DIM)
    return SparseInputs(case, layer, caches, batch, q, q_index, weights, k_index)


def backend_of(name: str, inputs: SparseInputs, store: Store) -> tuple[AttentionBackend, Any]:
    """Create one of our backends for a case, and plan its pass. name: "nsa:flashmla_kv", or triton.

    Raises LookupError where it has no such row.
    """
    case, device = inputs.case, inputs.q.device
    backend, _, kernel = name.partition(":")
    spec = load_plugins().get(backend)
    rows = (
        r for r in spec.capabilities
        if r.kind == "dsa" and r.device == "cuda" and store in r.kv_dtypes
        and (r.sub_backend or "") == kernel and not r.sinks
    )  # fmt: skip
    row = next(rows, None)
    if row is None:
        raise LookupError(f"{name} has no row for {store}")
    config = BackendConfig(
        name=spec.name, row=row, layers=(inputs.layer,), page_size=PAGE, dtype="bf16",
        kv_cache_dtype=store, device=device, max_bs=case.batch, max_num_tokens=case.tokens,
        max_seq_len=case.length,
    )  # fmt: skip
    created = create_backend(spec, config)
    return created, created.init_forward_metadata(inputs.batch)
