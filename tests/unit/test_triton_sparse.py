"""Our kernels of sparse MLA at their edges: bits of scores, borders of blocks, parts of keys."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from attn_core.backends.torch_native import sparse
from attn_core.backends.triton.sparse import gather, launch, scoring, selecting
from attn_core.backends.triton.sparse.backend import TritonSparse
from attn_core.backends.triton.sparse.passes import SparsePass, stored
from attn_core.cache.layer_cache import LayerCache
from attn_core.cache.pool import KVPool
from attn_core.ops.index import read_index, write_index
from attn_core.ops.kv import write_kv
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import CacheView
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.device import parse_device
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from sparse_routes import ROUTES

PAGE = 16


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    """Let a program hold few scores of a row, so that rows are cut, and what was kept again."""
    monkeypatch.setattr(selecting, "ROW", 64)
    short = selecting.SelectConstants(SAMPLE=16, SEGMENT=128, AT_ONCE=32, CAPACITY=4)
    monkeypatch.setattr(selecting, "WIDE", selecting.Selecting(short, 4, 64))


def selection(scores, topk, visible=None):
    """Select from scores [n, L] of one request per row, each in pages of its own, backwards."""
    n, length = scores.shape
    pages = -(-length // PAGE)
    table = torch.arange(n * pages).flip(0).view(n, pages).int()
    lengths = torch.tensor(visible or [length] * n, dtype=torch.int32)
    chosen = torch.full((n, topk), -7, dtype=torch.int32)
    view = CacheView(page_table=table, seq_lens=lengths, out_cache_loc=None, max_seq_len=length)
    ends, requests = torch.arange(n + 1).int(), torch.arange(n).int()
    inputs = SparsePass(view, ends, requests, queries=1)
    selecting.select(scores.contiguous(), 0, n, inputs, chosen, selecting.WIDE, page_size=PAGE)
    return chosen, table.long()


def right(scores, topk, table, seen):
    best = scores[:seen].argsort(descending=True, stable=True)[:topk].sort().values
    slots = table[best // PAGE] * PAGE + best % PAGE
    return torch.cat([slots, slots.new_full((topk - len(slots),), -1)]).int()


@pytest.mark.parametrize("topk", [1, 13, 64, 199])
def test_every_magnitude_is_ranked(topk):
    """Both signs, subnormals, infinities and numbers that differ in their last bit alone."""
    rng = torch.Generator().manual_seed(topk)
    bits = torch.randint(-(2**31), 2**31, (3, 200), generator=rng).int()
    scores = bits.view(torch.float32).nan_to_num(nan=1.0, posinf=torch.inf, neginf=-torch.inf)
    scores[1] = 1.0 + torch.randint(0, 4, (200,), generator=rng) * 2.0**-23
    scores[2, ::7], scores[2, 1::7] = torch.inf, 1e-42
    chosen, table = selection(scores, topk)
    for row in range(3):
        assert torch.equal(chosen[row], right(scores[row], topk, table[row], 200)), row


def test_the_two_zeros_are_equal():
    scores = torch.zeros(1, 100)
    scores[0, ::2] = -0.0
    chosen, table = selection(scores, 40)
    assert torch.equal(chosen[0], right(scores[0].abs(), 40, table[0], 100))


def test_equal_scores_go_to_the_earliest_across_blocks():
    scores = torch.zeros(2, 300)
    scores[0, [5, 63, 64, 200, 299]] = 3.0
    scores[1, 100:] = -1.0
    chosen, table = selection(scores, 70)
    for row in range(2):
        assert torch.equal(chosen[row], right(scores[row], 70, table[row], 300))


def test_what_a_query_does_not_see_is_not_read():
    scores = torch.full((4, 130), torch.nan)
    visible = [0, 1, 40, 41]
    for row, seen in enumerate(visible):
        scores[row, :seen] = torch.arange(seen).float()
    chosen, table = selection(scores, 40, visible)
    for row, seen in enumerate(visible):
        assert torch.equal(chosen[row], right(scores[row], 40, table[row], seen)), seen


def test_a_padded_row_of_negative_length_selects_nothing():
    chosen, _ = selection(torch.zeros(1, 40), 20, [-3])
    assert (chosen == -1).all()


def test_scores_in_parts_of_bounded_memory(monkeypatch):
    """Some queries at a time where all scores would not fit: the same selection."""
    rng = torch.Generator().manual_seed(0)
    tokens, length, topk = 21, 90, 16
    cache = LayerCache(
        k=torch.zeros(8, PAGE, 1, 48), v=None, index=torch.randn(8, PAGE, 32, generator=rng)
    )
    view = CacheView(
        page_table=torch.tensor([[3, 1, 7, 2, 5, 4], [6, 0, 0, 0, 0, 0]], dtype=torch.int32),
        seq_lens=torch.tensor([length, 9], dtype=torch.int32),
        out_cache_loc=None,
        max_seq_len=length,
    )
    cu, requests = torch.tensor([0, 18, tokens]).int(), torch.tensor([0] * 18 + [1] * 3).int()
    q, w = torch.randn(tokens, 4, 32, generator=rng), torch.rand(tokens, 4, generator=rng)

    def select():
        return launch.index_topk(q, w, cache, SparsePass(view, cu, requests, queries=18), topk)

    whole = select()
    monkeypatch.setattr(launch, "MOST_SCORES", 5 * length)
    assert torch.equal(select(), whole)
    assert (whole[18:, 9:] == -1).all()


@pytest.mark.parametrize("processors", [0, 1, 64])
def test_a_selection_in_parts(processors):
    """However its keys are cut, a query attends to the same; empty parts weigh nothing."""
    rng = torch.Generator().manual_seed(1)
    latents = torch.randn(30, PAGE, 1, 48, generator=rng)
    layer = AttentionLayer(
        layer_id=0, num_q_heads=3, num_kv_heads=1, head_dim=48, v_head_dim=32, scale=0.2
    )
    q, counts = torch.randn(4, 3, 48, generator=rng), [300, 129, 1, 0]
    slots = torch.full((4, 300), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        slots[row, :count] = torch.randperm(480, generator=rng)[:count].int()
    out, lse = torch.full((4, 3, 32), torch.nan), torch.full((4, 3), torch.nan)
    cache = LayerCache(k=latents, v=None)
    more = {"processors": processors, "launchers": {}}
    attention = launch.Attention.of(q, layer, cache, slots, out, lse, **more)
    attention.run(q, cache, slots, out, lse)
    for row, count in enumerate(counts):
        keys = latents.view(-1, 48)[slots[row, :count].long()].double()
        scores = q[row].double() @ keys.T * 0.2
        torch.testing.assert_close(lse[row].double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
        want = scores.softmax(-1) @ keys[:, :32] if count else torch.zeros(3, 32).double()
        torch.testing.assert_close(out[row].double(), want, atol=1e-5, rtol=1e-5)


def test_prompts_of_all_lengths_run_the_kernels_of_a_warm_up(monkeypatch):
    """A kernel is compiled per set of constants; none of them may follow a length."""
    constants = set()

    class Recorded:
        def __init__(self, name, count):
            self.name, self.count = name, count

        def __getitem__(self, grid):
            return lambda *args, **how: constants.add((self.name, args[-self.count :]))

    monkeypatch.setattr(scoring, "index_scores", Recorded("scores", 2))
    monkeypatch.setattr(selecting, "select_topk", Recorded("topk", 4))
    cache = LayerCache(k=torch.zeros(1, 64, 1, 48), v=None, index=torch.zeros(1, 64, 16))

    def compiled(lengths, queries=1):
        constants.clear()
        for length in lengths:
            lens, table = torch.tensor([length]).int(), torch.zeros(1, 1).int()
            view = CacheView(
                page_table=table, seq_lens=lens, out_cache_loc=None, max_seq_len=length
            )
            ends, request = torch.tensor([0, 1]).int(), torch.zeros(1).int()
            q, w = torch.zeros(1, 4, 16), torch.zeros(1, 4)
            inputs = SparsePass(view, ends, request, queries=queries)
            launch.index_topk(q, w, cache, inputs, 2048)
        return {*constants}

    assert len(compiled([128, 1128, 2128])) == 2
    assert compiled([128, 1128, 2128]) == compiled([1, 17, 300, 2048, 2049, 4097, 70_000])
    by_queries = [frozenset(compiled([2128], n)) for n in range(1, 300)]
    assert len({*by_queries}) == 4
    assert by_queries[63:] == by_queries[16:17] * 236


@pytest.mark.parametrize("queries", [1, 20])
def test_fp8_keys_with_infinities_and_nans_score_as_in_torch(queries):
    """All their products are NaN, and relu of these is 0: they are not the best."""
    rng, topk, length = torch.Generator().manual_seed(3), 8, 60
    keys, slots = torch.randn(length, 32, generator=rng), torch.arange(PAGE, PAGE + length)
    keys[3, 5], keys[7, 0], keys[59, 31] = torch.inf, torch.nan, -torch.inf
    cache = LayerCache(
        k=torch.zeros(5, PAGE, 1, 48), v=None, index=torch.zeros(5, PAGE * 36, dtype=torch.uint8)
    )
    write_index(cache, keys, slots)
    q = torch.randn(queries, 3, 32, generator=rng)
    w = torch.rand(queries, 3, generator=rng)
    view = CacheView(
        page_table=torch.arange(1, 5).int()[None], seq_lens=torch.tensor([length]).int(),
        out_cache_loc=None, max_seq_len=length,
    )  # fmt: skip
    ends, requests = torch.tensor([0, queries]).int(), torch.zeros(queries).int()
    inputs = SparsePass(view, ends, requests, queries=queries)
    chosen = launch.index_topk(q, w, cache, inputs, topk)
    scores = sparse.index_scores(q, w, read_index(cache, slots, torch.float32))
    best = sparse.best(scores, torch.arange(length - queries, length), topk)
    assert torch.equal(chosen, (best + PAGE).int())
    assert scores[:, [3, 7, 59]].eq(0).all()


@pytest.mark.parametrize("queries", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("keys", [torch.bfloat16, torch.float16, torch.float32])
def test_keys_are_not_rounded_to_the_dtype_of_queries(queries, keys):
    """Scores that lie near each other keep their order, as in torch_native's float32."""
    rng, topk, length = torch.Generator().manual_seed(5), 8, 250
    index = 1 + torch.randn(17, PAGE, 32, generator=rng).mul(2e-3)
    cache = LayerCache(k=torch.zeros(17, PAGE, 1, 48), v=None, index=index.to(keys))
    view = CacheView(
        page_table=torch.arange(1, 17).int()[None], seq_lens=torch.tensor([length]).int(),
        out_cache_loc=None, max_seq_len=length,
    )  # fmt: skip
    q = torch.rand(1, 3, 32, generator=rng).add(0.5).to(queries)
    w = torch.rand(1, 3, generator=rng)
    inputs = SparsePass(view, torch.tensor([0, 1]).int(), torch.zeros(1).int(), queries=1)
    chosen = launch.index_topk(q, w, cache, inputs, topk)
    slots = torch.arange(PAGE, PAGE + length)
    products = q[0].double() @ read_index(cache, slots, torch.float32).double().T
    scores = (w[0].double()[:, None] * products.clamp(min=0)).sum(0)
    best = scores.argsort(descending=True, stable=True)[:topk].sort().values
    assert chosen[0].tolist() == (best + PAGE).tolist()


