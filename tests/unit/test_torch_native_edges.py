"""torch_native where there are no keys or no sinks, and called by several threads."""

import math
import threading

import pytest
import torch
from attn_core import (
    AttentionLayer,
    BatchError,
    CacheView,
    ForwardBatch,
    ForwardMode,
    HybridDispatcher,
    KVPool,
    LayerCache,
    SpecInfo,
    load_plugins,
    pad_page_table,
    slot_table,
    write_kv,
)
from attn_core.testing.harness import Bench

SPEC = load_plugins().get("torch_native")
SHAPE = {"layer_id": 0, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32}


def create(layer, page_size=1, dtype="fp32"):
    row = next(x for x in SPEC.capabilities if x.kind == "mha" and x.device == "cpu")
    bench = Bench(spec=SPEC, row=row, torch_device=torch.device("cpu"))
    return bench.create((layer,), dtype=dtype, page_size=page_size)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("lens", [(), (0,), (3, 0, 2)])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_ragged_attention_to_no_keys_at_all(lens, cap):
    layer = AttentionLayer(**SHAPE, scale=0.2, logit_cap=cap)
    q, none = torch.randn(sum(lens), 4, 32), torch.randn(0, 2, 32)
    cu = torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)
    lengths = (cu, torch.zeros_like(cu), max(lens, default=0), 0)
    got, lse = create(layer).forward_ragged(
        q, none, none, layer, *lengths, causal=False, return_lse=True
    )
    assert torch.equal(got, torch.zeros(sum(lens), 4, 32))
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("cap", [None, 5.0])
def test_a_head_without_a_sink_and_queries_without_keys(cap):
    """A sink of -inf is none; the first two of five causal queries come before all three keys."""
    sinks = torch.tensor([-math.inf, 0.5, -math.inf, 2.0])
    layer = AttentionLayer(**SHAPE, scale=0.2, logit_cap=cap, sinks=sinks)
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    got, lse = create(layer).forward_ragged(
        q, k, v, layer, int32(0, 5), int32(0, 3), 5, 3, causal=True, return_lse=True
    )
    assert (got[:2] == 0).all()
    assert torch.equal(lse[:2], sinks.expand(2, 4))
    assert got.isfinite().all()
    torch.testing.assert_close(got[2, 0], v[0, 0])  # one key, no sink


