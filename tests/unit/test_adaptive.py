"""The dispatcher takes per pass what was measured fastest, over one cache, and nothing else."""

from __future__ import annotations

import sys
import timeit
import types
from dataclasses import replace

import pytest
import torch
from attn_core.backends.torch_native.backend import TorchNative
from attn_core.cache.pool import KVPool
from attn_core.costs.model import CostModel
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form, Pass
from attn_core.costs.table import Cell, Table, bucket_of, table
from attn_core.costs.workload import Workload
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.runtime.adaptive import Picker, Pickers, Planned, tables
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.graphs import GraphRunner
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.trace import Trace, size_of
from attn_core.runtime.warmup import warmup
from attn_core.selection.result import Overrides, explain, to_json
from attn_core.selection.solver import select
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from recording import LAYERS, M, batch, make, qkv, recorder

HERE = Device("cpu")
FORM = Form(q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16, page_size=1, dtype="fp32",
            store="fp32")  # fmt: skip
NEEDS = Requirements(
    layers=(LayerRequirements(num_q_heads=4, num_kv_heads=2, head_dim=16),), dtype="fp32"
)
ROW = Capabilities(kind="mha", device="any", dtypes={"fp32"}, kv_dtypes={"fp32"}, priority=1)
SIZES = [Pass.even("decode", b, n) for b in (1, 8, 64) for n in (16, 256, 4096)]
SIZES += [Pass.even("prefill", 1, n, q) for n in (16, 256, 4096) for q in (1, 16, 256) if q <= n]
SIZES += [Pass.even("prefill", 64, 4096, 256)]
WORKLOAD = Workload(prompts={200: 1}, requests={1: 1, 8: 1}, output=16)


def short(x):
    return 10.0 + x.kv_tokens / 50  # quick to start, slow


def long(x):
    return 20.0 + x.kv_tokens / 500  # slow to start, quick: from 556 tokens on


def profile(form=FORM, **times):
    return Profile(
        costs={
            Key(name, "", form, x): Cost(time(x), time(x) * 0.99, time(x) * 1.01, 0.0)
            for name, time in times.items()
            for x in SIZES
        }
    )


def registry(rows=None, create="attn_core.backends.torch_native.backend:TorchNative"):
    rows = rows or {"short": ROW, "long": ROW}
    specs = [BackendSpec(name=n, capabilities=[r], create=create) for n, r in rows.items()]
    return Registry(backends={("softmax", s.name): s for s in specs})


def chosen(needs=NEEDS, overrides=None, rows=None, times=None, form=FORM):
    measured = profile(form, **({"short": short, "long": long} if times is None else times))
    return select(
        needs, HERE, registry(rows), {}, overrides, measured, workload=WORKLOAD, advise=False
    )


@pytest.mark.parametrize(("large", "backend"), [(1, "long"), (3, "short")])
def test_costs_of_few_of_the_requests_leave_the_choice_to_priorities(large, backend):
    """As after a tuning that was cut off: one request was measured, and no batch."""
    rows = {"short": replace(ROW, priority=2), "long": ROW}
    size = Pass.even("decode", 1, 1024)
    costs = {Key(n, "", FORM, size): Cost(us, us, us, 0.0) for n, us in (("short", 9), ("long", 7))}
    workload = Workload(prompts={1000: 1}, requests={1: 1, 64: large}, output=16)
    found = select(
        NEEDS, HERE, registry(rows), {}, None, Profile(costs=costs), workload=workload, advise=False
    )
    assert found.roles["decode"].backend == backend


