"""Hopper's decode, emulated on a CPU: against float64, wherever requests are cut."""

import pytest
import torch
from emulated_gluon import HOPPER, Pointer, launch, load

D, BLOCK, SCALE = 64, 64, 0.2
LOG2E = 1.4426950408889634
LENGTHS = (300, 1, 64, 0, 131, 700)


def merged(partial_out, partial_lse, slots):
    """Return the outputs and the natural LSE of 64 rows from their partials."""
    lse = partial_lse[slots].double()
    weight = (lse - lse.amax(0)).exp2()
    total = weight.sum(0)
    out = (partial_out[slots].double() * weight[..., None]).sum(0) / total[:, None]
    return out, (lse.amax(0) + total.log2()) / LOG2E


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"at_once": 1},
        {"at_once": 4},
        {"parts": 1},
        {"parts": 60},
        {"tile_units": 2},
        {"queries": 5, "mask": 1},
        {"queries": 5, "mask": 2},
        {"queries": 5, "mask": 1, "group": 16},
        {"window": 70},
        {"page": 1},
        {"page": 4, "layout": "HND"},
        {"page": 8},
        {"page": 128},
        {"layout": "HND"},
        {"stages": 3},
        {"copy_rows": 128},
    ],
    ids=str,
)
def test_equals_float64(more):
    run(**more)


def run(
    *, at_once=2, parts=4, tile_units=0, queries=1, mask=1, group=2, window=0, page=64,
    layout="NHD", stages=2, copy_rows=16,
):  # fmt: skip
    """Run the kernel over pages, merge what is cut, and compare."""
    torch.manual_seed(0)
    heads, batch = 4, len(LENGTHS)
    lengths = [n + queries if n else 0 for n in LENGTHS]
    pages = [-(-n // page) for n in lengths]
    row_blocks = -(-queries * group // 64)
    table, begin = torch.zeros(batch, max(pages)).int(), 0
    order = (torch.randperm(sum(pages)) + 1).int()
    for row, count in zip(table, pages, strict=True):
        row[:count], begin = order[begin : begin + count], begin + count
    stores = [torch.full((sum(pages) + 1, page, heads, D), torch.nan).bfloat16() for _ in "kv"]
    keys = []
    for row, n in zip(table, lengths, strict=True):
        at = torch.arange(n)
        keys.append([torch.randn(n, heads, D).bfloat16() for _ in "kv"])
        for store, x in zip(stores, keys[-1], strict=True):
            store[row[at // page].long(), at % page] = x
    if layout == "HND":
        stores = [x.transpose(1, 2).contiguous() for x in stores]
    tokens = batch * queries
    q = torch.randn(tokens, heads * group, D).bfloat16()
    tree = torch.rand(batch, queries, queries) < 0.5
    tree = (tree | torch.eye(queries, dtype=torch.bool)).tril()
    first = [max(n - queries - window + 1, 0) if window else 0 for n in lengths]
    units = [
        max(1, -(-n // BLOCK) - low // BLOCK) + tile_units
        for n, low in zip(lengths, first, strict=True)
    ]
    indptr = torch.tensor([0, *torch.tensor(units).cumsum(0).tolist()]).int()
    turns, lanes = heads // at_once, at_once * row_blocks
    quota = max(1 + tile_units, -(-sum(units) * turns // parts))
    programs = parts * lanes
    ends = (torch.arange(batch + 1) * queries).int()
    out = torch.full((tokens, heads * group, D), torch.nan).bfloat16()
    lse = torch.full((tokens, heads * group), torch.nan)
    partial_out = torch.full((2 * programs, 64, D), torch.nan)
    partial_lse = torch.full((2 * programs, 64), torch.nan)

    kernel = load("decode", HOPPER)
    arguments = load("arguments", "attn_core.backends.triton.portable")
    config = load("common", HOPPER).AttentionConfig(
        HEADS=heads, GROUP=group, PAGE=page, HND=layout == "HND", GATHERS=page < 8, BN=BLOCK, D=D,
        USE_SOFTCAP=False, USE_SINKS=False, MASK=mask, WINDOW=window > 0, STAGES=stages,
        INT64_OFFSETS=False, ROW_BLOCKS=row_blocks, TILE_UNITS=tile_units, HEADS_AT_ONCE=at_once,
        MIN_UNITS=1 + tile_units, COPY_ROWS=copy_rows,
    )  # fmt: skip

    def rows(x):
        return x.reshape(-1, D) if layout == "HND" else x.flatten(0, 1).flatten(1)

    def store(x):
        strides = x.stride() if layout == "NHD" else [x.stride(i) for i in (0, 2, 1)]
        return arguments.Store(Pointer(x), *map(torch.tensor, strides[:3]))

    launch(
        kernel.decode_hopper, (programs, 1, 1),
        arguments.Queries(Pointer(q), heads * group * D, D),
        arguments.Outputs(Pointer(out), Pointer(lse), heads * group * D, D),
        arguments.Partials(Pointer(partial_out), Pointer(partial_lse)),
        arguments.Requests(
            Pointer(ends), Pointer(torch.tensor(lengths).int()), Pointer(table)
        ),
        Pointer(indptr), Pointer(indptr), Pointer(indptr),
        Pointer(tree.contiguous().view(torch.uint8)),
        torch.tensor(batch), queries, table.stride(0), *map(rows, stores), *map(store, stores),
        Pointer(torch.zeros(1)), arguments.Scales(SCALE, 1.0, 1.0), window, config,
    )  # fmt: skip

    for b, (n, (k, v)) in enumerate(zip(lengths, keys, strict=True)):
        mine = slice(b * queries, (b + 1) * queries)
        query, key = torch.arange(n - queries, n)[:, None], torch.arange(n)
        seen = key <= query if n else torch.zeros(queries, 0, dtype=torch.bool)
        if mask == 2 and n:
            seen = torch.cat((torch.ones(queries, n - queries, dtype=torch.bool), tree[b]), 1)
        if window:
            seen = seen & (key > query - window)
        for head in range(heads):
            of = slice(head * group, (head + 1) * group)
            s = torch.einsum("qgd,kd->qgk", q[mine, of].double(), k[:, head].double()) * SCALE
            s = s.masked_fill(~seen[:, None], -torch.inf)
            want = (s.softmax(-1).nan_to_num() @ v[:, head].double()).flatten(0, 1)
            actual, got_lse = (x[mine, of].flatten(0, 1) for x in (out, lse))
            at = int(indptr[b]) * turns + head // at_once * units[b]
            low, high = (at + tile_units) // quota, (at + units[b] - 1) // quota
            if low < high:
                actual, got_lse = (
                    torch.cat(x)[: queries * group]
                    for x in zip(
                        *(
                            merged(
                                partial_out, partial_lse,
                                [
                                    2 * (p * lanes + head % at_once * row_blocks + r) + (p == low)
                                    for p in range(low, high + 1)
                                ],
                            )
                            for r in range(row_blocks)
                        ),
                        strict=True,
                    )
                )  # fmt: skip
            torch.testing.assert_close(actual.double(), want, atol=2e-2, rtol=2e-2)
            sums = s.logsumexp(-1).flatten()
            torch.testing.assert_close(got_lse.double(), sums, atol=2e-3, rtol=1e-3)