def test_sinks_that_are_a_parameter_are_followed_by_no_graph():
    sinks = torch.nn.Parameter(torch.randn(4))
    layer = AttentionLayer(**SHAPE, scale=0.2, sinks=sinks)
    q, k, v = torch.randn(5, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    got, lse = create(layer).forward_ragged(
        q, k, v, layer, int32(0, 5), int32(0, 3), 5, 3, causal=True, return_lse=True
    )
    assert not got.requires_grad
    assert not lse.requires_grad


def test_threads_share_an_instance():
    """What one thread gathers does not lie in the buffer of another."""
    layer = AttentionLayer(**SHAPE, scale=0.2)
    backend = create(layer)
    torch.manual_seed(0)
    k, v = torch.randn(2, 2000, 1, 2, 32).unbind(0)
    cache = LayerCache(k=k, v=v)

    def make_pass():
        lens = [700, 900, 300]
        batch = ForwardBatch.build(
            ForwardMode.DECODE,
            query_lens=[1] * 3,
            seq_lens=lens,
            page_table=torch.randint(2000, (3, 900), dtype=torch.int32),
            page_size=1,
        )
        plan = backend.init_forward_metadata(batch)
        return torch.randn(3, 4, 32), None, None, layer, cache, batch, plan

    passes, wrong = [make_pass() for _ in range(4)], []
    wanted = [backend.forward(*x) for x in passes]

    def repeat(i):
        wrong.extend(
            i for _ in range(60) if not torch.equal(backend.forward(*passes[i]), wanted[i])
        )

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def seen_alone(q, k, v, seen, layer):
    """Attend from each query to the keys that it sees, as if there were no others: float64."""
    rows = []
    for i, mine in enumerate(seen):
        for h in range(layer.num_q_heads):
            keys, values = (x[mine, h // 2].double() for x in (k, v))
            s = layer.scale * (keys @ q[i, h].double())
            s = s if layer.logit_cap is None else layer.logit_cap * (s / layer.logit_cap).tanh()
            rows.append(s.softmax(0) @ values)
    return torch.stack(rows).view(len(seen), layer.num_q_heads, -1)


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf])
def test_hidden_keys_have_no_part_whatever_they_hold(wild, window, cap):
    """Key 6 is wild, in K or in a column of V; queries before it and behind its window are not."""
    layer = AttentionLayer(**SHAPE, scale=0.2, logit_cap=cap, sliding_window=window)
    backend, lens = create(layer), (int32(0, 12), int32(0, 12), 12, 12)
    torch.manual_seed(0)
    q, k, v = torch.randn(12, 4, 32), torch.randn(12, 2, 32), torch.randn(12, 2, 32)
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    if window is not None:
        seen &= ~torch.ones(12, 12, dtype=torch.bool).tril(-window)
    sees = seen[:, 6]
    for wild_k, wild_v in ((True, False), (False, True), (True, True)):
        keys, values = k.clone(), v.clone()
        keys[6] = wild if wild_k else keys[6]
        values[6, :, 3] = wild if wild_v else values[6, :, 3]
        want = seen_alone(q, keys, values, seen, layer)
        got, lse = backend.forward_ragged(
            q, keys, values, layer, *lens, causal=True, return_lse=True
        )
        torch.testing.assert_close(got[~sees], want[~sees].float(), atol=1e-5, rtol=1e-5)
        assert lse[~sees].isfinite().all()
        if wild_v and not wild_k:  # who sees the value gets it, in its column alone
            torch.testing.assert_close(
                got[sees], want[sees].float(), atol=1e-5, rtol=1e-5, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_drafts_have_no_part_whatever_they_hold(dtype):
    layer = AttentionLayer(**SHAPE, scale=0.2)
    tree = torch.eye(4, dtype=torch.bool)
    tree[1:, 0] = True  # drafts 1, 2 and 3 are siblings
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, 32).to(dtype) for n, h in ((4, 4), (9, 2), (9, 2)))
    k[7], v[7] = math.nan, math.inf  # draft 2 of 4, after 5 tokens
    seen = torch.cat([torch.ones(4, 5, dtype=torch.bool), tree], 1)
    batch = ForwardBatch.build(
        ForwardMode.TARGET_VERIFY, query_lens=[4], seq_lens=[9], page_size=1,
        page_table=torch.arange(9, dtype=torch.int32)[None],
        spec=SpecInfo(topk=3, num_draft_tokens=4, tree_mask=tree[None]),
    )  # fmt: skip
    backend = create(layer, dtype={torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype])
    cache = LayerCache(k=k[:, None], v=v[:, None])
    got = backend.forward(q, None, None, layer, cache, batch, backend.init_forward_metadata(batch))
    want, others = seen_alone(q, k, v, seen, layer).to(dtype), [0, 1, 3]
    torch.testing.assert_close(got[others], want[others], atol=2e-2, rtol=2e-2)
    assert got[2].isnan().all()


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_window_over_drafts_that_do_not_see_themselves(window):
    """A window counts positions, and that of a draft counts the other drafts that it sees."""
    layer = AttentionLayer(**SHAPE, scale=0.2, sliding_window=window)
    tree = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 0, 1]], dtype=torch.bool)
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, 32) for n, h in ((3, 4), (8, 2), (8, 2)))
    depth, positions = [0, 1, 1], torch.tensor([0, 1, 2, 3, 4, 5, 6, 6])
    seen = torch.cat([torch.ones(3, 5, dtype=torch.bool), tree], 1)
    for i in range(3):
        seen[i] &= positions > 5 + depth[i] - window
    batch = ForwardBatch.build(
        ForwardMode.TARGET_VERIFY, query_lens=[3], seq_lens=[8], page_size=1,
        page_table=torch.arange(8, dtype=torch.int32)[None],
        spec=SpecInfo(topk=3, num_draft_tokens=3, tree_mask=tree[None]),
    )  # fmt: skip
    backend, cache = create(layer), LayerCache(k=k[:, None], v=v[:, None])
    got = backend.forward(q, None, None, layer, cache, batch, backend.init_forward_metadata(batch))
    want = seen_alone(q, k, v, seen, layer)
    torch.testing.assert_close(got.double(), want.double().nan_to_num(0.0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("starts", "keys"), [((2, 6), 6), ((0, 5, 3, 6), 6), ((0, 7), 6)])
def test_ragged_requests_that_are_no_ranges_are_refused(starts, keys):
    """Their keys would be those of others, or end early."""
    layer = AttentionLayer(**SHAPE, scale=0.2)
    pool = KVPool([layer], num_pages=1, page_size=1, kv_cache_dtype="fp32")
    backend = create(layer)
    dispatcher = HybridDispatcher({"prefill": backend, "decode": backend}, pool)
    q, k = torch.randn(6, 4, 32), torch.randn(keys, 2, 32)
    cu = int32(*starts)
    with pytest.raises(BatchError, match=r"cu_seqlens_q .* .expected to rise from 0 to at most 6"):
        dispatcher.forward_ragged(q, k, k, layer, cu, cu, 7, 7, causal=False)


@pytest.mark.parametrize(("dim", "v_dim"), [(33, 33), (65, 17)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_deterministic_bits_depend_on_no_address(dim, v_dim, page_size):
    """Heads of odd dims begin between lines of memory, elsewhere in each batch and page."""
    layer = AttentionLayer(
        layer_id=0, num_q_heads=2, num_kv_heads=1, head_dim=dim, v_head_dim=v_dim, scale=0.2
    )
    row = next(x for x in SPEC.capabilities if x.kind == "mha" and x.device == "cpu")
    bench = Bench(spec=SPEC, row=row, torch_device=torch.device("cpu"), deterministic=True)
    backend = bench.create((layer,), dtype="fp32", page_size=page_size)
    lengths, news = (130, 2, 17, 5), (1, 2, 9, 1)
    pages = [-(-n // page_size) for n in lengths]
    pool = KVPool([layer], num_pages=2 * sum(pages) + 1, page_size=page_size, kv_cache_dtype="fp32")
    cache = pool.layer(0)
    torch.manual_seed(0)
    here = pad_page_table((torch.randperm(sum(pages)) + 1).split(pages))
    there = pad_page_table((torch.arange(sum(pages)) + sum(pages) + 1).split(pages))
    for i, n in enumerate(lengths):
        k, v = torch.randn(n, 1, dim), torch.randn(n, 1, v_dim)
        for table in (here, there):
            write_kv(cache, k, v, slot_table(table[i : i + 1], page_size, n)[0])
    q = torch.randn(sum(news), 2, dim)

    def run(table, requests, queries):
        batch = ForwardBatch.build(
            ForwardMode.EXTEND,
            query_lens=[news[i] for i in requests],
            seq_lens=[lengths[i] for i in requests],
            page_table=table[list(requests)],
            page_size=page_size,
        )
        plan = backend.init_forward_metadata(batch)
        tensors = (queries, None, None, layer, cache, batch, plan)
        return torch.cat([x.flatten(1) for x in backend.forward(*tensors, return_lse=True)], 1)

    together = run(here, range(4), q).split(news)
    for i, (own, want) in enumerate(zip(q.split(news), together, strict=True)):
        assert torch.equal(run(here, [i], own.clone()), want)
        assert torch.equal(run(there, [i], own.clone()), want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("pages", [(8, 9), (7, 8), (-1, 0), (3, 30)])
def test_pages_that_the_pool_has_not(pages, layout):
    """Adjacent ones are a slice, which leaves them out: torch's kernel then ended the process."""
    layer = AttentionLayer(**SHAPE, scale=0.2)
    pool = KVPool([layer], num_pages=8, page_size=4, kv_cache_dtype="fp32", layout=layout)
    backend = create(layer, page_size=4)
    batch = ForwardBatch.build(
        ForwardMode.EXTEND, query_lens=[1], seq_lens=[7], page_table=int32(*pages)[None],
        page_size=4, writes=False,
    )  # fmt: skip
    plan = backend.init_forward_metadata(batch)
    tensors = (torch.randn(1, 4, 32), None, None, layer, pool.layer(0), batch, plan)
    with pytest.raises(BatchError, match=r"lists page -?\d+ of a pool of 8 pages"):
        backend.forward(*tensors)


@pytest.mark.parametrize("host", [(11,), None])
def test_more_tokens_than_columns(host):
    """Not by CacheView.build, which refuses it: by hand; the keys beyond were left out."""
    layer = AttentionLayer(**SHAPE, scale=0.2)
    pool = KVPool([layer], num_pages=8, page_size=4, kv_cache_dtype="fp32")
    backend = create(layer, page_size=4)
    dispatcher = HybridDispatcher({"prefill": backend, "decode": backend}, pool)

    def view(columns, most):
        return CacheView(
            page_table=torch.ones(1, columns, dtype=torch.int32), seq_lens=int32(11),
            out_cache_loc=None, max_seq_len=most, seq_lens_host=host,
        )  # fmt: skip

    def batch(of):
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE, cu_seqlens_q=int32(0, 1),
            positions=torch.tensor([10]), max_q_len=1, views={"full": of},
        )  # fmt: skip

    dispatcher.init_forward_metadata(batch(view(3, 99)))  # an upper bound may be higher
    with pytest.raises(BatchError, match="a request of 11 tokens, and a page table of 2 columns"):
        dispatcher.init_forward_metadata(batch(view(2, 11)))


def test_out_takes_floats():
    layer = AttentionLayer(**SHAPE, scale=0.2)
    pool = KVPool([layer], num_pages=8, page_size=4, kv_cache_dtype="fp32")
    backend = create(layer, page_size=4)
    dispatcher = HybridDispatcher({"prefill": backend, "decode": backend}, pool)
    batch = ForwardBatch.build(
        ForwardMode.EXTEND, query_lens=[1], seq_lens=[1], page_table=int32(1)[None], page_size=4
    )
    plan = dispatcher.init_forward_metadata(batch)
    q, k = torch.randn(1, 4, 32), torch.randn(1, 2, 32)
    with pytest.raises(BatchError, match=r"layer 0: out is torch\.int32"):
        dispatcher.forward(q, k, k, layer, batch, plan, out=torch.empty(1, 4, 32).int())