def test_a_table_has_the_fastest_of_every_measured_bucket():
    rows = [("short", "", False), ("long", "", False)]
    costs, usual = profile(short=short, long=long), Workload(prompts={200: 1}, output=16)
    made = table(CostModel(costs), rows, [FORM], "decode", usual)
    assert made.cells[bucket_of(1, 100, 1)] == Cell(0, (True, False))
    assert made.cells[bucket_of(40, 3000, 40)] == Cell(1, (False, True))
    assert bucket_of(200, 3000, 200) not in made.cells  # nothing was measured there
    assert bucket_of(1, 9000, 1) not in made.cells
    assert made.graphs[1] == 0  # for all lengths of the workload
    assert made.graphs[bucket_of(40, 0, 40)[0]] == 1
    alone = table(CostModel(profile(short=short)), rows, [FORM], "decode", usual)
    assert not alone.cells
    assert not alone.graphs
    other = replace(FORM, page_size=64)  # near, but not measured itself
    assert not table(CostModel(costs), rows, [other], "decode", usual).cells


def test_a_table_knows_that_requests_of_a_pass_differ():
    """`long` is the better one where all requests are as long as the longest, and only there."""
    sizes = [Pass.even("decode", 4, 500)]
    sizes += [replace(sizes[0], kv_tokens=n) for n in (600, 800, 1200, 1600)]
    costs = {
        Key(name, "", FORM, size): Cost(us, us, us, 0.0)
        for size in sizes
        for name, us in (("short", 10.0), ("long", 5.0 if size.kv_tokens == 2000 else 20.0))
    }
    rows = [("short", "", False), ("long", "", False)]
    model, bucket = CostModel(Profile(costs=costs)), bucket_of(4, 500, 4)

    def best(prompts):
        workload = Workload(prompts=prompts, output=16)
        return table(model, rows, [FORM], "decode", workload).cells[bucket].best

    assert best({500: 1}) == 1
    assert best({100: 3, 500: 1}) == 0


@pytest.mark.parametrize(("level", "best"), [("uniform", "light"), ("decode", "quick")])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_verification_that_a_graph_replays_costs_no_launches(mode, level, best):
    """`light` is faster on the device and slower to launch; graphs of decode replay no drafts."""
    times = {"light": (10.0, 50.0), "quick": (20.0, 20.0)}
    many = {"light": (100.0, 50.0), "quick": (20.0, 20.0)}  # the workload has no such batch
    sizes = [replace(x, phase="verify", drafts=4, queries=4 * x.requests) for x in SIZES]
    sizes = [x for x in sizes if x.kv_tokens >= x.queries]
    costs = {
        Key(name, "", FORM, x): Cost(us, us, us, host)
        for x in (*SIZES, *sizes)
        for name, (us, host) in (many if x.requests == 64 else times).items()
    }
    row = replace(ROW, cuda_graph=level, max_verify_topk=1)
    needs = replace(NEEDS, speculation=Speculation(num_draft_tokens=4, mode=mode))
    rows, profile = registry(dict.fromkeys(times, row)), Profile(costs=costs)
    found = select(needs, HERE, rows, {}, None, profile, workload=WORKLOAD, advise=False)
    assert found.backend("verify") == best
    made = tables(found).get("verify")
    assert (made is not None) == (level == "uniform")  # else one backend takes all passes
    if made is not None:
        assert (made.graphs[1], made.graphs[7]) == (0, 1)


@pytest.mark.parametrize(("us", "taken"), [(10.1, 0), (10.4, 1)])
def test_a_captured_batch_is_weighed_as_the_workload_has_it_and_two_percent_count(us, taken):
    """64 requests stand for 64 to 127 where the workload has them; eager passes stay within 5 %."""
    costs = {
        Key(name, "", FORM, Pass.even("decode", n, 500)): Cost(x, x, x, 0.0)
        for n, times in ((64, (us, 10.0)), (95, (10.0, 20.0)))
        for name, x in zip(("short", "long"), times, strict=True)
    }
    rows = [("short", "", True), ("long", "", True)]
    model, bits = CostModel(Profile(costs=costs)), (64).bit_length()

    def made(requests):
        workload = Workload(prompts={492: 1}, requests=requests, output=16)
        return table(model, rows, [FORM], "decode", workload)

    assert made({64: 1}).graphs[bits] == taken
    assert made({64: 2, 96: 1}).graphs[bits] == taken
    assert made({1: 1}).graphs[bits] == 0  # 95, the middle
    assert made({64: 1}).cells[bucket_of(64, 500, 64)].near[0]


