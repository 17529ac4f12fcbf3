"""What the indexers of torch_native and triton select where numbers are not finite: the same."""

import math

import pytest
import torch
from attn_core.cache.pool import KVPool
from attn_core.ops.index import write_index
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.testing.harness import Bench

TOKENS, TOPK, HEADS, DIM, QUERIES, PAGE = 90, 16, 4, 32, 3, 16
LAYER = AttentionLayer(
    layer_id=0, num_q_heads=2, num_kv_heads=1, head_dim=40, v_head_dim=32, scale=0.2,
    index_topk=TOPK,
)  # fmt: skip


def chosen(backend, queries, weights, keys):
    """Return the positions that a backend selects, in pages that lie backwards."""
    spec, device = load_plugins().get(backend), torch.device("cpu")
    row = next(row for row in spec.capabilities if row.kind == "dsa")
    bench = Bench(spec=spec, row=row, torch_device=device)
    pages = -(-TOKENS // PAGE)
    pool = KVPool(
        [LAYER], num_pages=pages + 1, page_size=PAGE, kv_cache_dtype="bf16", kind="dsa",
        index_dim=DIM,
    )  # fmt: skip
    table = torch.arange(pages, 0, -1, dtype=torch.int32)[None]
    position = torch.arange(TOKENS)
    slots = table[0, position // PAGE].long() * PAGE + position % PAGE
    cache = pool.layer(0)
    write_index(cache, keys, slots)
    batch = ForwardBatch.build(
        ForwardMode.EXTEND, query_lens=[QUERIES], seq_lens=[TOKENS], page_table=table,
        page_size=PAGE, writes=False,
    )  # fmt: skip
    runs = bench.create((LAYER,), dtype="bf16", page_size=PAGE)
    got = runs.index_topk(queries, weights, LAYER, cache, batch, runs.init_forward_metadata(batch))
    at = {int(slot): i for i, slot in enumerate(slots)}
    return [sorted(at[int(slot)] for slot in row) for row in got]


def right(queries, weights, keys):
    """The definition, number by number: relu(NaN) is 0, a NaN score the greatest."""
    rows = []
    for i, (query, weight) in enumerate(zip(queries.double(), weights.double(), strict=True)):
        scores = []
        for key in keys.double()[: TOKENS - QUERIES + i + 1]:
            products = (query @ key).tolist()
            products = [x if x > 0 else 0.0 for x in products]
            scores.append(sum(w * x for w, x in zip(weight.tolist(), products, strict=True)))
        best = [-math.inf if math.isnan(x) else -x for x in scores]
        # (a NaN stands before an infinity, and of equal scores the earliest)
        order = sorted(
            range(len(best)), key=lambda j: (not math.isnan(scores[j]), best[j], j)
        )  # fmt: skip
        rows.append(sorted(order[:TOPK]))
    return rows


@pytest.mark.parametrize("what", ["keys", "infinite keys", "queries", "weights", "all"])
@pytest.mark.parametrize("backend", ["torch_native", "triton"])
def test_numbers_that_are_not_finite(backend, what):
    if backend == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("Triton compiles for the GPU here: these tensors are the host's")
    rng = torch.Generator().manual_seed(0)
    shapes = ((QUERIES, HEADS, DIM), (QUERIES, HEADS), (TOKENS, DIM))
    queries, weights, keys = (
        torch.randint(-2, 3, shape, generator=rng).float()  # so that sums are exact
        for shape in shapes
    )
    if what in ("keys", "all"):
        keys[::7] = math.nan
    if what in ("infinite keys", "all"):
        keys[3::11, 0], keys[5::11, 1] = math.inf, -math.inf
    if what in ("queries", "all"):
        queries[0], queries[1, 2] = math.nan, math.inf
    if what in ("weights", "all"):
        weights[0], weights[1, 1], weights[2, 0] = math.nan, math.inf, -math.inf
    queries, keys = queries.bfloat16(), keys.bfloat16()
    assert chosen(backend, queries, weights, keys) == right(queries, weights, keys)
