"""fa3 over the emulated libraries: the suite, the conventions, what is refused, what would fail."""

import dataclasses
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.page_table import pad_page_table
from attn_core.cache.pool import KVPool
from attn_core.errors import BackendError, UnsupportedError
from attn_core.ops.kv import write_kv
from attn_core.ops.quant import to_fp8
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.case_catalog import random_tree
from attn_core.testing.cases import Case
from attn_core.testing.inputs import make_layer
from attn_core.testing.oracle import tree_mask, visible_keys
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed

SGL, UPSTREAM = {"sglang-kernel": "0.4.5"}, {"flash-attn-3": "3.0.0b1"}
HERE = Path(__file__).parent
LAYER = make_layer(Case(feature="", query_lens=(), seq_lens=()), torch.Generator().manual_seed(0))


class TestFA3(BackendSuite):
    name = "fa3"
    kinds = ("mha",)
    device = "cuda:sm90"
    on = "cpu"
    libraries = SGL
    passes = 60


@pytest.mark.usefixtures("upstream")
class TestUpstreamsBuild(BackendSuite):
    name = "fa3"
    kinds = ("mha",)
    device = "cuda:sm90"
    on = "cpu"
    libraries = UPSTREAM
    passes = 30
    reduced = True


@pytest.mark.usefixtures("ampere")
@pytest.mark.long  # the same wrapper again
class TestAmpere(BackendSuite):
    name = "fa3"
    kinds = ("mha",)
    device = "cuda:sm80"
    on = "cpu"
    libraries = SGL
    passes = 30
    reduced = True


@pytest.fixture
def upstream(vendor, monkeypatch):
    """Let flash-attn-3 be found as well."""
    monkeypatch.syspath_prepend(str(HERE / "flash_attn_3_installed"))


@pytest.fixture
def ampere(vendor, monkeypatch):
    import fa3_leaf

    monkeypatch.setattr(fa3_leaf, "ARCH", 80)


def spec():
    return load_plugins().get("fa3")


def row(kind="mha", *, sinks=False, fp8=False):
    requested = (kind, sinks, fp8)
    return next(
        r for r in spec().capabilities if (r.kind, r.sinks, r.quantizes_q_to_fp8) == requested
    )


def backend_of(*layers, **more):
    kwargs = {"row": row(sinks=any(x.sinks is not None for x in layers))}
    kwargs |= {"page_size": 16, "dtype": "bf16", "kv_cache_dtype": "bf16", **more}
    config = BackendConfig(
        name="fa3", layers=layers, device=torch.device("cpu"), arch="sm90", **kwargs
    )
    return create_backend(spec(), config)


def checks(*wanted, kind="mha", **options):
    """Yield the checks whose name begins with one of `wanted`."""
    result = plan(spec(), parse_device("cuda:sm90"), SGL, kinds=(kind,), passes=10, **options)
    return [p for p in result if p.row and p.check.id.startswith(wanted)]


def ask(*wanted, **options):
    requested = checks(*wanted, **options)
    assert requested
    for planned in requested:
        run_check(planned, spec(), torch.device("cpu"), arch="sm90")