def test_the_selection_admits_what_was_measured_and_shares_the_cache():
    found = chosen()
    assert found.backend("decode") == "short"
    assert {r: [c.backend for c in cs] for r, cs in found.alternatives.items()} == {
        "prefill": ["short"] if found.backend("prefill") == "long" else ["long"],
        "decode": ["long"],
    }
    assert "long may take over passes" in explain(found)
    assert to_json(found)["alternatives"]["decode"] == ["long"]


@pytest.mark.parametrize(
    ("change", "roles"),
    [
        ({"needs": replace(NEEDS, deterministic=True), "form": replace(FORM, deterministic=True),
          "rows": dict.fromkeys(("short", "long"), replace(ROW, deterministic=True))}, set()),
        ({"overrides": Overrides(attention_backend="long")}, set()),
        ({"overrides": Overrides(decode_attention_backend="long")}, {"prefill"}),
        ({"overrides": Overrides(prefer=("short",))}, set()),
        ({"times": {"short": short}}, set()),
        ({"times": {}}, set()),
        ({"rows": {"short": ROW, "long": replace(ROW, layouts={"HND"})}}, set()),
        ({"rows": {"short": ROW, "long": replace(ROW, page_sizes={16})}}, set()),
        # a page of layout HND is whole; `long` alone could split one, in its other layout
        ({"rows": {"short": replace(ROW, layouts={"HND"}),
                   "long": replace(ROW, layouts={"HND", "NHD"}, page_sizes={16})},
          "needs": replace(NEEDS, page_size=32)}, set()),
        ({"rows": {"short": ROW, "long": replace(ROW, bans={"short": "no"})}}, set()),
        ({"rows": {"short": ROW, "long": replace(ROW, needs_host_lengths=True)}}, set()),
        ({"rows": {"short": ROW, "long": replace(ROW, requires_finite_padding=True)}},
         {"prefill", "decode"}),
        ({"rows": {"short": replace(ROW, lse=True), "long": ROW}}, set()),
        ({"rows": {"short": replace(ROW, cuda_graph="uniform"), "long": ROW}}, set()),
        ({"rows": {"short": ROW, "long": replace(ROW, phases={Phase.DECODE})}}, {"decode"}),
        ({"needs": replace(NEEDS, speculation=Speculation(mode="decode")),
          "rows": dict.fromkeys(("short", "long"), replace(ROW, max_verify_topk=1))}, {"prefill"}),
    ],
)  # fmt: skip
def test_nothing_is_admitted_that_the_caller_or_the_cache_excludes(change, roles):
    """`short` is the better one of both, so that `long` is what may be admitted."""
    slower = {"short": lambda x: 1.0, "long": lambda x: 2.0}
    found = chosen(**{"times": slower} | change)
    assert found.alternatives.keys() == roles


CELLS = {
    bucket_of(2, 6, 2): Cell(1, (False, True)),
    bucket_of(1, 6, 1): Cell(0, (True, True)),  # almost equal
    bucket_of(4, 6, 4): Cell(0, (True, False)),
}


def picked(picker, requests):
    return picker.pick(bucket_of(requests, 6, requests)).backend.config.name


def test_a_pick_stays_until_another_is_clearly_faster():
    picker = Picker([recorder("a"), recorder("b")], Table(CELLS, {}))
    assert [picked(picker, n) for n in (1, 2, 1, 4, 1)] == ["a", "b", "b", "a", "a"]
    assert picked(picker, 2) == "b"
    assert picked(picker, 64) == "a"  # a size that was not measured: the chosen one
    assert picked(picker, 1) == "b"


