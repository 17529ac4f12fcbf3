"""Ranks of one model: heads split over them, and the keys of each request split over them.

An engine does the communication. Its backends have to give partial results that fit together.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_core import (
    AttentionLayer,
    CacheView,
    ForwardBatch,
    ForwardMode,
    HybridDispatcher,
    KVPool,
    LayerRequirements,
    Overrides,
    Requirements,
    load_plugins,
    probe_device,
    select,
)
from attn_core.ops.kv import write_kv
from attn_core.ops.merge import merge_states
from ranks import gathered, on_ranks
from torch import Tensor

HEADS, KV_HEADS, DIM, PAGE = 8, 4, 64, 4
LENGTHS = (1, 3, 70, 37)  # with four ranks, the first two leave some of them without keys
NEW = (5, 1, 7, 64)  # tokens of a chunk behind those
ONE_EACH = (1,) * len(LENGTHS)
BACKENDS = ("torch_native", "intel_amx")


def _layer(heads: int, kv_heads: int, **more: Any) -> AttentionLayer:
    dims = {"head_dim": DIM, "v_head_dim": DIM, "scale": DIM**-0.5}
    return AttentionLayer(layer_id=0, num_q_heads=heads, num_kv_heads=kv_heads, **dims, **more)


def _dispatcher(layer: AttentionLayer, backend: str, pages: int) -> HybridDispatcher:
    registry = load_plugins()
    needs = Requirements(layers=(LayerRequirements.of(layer),), dtype="fp32", page_size=PAGE)
    installed = registry.installed_libraries()
    names = Overrides(attention_backend=backend)
    selection = select(needs, probe_device(), registry, installed, names)
    pool = KVPool(
        [layer], num_pages=pages, page_size=PAGE, kv_cache_dtype=selection.kv_cache_dtype,
        layout=selection.layout, device="cpu",
    )  # fmt: skip
    return HybridDispatcher.from_selection(
        selection, registry, [layer], pool, max_bs=len(LENGTHS), max_num_tokens=128, max_seq_len=256
    )


def _tokens(lengths: tuple[int, ...], heads: int, seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(n, heads, DIM, generator=rng) for n in lengths]


def _whole(queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attend to all keys of each request, in float64: [T, H, D]."""
    out = []
    for q, k, v in zip(queries, keys, values, strict=True):
        k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * DIM**-0.5
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(out)