def test_fp8_latents_beyond_fp16_are_its_largest_number():
    """64,000 is stored as 65,536, which is infinite in fp16: all outputs were NaN."""
    latents = torch.randn(20, 1, 144, generator=torch.Generator().manual_seed(7))
    latents[:, :, 5] = 64000.0
    layer = AttentionLayer(
        layer_id=0, num_q_heads=2, num_kv_heads=1, head_dim=144, v_head_dim=128, scale=1e-5,
        index_topk=16,
    )  # fmt: skip
    pool = KVPool(
        [layer], num_pages=3, page_size=PAGE, kv_cache_dtype="fp8_e4m3", kind="dsa", index_dim=8
    )
    cache, slots = pool.layer(0), torch.arange(PAGE, PAGE + 20)
    write_kv(cache, latents.half(), None, slots)
    q, chosen = torch.randn(3, 2, 144).half(), slots[:16].int().expand(3, 16).contiguous()
    out, lse = torch.empty(3, 2, 128).half(), torch.empty(3, 2)
    launch.Attention.of(q, layer, cache, chosen, out, lse, processors=1, launchers={}).run(
        q, cache, chosen, out, lse
    )
    assert out.isfinite().all()
    assert (out[..., 5] == 65504).all()
    view = CacheView(
        page_table=torch.arange(1, 3).int()[None], seq_lens=torch.tensor([20]).int(),
        out_cache_loc=None, max_seq_len=20,
    )  # fmt: skip
    selected = gather.Selected(chosen, {}, cache, torch.float16)
    for source in (selected, gather.Pages(chosen, {}, view, cache, torch.float16)):
        brought, places, *_ = source.bring(cache, chosen)
        assert (brought.view(-1, 144)[places[0].long(), 5] == 65504).all()


