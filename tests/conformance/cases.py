"""The cases of attention over a paged cache, as data, and the inputs that a case describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from attn_core.forward import AttentionLayer, CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.kv_cache import LayerCache
from oracle import attend_one, visible_keys
from torch import Tensor

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pass: B requests with query_lens new tokens that end seq_lens tokens.

    heads = (q, kv), dims = (D, Dv). kv_dtype "auto" is the dtype of the queries; the scales apply
    to FP8 and FP4. trees: parents per request. encoder_lens: cross attention to as many keys.
    padding: rows appended to the batch, on page 0.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    mode: ForwardMode = ForwardMode.EXTEND
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    kind: str = "mha"
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    kv_dtype: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0
    window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False
    is_causal: bool = True
    encoder_lens: tuple[int, ...] | None = None
    trees: tuple[tuple[int, ...], ...] | None = None
    padding: int = 0


CHAIN = (-1, 0, 1, 2)
TREE_A = (-1, 0, 0, 1, 1, 2, 5)
TREE_B = (-1, 0, 1, 1, 0, 4, 4)
FOREST = (-1, -1, 0, 1, 1, 2, 4)
DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
EDGES = (1, 15, 16, 17, 63, 64, 65)
ALL = ("fp32", "fp16", "bf16")

CASES = (
    Case(name="prefill-edges", query_lens=EDGES, seq_lens=EDGES, dtypes=ALL),
    Case(name="prefill-equal", query_lens=(33, 9, 33, 33), seq_lens=(33, 9, 33, 33)),
    Case(name="prefill-prefix", query_lens=(5, 64, 1, 5, 80), seq_lens=(37, 64, 65, 37, 210)),
    Case(name="prefill-long", query_lens=(300,), seq_lens=(333,), heads=(2, 1), dims=(16, 16)),
    Case(name="mixed", mode=ForwardMode.MIXED, query_lens=(19, 1, 1, 4), seq_lens=(19, 50, 50, 66)),
    Case(
        name="draft-extend",
        mode=ForwardMode.DRAFT_EXTEND,
        query_lens=(1, 3, 2, 3),
        seq_lens=(18, 33, 129, 33),
    ),
    Case(name="decode-edges", mode=DECODE, query_lens=(1,) * 7, seq_lens=EDGES, dtypes=ALL),
    Case(name="decode-equal", mode=DECODE, query_lens=(1,) * 5, seq_lens=(70, 70, 31, 70, 70)),
    Case(name="decode-long", mode=DECODE, query_lens=(1, 1), seq_lens=(1025, 300)),
    Case(name="decode-padded", mode=DECODE, query_lens=(1, 1), seq_lens=(40, 1), padding=3),
    Case(name="prefill-padded", query_lens=(1, 7), seq_lens=(1, 20), padding=2),
    Case(
        name="draft-decode",
        mode=ForwardMode.DRAFT_DECODE,
        query_lens=(1,) * 4,
        seq_lens=(21, 21, 48, 48),
    ),
    Case(name="mha", query_lens=(20, 1), seq_lens=(41, 30), heads=(3, 3)),
    Case(name="mqa", query_lens=(20, 1), seq_lens=(41, 30), heads=(8, 1)),
    Case(name="dim-13", query_lens=(18, 1), seq_lens=(33, 17), dims=(13, 13)),
    Case(name="dim-80", query_lens=(18, 1), seq_lens=(33, 17), dims=(80, 80)),
    Case(name="dim-256", query_lens=(18, 1), seq_lens=(33, 17), dims=(256, 256)),
    Case(name="dims-192-128", query_lens=(18, 1), seq_lens=(33, 17), dims=(192, 128)),
    Case(name="dims-32-96", query_lens=(18, 1), seq_lens=(33, 17), dims=(32, 96)),
    Case(name="window-1", query_lens=(9, 1), seq_lens=(30, 17), window=1),
    Case(name="window-4", query_lens=(3, 4, 5, 2, 2, 2), seq_lens=(3, 4, 5, 5, 6, 7), window=4),
    Case(name="window-prefill", query_lens=(90, 17), seq_lens=(90, 100), window=20),
    Case(name="window-half", query_lens=(80,), seq_lens=(160,), window=100),
    Case(
        name="window-blocks",
        query_lens=(560,),
        seq_lens=(600,),
        window=33,
        heads=(2, 1),
        dims=(16, 16),
    ),
    Case(
        name="window-decode",
        mode=DECODE,
        query_lens=(1,) * 4,
        seq_lens=(16, 17, 18, 300),
        window=17,
    ),
    Case(name="softcap", query_lens=(17, 1), seq_lens=(40, 65), logit_cap=2.0),
    Case(name="softcap-prefill", query_lens=(70,), seq_lens=(70,), logit_cap=2.0, window=30),
    Case(name="sinks", query_lens=(17, 1, 70), seq_lens=(40, 65, 70), sinks=True),
    Case(
        name="sinks-window-decode",
        mode=DECODE,
        query_lens=(1, 1),
        seq_lens=(150, 9),
        window=100,
        sinks=True,
    ),
    Case(
        name="cross",
        query_lens=(3, 1, 3, 70),
        seq_lens=(9, 8, 3, 70),
        encoder_lens=(20, 1, 20, 130),
    ),
    Case(
        name="cross-decode",
        mode=DECODE,
        query_lens=(1, 1),
        seq_lens=(9, 8),
        encoder_lens=(33, 0),
    ),
    Case(name="bidirectional", query_lens=(17, 3, 70), seq_lens=(40, 3, 70), is_causal=False),
    Case(name="verify-chain", mode=VERIFY, query_lens=(4, 4, 4), seq_lens=(4, 21, 68)),
    Case(
        name="verify-chain-as-tree",
        mode=VERIFY,
        query_lens=(4, 4),
        seq_lens=(20, 68),
        trees=(CHAIN, CHAIN),
    ),
    Case(
        name="verify-tree",
        mode=VERIFY,
        query_lens=(7, 7, 7, 7),
        seq_lens=(70, 7, 70, 150),
        trees=(TREE_A, TREE_B, FOREST, TREE_A),
    ),
    Case(
        name="verify-tree-window",
        mode=VERIFY,
        query_lens=(7, 7, 7),
        seq_lens=(70, 9, 70),
        trees=(TREE_A, TREE_B, TREE_B),
        window=3,
        padding=1,
    ),
    Case(
        name="verify-tree-sinks-window",
        mode=VERIFY,
        query_lens=(7, 7),
        seq_lens=(90, 200),
        trees=(TREE_A, TREE_B),
        window=66,
        sinks=True,
    ),
    Case(name="fp8-e4m3", query_lens=(18, 1), seq_lens=(33, 70), kv_dtype="fp8_e4m3"),
    Case(
        name="fp8-e4m3-scaled",
        query_lens=(18, 1),
        seq_lens=(33, 70),
        kv_dtype="fp8_e4m3",
        k_scale=0.37,
        v_scale=1.7,
        dtypes=ALL,
    ),
    Case(
        name="fp8-e5m2-softcap",
        query_lens=(18, 1),
        seq_lens=(33, 70),
        kv_dtype="fp8_e5m2",
        k_scale=0.37,
        v_scale=1.7,
        logit_cap=3.0,
    ),
    Case(
        name="fp4",
        query_lens=(18, 1),
        seq_lens=(33, 70),
        kv_dtype="fp4_e2m1",
        k_scale=0.21,
        v_scale=0.6,
        dtypes=ALL,
    ),
    Case(name="mixed-kv-fp16", query_lens=(5, 1), seq_lens=(33, 17), kv_dtype="fp16"),
    Case(name="mixed-kv-fp32", query_lens=(5, 1), seq_lens=(33, 17), kv_dtype="fp32"),
    Case(
        name="mla-prefill",
        kind="mla",
        heads=(4, 1),
        dims=(576, 512),
        query_lens=(9, 70),
        seq_lens=(20, 70),
    ),
    Case(
        name="mla-decode",
        kind="mla",
        mode=DECODE,
        heads=(16, 1),
        dims=(576, 512),
        query_lens=(1, 1, 1),
        seq_lens=(65, 17, 65),
    ),
    Case(
        name="mla-verify-tree",
        kind="mla",
        mode=VERIFY,
        heads=(4, 1),
        dims=(576, 512),
        query_lens=(7, 7),
        seq_lens=(40, 66),
        trees=(TREE_A, TREE_B),
    ),
    Case(
        name="mla-fp8",
        kind="mla",
        mode=DECODE,
        heads=(4, 1),
        dims=(576, 512),
        query_lens=(1, 1),
        seq_lens=(33, 64),
        kv_dtype="fp8_e4m3",
        k_scale=0.4,
    ),
    Case(
        name="mla-fp4",
        kind="mla",
        mode=DECODE,
        heads=(4, 1),
        dims=(576, 512),
        query_lens=(1, 1),
        seq_lens=(33, 64),
        kv_dtype="fp4_e2m1",
        k_scale=0.3,
    ),
)


@dataclass(frozen=True, kw_only=True)
class RaggedCase:
    """Attention without a cache: query_lens and key_lens per request, heads = (q, kv)."""

    name: str
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    causal: bool
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False


RAGGED_CASES = (
    RaggedCase(name="encoder", query_lens=(9, 9, 1, 33), key_lens=(9, 9, 1, 33), causal=False),
    RaggedCase(name="encoder-apart", query_lens=(9, 4, 9), key_lens=(9, 4, 9), causal=False),
    RaggedCase(
        name="vision",
        query_lens=(80, 80),
        key_lens=(80, 80),
        causal=False,
        heads=(3, 3),
        dims=(72, 72),
    ),
    RaggedCase(name="causal", query_lens=(9, 70, 1), key_lens=(9, 70, 1), causal=True),
    RaggedCase(name="bottom-right", query_lens=(9, 70, 1), key_lens=(30, 200, 77), causal=True),
    RaggedCase(name="more-queries", query_lens=(9, 70), key_lens=(4, 66), causal=True),
    RaggedCase(name="no-keys", query_lens=(3, 2), key_lens=(0, 5), causal=False),
    RaggedCase(name="no-queries", query_lens=(0, 2), key_lens=(4, 5), causal=False),
    RaggedCase(
        name="window", query_lens=(9, 70), key_lens=(30, 100), causal=True, window=5, sinks=True
    ),
    RaggedCase(name="softcap", query_lens=(9, 20), key_lens=(9, 90), causal=True, logit_cap=2.0),
    RaggedCase(
        name="mla",
        query_lens=(9, 70),
        key_lens=(9, 100),
        causal=True,
        heads=(4, 4),
        dims=(192, 128),
    ),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What a backend gets, and per request the keys and values in its cache, in float64."""

    layer: AttentionLayer
    cache: LayerCache
    batch: ForwardBatch
    q: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    real_tokens: int  # the tokens after these are padding