def adaptive(by_size=None):
    """Return a dispatcher whose decode passes of two requests go to another backend."""
    _, pre, dec = make()
    other = recorder("other")
    picker = Picker([dec, other], by_size or Table(CELLS, {2: 1}))
    pool = KVPool(LAYERS, num_pages=5, page_size=4, kv_cache_dtype="fp32")
    routes = {"prefill": pre, "decode": dec, "verify": pre, "draft": dec}
    return HybridDispatcher(routes, pool, pickers=Pickers({"decode": picker})), pre, dec, other


def test_a_pass_is_planned_and_run_by_the_backend_that_was_picked():
    dispatcher, pre, dec, other = adaptive()
    b = batch(M.DECODE)
    q, k, v = qkv(2)
    metadata = dispatcher.init_forward_metadata(b)
    assert type(metadata) is Planned
    for layer in LAYERS:
        dispatcher.forward(q, k, v, layer, b, metadata)
    assert [name for name, *_ in other.calls] == ["init_forward_metadata", *["forward_decode"] * 2]
    assert other.calls[1][1][6] == "other.init_forward_metadata"  # its own plan
    assert torch.equal(other.calls[1][1][4][0], k)  # written before
    assert not dec.calls
    draft = batch(M.DRAFT_DECODE)  # no role of a picker
    dispatcher.forward(q, k, v, LAYERS[0], draft, dispatcher.init_forward_metadata(draft))
    assert dec.calls
    extend = batch(M.EXTEND)
    dispatcher.forward(*qkv(4), LAYERS[0], extend, dispatcher.init_forward_metadata(extend))
    assert pre.calls
    assert dispatcher.init_forward_metadata(batch(M.IDLE)) is None


def test_a_captured_pass_keeps_the_backend_that_it_was_captured_with():
    dispatcher, _, dec, other = adaptive()
    dispatcher.init_cuda_graph_state(8, 16)
    b = batch(M.DECODE)
    metadata = dispatcher.init_forward_metadata_capture_cuda_graph(b)
    dispatcher.init_forward_metadata_replay_cuda_graph(b, metadata)
    names = [name for name, *_ in other.calls]
    assert names == [
        "init_cuda_graph_state",
        "init_forward_metadata_capture_cuda_graph",
        "init_forward_metadata_replay_cuda_graph",
    ]
    assert [name for name, *_ in dec.calls] == ["init_cuda_graph_state"]
    assert dispatcher.get_cuda_graph_seq_len_fill_value() == 3
    assert set(dispatcher.captured) >= {dec, other}


@pytest.mark.parametrize("names", [["full"], ["window"], ["group 0", "group 1"], ["chunk"]])
def test_the_longest_request_counts_whatever_its_views_are_called(names):
    """A model whose layers all have a window has no view "full", generate_batch() has groups."""
    one = batch(M.DECODE)
    view = one.views["full"]
    encoder = replace(view, max_seq_len=4096)
    other = replace(one, views={"cross": encoder, **dict.fromkeys(names, view)})
    assert size_of(other) == size_of(one)
    assert size_of(one)[1] == view.max_seq_len.bit_length() > 0


def test_a_pick_takes_as_long_as_some_lookups_and_reads_no_tensor():
    """With the counter, under 40 lookups in a dictionary, mostly 15; both take turns."""
    picker, trace = Picker([recorder("a"), recorder("b")], Table(CELLS, {})), Trace()
    pickers = Pickers({"decode": picker})
    one = batch(M.DECODE)

    def pick(one):
        size = size_of(one)
        route = pickers.pick(M.DECODE, size)
        trace.count("decode", route.backend.config.name, size, False)
        return route

    entries = {(x, 1, 2): x for x in range(20)}

    def lookups():
        for x in range(20):
            entries[x, 1, 2]

    calls = (lambda: pick(one), lookups)
    turns = [[timeit.timeit(call, number=100) for call in calls] for _ in range(140)]
    seconds, of_lookups = map(min, zip(*turns, strict=True))
    assert seconds < 2 * of_lookups
    assert sum(trace.passes().values()) == 14000
    view, names = one.views["full"], ("page_table", "seq_lens", "out_cache_loc")
    views = {"full": replace(view, **{n: getattr(view, n).to("meta") for n in names})}
    own = {n: getattr(one, n).to("meta") for n in ("cu_seqlens_q", "positions")}
    on_meta = replace(one, views=views, **own)
    assert pick(on_meta).backend.config.name == "b"  # a value of a meta tensor raises