class Serving:
    """A pool with some requests, and a backend over it."""

    def __init__(self, *layers, seq_lens=(40, 7), dtype="bf16", store="bf16", scales=None, **more):
        page_size = more.setdefault("page_size", 16)
        counts = [-(-n // page_size) for n in seq_lens]
        ids = iter(range(1, sum(counts) + 1))
        rows = [[next(ids) for _ in range(c)] for c in counts]
        self.table, self.lens = pad_page_table(rows), seq_lens
        self.layers, self.page_size = layers, page_size
        self.pool = KVPool(
            layers,
            num_pages=sum(counts) + 1,
            page_size=page_size,
            kv_cache_dtype=store,
            scales=scales,
        )
        rng = torch.Generator().manual_seed(3)
        slots = self.batch(ForwardMode.EXTEND, seq_lens).views["full"].out_cache_loc
        self.new = {}
        for x in layers:
            k = torch.randn(len(slots), x.num_kv_heads, x.head_dim, generator=rng)
            v = torch.randn(len(slots), x.num_kv_heads, x.v_head_dim, generator=rng)
            write_kv(self.pool.layer(x.layer_id), k, v, slots)
            self.new[x.layer_id] = (k, v)
        self.q = torch.randn(64, LAYER.num_q_heads, 64, generator=rng).to(TORCH_DTYPES[dtype])
        self.backend = backend_of(*layers, dtype=dtype, kv_cache_dtype=store, **more)

    def batch(self, mode, query_lens, spec=None):
        return ForwardBatch.build(
            mode,
            query_lens=query_lens,
            seq_lens=self.lens,
            page_table=self.table,
            page_size=self.page_size,
            spec=spec,
        )

    def decode(self, layer, metadata=None, **more):
        batch = self.batch(ForwardMode.DECODE, [1] * len(self.lens))
        if metadata is None:
            metadata = self.backend.init_forward_metadata(batch)
        cache, q = self.pool.layer(layer.layer_id), self.q[: len(self.lens)]
        return self.backend.forward(q, None, None, layer, cache, batch, metadata, **more)


@pytest.fixture
def calls(monkeypatch):
    """Record every call of the library, as (name, keyword arguments)."""
    from sgl_kernel import flash_attn

    made = []

    def watched(name):
        real = getattr(flash_attn, name)

        def call(*positional, **named):
            made.append((name, named))
            return real(*positional, **named)

        import functools

        monkeypatch.setattr(flash_attn, name, functools.wraps(real)(call))

    for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func", "get_scheduler_metadata"):
        watched(name)
    return made


def named(calls, name):
    return [kwargs for called, kwargs in calls if called == name]


def test_one_schedule_per_pass_serves_all_layers_of_a_kind(calls):
    layers = [replace(LAYER, layer_id=i) for i in range(3)]
    capped = replace(LAYER, layer_id=3, logit_cap=2.0)  # the tiles of a soft cap are others
    serving = Serving(*layers, capped)
    batch = serving.batch(ForwardMode.DECODE, [1, 1])
    metadata = serving.backend.init_forward_metadata(batch)
    for layer in serving.layers:
        serving.decode(layer, metadata)
    assert len(named(calls, "get_scheduler_metadata")) == 2
    used = [x["scheduler_metadata"] for x in named(calls, "flash_attn_with_kvcache")]
    assert used[0] is used[1] is used[2] is not used[3]


def test_layers_share_no_schedule_of_several_queries(calls):
    """sglang-kernel 0.4.5 writes out of bounds there, once keys are split."""
    serving = Serving(LAYER)
    metadata = serving.backend.init_forward_metadata(serving.batch(ForwardMode.EXTEND, [5, 1]))
    assert not named(calls, "get_scheduler_metadata")
    assert [x.arguments["scheduler_metadata"] for plan in metadata.values() for x in plan] == [None]


def test_conventions_of_the_library(calls):
    """A window counts the tokens before the query's own; sinks are bf16; out is filled in place."""
    layer = replace(LAYER, sliding_window=17, logit_cap=3.0, sinks=torch.randn(4))
    serving = Serving(layer)
    out = serving.q.new_empty(2, 4, 64)
    actual, lse = serving.decode(layer, out=out, return_lse=True)
    [kwargs] = named(calls, "flash_attn_with_kvcache")
    assert kwargs["window_size"] == (16, 0)
    assert kwargs["sinks"].dtype == torch.bfloat16
    assert (kwargs["softcap"], kwargs["num_splits"]) == (3.0, 0)
    assert actual is out
    assert kwargs["out"] is out
    assert lse.shape == (2, 4)
    assert lse.dtype == torch.float32


def test_a_row_without_determinism_splits_as_the_library_likes(calls):
    serving = Serving(LAYER, deterministic=True)
    serving.decode(LAYER)
    assert {kwargs["num_splits"] for _, kwargs in calls} == {1}


def test_a_tree_is_two_calls_and_one_with_a_window(calls):
    spec = SpecInfo(
        topk=2, num_draft_tokens=4, tree_mask=torch.stack([tree_mask((-1, 0, 0, 1))] * 2)
    )
    layer = replace(LAYER, layer_id=1, sliding_window=9)
    serving = Serving(LAYER, layer, page_size=64)
    batch = serving.batch(ForwardMode.TARGET_VERIFY, [4, 4], spec)
    metadata = serving.backend.init_forward_metadata(batch)
    for x in serving.layers:
        cache = serving.pool.layer(x.layer_id)
        serving.backend.forward(serving.q[:8], None, None, x, cache, batch, metadata)
    prefix, drafts, both = named(calls, "flash_attn_with_kvcache")
    assert prefix["cache_seqlens"].tolist() == [36, 3]
    assert prefix["page_table"] is batch.views["full"].page_table
    assert drafts["cache_seqlens"].tolist() == [1, 2, 2, 3] * 2
    assert both["cache_seqlens"].tolist() == [9] * 4 + [4, 5, 5, 6]
    for x in (drafts, both):
        assert x["cu_seqlens_q"].tolist() == list(range(9))
        assert x["window_size"] == (-1, -1)
    assert not prefix["causal"]


def shuffled(parents, rng):
    """Return a tree whose drafts are named in any order, a child before its parent too."""
    order = torch.randperm(len(parents), generator=rng).tolist()
    place = {draft: i for i, draft in enumerate(order)} | {-1: -1}
    return tuple(place[parents[draft]] for draft in order)


@pytest.mark.parametrize("window", [None, 1, 2, 4, 20, 300])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("itself", [True, False])
def test_what_a_draft_sees(window, seed, itself):
    from attn_nvidia.common.tree_page_table import seen_slots

    rng, n, lens, page_size = torch.Generator().manual_seed(seed), 7, (60, 7, 33, 8), 8
    table = torch.randperm(40, generator=rng)[: 4 * 9].view(4, 9).int()
    trees = [shuffled(random_tree(n, 10 * seed + b), rng) for b in range(4)]
    masks = torch.stack([tree_mask(t) for t in trees])
    if not itself:
        masks &= ~torch.eye(n, dtype=torch.bool)
    width = n if window is None else max(n, min(window, 60))
    slots, counts = seen_slots(
        table,
        torch.tensor(lens, dtype=torch.int32) - n,
        masks,
        page_size,
        window=window,
        width=width,
    )
    assert slots.shape == (4 * n, width + 1)
    assert slots.dtype == counts.dtype == torch.int32
    for b, (s, parents) in enumerate(zip(lens, trees, strict=True)):
        for i in range(n):
            seen = visible_keys(i, n, s, causal=True, window=window, parents=parents)
            if window is None:
                seen = [j for j in seen if j >= s - n]
            if not itself:
                seen = [j for j in seen if j != s - n + i]
            want = {int(table[b, j // page_size]) * page_size + j % page_size for j in seen}
            at = b * n + i
            assert counts[at] == len(want)
            assert set(slots[at, : counts[at]].tolist()) == want


def test_ragged_without_keys_is_empty_not_infinite():
    none = torch.zeros(0, 2, 64, dtype=torch.bfloat16)
    lengths = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
    q = torch.randn(3, 4, 64).bfloat16()
    for layer, empty in ((LAYER, -torch.inf), (replace(LAYER, sinks=torch.ones(4)), 1.0)):
        backend = backend_of(layer)
        out, lse = backend.forward_ragged(
            q, none, none, layer, *lengths, 3, 0, causal=False, return_lse=True
        )
        assert not out.any()
        assert (lse == empty).all()


def test_fp8_rounds_the_queries_and_scales_per_request_and_head():
    """The row says so (quantizes_q_to_fp8): the suite's budget for it rounds them as well."""
    serving = Serving(
        LAYER,
        store="fp8_e4m3",
        scales={0: (0.4, 1.7)},
        row=row(fp8=True),
    )
    actual = serving.decode(LAYER).float()
    k, v = serving.new[0]
    q = to_fp8(serving.q[:2], torch.float8_e4m3fn, 1.0).float()
    at = 0
    for b, n in enumerate(serving.lens):
        keys, values = (
            (to_fp8(x[at : at + n], torch.float8_e4m3fn, s).float() * s).repeat_interleave(2, 1)
            for x, s in ((k, 0.4), (v, 1.7))
        )
        at += n
        p = torch.einsum("hd,khd->hk", q[b], keys).mul(LAYER.scale).softmax(-1)
        right = torch.einsum("hk,khd->hd", p, values)
        # e4m3 has 3 bits behind the point, and so have the probabilities
        assert (actual[b] - right).abs().max() < 2**-4 * right.abs().max()


def test_the_libraries_in_their_order(upstream, monkeypatch):
    from attn_nvidia.fa3.library import load

    (both,), (one,) = row().requires, row(sinks=True).requires
    assert load(both).distribution == "flash-attn-3"
    assert load(one).distribution == "sglang-kernel"
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "flash_attn_3_installed" not in p])
    assert load(both).distribution == "sglang-kernel"
    with pytest.raises(BackendError, match=r"fa3 needs sglang-kernel>=9, here: sglang-kernel \d"):
        load("sglang-kernel>=9")


def test_refusals():
    serving = Serving(LAYER)
    with pytest.raises(UnsupportedError, match="window of 4 without causal order"):
        backend_of(replace(LAYER, sliding_window=4, is_causal=False))
    with pytest.raises(BackendError, match="was not planned"):
        serving.decode(replace(LAYER, view="window"))
    with pytest.raises(UnsupportedError, match="topk_indices"):
        serving.decode(LAYER, topk_indices=torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="sinks"):
        serving.decode(replace(LAYER, sinks=torch.randn(4)))
    with pytest.raises(UnsupportedError, match=r"num_q_heads 128 \(supports"):
        backend_of(replace(LAYER, num_q_heads=128, sinks=torch.randn(128)))


def test_a_layer_that_the_config_does_not_list_runs_where_its_kind_is_planned():
    serving = Serving(LAYER)
    twin = replace(LAYER, scale=LAYER.scale / 2)
    assert not torch.equal(serving.decode(LAYER), serving.decode(twin))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"page_table": torch.int64}, RuntimeError, "page_table must have dtype torch.int32"),
        ({"cache_seqlens": torch.int64}, RuntimeError, "seqused_k must have dtype torch.int32"),
        ({"sinks": torch.float32}, RuntimeError, "sinks must have dtype bfloat16"),
        ({"out": torch.float32}, RuntimeError, "same dtype as inputs"),
    ],
)
def test_the_emulation_refuses_what_the_library_refuses(change, error, message, calls):
    from sgl_kernel import flash_attn

    layer = replace(LAYER, sinks=torch.randn(4))
    serving = Serving(layer)
    serving.decode(layer, out=serving.q.new_empty(2, 4, 64))
    [kwargs] = named(calls, "flash_attn_with_kvcache")
    [(name, dtype)] = change.items()
    cache, q = serving.pool.layer(0), serving.q[:2]
    with pytest.raises(error, match=message):
        flash_attn.flash_attn_with_kvcache(
            q, cache.k, cache.v, **kwargs | {name: kwargs[name].to(dtype)}
        )


