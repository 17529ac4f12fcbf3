"""Hopper's decode of requests that share keys, emulated on a CPU: against float64."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from emulated_gluon import HOPPER, Pointer, gl_load, launch, load
from first_spans import FIRST_BLOCK, PAGES, first_spans

D, SCALE, HEADS = 64, 0.2, 2
LOG2E = 1.4426950408889634
LENGTHS = (300, 450, 400, 513, 270, 530)  # the page table ends with the last request
# first request, requests, begin, end, level: all but the last one share, three of them more
GROUPS = ((0, 5, 0, 256, 1), (1, 3, 256, 384, 2))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"parts": 1},
        {"parts": 5},
        {"parts": 60},
        {"without_keys": True},
        {"tile_units": 2},
        {"tile_units": 2, "parts": 7},
        {"group": 16, "parts": 9},
        {"group": 7, "queries": 9},
        {"at_once": 1},
        {"queries": 5},
        {"page": 1},
        {"page": 8},
        {"page": 128},
        {"block": 128},
        {"block": 128, "page": 16, "queries": 5, "at_once": 1, "tile_units": 2, "parts": 7},
        {"rows": 128},
        {"rows": 128, "parts": 1},
        {"rows": 128, "parts": 60, "block": 128},
        {"rows": 128, "queries": 7, "group": 8, "parts": 9, "page": 16, "at_once": 1},
        {"rows": 128, "queries": 9, "group": 14, "parts": 9, "block": 128},
        {"rows": 128, "queries": 5, "group": 8, "parts": 5, "tile_units": 2, "batch": 5},
        {"rows": 128, "queries": 4, "tree": True, "parts": 5, "tile_units": 1},
        {"queries": 4, "tree": True},
        {"queries": 4, "tree": True, "block": 128, "page": 8, "tile_units": 2, "copy_rows": 128},
        {"hnd": True, "page": 16},
        {"rows": 128, "hnd": True, "page": 16, "block": 128, "parts": 5},
        {"rows": 128, "hnd": True, "page": 128, "block": 128, "copy_rows": 128},
        {"rows": 128, "page": 16, "block": 128, "copy_rows": 128, "tile_units": 1},
    ],
    ids=str,
)
def test_equals_float64(more):
    run(**more)


@pytest.mark.parametrize("rows", [64, 128])
def test_the_first_block_is_read_from_the_pages_of_the_plan(rows):
    run(rows=rows, page=16)
    with pytest.raises(AssertionError, match="not close"):
        run(rows=rows, page=16, wrong_pages=True)
    run(rows=rows, page=16, wrong_pages=True, planned_blocks=False)


def begin_with_the_planned_block(plan, requests, batch, config):
    """Check that a program begins with the block whose pages the plan has looked up."""
    split_kv, common = load("split_kv", HOPPER), load("common", HOPPER)
    program_work = load("program_work", HOPPER)
    sizes = common.Sizes(torch.tensor(batch), 0, 0, 0, 1)
    work = program_work.program_work(program_work.Plan(*plan), sizes, config)
    if work.start < work.last:
        item = split_kv.split_item(work, work.seq, work.start, requests, sizes, config)
        planned = int(gl_load(work.first_span + FIRST_BLOCK))
        has_pages = item.num_blocks > 0 and item.seq_len > 0 and config.PAGE >= 8
        assert planned == (item.begin_block if has_pages else -1)


def run(
    *, at_once=2, parts=4, tile_units=0, queries=1, group=2, page=64, block=64, rows=64, batch=6,
    tree=False, hnd=False, copy_rows=16, without_keys=False, wrong_pages=False,
    planned_blocks=True,
):  # fmt: skip
    """Run the kernel over pages that requests share, merge the states, and compare."""
    torch.manual_seed(0)
    tokens = batch * queries
    lengths = [n + queries for n in LENGTHS[:batch]]
    if without_keys:
        lengths[-1] = 0
    pages = [-(-n // page) for n in lengths]
    table = torch.zeros(batch, max(pages)).int()
    order = iter((torch.randperm(sum(pages)) + 1).tolist())
    for row, count in zip(table, pages, strict=True):
        row[:count] = torch.tensor(list(itertools.islice(order, count)))
    for first, count, begin, end, _ in GROUPS:
        at = slice(begin // page, end // page)
        table[first : first + count, at] = table[first, at]
    stores = [torch.full((sum(pages) + 1, page, HEADS, D), torch.nan).bfloat16() for _ in "kv"]
    for row, n in reversed(list(zip(table, lengths, strict=True))):
        at = torch.arange(n)
        for store in stores:
            store[row[at // page].long(), at % page] = torch.randn(n, HEADS, D).bfloat16()
    q = torch.randn(tokens, HEADS * group, D).bfloat16()

    trees = torch.rand(batch, queries, queries) < 0.5
    trees |= torch.eye(queries).bool()
    spans, units = [], []  # (request, level, first query, queries, first key, last key + 1)
    for b, n in enumerate(lengths):
        begin = max((g[3] for g in GROUPS if g[0] <= b < g[0] + g[1]), default=0)
        spans.append((b, 0, b * queries, queries, begin, n))
        units.append(max(1, -(-n // block) - begin // block) + tile_units)
    for first, count, begin, end, level in GROUPS:
        spans.append((first, level, first * queries, count * queries, begin, end))
        units.append(-(-count * queries * group // rows) * ((end - begin) // block + tile_units))
    planned = torch.full((2 * batch, 8), -1).int()
    planned[: len(spans), :6] = torch.tensor(spans)
    units += [0] * (2 * batch - len(units))
    indptr = torch.tensor([0, *itertools.accumulate(units)]).int()
    turns = HEADS // at_once
    quota = max(1 + tile_units, -(-sum(units) * turns // parts))
    first = first_spans(
        indptr, planned, parts=parts, turns=turns, min_units=1 + tile_units, table=table, page=page,
        block=block, tile_units=tile_units,
    )  # fmt: skip
    if wrong_pages:
        first[:, PAGES:] = 0
    if not planned_blocks:
        first[:, FIRST_BLOCK] = -1
    programs = parts * at_once
    places = programs * 2 * rows + 3 * tokens * HEADS * group
    out = torch.full((tokens, HEADS * group, D), torch.nan).bfloat16()
    lse = torch.full((tokens, HEADS * group), torch.nan)
    partial_out, partial_lse = torch.full((places, D), torch.nan), torch.full((places,), torch.nan)

    arguments = load("arguments", "attn_core.backends.triton.portable")
    config = load("common", HOPPER).AttentionConfig(
        HEADS=HEADS, GROUP=group, PAGE=page, HND=hnd, GATHERS=page < 8, BN=block, D=D,
        USE_SOFTCAP=False, USE_SINKS=False, MASK=2 if tree else 1, WINDOW=False,
        INT64_OFFSETS=False, SHARED=True, TILE_UNITS=tile_units, HEADS_AT_ONCE=at_once,
        MIN_UNITS=1 + tile_units, COPY_ROWS=copy_rows, STAGES=2 if rows == 128 else 128 // block,
        TILE_ROWS=rows,
    )  # fmt: skip

    def rows_of(store):
        return store.transpose(1, 2).flatten(0, 2) if hnd else store.flatten(0, 1).flatten(1)

    store_of = [arguments.Store(Pointer(x), *map(torch.tensor, x.stride()[:3])) for x in stores]
    requests = arguments.Requests(
        Pointer((torch.arange(batch + 1) * queries).int()), Pointer(torch.tensor(lengths).int()),
        Pointer(table),
    )  # fmt: skip
    plan = [Pointer(x) for x in (indptr, planned, first)]
    if planned_blocks:
        launch(begin_with_the_planned_block, (programs, 1, 1), plan, requests, batch, config)
    launch(
        load("decode", HOPPER).decode_hopper, (programs, 1, 1),
        arguments.Queries(Pointer(q), HEADS * group * D, D),
        arguments.Outputs(Pointer(out), Pointer(lse), HEADS * group * D, D),
        arguments.Partials(Pointer(partial_out), Pointer(partial_lse)),
        requests, *plan, Pointer(trees),
        torch.tensor(batch), queries, table.stride(0),
        *(rows_of(x) for x in stores), *store_of, Pointer(torch.zeros(1)),
        arguments.Scales(SCALE, 1.0, 1.0), 0, config,
    )  # fmt: skip

    def states(span, token, head, q_head):
        """Yield where the states of a row of a span are; None for its output."""
        own = span < batch
        _, level, first_query, count, begin, _ = spans[span]
        row = (token - first_query) * group + q_head
        blocks = 1 if own else -(-count * group // rows)
        of_tile = units[span] // blocks
        at = int(indptr[span]) * turns + head // at_once * units[span] + row // rows * of_tile
        low, high = (at + tile_units) // quota, (at + of_tile - 1) // quota
        if low < high:
            for p in range(low, high + 1):
                slot = 2 * (p * at_once + head % at_once) + (p == low)
                yield slot * rows + row % rows
        elif own and begin == 0:
            yield None
        else:
            whole = (3 * token + level) * HEADS * group + head * group + q_head
            yield programs * 2 * rows + whole

    for token, head, q_head in itertools.product(range(tokens), range(HEADS), range(group)):
        b = token // queries
        mine = [b] + [batch + i for i, g in enumerate(GROUPS) if g[0] <= b < g[0] + g[1]]
        found = [x for span in mine for x in states(span, token, head, q_head)]
        context, query = lengths[b] - queries, token % queries
        seen = torch.arange(context + query + 1)
        if tree:
            seen = torch.cat((torch.arange(context), context + trees[b, query].nonzero()[:, 0]))
        k, v = (x[table[b][seen // page].long(), seen % page, head].double() for x in stores)
        s = k @ q[token, head * group + q_head].double() * SCALE
        if found == [None]:
            got = out[token, head * group + q_head].double()
            total = lse[token, head * group + q_head].double()
        else:
            logs = partial_lse[found].double()
            total = (logs - logs.amax()).exp2().sum().log2() + logs.amax()
            got = ((logs - total).exp2()[:, None] * partial_out[found].double()).sum(0)
            total = total / LOG2E
        torch.testing.assert_close(got, s.softmax(0) @ v, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(total, s.logsumexp(0), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("own", [0, 20, 700])
@pytest.mark.parametrize("quota", [1, 5, 31, 34, 128, 148, 200])
def test_programs_come_by_the_blocks_of_a_group_together(quota, own):
    """However its tiles are cut, a block of keys has one turn of all programs but a few."""
    split_kv, tile, tiles, turns = load("split_kv", HOPPER), 128, 4, {}
    for at in range(own // quota * quota, own + tiles * tile, quota):
        unit = max(at, own)
        while unit < min(at + quota, own + tiles * tile):
            start = (unit - own) % tile
            count = min(at + quota - unit, tile - start)
            numbers = (start, count, tile, unit - at, quota)
            rotation = int(split_kv.rotation_of(*map(torch.tensor, numbers)))
            item = SimpleNamespace(first_block=start, num_blocks=count)
            order = [torch.tensor(start + (rotation or count) - 1)]
            for _ in range(count - 1):
                order.append(split_kv.next_block(item, order[-1], SimpleNamespace(SHARED=True)))
            order = [int(block) for block in order]
            assert sorted(order) == list(range(start, start + count))
            for i, block in enumerate(order):
                turns.setdefault(block, []).append(unit - at + i)
            unit += count
    late = [abs(turn - sorted(found)[1]) > 1 for found in turns.values() for turn in found]
    if quota <= tile:  # else some programs have parts of two tiles and begin with another one
        assert sum(late) < 0.11 * len(late)
