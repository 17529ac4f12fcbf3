"""Hopper's kernel of prompts, emulated on a CPU: against float64, query by query."""

from collections import namedtuple
from itertools import accumulate
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from attn_core.backends.triton.portable.arguments import KeyParts, MergeConstants, Outputs
from attn_core.backends.triton.portable.merge import store_merged
from attn_core.backends.triton.portable.merge_tiles import merge_tiles
from edited import edited
from emulated_gluon import HOPPER, Pointer, launch, load

D = 64  # one panel of a block: how wider ones lie in shared memory is not emulated
BF16 = torch.bfloat16


def tuple_of(names, *values):
    return namedtuple("Tuple", names)(*values)


class Prompts:
    """Requests (new tokens, keys), their queries and all their keys, drawn once."""

    def __init__(self, *requests, heads=(4, 2), strided=False):
        self.queries, self.keys = zip(*requests, strict=True)
        self.q_heads, self.kv_heads = heads
        self.group = heads[0] // heads[1]
        rng = torch.Generator().manual_seed(len(requests))

        def draw(count, heads):
            room = 3 * heads if strided else heads  # k as a part of a projection
            return torch.randn(count, room, D, generator=rng).to(BF16)[:, -heads:]

        self.q = draw(sum(self.queries), heads[0])
        self.k, self.v = (draw(sum(self.keys), heads[1]) for _ in range(2))

    def right(self, scale, window=None, sinks=None, cap=None):
        """Return the outputs and their LSE in float64."""
        found, sums, at_q, at_k = [], [], 0, 0
        for n, m in zip(self.queries, self.keys, strict=True):
            q = self.q[at_q : at_q + n].double()
            k, v = (
                x[at_k : at_k + m].double().repeat_interleave(self.group, 1)
                for x in (self.k, self.v)
            )
            s = torch.einsum("qhd,khd->hqk", q, k) * scale
            s = s if cap is None else cap * torch.tanh(s / cap)
            query, key = torch.arange(m - n, m)[:, None], torch.arange(m)
            hidden = key > query if window is None else (key > query) | (key <= query - window)
            s = s.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                s = torch.cat((s, sinks.double()[:, None, None].expand(-1, n, 1)), -1)
            sums.append(s.logsumexp(-1).T)
            p = s.clamp(max=1e300).softmax(-1)[..., :m]  # an infinity less itself is NaN
            found.append(torch.einsum("hqk,khd->qhd", p, v))
            at_q, at_k = at_q + n, at_k + m
        return torch.cat(found), torch.cat(sums)

    def paged(self, page, layout):
        """Return pages that hold the keys, shuffled, those of the values, and the table."""
        counts = [-(-m // page) for m in self.keys]
        order, total = torch.randperm(sum(counts)) + 1, sum(counts) + 1
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        pools = [torch.full((total, page, self.kv_heads, D), torch.nan).to(BF16) for _ in "kv"]
        at, begin = 0, 0
        for b, (m, count) in enumerate(zip(self.keys, counts, strict=True)):
            table[b, :count] = order[begin : begin + count]
            where = torch.arange(m)
            for pool, x in zip(pools, (self.k, self.v), strict=True):
                pool[table[b, where // page].long(), where % page] = x[at : at + m]
            at, begin = at + m, begin + count
        if layout == "HND":
            pools = [x.transpose(1, 2).contiguous() for x in pools]
        return *pools, table


def attend(
    prompts, *, page=0, layout="NHD", bn=64, window=0, sinks=None, cap=None, programs=3, parts=None,
    seldom=None,
):  # fmt: skip
    """Run the kernel over pages, or with page 0 over K and V side by side.

    parts: into how many the keys of each request are cut; merge_tiles follows then. seldom: whether
    old sums seldom shrink.
    """
    modules = load("prefill", HOPPER)
    common, queue = load("common", HOPPER), load("tile_queue", HOPPER)
    batch, heads = len(prompts.keys), prompts.kv_heads
    ends = torch.tensor([0, *prompts.queries]).cumsum(0).int()
    rank = sorted(range(batch), key=lambda b: -prompts.keys[b])
    counts = parts or [1] * batch
    tiles = [-(-prompts.queries[b] * prompts.group // 128) * counts[b] for b in rank]
    offsets, rank = (torch.tensor(x).int() for x in ([0, *accumulate(tiles)], rank))
    order = queue.TileOrder(
        Pointer(offsets), Pointer(rank), Pointer(torch.zeros(2, dtype=torch.int32))
    )
    slots = torch.empty(batch, dtype=torch.int32)
    slots[rank.long()] = offsets[:-1] * heads
    states = torch.full((sum(tiles) * heads, 128, D + 1), torch.nan)
    cuts = KeyParts(
        torch.tensor(counts).int(), slots, states[..., :D].contiguous(), states[..., D].contiguous()
    )

    lengths, table, stride = torch.tensor(prompts.keys).int(), ends, 0
    if page:
        k, v, table = prompts.paged(page, layout)
        stride = table.stride(0)
    else:
        k, v = prompts.k, prompts.v
        lengths = torch.tensor([0, *prompts.keys]).cumsum(0).int()

    def rows(x):
        if layout == "HND":
            return x.reshape(-1, D)
        if page:
            return x.reshape(-1, heads * D)
        return x.as_strided((len(x), heads * D), (x.stride(0), 1))

    def store(x):
        if not page:
            return 0
        strides = x.stride() if layout == "NHD" else [x.stride(i) for i in (0, 2, 1)]
        return tuple_of(
            "ptr page_stride token_stride head_stride", Pointer(x), *map(torch.tensor, strides[:3])
        )

    out = torch.full(prompts.q.shape, torch.nan).to(BF16)
    lse = torch.full(prompts.q.shape[:2], torch.nan)
    config = common.AttentionConfig(
        HEADS=heads, GROUP=prompts.group, PAGE=page, HND=layout == "HND",
        GATHERS=0 < page < 8, BN=bn, D=D, USE_SOFTCAP=cap is not None, USE_SINKS=sinks is not None,
        MASK=1, WINDOW=window > 0, STAGES=2, INT64_OFFSETS=False, CUT_TILES=parts is not None,
        SELDOM=not 0 < page < 8 if seldom is None else seldom,
    )  # fmt: skip
    scale = D**-0.5
    q = prompts.q.contiguous()
    launch(
        modules.extend_hopper, programs,
        tuple_of("ptr token_stride head_stride", Pointer(q), *q.stride()[:2]),
        tuple_of("ptr lse token_stride head_stride", Pointer(out), Pointer(lse), *out.stride()[:2]),
        tuple_of("cu_seqlens_q seq_lens page_table", *map(Pointer, (ends, lengths, table))),
        order, KeyParts(*map(Pointer, cuts)), batch, 1, stride,
        rows(k), rows(v), store(k), store(v),
        Pointer(torch.zeros(1) if sinks is None else sinks),
        tuple_of("qk cap v", scale, cap or 1.0, 1.0), window, config,
    )  # fmt: skip
    if parts:
        merge_tiles[(len(states), 3)](
            Outputs(out, lse, *out.stride()[:2]), cuts, ends, offsets, rank, batch,
            torch.zeros(1) if sinks is None else sinks, 1.0, 128, 8, False,
            MergeConstants(heads, prompts.group, D, D, sinks is not None),
        )  # fmt: skip
    assert order.counter.flat.tolist() == [0, 0], "as the next launch wants to find it"
    want, sums = prompts.right(scale, window or None, sinks, cap)
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)
    assert not lse.isnan().any()
    normal = sums.abs() < 2e38  # beyond, its base 2 logarithm is infinite in fp32
    torch.testing.assert_close(lse.double()[normal], sums[normal], atol=1e-4, rtol=1e-4)
    return out, lse


PREFIXED = ((70, 200), (3, 64), (130, 300))
FRESH = ((200, 200), (70, 70), (1, 1), (129, 129))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (7, 1)])
def test_prompts_read_their_own_keys(heads, strided):
    attend(Prompts(*FRESH, heads=heads, strided=strided))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 4, 16, 64, 128])
def test_prompts_read_a_prefix_in_pages(page, layout):
    """What no request has written is NaN."""
    attend(Prompts(*PREFIXED), page=page, layout=layout)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(
    "more",
    [
        {"window": 50},
        {"window": 1},
        {"sinks": torch.tensor([0.5, 1.0, -1.0, 3.0])},
        {"sinks": torch.tensor([torch.inf, 3e38, -torch.inf, -3e38])},
        {"cap": 5.0},
        {"bn": 128},
        {"programs": 1},
        {"programs": 40},
    ],
    ids=lambda more: next(iter(more)),
)
def test_own_keys_and_pages_give_the_same(page, more):
    prompts = Prompts(*FRESH)
    for seldom in (False, True):
        mine = attend(prompts, page=page, seldom=seldom, **more)
        other = attend(prompts, page=1, seldom=seldom, **more)
        for a, b in zip(mine, other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "more", [{}, {"bn": 128, "page": 64}, {"page": 16, "parts": (3, 1, 2)}], ids=str
)
def test_sums_shrink_where_maxima_grow(more):
    """By more than what leaves them as they are, in some rows of a block."""
    prompts = Prompts(*PREFIXED)
    prompts.q *= 64  # weights would be infinite if the maximum did not grow
    attend(prompts, **{"page": 1, **more})


@pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.long), 16])
@pytest.mark.parametrize(
    "more",
    [
        {"parts": (1, 1, 1)},
        {"parts": (3, 1, 2)},
        {"parts": (2, 2, 4), "programs": 1},
        {"parts": (4, 2, 9), "heads": (7, 1)},
        {"parts": (3, 1, 2), "sinks": torch.tensor([0.5, 1.0, -1.0, 3.0])},
        {"parts": (3, 1, 2), "cap": 5.0, "bn": 128},
    ],
    ids=str,
)
def test_parts_of_keys_are_merged(page, more):
    """Of nine parts of five blocks some have no keys; the tiles of a request end at other keys."""
    heads = {k: more[k] for k in ("heads",) if k in more}
    rest = {k: v for k, v in more.items() if k != "heads"}
    attend(Prompts(*PREFIXED, **heads), page=page, **rest)


def test_parts_are_merged_in_one_order():
    """Whoever takes them."""
    prompts = Prompts(*PREFIXED)
    a, b = (attend(prompts, page=16, parts=(3, 1, 2), programs=n) for n in (1, 7))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("total = total * shrink + weight", "total += weight"),
        ("acc = acc * shrink[:, None] + x", "acc = acc + x"),
        ("(first_tile + part * tiles + tile)", "(first_tile + part + tile * count)"),
        ("program * ROWS, BM, count *", "program * ROWS, BM, 2 * count *"),
        ("lse, mask=row_mask)", "lse * 1.01, mask=row_mask)"),
    ],
)
def test_a_fault_of_the_merge_is_seen(before, after):
    from triton.runtime.interpreter import InterpretedFunction

    kernel = (store_merged if before.startswith("lse") else merge_tiles).fn
    prompts = Prompts(*PREFIXED, heads=(7, 1))
    new = {kernel: edited(kernel, before, after)}
    with mock.patch.dict(InterpretedFunction.rewritten_fn, new), pytest.raises(AssertionError):
        attend(prompts, page=16, parts=(4, 2, 3))