def _window_too_wide(monkeypatch):
    monkeypatch.setattr(
        "attn_nvidia.fa3.plan.window_of", lambda w: (-1, -1) if w is None else (w, 0)
    )


def _stale_schedule(monkeypatch):
    from attn_nvidia.fa3.backend import FA3

    monkeypatch.setattr(FA3, "init_forward_metadata_replay_cuda_graph", lambda *a: None)


def _sinks_twice(monkeypatch):
    from attn_nvidia.fa3 import plan as fa3_plan

    real = fa3_plan.Call
    monkeypatch.setattr(fa3_plan, "Call", lambda *a, **k: real(*a, **k | {"last": True}))


def _merge_in_log2(monkeypatch):
    from attn_core.ops.merge import merge_states

    monkeypatch.setattr(
        "attn_nvidia.fa3.backend.merge_states", lambda out, lse: merge_states(out, lse / 0.6931)
    )


def _one_token_too_many(monkeypatch):
    from attn_nvidia.fa3 import plan as fa3_plan

    real = fa3_plan.seen_slots

    def more(*a, **k):
        table, lengths = real(*a, **k)
        return table, lengths + 1

    monkeypatch.setattr(fa3_plan, "seen_slots", more)


@pytest.mark.parametrize(
    ("mistake", "wanted"),
    [
        (_window_too_wide, ("window-4-bf16", "window-decode-bf16")),
        (_stale_schedule, ("graph-decode", "graph-tree")),
        (_merge_in_log2, ("verify-tree-bf16",)),
        (_one_token_too_many, ("verify-tree-bf16",)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_mistake_in_the_wrapper_is_seen(mistake, wanted, monkeypatch):
    ask(*wanted)
    mistake(monkeypatch)
    for planned in checks(*wanted):
        with pytest.raises(CheckFailed):
            run_check(planned, spec(), torch.device("cpu"), arch="sm90")


def test_sinks_of_a_tree_are_counted_once(monkeypatch):
    """Every tree of the suite with sinks has a window too, and so one call: ask without it."""
    requested = [
        dataclasses.replace(LAYER, sinks=torch.full((4,), 2.0)),
        dataclasses.replace(LAYER, sinks=None),
    ]
    mask = torch.stack([tree_mask((-1, 0, 0, 1))] * 2)
    spec_info = SpecInfo(topk=2, num_draft_tokens=4, tree_mask=mask)

    def run(layer):
        serving = Serving(layer)
        batch = serving.batch(ForwardMode.TARGET_VERIFY, [4, 4], spec_info)
        metadata = serving.backend.init_forward_metadata(batch)
        return serving.backend.forward(
            serving.q[:8], None, None, layer, serving.pool.layer(0), batch, metadata,
            return_lse=True,
        )  # fmt: skip

    (_, with_sinks), (_, without) = map(run, requested)
    right = torch.logaddexp(without, torch.tensor(2.0))
    assert torch.allclose(with_sinks, right, atol=1e-5)
    _sinks_twice(monkeypatch)
    assert not torch.allclose(run(requested[0])[1], right, atol=1e-2)


def test_a_sink_far_above_the_scores_is_their_log_sum_exp():
    """The kernel's sum is infinite from e^88 on; its output, zeros, is right."""
    layer = replace(LAYER, sinks=torch.tensor([150.0, 89.0, 2.0, -3.0]))
    (out, lse), (_, bare) = (
        Serving(x).decode(x, return_lse=True) for x in (layer, replace(LAYER, sinks=None))
    )
    torch.testing.assert_close(lse, torch.logaddexp(bare, layer.sinks))
    assert not out[:, 0].any()


def test_a_sink_far_above_the_drafts_leaves_the_prefix_its_weight():
    """Keys of the prefix score 120, drafts 0, and the sink, which goes with the drafts, is 100."""
    layer = replace(LAYER, sinks=torch.full((4,), 100.0))
    serving = Serving(layer)
    mask = torch.stack([tree_mask((-1, 0, 0, 1))] * 2)
    spec_info = SpecInfo(topk=2, num_draft_tokens=4, tree_mask=mask)
    batch, cache = (
        serving.batch(ForwardMode.TARGET_VERIFY, [4, 4], spec_info),
        serving.pool.layer(0),
    )
    cache.k.fill_(120 / layer.head_dim / layer.scale)
    cache.k.flatten(0, 1)[batch.views["full"].out_cache_loc] = 0
    out, lse = serving.backend.forward(
        torch.ones(8, 4, layer.head_dim).bfloat16(), None, None, layer, cache, batch,
        serving.backend.init_forward_metadata(batch), return_lse=True,
    )  # fmt: skip
    values = serving.new[0][1].split([40, 7])
    for actual, total, v in zip(out.split(4), lse.split(4), values, strict=True):
        prefix = v[:-4].mean(0).repeat_interleave(2, 0)
        torch.testing.assert_close(actual.float(), prefix.expand(4, -1, -1), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(total, torch.full((4, 4), 120 + math.log(len(v) - 4)))


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("parents", [None, (-1,), (-1, 0, 0, 1)])
def test_a_replay_of_one_request(parents, window):
    """Tensors of size 1: lengths, a page table of one column, a tree of one draft."""
    layer, page_size, long, short = replace(LAYER, sliding_window=window), 64, 40, 23
    serving = Serving(layer, seq_lens=(long,), page_size=page_size)
    tree = None
    if parents is not None:
        mask = tree_mask(parents)[None]
        tree = SpecInfo(topk=2, num_draft_tokens=len(parents), tree_mask=mask)
    mode = ForwardMode.DECODE if tree is None else ForwardMode.TARGET_VERIFY
    n = len(parents or (0,))
    backend, cache, q = serving.backend, serving.pool.layer(0), serving.q[:n]

    def run(batch, metadata):
        return backend.forward(q, None, None, layer, cache, batch, metadata, return_lse=True)

    static = serving.batch(mode, [n], tree)
    metadata = backend.init_forward_metadata_capture_cuda_graph(static)
    serving.lens = (short,)
    fresh = serving.batch(mode, [n], tree)
    static.views["full"].seq_lens.copy_(fresh.views["full"].seq_lens)
    static.positions.copy_(fresh.positions)
    backend.init_forward_metadata_replay_cuda_graph(static, metadata)
    right = run(fresh, backend.init_forward_metadata(fresh))
    for actual, expected in zip(run(static, metadata), right, strict=True):
        assert torch.equal(actual, expected)
