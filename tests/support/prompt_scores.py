"""Scores of prompts by Hopper's kernel, beside float64 and, bit for bit, the portable kernel."""

from dataclasses import replace
from unittest import mock

import torch
from attn_core.backends.triton.sparse import launch, scoring
from attn_core.backends.triton.sparse.passes import SparsePass
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.index import to_fp8_queries
from attn_core.runtime.batch import CacheView

TOPK, PAGE, DIM = 2048, 64, 128


def check_scores(heads, lengths, queries):
    """Score the last queries of requests of some lengths by both kernels, on a GPU."""
    torch.manual_seed(heads)
    pages = [-(-length // PAGE) for length in lengths]
    order, begin = torch.randperm(sum(pages), device="cuda").int(), 0
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device="cuda")
    for row, count in enumerate(pages):
        table[row, :count], begin = order[begin : begin + count], begin + count
    keys = torch.randn(sum(pages), PAGE, DIM, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(sum(pages), PAGE, device="cuda") + 0.5
    planes = (keys.view(torch.uint8).flatten(1), scales.view(torch.uint8))
    index = torch.cat(planes, 1)
    latents = torch.zeros(sum(pages), PAGE, 1, 576, dtype=torch.bfloat16, device="cuda")
    cache = LayerCache(k=latents, v=None, index=index)
    tokens = sum(queries)
    q, w = torch.randn(tokens, heads, DIM), torch.randn(tokens, heads)
    q, w = to_fp8_queries(q.bfloat16().cuda(), w.cuda())
    view = CacheView(
        page_table=table, seq_lens=torch.tensor(lengths).int().cuda(), out_cache_loc=None,
        max_seq_len=max(lengths),
    )  # fmt: skip
    ends = torch.tensor([0, *queries]).cumsum(0).int().cuda()
    requests = torch.repeat_interleave(torch.tensor(queries)).int().cuda()
    inputs = SparsePass(view, ends, requests, queries=max(queries))
    columns = -(-max(lengths) // 64) * 64
    first, count = 3, tokens - 3
    own, portable = torch.full((2, count, columns), torch.nan, device="cuda")
    assert scoring.Scoring.of(q, w, cache, inputs, own, TOPK, "sm90")[1].on_hopper
    launch.score(q, w, cache, inputs, own, first, count, TOPK, arch="sm90")
    with mock.patch.object(scoring, "has_gluon", return_value=False):  # and a cache of its own
        launch.score(q, w, replace(cache), inputs, portable, first, count, TOPK, arch="sm90")
    end, length = ends[1:][requests.long()], view.seq_lens[requests.long()]
    seen = (length - end + torch.arange(tokens, device="cuda") + 1)[first:, None]
    written = (torch.arange(columns, device="cuda") < seen) & (seen > TOPK)
    assert torch.equal(own[written], portable[written])
    assert own[(torch.arange(columns, device="cuda") >= seen)].isnan().all()
    for t in (first, tokens // 2, tokens - 2):
        r, visible = int(requests[t]), int(seen[t - first])
        if visible <= TOPK:
            continue
        at = torch.arange(visible, device="cuda")
        where = table[r][at // PAGE].long(), at % PAGE
        products = (q[t].double() @ keys[where].double().T).clamp(min=0)
        want = (w[t].double()[:, None] * products).sum(0) * scales[where].double()
        torch.testing.assert_close(
            own[t - first, :visible].double(), want, atol=0.5, rtol=1e-2
        )  # QGMMA adds in 14 bits or so