class Other(TorchNative):
    """A second backend with the numerics of torch_native, which counts its passes."""

    passes = 0

    def init_forward_metadata(self, batch):
        type(self).passes += 1
        return super().init_forward_metadata(batch)


@pytest.mark.parametrize("graphs", [False, True])
def test_passes_of_any_size_over_one_cache_give_what_one_backend_gives(monkeypatch, graphs):
    module = types.ModuleType("other_backend")
    module.Other = Other
    monkeypatch.setitem(sys.modules, "other_backend", module)
    native = next(
        r
        for r in load_plugins().get("torch_native").capabilities
        if r.kind == "mha" and "fp32" in r.dtypes and Phase.DECODE in r.phases
    )
    rows = {"short": replace(native, create=None, cuda_graph="uniform"), "long": None}
    rows["long"] = replace(rows["short"], create="other_backend:Other")
    found = select(
        NEEDS, HERE, registry(rows), {}, None, profile(short=short, long=long), workload=WORKLOAD,
        advise=False,
    )  # fmt: skip
    layer = AttentionLayer(
        layer_id=0, num_q_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, scale=0.25
    )
    table_of = torch.randperm(16 * 256, generator=torch.Generator().manual_seed(0)).int() + 1
    tables = table_of.view(16, 256)

    def run(adaptive):
        pool = KVPool([layer], num_pages=1 + 16 * 256, page_size=1, kv_cache_dtype="fp32")
        serve = HybridDispatcher.from_selection(
            found, registry(rows), [layer], pool, adaptive=adaptive
        )
        rng, outs = torch.Generator().manual_seed(1), []
        runner = None
        if graphs:
            runner = GraphRunner(serve, batch_sizes=[1, 16], max_seq_len=256)

            def step(b, metadata, q, k, v):
                return serve.forward(q, k, v, layer, b, metadata)

            like = [torch.empty(1, h, 16) for h in (4, 2, 2)]
            runner.capture(M.DECODE, step, inputs=like)
        for b, new, have in ((16, 40, 40), (1, 1, 41), (16, 1, 42), (2, 1, 43), (16, 150, 200)):
            mode = M.DECODE if new == 1 else M.EXTEND
            one = ForwardBatch.build(
                mode, query_lens=[new] * b, seq_lens=[have] * b, page_table=tables[:b], page_size=1
            )
            x = [torch.randn(b * new, h, 16, generator=rng) for h in (4, 2, 2)]
            if runner is not None and runner.fits(one):
                outs.append(runner.replay(one, *x).clone())
            else:
                outs.append(serve.forward(*x, layer, one, serve.init_forward_metadata(one)))
        return outs, serve

    before = Other.passes
    expected, fixed = run(adaptive=False)
    assert not fixed.pickers.items()
    assert Other.passes == before
    got, serve = run(adaptive=True)
    assert Other.passes > before
    assert {role for role, _ in serve.pickers.items()} == {"prefill", "decode"}
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    names = {x.backend for x in serve.passes}
    assert names == {"short", "long"}
    assert sum(serve.passes.values()) == 5
    assert sum(n for x, n in serve.passes.items() if x.captured) == (3 if graphs else 0)


def test_a_warm_up_runs_every_backend_that_may_be_picked():
    dispatcher, pre, dec, other = adaptive()
    warmed = warmup(dispatcher, max_bs=2)
    assert {w.backend for w in warmed} == {"prefiller", "decoder", "other"}
    assert any(name == "forward_decode" for name, *_ in other.calls)
    assert any(name == "forward_decode" for name, *_ in dec.calls)
    assert pre.calls
    assert not dispatcher.passes
