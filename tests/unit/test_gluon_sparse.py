"""Hopper's scores of a prompt's queries, emulated on a CPU: against float64, key by key."""

import pytest
import torch
from emulated_gluon import SPARSE, Pointer, launch, load

HEADS, DIM, TOPK = 32, 128, 20
F8 = torch.float8_e4m3fn


def right(q, w, keys, scales):
    """Return scores float64 [keys] of one query [HEADS, DIM]; relu of a NaN is 0."""
    products = q.double() @ (keys.double() * scales.double()[:, None]).T
    return (w.double()[:, None] * products.nan_to_num(nan=0.0).clamp(min=0)).sum(0)


@pytest.mark.parametrize("at_once", [16, 64])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_each_query_scores_the_keys_that_it_sees(page, at_once):
    """Requests with and without keys before; one that sees too few; rows of padding behind."""
    torch.manual_seed(page)
    lengths, queries, padding = [300, 7, 270, 64], [33, 7, 1, 64], 3
    pages = [-(-length // page) for length in lengths]
    order, most = (torch.randperm(sum(pages)) + 1).int(), max(pages)
    table, begin = torch.zeros(len(lengths), most).int(), 0
    for row, count in enumerate(pages):
        table[row, :count], begin = order[begin : begin + count], begin + count
    stored = torch.randn(sum(pages) + 1, page, DIM).to(F8)
    scales = torch.rand(sum(pages) + 1, page) + 0.5
    for slot, scale in ((5, torch.inf), (99, torch.nan)):  # keys with an infinity, with a NaN
        stored[slot // page, slot % page] = torch.nan
        scales[slot // page, slot % page] = scale
    tokens = sum(queries)
    ends = torch.tensor([0, *queries]).cumsum(0).int()
    requests = torch.repeat_interleave(torch.tensor(queries)).int()
    requests = torch.cat((requests, torch.zeros(padding).int()))
    q = torch.randn(tokens + padding, HEADS, DIM).to(F8)
    w = torch.randn(tokens + padding, HEADS)
    first, count = 5, tokens + padding - 5
    scores = torch.full((count, 512), torch.nan)
    kernel = load("index_hopper", SPARSE).score_prompts_hopper
    launch(
        kernel, (-(-count // at_once), 2), q.flatten(0, 1), w, Pointer(table), most,
        Pointer(torch.tensor(lengths)), Pointer(ends), Pointer(requests), first, count,
        Pointer(scores), 512, at_once, Pointer(stored), Pointer(scales), page * DIM, DIM, page,
        HEADS, page, TOPK,
    )  # fmt: skip
    for t in range(first, tokens + padding):
        r = int(requests[t])
        visible = min(lengths[r] - (int(ends[r + 1]) - t) + 1, lengths[r])
        position = torch.arange(visible)
        where = table[r][position // page].long(), position % page
        want = right(q[t], w[t], stored[where], scales[where])
        if visible > TOPK:
            torch.testing.assert_close(
                scores[t - first, :visible].double(), want, atol=1e-3, rtol=1e-4
            )
        assert scores[t - first, visible:].isnan().all()