def ancestors(parents: Sequence[int]) -> Tensor:
    """The tree mask bool [n, n] of a list of parents."""
    n = len(parents)
    rows = [visible_keys(i, n, n, causal=True, parents=parents) for i in range(n)]
    return torch.tensor([[j in row for j in range(n)] for row in rows])


def make_inputs(
    case: Case, dtype: str, page_size: int, *, layout: str = "shuffled", seed: int = 0
) -> Inputs:
    """Draw the inputs of a case; every byte of the pool that no request owns is NaN.

    layout: "shuffled" pages, or "consecutive" ones in the order of the requests.
    """
    rng = torch.Generator().manual_seed(seed)
    (hq, hkv), (d, dv) = case.heads, case.dims
    owned = case.seq_lens if case.encoder_lens is None else case.encoder_lens
    table, where, num_pages = _lay_out(owned, page_size, case.padding, layout, rng)
    stored = case.kv_dtype if case.kv_dtype != "auto" else dtype
    pool_k, block_k, keys = _store(stored, num_pages, page_size, hkv, d, where, case.k_scale, rng)
    pool_v, block_v = None, None
    values = tuple(k[..., :dv] for k in keys)
    if case.kind == "mha":
        pool_v, block_v, values = _store(
            stored, num_pages, page_size, hkv, dv, where, case.v_scale, rng
        )
    cache = LayerCache(
        k=pool_k,
        v=pool_v,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        block_scales=None if block_k is None else (block_k, block_v),
    )
    layer = AttentionLayer(
        layer_id=0,
        num_q_heads=hq,
        num_kv_heads=hkv,
        head_dim=d,
        v_head_dim=dv,
        scale=d**-0.5,
        view="full" if case.encoder_lens is None else "cross",
        logit_cap=case.logit_cap,
        sliding_window=case.window,
        sinks=torch.randn(hq, generator=rng) * 2 if case.sinks else None,
        is_causal=case.is_causal,
        is_cross=case.encoder_lens is not None,
    )
    n_pad = max(case.query_lens) if case.mode is ForwardMode.TARGET_VERIFY else 1
    query_lens = [*case.query_lens, *[n_pad] * case.padding]
    seq_lens = [*case.seq_lens, *[n_pad] * case.padding]
    spec, views, full = None, {}, table
    if case.mode is ForwardMode.TARGET_VERIFY:
        mask = None
        if case.trees is not None:
            padded = [*case.trees, *[case.trees[0]] * case.padding]
            mask = torch.stack([ancestors(p) for p in padded])
        spec = SpecInfo(topk=1 if mask is None else 2, num_draft_tokens=n_pad, tree_mask=mask)
    if case.encoder_lens is not None:
        lens = torch.tensor(case.encoder_lens, dtype=torch.int32)
        views["cross"] = CacheView(
            page_table=table,
            seq_lens=lens,
            out_cache_loc=torch.zeros(0, dtype=torch.int64),
            max_seq_len=max(case.encoder_lens),
            seq_lens_host=case.encoder_lens,
        )
        full = torch.zeros(len(seq_lens), -(-max(seq_lens) // page_size), dtype=torch.int32)
    batch = ForwardBatch.build(
        case.mode,
        query_lens=query_lens,
        seq_lens=seq_lens,
        page_table=full,
        page_size=page_size,
        spec=spec,
        views=views,
    )
    q = torch.randn(batch.num_tokens, hq, d, generator=rng).to(DTYPES[dtype])
    return Inputs(
        layer=layer,
        cache=cache,
        batch=batch,
        q=q,
        keys=keys,
        values=values,
        real_tokens=sum(case.query_lens),
    )


def answer(case: Case, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The oracle's output [T, Hq, Dv] and LSE [T, Hq] of the real tokens, computed in `dtype`."""
    layer, at, outs, lses = inputs.layer, 0, [], []
    for b, n in enumerate(case.query_lens):
        k, v = inputs.keys[b].to(dtype), inputs.values[b].to(dtype)
        for i in range(n):
            seen = visible_keys(
                i,
                n,
                k.shape[0],
                causal=layer.is_causal and not layer.is_cross,
                window=layer.sliding_window,
                parents=case.trees[b] if case.trees else None,
            )
            out, lse = attend_one(
                inputs.q[at + i].to(dtype),
                k[seen],
                v[seen],
                scale=layer.scale,
                logit_cap=layer.logit_cap,
                sinks=layer.sinks,
            )
            outs.append(out)
            lses.append(lse)
        at += n
    return torch.stack(outs), torch.stack(lses)


def _lay_out(
    lens: Sequence[int], page_size: int, padding: int, layout: str, rng: torch.Generator
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], int]:
    """A page table, per request the (page, offset) of its tokens, and the number of pages."""
    need = [-(-s // page_size) for s in lens]
    total = 1 + sum(need) + 3  # the dummy page, and some that nobody owns
    ids = torch.arange(1, total)
    if layout == "shuffled":
        ids = ids[torch.randperm(total - 1, generator=rng)]
    width = max(need) + 2
    table = torch.randint(0, total, (len(lens) + padding, width), generator=rng)
    table[len(lens) :] = 0
    where, at = [], 0
    for b, (s, pages) in enumerate(zip(lens, need, strict=True)):
        table[b, :pages] = ids[at : at + pages]
        at += pages
        token = torch.arange(s)
        where.append((table[b, token // page_size], token % page_size))
    return table.int(), where, total


def _store(
    stored: str,
    num_pages: int,
    page_size: int,
    heads: int,
    dim: int,
    where: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """A pool of random tokens, its block scales, and per request the values in float64."""
    shape = (num_pages, page_size, heads)
    truth: list[Tensor] = []
    if stored == "fp4_e2m1":
        pool = torch.full((*shape, dim // 2), 0x77, dtype=torch.uint8)
        blocks = torch.full((*shape, dim // 16), 0x7F, dtype=torch.uint8).view(FP8["fp8_e4m3"])
        for page, offset in where:
            n = len(page)
            codes = torch.randint(0, 16, (n, heads, dim), generator=rng)
            unit = torch.rand(n, heads, dim // 16, generator=rng).add(0.1).to(blocks.dtype)
            pool[page, offset] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
            blocks.view(torch.uint8)[page, offset] = unit.view(torch.uint8)
            truth.append(E2M1[codes] * unit.double().repeat_interleave(16, -1) * scale)
        return pool, blocks, tuple(truth)
    if stored in FP8:
        pool = torch.full((*shape, dim), 0x7F, dtype=torch.uint8).view(FP8[stored])
    else:
        pool, scale = torch.full((*shape, dim), torch.nan, dtype=DTYPES[stored]), 1.0
    for page, offset in where:
        x = torch.randn(len(page), heads, dim, generator=rng).to(pool.dtype)
        if stored in FP8:
            pool.view(torch.uint8)[page, offset] = x.view(torch.uint8)
        else:
            pool[page, offset] = x
        truth.append(x.double() * scale)
    return pool, None, tuple(truth)