def _view(counts: list[int]) -> tuple[CacheView, int]:
    """Lay out requests of so many keys on this rank, none being possible, page after page."""
    needed = [max(1, -(-n // PAGE)) for n in counts]
    table = torch.zeros(len(counts), max(needed), dtype=torch.int32)
    first = 0
    for row, n in zip(table, needed, strict=True):
        row[:n] = torch.arange(first, first + n)
        first += n
    slots = [table[i, p // PAGE] * PAGE + p % PAGE for i, n in enumerate(counts) for p in range(n)]
    view = CacheView(
        page_table=table,
        seq_lens=torch.tensor(counts, dtype=torch.int32),
        out_cache_loc=torch.tensor(slots, dtype=torch.int64),
        max_seq_len=max(counts),
        seq_lens_host=tuple(counts),
    )
    return view, first


def _batch(mode: ForwardMode, query_lens: list[int], name: str, view: CacheView) -> ForwardBatch:
    cu = torch.tensor([0, *query_lens]).cumsum(0)
    return ForwardBatch(
        forward_mode=mode,
        cu_seqlens_q=cu.int(),
        positions=torch.zeros(int(cu[-1]), dtype=torch.int64),
        max_q_len=max(query_lens),
        query_lens_host=tuple(query_lens),
        views={name: view},
    )


def context_parallel(rank: int, size: int, backend: str, new: tuple[int, ...] | None) -> Tensor:
    """Attend to this rank's keys, token p being on rank p mod size, and merge all ranks' results.

    The keys before the new tokens are as those of cross attention: each query sees them all, and
    there may be none. A decode step's own token is among them; the new tokens of a chunk attend to
    one another in a second, causal pass, which every rank computes.
    """
    layer = _layer(HEADS, KV_HEADS, view="cross", is_cross=True)
    keys, values = _tokens(LENGTHS, KV_HEADS, 1), _tokens(LENGTHS, KV_HEADS, 2)
    mine = [[x[rank::size] for x in tensors] for tensors in (keys, values)]
    view, pages = _view([len(x) for x in mine[0]])
    dispatcher = _dispatcher(layer, backend, pages)
    query_lens = new or ONE_EACH
    q = torch.cat(_tokens(query_lens, HEADS, 3))
    mode = ForwardMode.DECODE if new is None else ForwardMode.EXTEND
    batch = _batch(mode, list(query_lens), layer.view, view)
    metadata = dispatcher.init_forward_metadata(batch)
    out, lse = dispatcher.forward(
        q, *(torch.cat(x) for x in mine), layer, batch, metadata, return_lse=True
    )
    outs, all_lse = gathered(out, size), gathered(lse, size)
    if new is not None:
        k, v = torch.cat(_tokens(new, KV_HEADS, 4)), torch.cat(_tokens(new, KV_HEADS, 5))
        cu, longest = batch.cu_seqlens_q, max(new)
        own, own_lse = dispatcher.forward_ragged(
            q, k, v, layer, cu, cu, longest, longest, causal=True, return_lse=True
        )
        outs, all_lse = torch.cat([outs, own[None]]), torch.cat([all_lse, own_lse[None]])
    return merge_states(outs, all_lse)[0]


def tensor_parallel(rank: int, size: int, backend: str) -> Tensor:
    """Attend with this rank's share of the heads, and gather the heads of all ranks."""
    heads, kv_heads = HEADS // size, KV_HEADS // size
    layer = _layer(heads, kv_heads)
    mine = slice(rank * kv_heads, (rank + 1) * kv_heads)
    keys, values = (torch.cat(_tokens(LENGTHS, KV_HEADS, seed))[:, mine] for seed in (1, 2))
    q = torch.cat(_tokens(ONE_EACH, HEADS, 3))[:, rank * heads : (rank + 1) * heads]
    view, pages = _view(list(LENGTHS))
    dispatcher = _dispatcher(layer, backend, pages)
    write_kv(dispatcher.caches.layer(0), keys, values, view.out_cache_loc)
    batch = _batch(ForwardMode.DECODE, list(ONE_EACH), "full", replace(view, out_cache_loc=None))
    metadata = dispatcher.init_forward_metadata(batch)
    return torch.cat(
        [*gathered(dispatcher.forward(q, None, None, layer, batch, metadata), size)], 1
    )


def every_pass(rank: int, size: int) -> dict[tuple[str, str], Tensor]:
    """Run all passes of this file on one rank: (backend, pass) → what the rank has in the end."""
    results = {}
    for backend in BACKENDS:
        results[backend, "heads"] = tensor_parallel(rank, size, backend)
        results[backend, "decode"] = context_parallel(rank, size, backend, None)
        results[backend, "extend"] = context_parallel(rank, size, backend, NEW)
    return results


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], Tensor]]:
    """What each of two and of four ranks has in the end."""
    return on_ranks(request.param, every_pass)


def _expected(what: str) -> Tensor:
    keys, values = _tokens(LENGTHS, KV_HEADS, 1), _tokens(LENGTHS, KV_HEADS, 2)
    if what != "extend":
        return _whole(_tokens(ONE_EACH, HEADS, 3), keys, values)
    keys = [torch.cat(x) for x in zip(keys, _tokens(NEW, KV_HEADS, 4), strict=True)]
    values = [torch.cat(x) for x in zip(values, _tokens(NEW, KV_HEADS, 5), strict=True)]
    return _whole(_tokens(NEW, HEADS, 3), keys, values)


@pytest.mark.parametrize("what", ["heads", "decode", "extend"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_together_give_the_attention_of_one_device(
    ranks: list[dict[tuple[str, str], Tensor]], backend: str, what: str
) -> None:
    want = _expected(what)
    for rank in ranks:
        torch.testing.assert_close(rank[backend, what].double(), want, atol=2e-6, rtol=2e-6)


def test_all_ranks_hold_the_same_bits(ranks: list[dict[tuple[str, str], Tensor]]) -> None:
    """They sample from what they hold: one bit that differs lets them drift apart."""
    for rank in ranks[1:]:
        for name, x in rank.items():
            assert torch.equal(x, ranks[0][name]), name