@pytest.mark.parametrize("queries", [[1, 1], [70, 9]])
@pytest.mark.parametrize("span", [128, 256])
def test_fp8_is_scored_as_it_is_stored(queries, span, monkeypatch):
    """Tokens of some requests pass by keys, or spans of keys by one; no more is written."""
    monkeypatch.setattr(scoring, "SPAN", span)
    rng, topk, heads, dim = torch.Generator().manual_seed(3), 16, 3, 32
    seen, tokens = [300, 40], sum(queries)
    keys = torch.randn(24, PAGE, dim, generator=rng).to(torch.float8_e4m3fn)
    scales = torch.rand(24, PAGE, generator=rng) + 0.5
    planes = (keys.view(torch.uint8).flatten(1), scales.view(torch.uint8))
    cache = LayerCache(k=torch.zeros(24, PAGE, 1, 48), v=None, index=torch.cat(planes, 1))
    table = torch.randperm(23, generator=rng).int() + 1
    table = torch.stack([table[:19], table[4:].flip(0)])
    lengths = torch.tensor(seen, dtype=torch.int32)
    view = CacheView(page_table=table, seq_lens=lengths, out_cache_loc=None, max_seq_len=300)
    ends = torch.tensor([0, queries[0], tokens]).int()
    requests = torch.tensor([0] * queries[0] + [1] * queries[1]).int()
    q = torch.randn(tokens, heads, dim, generator=rng).to(torch.float8_e4m3fn)
    w = torch.randn(tokens, heads, generator=rng)
    inputs = SparsePass(view, ends, requests, queries=max(queries))
    scores = torch.full((tokens, 300), torch.nan)
    assert scoring.Scoring.of(q, w, cache, inputs, scores, topk, "sm90")[1].constants.NATIVE
    launch.score(q, w, cache, inputs, scores, 0, tokens, topk, arch="sm90")
    for t in range(tokens):
        r = int(requests[t])
        visible = seen[r] - (int(ends[r + 1]) - t) + 1
        position = torch.arange(visible)
        page, inner = table[r][position // PAGE].long(), position % PAGE
        right = q[t].double() @ keys.view(24, PAGE, dim).double()[page, inner].T
        right = (w[t].double()[:, None] * right.clamp(min=0)).sum(0) * scales[page, inner]
        if visible > topk:
            torch.testing.assert_close(scores[t, :visible].double(), right, atol=1e-3, rtol=1e-4)
        assert scores[t, visible:].isnan().all()


@pytest.fixture
def on_hopper(monkeypatch):
    """Let backends attend as on Hopper, by the portable kernel; the list has the ways they took."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from attn_core.backends.triton.sparse import hopper

    ways, create, portable = [], TritonSparse.__init__, launch.Attention.of

    class Gathered:
        """Attends as Hopper's kernel does, over what a source brings."""

        nbytes = 0

        def __init__(self, layer, source, more):
            self.layer, self.source, self.more = layer, source, more
            source.units = 3

        def run(self, q, cache, topk_indices, out, lse):
            latents, slots, counts, _ = self.source.bring(cache, topk_indices)
            tokens = torch.arange(len(slots) + 1, dtype=torch.int32)
            counts, order, first = counts[:, : len(tokens)]
            assert torch.equal(counts[:-1], (slots >= 0).sum(1).int())
            assert counts[-1] == 0
            assert torch.equal(order, tokens)
            assert torch.equal(first, 3 * tokens)
            assert latents.dtype is q.dtype
            if type(self.source) is gather.Selected:
                ways.append("decoded")
            ways.append("gathered")
            cache = LayerCache(k=latents, v=None)
            attention = portable(q, self.layer, cache, slots, out, lse, **self.more)
            attention.run(q, cache, slots, out, lse)

        @classmethod
        def of(cls, q, layer, source, latents, slots, out, lse, **more):
            return cls(layer, source, more)

    def attend(*args, **more):
        ways.append("portable")
        return portable(*args, **more)

    def init(self, config):
        create(self, config)
        self._hopper = SimpleNamespace(takes=hopper.takes, Attention=Gathered)

    monkeypatch.setattr(TritonSparse, "__init__", init)
    monkeypatch.setattr(launch.Attention, "of", attend)
    return ways


@pytest.mark.parametrize(
    ("feature", "dtype"),
    [pytest.param(*x, marks=[pytest.mark.long] * ("prefill" in x[0])) for x in ROUTES],
)
def test_the_way_of_a_check_on_hopper(feature, dtype, on_hopper):
    """What the tests on a device expect to be launched, and that the numbers are right there."""
    spec = load_plugins().get("triton")
    found = plan(spec, parse_device("cuda:sm90"), {"triton": "3.6"}, kinds=("dsa",), passes=1)
    run_check(
        next(p for p in found if (p.check.feature, p.check.needs.dtype) == (feature, dtype)),
        spec,
        torch.device("cpu"),
    )
    way = ROUTES[feature, dtype]
    way = "gathered" if way in ("cut", "pages") else way
    assert {*on_hopper} == {way, *["gathered"] * (way == "decoded")}


def test_a_larger_pool_does_not_take_the_scratch_of_a_smaller_one():
    """Hopper's gathering keeps the place of each page: more pages would be written behind it."""
    few, more, as_many = (
        LayerCache(k=torch.zeros(n, 64, 1, 656, dtype=torch.uint8), v=None, latent_dim=512)
        for n in (4, 400, 4)
    )
    assert stored(few) == stored(as_many) != stored(more)
