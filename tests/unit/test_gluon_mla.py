"""Hopper's latent decode, emulated on a CPU: against float64, wherever requests are cut."""

import pytest
import torch
from emulated_gluon import HOPPER, Pointer, launch, load
from first_spans import PAGES, first_spans

DIM, LATENT, BLOCK, SCALE = 576, 512, 64, 0.07
LOG2E = 1.4426950408889634


def merged(partial_out, partial_lse, slots):
    """Return the outputs and the natural LSE of 64 rows from their partials."""
    lse = partial_lse[slots].double()
    weight = (lse - lse.amax(0)).exp2()
    total = weight.sum(0)
    out = (partial_out[slots].double() * weight[..., None]).sum(0) / total[:, None]
    return out, (lse.amax(0) + total.log2()) / LOG2E


def draw_latents(table, lengths, page, pages):
    """Return a store of so many pages: NaN but for the keys of requests."""
    stored = torch.full((pages, page, DIM), torch.nan).bfloat16()
    for row, n in zip(table, lengths, strict=True):
        at = torch.arange(n)
        stored[row[at // page].long(), at % page] = torch.randn(n, DIM).bfloat16()
    return stored


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("plan", ["even", "filled", "weighed"])
@pytest.mark.parametrize(("group", "queries"), [(24, 1), (40, 3)])
def test_equals_float64(group, queries, plan, dense):
    torch.manual_seed(group)
    page, lengths, parts = 16, [300, 64, 0, 131], 5
    lengths = [n + queries if n else 0 for n in lengths]
    batch, pages = len(lengths), [-(-n // page) for n in lengths]
    row_blocks = -(-queries * group // 64)
    table, begin = torch.zeros(batch, max(pages)).int(), 0
    order = (torch.randperm(sum(pages)) + 1).int()
    for row, count in enumerate(pages):
        table[row, :count], begin = order[begin : begin + count], begin + count
    stored = draw_latents(table, lengths, page, sum(pages) + 1)
    tokens = batch * queries
    q = torch.randn(tokens, group, DIM).bfloat16()
    units = [max(1, -(-n // BLOCK)) for n in lengths]
    quota = max(2, -(-sum(units) // parts))
    filled, tile_units = units, 0
    if plan == "filled":
        filled, quota = [-(-n // 3) * 3 for n in units], 3
    elif plan == "weighed":
        filled, quota, tile_units = [n + 2 for n in units], 4, 2
    indptr = torch.tensor([0, *torch.tensor(filled).cumsum(0).tolist(), quota, tile_units]).int()
    assert sum(filled) > 2 * quota
    ends = (torch.arange(batch + 1) * queries).int()
    wide = LATENT if dense else LATENT + 8
    out = torch.full((tokens, group, wide), torch.nan).bfloat16()
    lse = torch.full((tokens, group), torch.nan)
    programs = parts * row_blocks
    partial_out = torch.full((2 * programs, 64, LATENT), torch.nan)
    partial_lse = torch.full((2 * programs, 64), torch.nan)

    kernel = load("mla_decode", HOPPER)
    arguments = load("arguments", "attn_core.backends.triton.portable")
    config = load("common", HOPPER).AttentionConfig(
        HEADS=1, GROUP=group, PAGE=page, HND=False, GATHERS=False, BN=BLOCK, D=DIM,
        USE_SOFTCAP=False, USE_SINKS=False, MASK=int(queries > 1), WINDOW=False, STAGES=2,
        INT64_OFFSETS=False, ROW_BLOCKS=row_blocks, MIN_UNITS=2, PLANNED_QUOTA=plan != "even",
    )  # fmt: skip
    launch(
        kernel.decode_mla_hopper, (programs, 1, 1), q.flatten(0, 1),
        arguments.Outputs(Pointer(out), Pointer(lse), group * wide, wide),
        arguments.Partials(Pointer(partial_out), Pointer(partial_lse)),
        arguments.Requests(
            Pointer(ends), Pointer(torch.tensor(lengths).int()), Pointer(table)
        ),
        Pointer(indptr), Pointer(indptr), Pointer(indptr), torch.tensor(batch), table.shape[1],
        stored.flatten(0, 1),
        arguments.Scales(SCALE, 1.0, 1.0), config,
    )  # fmt: skip

    for b, n in enumerate(lengths):
        at = torch.arange(n)
        k = stored[table[b][at // page].long(), at % page].double()
        rows = q[b * queries : (b + 1) * queries].double()
        seen = at[None, :] <= torch.arange(queries)[:, None] + n - queries
        s = torch.einsum("qhd,kd->qhk", rows, k) * SCALE
        s = s.masked_fill(~seen[:, None], -torch.inf)
        want = torch.einsum("qhk,kd->qhd", s.softmax(-1).nan_to_num(), k[:, :LATENT])
        begin, own = int(indptr[b]), units[b]
        low, high = (begin + tile_units) // quota, (begin + filled[b] - 1) // quota
        actual, got_lse = (x[b * queries : (b + 1) * queries].flatten(0, 1) for x in (out, lse))
        actual = actual[..., :LATENT].double()
        if low < high:
            parts_of = [
                merged(
                    partial_out, partial_lse,
                    [2 * (p * row_blocks + r) + (p == low) for p in range(low, high + 1)],
                )
                for r in range(row_blocks)
            ]  # fmt: skip
            actual, got_lse = (torch.cat(x)[: queries * group] for x in zip(*parts_of, strict=True))
        assert own > 0
        want = want.flatten(0, 1)
        error = (actual - want).norm()
        assert error <= 6e-3 * want.norm(), (b, float(error), float(want.norm()))
        torch.testing.assert_close(
            got_lse.double(), s.logsumexp(-1).flatten(), atol=2e-3, rtol=1e-3
        )
    if not dense:
        assert bool(out[..., LATENT:].isnan().all())


@pytest.mark.parametrize("tile_units", [0, 2])
@pytest.mark.parametrize("parts", [1, 3, 7, 30])
def test_requests_that_share_keys(parts, tile_units):
    share_keys(parts, tile_units)


def test_the_first_latents_are_read_from_the_pages_of_the_plan():
    with pytest.raises(AssertionError):
        share_keys(7, 0, wrong_pages=True)


def share_keys(parts, tile_units, *, wrong_pages=False):
    """Five requests of 16 heads: their group is two tiles, and each has one of its own keys."""
    torch.manual_seed(parts)
    group, page, shared, lengths = 16, 16, 192, [230, 300, 257, 193, 448]
    batch, pages = len(lengths), [-(-n // page) for n in lengths]
    table, order = torch.zeros(batch, max(pages)).int(), (torch.randperm(sum(pages)) + 1).int()
    for row, own in zip(table, order.split(pages), strict=True):
        row[: len(own)] = own
    table[:, : shared // page] = table[0, : shared // page]
    stored = draw_latents(table, lengths, page, sum(pages) + 1)
    q = torch.randn(batch, group, DIM).bfloat16()
    spans = [(b, 0, b, 1, shared, n) for b, n in enumerate(lengths)]
    spans.append((0, 1, 0, batch, 0, shared))
    planned = torch.full((2 * batch, 8), -1).int()
    planned[: batch + 1, :6] = torch.tensor(spans)
    units = [-(-n // BLOCK) - shared // BLOCK + tile_units for n in lengths]
    units += [2 * (shared // BLOCK + tile_units)] + [0] * (batch - 1)
    indptr = torch.tensor([0, *torch.tensor(units).cumsum(0).tolist()]).int()
    quota = max(1 + tile_units, -(-sum(units) // parts))
    first = first_spans(
        indptr, planned, parts=parts, turns=1, min_units=1 + tile_units, table=table, page=page,
        tile_units=tile_units,
    )  # fmt: skip
    if wrong_pages:
        first[:, PAGES:] = 0
    places = parts * 2 * 64 + 3 * batch * group
    partial_out, partial_lse = torch.full((places, LATENT), torch.nan), torch.full((places,), 0.0)
    out = torch.full((batch, group, LATENT), torch.nan).bfloat16()  # no item is final
    lse = torch.full((batch, group), torch.nan)
    kernel = load("mla_decode", HOPPER)
    arguments = load("arguments", "attn_core.backends.triton.portable")
    config = load("common", HOPPER).AttentionConfig(
        HEADS=1, GROUP=group, PAGE=page, HND=False, GATHERS=False, BN=BLOCK, D=DIM,
        USE_SOFTCAP=False, USE_SINKS=False, MASK=0, WINDOW=False, STAGES=2, INT64_OFFSETS=False,
        SHARED=True, TILE_UNITS=tile_units, MIN_UNITS=1 + tile_units,
    )  # fmt: skip
    launch(
        kernel.decode_mla_hopper, (parts, 1, 1), q.flatten(0, 1),
        arguments.Outputs(Pointer(out), Pointer(lse), group * LATENT, LATENT),
        arguments.Partials(Pointer(partial_out), Pointer(partial_lse)),
        arguments.Requests(
            Pointer(torch.arange(batch + 1).int()), Pointer(torch.tensor(lengths).int()),
            Pointer(table),
        ),
        Pointer(indptr), Pointer(planned), Pointer(first), torch.tensor(batch), table.shape[1],
        stored.flatten(0, 1), arguments.Scales(SCALE, 1.0, 1.0), config,
    )  # fmt: skip

    def states(span, b):
        """Return where the states of a request's 16 rows in a span lie."""
        row = 0 if span < batch else b * group
        of_tile = units[span] if span < batch else units[span] // 2
        at = int(indptr[span]) + row // 64 * of_tile
        low, high = (at + tile_units) // quota, (at + of_tile - 1) // quota
        if low == high:
            return [parts * 2 * 64 + (3 * b + (span >= batch)) * group]
        return [(2 * p + (p == low)) * 64 + row % 64 for p in range(low, high + 1)]

    for b, n in enumerate(lengths):
        at = torch.arange(n)
        k = stored[table[b][at // page].long(), at % page].double()
        s = q[b].double() @ k.T * SCALE
        first = torch.tensor([x for span in (b, batch) for x in states(span, b)])
        rows = first[:, None] + torch.arange(group)
        found, found_lse = merged(partial_out, partial_lse, rows)
        want = s.softmax(-1) @ k[:, :LATENT]
        assert (found - want).norm() <= 6e-3 * want.norm(), b
        torch.testing.assert_close(found_lse, s.logsumexp(-1), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("heads", [24, 80])
def test_gathered_latents_equal_float64(heads):
    """As sparse MLA launches it: each query is a request, and page tables hold slots."""
    torch.manual_seed(heads)
    counts, width = [70, 130, 0, 64, 1], 192
    tokens, row_blocks = len(counts), -(-heads // 64)
    stored = torch.full((400, DIM), torch.nan).bfloat16()
    slots = torch.full((tokens, width), -1).int()
    for row, n in zip(slots, counts, strict=True):
        row[:n] = torch.randperm(400)[:n].int()
        stored[row[:n].long()] = torch.randn(n, DIM).bfloat16()
    stored[0] = stored[0].nan_to_num()  # what rows without a slot are led to
    q = torch.randn(tokens, heads, DIM).bfloat16()
    out = torch.full((tokens, heads, LATENT), torch.nan).bfloat16()
    lse = torch.full((tokens, heads), torch.nan)
    ends, indptr = torch.arange(tokens + 1).int(), torch.arange(tokens + 1).int()
    kernel = load("mla_decode", HOPPER)
    arguments = load("arguments", "attn_core.backends.triton.portable")
    config = load("common", HOPPER).AttentionConfig(
        HEADS=1, GROUP=heads, PAGE=1, HND=False, GATHERS=True, BN=BLOCK, D=DIM,
        USE_SOFTCAP=False, USE_SINKS=False, MASK=0, WINDOW=False, STAGES=2, INT64_OFFSETS=True,
        ROW_BLOCKS=row_blocks, BLOCKS_PER_UNIT=width // BLOCK, BATCH_INVARIANT=True,
    )  # fmt: skip
    launch(
        kernel.decode_mla_hopper, (2 * row_blocks, 1, 1), q.flatten(0, 1),
        arguments.Outputs(Pointer(out), Pointer(lse), heads * LATENT, LATENT),
        arguments.Partials(Pointer(lse), Pointer(lse)),
        arguments.Requests(Pointer(ends), Pointer(torch.tensor(counts).int()), Pointer(slots)),
        Pointer(indptr), Pointer(indptr), Pointer(indptr), torch.tensor(tokens), width,
        arguments.Store(Pointer(stored), DIM, DIM, DIM), arguments.Scales(SCALE, 1.0, 1.0), config,
    )  # fmt: skip
    for t, n in enumerate(counts):
        k = stored[slots[t, :n].long()].double()
        s = q[t].double() @ k.T * SCALE
        want = s.softmax(-1) @ k[:, :LATENT]
        error = (out[t].double() - want).norm()
        assert error <= 6e-3 * want.norm(), (t, float(error), float(want.norm()))
        torch.testing.assert_close(lse[t].double(), s.logsumexp(-1), atol=2e-3, rtol=1e-3)
