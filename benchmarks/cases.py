"""One shape to measure and its inputs: a shuffled paged pool, a batch, and what is right."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.cache.page_table import num_pages_for, slot_table
from attn_core.cache.pool import KVPool
from attn_core.ops.kv import read_kv
from attn_core.ops.quant import to_fp8
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer
from torch import Tensor

Of16Bits = Literal["decode", "verify", "prefill", "extend", "mla", "mla-verify", "mla-extend"]
# The same shapes over several stores, which no peer takes; "stores" alone is decode.
OfStores = Literal["stores", "stores-verify", "stores-extend", "mla-stores"]
Phase = Literal[Of16Bits, "fp8", "fp4", OfStores]
LATENT, ROPE = 512, 64  # absorbed MLA: what is compressed, and what carries the position
MLA_SCALE = (128 + ROPE) ** -0.5  # of the heads before absorption, DeepSeek-V3's
_DECODES = ("decode", "mla", "fp8", "fp4", "stores", "mla-stores")
_VERIFIES = ("verify", "mla-verify", "stores-verify")
_CHECKED_ROWS = 16  # queries of a request that are compared with the reference


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape, named by what is in it; all heads are those of one GPU.

    length: the KV length of each request, its new tokens included; ragged: of the longest, the
    others are drawn between an eighth of it and it. sigma: lengths are drawn log-normal with this
    standard deviation of their logarithm, `length` is their median and a sixteenth of the longest
    that there may be. queries: new tokens a request, None: all.
    tree: a random tree of drafts for each request, else they are a chain.
    shared: (requests of a group, tokens that they share) of each level, the outermost first; the
    groups lie in those before. sharers: how many requests share, None: all. alone: the KV length
    of each of the others, None: `length`; only beside sharers, and where no length is drawn.
    """

    phase: Phase
    batch: int
    length: int
    queries: int | None = 1
    ragged: bool = False
    sigma: float | None = None
    tree: bool = False
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    page_size: int = 64
    kv_dtype: str = "bf16"
    dtype: str = "bf16"
    shared: tuple[tuple[int, int], ...] = ()
    sharers: int | None = None
    alone: int | None = None

    def __post_init__(self) -> None:
        drawn = self.ragged or self.sigma is not None
        if self.alone is not None and (self.sharers is None or drawn):
            raise ValueError(f"{self.name}: `alone` needs `sharers` and lengths that are not drawn")

    @property
    def name(self) -> str:
        """Such as "verify B16 L4096 q8 tree H32/8 D128 p1", unique within a list of cases."""
        dims = str(self.head_dim) + (
            f"/{self.v_head_dim}" if self.v_head_dim != self.head_dim else ""
        )
        length = ("L<=" if self.ragged else "L") + str(self.length)
        if self.sigma is not None:
            length = f"L~{self.length} sigma{self.sigma:g}"
        parts = [self.phase, f"B{self.batch}", length]
        if self.phase not in _DECODES and self.queries is not None:
            parts.append(f"q{self.queries}")
        if self.phase in ("verify", "stores-verify"):
            parts.append("tree" if self.tree else "chain")
        parts += [f"H{self.q_heads}/{self.kv_heads}", f"D{dims}", f"p{self.page_size}"]
        parts += [f"shared {n}x{tokens}" for n, tokens in self.shared]
        parts += [f"of {self.sharers}"] if self.sharers is not None else []
        parts += [f"alone {self.alone}"] if self.alone is not None else []
        return " ".join(parts + ([self.kv_dtype] if self.kv_dtype != self.dtype else []))

    @property
    def kind(self) -> Literal["mha", "mla"]:
        return "mla" if self.phase.startswith("mla") else "mha"

    @property
    def mode(self) -> ForwardMode:
        if self.phase in _DECODES:
            return ForwardMode.DECODE
        return ForwardMode.TARGET_VERIFY if self.phase in _VERIFIES else ForwardMode.EXTEND

    @property
    def scale(self) -> float:
        return MLA_SCALE if self.kind == "mla" else float(self.head_dim**-0.5)

    @cached_property
    def seq_lens(self) -> tuple[int, ...]:
        """KV lengths, the same at every run."""
        rng = random.Random(f"{self.batch}x{self.length}")
        if self.sigma is not None:
            drawn = (rng.lognormvariate(0.0, self.sigma) for _ in range(self.batch))
            least = self.queries or 1
            return tuple(max(least, int(self.length * min(x, 16.0))) for x in drawn)
        if not self.ragged:
            if self.sharers is None or self.alone is None:
                return (self.length,) * self.batch
            others = self.batch - self.sharers
            return (self.length,) * self.sharers + (self.alone,) * others
        low = max(self.queries or 1, self.length // 8)
        rest = [rng.randint(low, self.length) for _ in range(self.batch - 1)]
        return (self.length, *rest)

    @property
    def longest(self) -> int:
        """The longest request, in tokens."""
        return max(self.seq_lens)

    @property
    def groups(self) -> tuple[tuple[tuple[int, int, int, int], ...], ...]:
        """The groups of each level: first request, requests, begin and end in tokens."""
        levels, begin = [], 0
        sharers = self.batch if self.sharers is None else self.sharers
        for n, tokens in self.shared:
            end = begin + tokens
            levels.append(tuple((first, n, begin, end) for first in range(0, sharers, n)))
            begin = end
        return tuple(levels)

    @property
    def query_lens(self) -> tuple[int, ...]:
        return self.seq_lens if self.queries is None else (self.queries,) * self.batch

    @property
    def tokens(self) -> int:
        """T, the queries of all requests."""
        return sum(self.query_lens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the requests hold, each counted once; MLA holds no V."""
        per_token = self.head_dim + (0 if self.kind == "mla" else self.v_head_dim)
        again = sum((n - 1) * (end - begin) for _, n, begin, end in itertools.chain(*self.groups))
        tokens = sum(self.seq_lens) - again
        values = tokens * self.kv_heads * per_token
        if self.kv_dtype == "fp4_e2m1":  # two codes a byte, and a scale for 16
            return values // 2 + values // 16
        return values * TORCH_DTYPES[self.kv_dtype].itemsize

    @property
    def bytes(self) -> int:
        """The least that must move: K and V and q read once, the output written once."""
        per_query = self.q_heads * (self.head_dim + self.v_head_dim)
        return self.kv_bytes + self.tokens * per_query * TORCH_DTYPES[self.dtype].itemsize

    @property
    def flops(self) -> int:
        """Two per multiply-add of q·k and p·v over the causal pairs; a tree counts as a chain."""
        pairs = sum(
            (s - n) * n + n * (n + 1) // 2
            for s, n in zip(self.seq_lens, self.query_lens, strict=True)
        )
        return 2 * self.q_heads * (self.head_dim + self.v_head_dim) * pairs


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What ours and every peer are called with.

    q [T, Hq, D]; k [T, Hkv, D] and v [T, Hkv, Dv] (None for MLA): the new tokens, which are in the
    pool too; cache is what the pool has for the layer. rows int64 [N]: the queries whose output is
    known, wanted fp32 [N, Hq, Dv].
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor | None
    pool: KVPool
    cache: LayerCache
    batch: ForwardBatch
    layer: AttentionLayer
    rows: Tensor
    wanted: Tensor

    @property
    def page_table(self) -> Tensor:
        """int32 [B, max_pages]."""
        return self.batch.views["full"].page_table

    @property
    def seq_lens(self) -> Tensor:
        """int32 [B]."""
        return self.batch.views["full"].seq_lens

    def error(self, out: Tensor) -> float:
        """Return the largest ‖out - wanted‖ / ‖wanted‖ of a known query; infinity for a NaN.

        Query by query: early ones average few values, and their size would hide the late ones.
        """
        out = out.reshape(-1, self.case.q_heads, self.case.v_head_dim)
        if not bool(out.isfinite().all()):
            return float("inf")
        expected = self.wanted.flatten(1)
        error = (out[self.rows].float().flatten(1) - expected).norm(dim=1) / expected.norm(dim=1)
        return float(error.max())


def build(case: Case, device: torch.device | str, seed: int = 0) -> Inputs:
    """Draw the inputs of a case on `device`, the same for the same seed and device type.

    The pages of all requests are shuffled over the pool; page 0 is the dummy.
    """
    device = torch.device(device)
    rng = torch.Generator(device).manual_seed(seed)
    layer = AttentionLayer(
        layer_id=0,
        num_q_heads=case.q_heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        scale=case.scale,
    )
    table = _shuffled_table(case, device, rng)
    pool = KVPool(
        [layer],
        num_pages=1 + sum(num_pages_for(s, case.page_size) for s in case.seq_lens),
        page_size=case.page_size,
        kv_cache_dtype=case.kv_dtype,
        device=device,
        kind=case.kind,
    )
    cache = pool.layer(0)
    for store, _ in cache.parts():
        _fill(store, rng)
    trees = [random_tree(case.queries or 1, seed + b) for b in range(case.batch)]
    spec = SpecInfo(
        topk=2 if case.tree else 1,
        num_draft_tokens=case.queries or 1,
        tree_mask=torch.stack(trees).to(device) if case.tree else None,
    )
    batch = ForwardBatch.build(
        case.mode,
        query_lens=case.query_lens,
        seq_lens=case.seq_lens,
        page_table=table,
        page_size=case.page_size,
        spec=spec if case.mode is ForwardMode.TARGET_VERIFY else None,
    )
    q_shape = (case.tokens, case.q_heads, case.head_dim)
    q = torch.randn(q_shape, dtype=TORCH_DTYPES[case.dtype], device=device, generator=rng)
    slots = batch.views["full"].out_cache_loc
    assert slots is not None  # built above
    k, v = read_kv(cache, slots, q.dtype)
    rows, expected = _reference(case, q, cache, table, batch.spec)
    return Inputs(
        case=case,
        q=q,
        k=k,
        v=v,
        pool=pool,
        cache=cache,
        batch=batch,
        layer=layer,
        rows=rows,
        wanted=expected,
    )


def random_tree(drafts: int, seed: int) -> Tensor:
    """Draw a mask bool [n, n] of a tree: each draft sees itself, its parent and all above."""
    rng, mask = random.Random(seed), torch.eye(drafts, dtype=torch.bool)
    for i in range(1, drafts):
        parent = rng.randrange(-1, i)
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask


def _shuffled_table(case: Case, device: torch.device, rng: torch.Generator) -> Tensor:
    pages = torch.tensor([num_pages_for(s, case.page_size) for s in case.seq_lens], device=device)
    width = num_pages_for(case.longest, case.page_size)
    owned = torch.arange(width, device=device) < pages[:, None]
    table = torch.zeros(case.batch, width, dtype=torch.int32, device=device)
    order = torch.randperm(int(pages.sum()), generator=rng, device=device)
    table[owned] = order.int() + 1
    for first, n, begin, end in itertools.chain(*case.groups):
        common = slice(begin // case.page_size, end // case.page_size)
        table[first : first + n, common] = table[first, common].clone()
    return table


def _fill(store: Tensor, rng: torch.Generator) -> None:
    if store.dtype.itemsize > 1:
        store.normal_(generator=rng)
        return
    if store.dtype == torch.uint8:  # two codes of FP4
        store.random_(0, 256, generator=rng)
        return
    for at in range(0, store.shape[0], 4096):  # float32 of it all would take four times its memory
        pages = store[at : at + 4096]
        draw = torch.randn(pages.shape, device=pages.device, generator=rng)
        pages.copy_(to_fp8(draw, store.dtype, 1.0))


def _reference(
    case: Case, q: Tensor, cache: LayerCache, table: Tensor, spec: SpecInfo | None
) -> tuple[Tensor, Tensor]:
    """Attend in float32 for some queries of the first, the middle and the last request."""
    starts = [0]
    for n in case.query_lens:
        starts.append(starts[-1] + n)
    rows: list[int] = []
    outs = []
    for b in sorted({0, case.batch // 2, case.batch - 1}):
        s, n = case.seq_lens[b], case.query_lens[b]
        rng = random.Random(b)
        picked = sorted({0, n - 1, *(rng.randrange(n) for _ in range(_CHECKED_ROWS - 2))})
        slots = slot_table(table[b : b + 1], case.page_size, s)[0]
        k, v = read_kv(cache, slots, torch.float32)  # [s, Hkv, D]
        v = k[..., : case.v_head_dim] if v is None else v
        at = torch.tensor(picked, device=q.device)
        queries = q[starts[b] : starts[b + 1]][at].float()
        grouped = queries.view(len(picked), case.kv_heads, -1, case.head_dim)
        scores = torch.einsum("nhgd,khd->hgnk", grouped, k) * case.scale
        seen = torch.arange(s, device=q.device) <= (s - n + at)[:, None]
        if spec is not None and spec.tree_mask is not None:
            seen[:, s - n :] = spec.tree_mask[b, at]
        probabilities = scores.masked_fill_(~seen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hgnk,khd->nhgd", probabilities, v).flatten(1, 2))
        rows += [starts[b] + i for i in picked]
    return torch.tensor(rows, device=q.device), torch.cat(outs)
