"""Keys that neighbouring requests share are read once: the plan on the device, and the numbers."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from attn_core.costs.shared_prefix import shared_granule, shared_tile_rows
from attn_core.runtime.batch import ForwardMode
from attn_core.runtime.layer import LayerGroup

pytest.importorskip("triton")

from attn_core.backends.triton import scheduler
from attn_core.backends.triton import shared as SHARED
from attn_core.backends.triton.schedule import Cuts
from attn_core.backends.triton.shared import TILE_UNITS, Sharing, sharing_of
from attn_core.backends.triton.tuning import Launch
from sharers import (
    GRANULE,
    Sharers,
    expected_spans,
    planned_spans,
    queries_of,
    random_trees,
    verify,
)
from triton_passes import DEVICE, make_layer

M = ForwardMode


@pytest.fixture(autouse=True)
def small_granule(monkeypatch):
    """Share from 64 keys on, and split short requests wherever this runs."""
    monkeypatch.setattr(SHARED, "shared_granule", lambda *args: GRANULE)
    monkeypatch.setattr(scheduler, "unsplit_keys_on", lambda device: 0)


def attend(sharers, queries=1, mode=M.DECODE, spec=None, trees=None, **config):
    """Attend with groups and check against float64; return the split that was planned."""
    rows = queries if isinstance(queries, list) else [queries] * len(sharers.lengths)
    batch = sharers.batch(rows, mode=mode, spec=spec)
    q = sharers.draw(sum(rows))
    backend = sharers.backend(shared_prefix=True, **config)
    plan = backend.init_forward_metadata(batch)
    got = backend.forward(q, None, None, sharers.layer, sharers.cache, batch, plan, return_lse=True)
    sharers.check(got, q, rows, trees=trees)
    return next(iter(plan.values())).split


@pytest.fixture
def large_tiles(monkeypatch):
    """Let requests that share fill tiles of 128 rows, as where Hopper's kernel has two halves."""
    choose = scheduler.decode_launch

    def launch(*args, shared, **more):
        chosen = choose(*args, shared=shared, **more)
        return replace(chosen, block_m=128) if shared else chosen

    monkeypatch.setattr(scheduler, "decode_launch", launch)


CASES = {
    "all": ([200, 230, 257, 193], [0, 8, 8, 8]),
    "one alone": ([200, 230, 90, 257], [0, 9, 0, 0]),
    "equal": ([240, 240, 240], [0, 15, 15]),
    "two groups": ([200, 190, 150, 180, 171], [0, 8, 0, 5, 5]),
    "levels": ([300, 280, 310, 290, 330, 260], [0, 12, 4, 12, 4, 9]),
    "three levels": ([400, 400, 400, 400], [0, 20, 12, 4]),
    "nothing": ([200, 190, 150], [0, 0, 0]),
    "too little": ([200, 190, 150], [0, 3, 3]),
    "many": ([80 + 3 * b for b in range(19)], [0, *[4] * 18]),
}


@pytest.mark.parametrize("name", CASES)
def test_groups_are_found_and_read_right(name):
    lengths, shared = CASES[name]
    sharers = Sharers(make_layer(1, dim=32), lengths, shared, page=16)
    split = attend(sharers)
    groups, begins = planned_spans(split, len(lengths))
    expected = expected_spans(sharers, 1)
    assert groups == expected
    assert bool(expected) == (name not in ("nothing", "too little"))
    for b, begin in enumerate(begins):
        ends = [end for first, n, _, end, _ in expected if first <= b < first + n]
        assert begin == max(ends, default=0)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("processors", [1, 5, 40])
@pytest.mark.parametrize("name", CASES)
def test_drafts_share_tiles_of_128_rows(name, processors):
    lengths, shared = CASES[name]
    sharers = Sharers(make_layer(2, 4, 32), lengths, shared, page=16)
    trees = random_trees(len(lengths), 8)
    spec = verify(8, trees)
    split = attend(sharers, 8, M.TARGET_VERIFY, spec, trees, multiprocessors=processors)
    assert split.cuts.launch.block_m == 128
    assert planned_spans(split, len(lengths))[0] == expected_spans(sharers, 8)


@pytest.mark.parametrize("heads", [(2, 4, 32), (1, 7, 64), (3, 1, 16)])
@pytest.mark.parametrize("page", [1, 8, 48, 64])
def test_pages_and_heads(heads, page):
    count, group, dim = heads
    keys = {1: 150, 8: 19, 48: 3, 64: 2}[page]
    sharers = Sharers(
        make_layer(count, group, dim), [200, 230, 160, 257], [0, keys, keys, keys], page=page
    )
    split = attend(sharers)
    assert planned_spans(split, 4)[0] == [(0, 4, 0, 128, 1)]


@pytest.mark.parametrize(("n", "tree"), [(3, False), (8, True)])
def test_drafts_are_verified_after_what_is_shared(n, tree):
    """Drafts never are shared: the last page that all share may hold some."""
    layer = make_layer(1, 7 if n == 3 else 4, 32)
    sharers = Sharers(layer, [134, 140, 130, 270], [0, 8, 8, 4], page=16)
    trees = random_trees(4, n) if tree else None
    split = attend(sharers, n, M.TARGET_VERIFY, verify(n, trees), trees)
    groups, _ = planned_spans(split, 4)
    assert groups == expected_spans(sharers, n)
    assert groups[0][3] == 64, "the context of one of them has no 128 tokens"


EXTENDS = {
    "short ones": ([200, 230, 257, 193], [0, 8, 8, 8], [3, 1, 5, 2]),
    "levels": ([300, 280, 310, 290, 330, 260], [0, 12, 4, 12, 4, 9], [1, 4, 2, 8, 1, 3]),
    "more rows than a tile": ([190] * 12, [0, *[8] * 11], [1, 8, 8, 2, 8, 7, 8, 8, 3, 8, 8, 8]),
    "what is new is not shared": ([134, 140, 130], [0, 8, 8], [4, 1, 3]),
    "one without tokens": ([200, 190, 195, 210, 200], [0, 8, 8, 8, 8], [2, 3, 0, 1, 4]),
    "none with tokens but two": ([200, 190, 195, 210], [0, 8, 8, 8], [0, 0, 4, 1]),
}


@pytest.mark.parametrize("name", EXTENDS)
def test_short_extends_share_what_comes_before_their_tokens(name):
    """Their query lengths differ; the longest decides whether groups are formed."""
    lengths, shared, queries = EXTENDS[name]
    sharers = Sharers(make_layer(1, dim=32), lengths, shared, page=16)
    split = attend(sharers, queries, M.EXTEND)
    groups, _ = planned_spans(split, len(lengths))
    assert groups == expected_spans(sharers, queries)
    assert groups


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("name", ["levels", "many", "nothing", "two groups"])
def test_rows_are_merged_side_by_side(name, rows, monkeypatch):
    """As of many requests: their rows lie in several tiles, which are cut elsewhere."""
    choose = scheduler.merge_tile

    def tile(*args):
        columns, _, partials, warps = choose(*args)
        return columns, rows, partials, warps

    monkeypatch.setattr(scheduler, "merge_tile", tile)
    lengths, shared = CASES[name]
    trees = random_trees(len(lengths), 5)
    sharers = Sharers(make_layer(2, 3, 32), lengths, shared, page=16)
    for processors in (2, 11):
        more = {"multiprocessors": processors}
        attend(sharers, 5, M.TARGET_VERIFY, verify(5, trees), trees, **more)
        assert attend(sharers, **more).cuts.merge_tile[1] == rows


@pytest.mark.parametrize("first", [4, 8, 16])
@pytest.mark.parametrize("name", ["all", "levels", "three levels", "one alone"])
def test_partials_beyond_the_first_ones_are_merged(name, first, monkeypatch):
    """The merge loads `first` at once, two of a request alone; several programs have the others."""
    monkeypatch.setattr(Cuts, "group_partials", first)
    lengths, shared = CASES[name]
    sharers = Sharers(make_layer(1, dim=32), [n + 400 for n in lengths], shared, page=16)
    for processors in (3, 24, 90):
        attend(sharers, multiprocessors=processors)


def test_partials_that_a_merge_loads_first():
    """As many as were fastest on an NVIDIA H200, see shared_forms.nvidia-h200.txt."""
    cuts = attend(Sharers(make_layer(1, dim=32), *CASES["all"], page=16)).cuts
    hopper = replace(cuts.launch, block_m=64)

    def partials(requests, heads, rows, merged=1):
        tile = (512, merged, 4, 4)
        sizes = {"tiles": requests * heads, "tile_rows": rows, "programs": 132, "launch": hopper}
        return replace(cuts, merge_tile=tile, **sizes).group_partials

    assert [partials(n, 1, 16) for n in (64, 48, 32)] == [8, 16, 16]
    assert [partials(n, 8, 4) for n in (64, 16)] == [8, 16]
    assert partials(64, 8, 32, merged=4) == 0
    assert replace(cuts, sharing=None).group_partials == 0


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("name", EXTENDS)
def test_short_extends_share_tiles_of_128_rows(name):
    lengths, shared, queries = EXTENDS[name]
    sharers = Sharers(make_layer(1, dim=32), lengths, shared, page=16)
    assert attend(sharers, queries, M.EXTEND).cuts.launch.block_m == 128


def test_prompts_and_steps_beside_them_form_no_groups():
    sharers = Sharers(make_layer(1, dim=32), [200, 190, 195], [0, 8, 8], page=16)
    batch = sharers.batch([60, 1, 1], mode=M.MIXED)
    [schedule] = sharers.backend(shared_prefix=True).init_forward_metadata(batch).values()
    assert schedule.split.buffer is None, "of requests of one token beside tiles of a prompt"
    assert schedule.tiles is not None


@pytest.mark.parametrize("store", ["fp32", "fp16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
def test_stores(store, monkeypatch):
    monkeypatch.setattr(SHARED, "shared_granule", lambda *args: 128)  # a block of FP8
    dtype = store if store in ("fp32", "fp16") else "bf16"
    layer = make_layer(dim=64)
    attend(Sharers(layer, [150, 180, 201], [0, 9, 9], page=16, dtype=dtype, store=store))


def test_over_fp8_and_fp4_a_tile_is_as_large_as_two_requests_need():
    for store in ("fp8_e4m3", "fp4_e2m1"):
        tiles = [shared_tile_rows(rows, 128, store, False, 64) for rows in (1, 4, 8, 9, 16, 32)]
        assert tiles == [16, 16, 16, 32, 32, 64]
    others = [("bf16", 128, False), ("fp8_e4m3", 512, False)]
    others.append(("fp8_e4m3", 128, True))  # trees
    assert {shared_tile_rows(4, v_dim, store, tree, 64) for store, v_dim, tree in others} == {64}


def test_requests_that_fill_half_of_a_tile_take_the_largest():
    tiles = [shared_tile_rows(rows, 128, "bf16", True, 128) for rows in (16, 31, 32, 56, 64)]
    assert tiles == [64, 64, 128, 128, 128]
    assert shared_tile_rows(32, 128, "bf16", True, 64) == 64  # where no larger one is


@pytest.mark.parametrize("own", [True, False])
def test_only_a_kernel_of_its_own_takes_large_tiles(own):
    """A Hopper with a Triton before 3.6 has the portable kernel alone, which spills in them."""
    sharers = Sharers(make_layer(2, 4, 128), [300] * 16, [0, *[16] * 15], page=16)
    made = sharers.backend(shared_prefix=True)
    made._scheduler._arch, made._scheduler._own_kernels = "sm90", own
    batch = sharers.batch([8] * 16, mode=M.TARGET_VERIFY, spec=verify(8))
    [plan] = made.init_forward_metadata(batch).values()
    assert plan.split.cuts.sharing is not None
    assert plan.split.cuts.launch.block_m == (128 if own else 64)


def test_units_beside_the_keys_of_a_large_tile():
    layer, launch = make_layer(dim=128).group, Launch(block_m=128, block_n=128, warps=8, stages=2)
    units = [sharing_of(layer, n, 16, 2, launch).tile_units for n in (1, 8, 16)]
    assert units == [0, 1, 1]  # of decode, and of drafts with 16 and 32 rows


def test_sinks_softcap_and_the_other_layout():
    sinks = torch.linspace(-2, 3, 8, device=DEVICE)
    layer = make_layer(dim=32, sinks=sinks, logit_cap=5.0)
    attend(Sharers(layer, [150, 180, 201], [0, 9, 4], page=16, layout="HND"))


@pytest.mark.parametrize(
    ("more", "config"),
    [({"sliding_window": 70}, {}), ({}, {"deterministic": True})],
    ids=["window", "deterministic"],
)
def test_windows_and_deterministic_mode_stay_without_groups(more, config):
    sharers = Sharers(make_layer(dim=32, **more), [150, 180, 201], [0, 9, 9], page=16)
    assert attend(sharers, **config).buffer is None


def test_without_the_switch_nothing_changes():
    sharers = Sharers(make_layer(dim=32), [150, 180], [0, 9], page=16)
    batch = sharers.batch([1, 1], mode=M.DECODE)
    [schedule] = sharers.backend().init_forward_metadata(batch).values()
    assert schedule.split.buffer is None
    assert schedule.split.cuts.sharing is None


def test_pages_that_are_equal_after_the_first_that_differ_are_not_shared():
    sharers = Sharers(make_layer(dim=32), [200, 230], [0, 9], page=16)
    sharers.table[1, 0] = sharers.table[0, 10]  # any other page
    groups, begins = planned_spans(plan_of(sharers), 2)
    assert groups == []
    assert begins == [0, 0]


def plan_of(sharers, **config):
    batch = sharers.batch([1] * len(sharers.lengths), mode=M.DECODE)
    [schedule] = sharers.backend(shared_prefix=True, **config).init_forward_metadata(batch).values()
    return schedule.split


def test_table_padding_is_not_compared():
    """Entries past the pages of a request may be anything, also those of its neighbour."""
    sharers = Sharers(make_layer(dim=32), [80, 230, 80], [0, 5, 5], page=16)
    sharers.table[0, 5:] = sharers.table[1, 5:15]
    sharers.table[2, 5:] = sharers.table[1, 5:15]
    split = attend(sharers)
    assert planned_spans(split, 3)[0] == [(0, 3, 0, 64, 1)]


def test_a_table_of_other_strides():
    sharers = Sharers(make_layer(dim=32), [150, 180, 201], [0, 9, 9], page=16)
    wide = torch.full((3, 40), 9999, dtype=torch.int32, device=DEVICE)
    wide[:, : sharers.table.shape[1]] = sharers.table
    sharers.table = wide[:, : sharers.table.shape[1]]
    assert planned_spans(attend(sharers), 3)[0] == [(0, 3, 0, 128, 1)]


def test_a_request_without_keys():
    """Unused rows of a captured pass may have none."""
    sharers = Sharers(make_layer(1, dim=32), [0, 150, 150], [0, 0, 8], page=16)
    sharers.lengths[0] = 1
    batch, q = sharers.batch([1, 1, 1], mode=M.DECODE), sharers.draw(3)
    sharers.lengths[0] = batch.views["full"].seq_lens[0] = 0
    backend = sharers.backend(shared_prefix=True)
    plan = backend.init_forward_metadata(batch)
    got = backend.forward(q, None, None, sharers.layer, sharers.cache, batch, plan, return_lse=True)
    sharers.check(got, q, [1, 1, 1])


def test_any_order_of_the_requests_gives_the_same_answers():
    lengths, shared = CASES["levels"]
    for seed in range(2):
        order = random.Random(seed).sample(range(len(lengths)), len(lengths))
        sharers = Sharers(make_layer(1, dim=32), lengths, shared, page=16).permuted(order)
        split = attend(sharers)
        assert planned_spans(split, len(lengths))[0] == expected_spans(sharers, 1)


def test_a_captured_plan_serves_other_groups():
    """The tables and lengths of a batch are overwritten in place, as before a replay."""
    layer = make_layer(dim=32)
    together = Sharers(layer, [300, 290, 280, 270], [0, 12, 12, 4], page=16)
    backend = together.backend(shared_prefix=True)
    backend.init_cuda_graph_state(4, 4)
    rows = [1] * 4
    batch = together.batch(rows, mode=M.DECODE)
    plan = backend.init_forward_metadata_capture_cuda_graph(batch)
    [split] = [schedule.split for schedule in plan.values()]
    view, address = batch.views["full"], split.buffer.data_ptr()
    q = together.draw(4)
    for lengths, shared in [
        ([300, 290, 280, 270], [0, 12, 12, 4]),
        ([250, 290, 100, 210], [0, 0, 0, 0]),
        ([290, 300, 128, 200], [0, 9, 0, 5]),
        ([1, 300, 300, 1], [0, 0, 18, 0]),  # padded rows
        ([0, 300, 300, 0], [0, 0, 18, 0]),  # without keys
    ]:
        other = Sharers(layer, lengths, shared, page=16)
        view.page_table.zero_()
        view.page_table[:, : other.table.shape[1]] = other.table
        view.seq_lens.copy_(torch.tensor(lengths))
        backend.init_forward_metadata_replay_cuda_graph(batch, plan)
        got = backend.forward(q, None, None, layer, other.cache, batch, plan, return_lse=True)
        other.check(got, q, rows)
        assert planned_spans(split, 4)[0] == expected_spans(other, 1)
        assert split.buffer.data_ptr() == address


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_of_requests(seed):
    rng = random.Random(seed)
    count, page = rng.randint(2, 12), rng.choice([1, 5, 16, 64])
    lengths = [rng.randint(1, 330) for _ in range(count)]
    shared = [0] + [
        rng.choice([0, rng.randint(0, min(pair))]) // page for pair in itertools.pairwise(lengths)
    ]
    layer = make_layer(rng.choice([1, 2]), rng.choice([1, 4, 5]), 32)
    sharers = Sharers(layer, lengths, shared, page=page, layout=rng.choice(["NHD", "HND"]))
    split = attend(sharers, multiprocessors=rng.choice([1, 3, 40]))
    assert planned_spans(split, count)[0] == expected_spans(sharers, 1)


def test_a_group_has_to_save_more_than_its_partials_cost():
    """More query rows write more partials, so that more keys have to be shared."""
    granule = shared_granule
    assert granule(4, 128, 128, 2) == 256
    for rows, dims, width in itertools.product((4, 7, 32, 64), ((64, 64), (128, 128)), (1, 2, 4)):
        keys = granule(rows, *dims, width)
        saved = keys * sum(dims) * width  # by two members, which would read them twice
        written = 2 * rows * (dims[1] + 1) * 4
        assert keys % 128 == 0
        assert saved >= 4 * 2 * written


def test_a_group_begins_and_ends_at_blocks():
    assert plan_of(Sharers(make_layer(dim=32), [150, 180], [0, 9], page=16)).cuts.sharing == (
        Sharing(GRANULE, 16, 4)
    )


def test_a_request_that_fills_most_of_a_tile_is_read_alone():
    """A tile of two members would not read less than one tile of each."""
    sharers = Sharers(make_layer(1, 5, 32), [150, 180], [0, 8], page=16)
    assert attend(sharers, 6, M.TARGET_VERIFY, verify(6)).cuts.sharing is not None
    assert attend(sharers, 7, M.TARGET_VERIFY, verify(7)).cuts.sharing is None


@pytest.mark.parametrize(
    ("queries", "heads", "block", "expected"),
    [
        (1, (1, 4, 128), 64, 0),
        (1, (1, 16, 128), 128, 0),
        (3, (1, 4, 128), 64, 0),
        (4, (1, 4, 128), 64, TILE_UNITS),
        (4, (1, 4, 128), 128, TILE_UNITS // 2),
        (4, (2, 7, 128), 64, TILE_UNITS),
        (4, (2, 7, 128), 128, TILE_UNITS),
        (1, (1, 16, 576, 512), 64, TILE_UNITS),
        (1, (1, 8, 576, 512), 64, 0),
    ],
)
def test_tiles_of_many_rows_count_units_beside_their_keys(queries, heads, block, expected):
    """In what was measured drafts and latents were faster so, and decode slower."""
    layer = make_layer(*heads)
    launch = Launch(block_m=64, block_n=block, warps=4, stages=2)
    assert sharing_of(LayerGroup.of(layer), queries, 64, 2, launch).tile_units == expected


@pytest.mark.parametrize("more", [0, 1, TILE_UNITS])
def test_units_of_work(more):
    """Each tile has a unit for 64 keys, and some more."""
    table = torch.arange(6 * 64, dtype=torch.int32).view(6, 64)
    table[1:4, :32] = table[0, :32]  # 512 tokens of four requests: 128 rows, two tiles
    table[5, :16] = table[4, :16]  # 256 of two: 64 rows
    requests = (
        torch.arange(0, 56, 8, dtype=torch.int32),
        torch.tensor([700, 640, 600, 530, 400, 264], dtype=torch.int32),
        table,
    )
    buffer = torch.zeros(SHARED.buffer_shape(6, 1), dtype=torch.int32)
    counter = torch.zeros(2, dtype=torch.int32)
    launch = Launch(block_m=64, block_n=64, warps=4, stages=2)
    sharing = Sharing(256, 16, 4, tile_units=more)
    SHARED.fill_spans({}, requests, buffer, counter, launch, sharing)
    alone = [-(-n // 64) + more for n in (700 - 512, 640 - 512, 600 - 512, 18, 400 - 256, 8)]
    groups = [2 * (512 // 64 + more), 256 // 64 + more]
    assert buffer[0, :13].diff().tolist() == [*alone, *groups, 0, 0, 0, 0]


def cuts_before_keys(split, size, group, queries):
    """Return how many of a tile's units without keys lie before a cut, of tiles cut there."""
    units = split.work_indptr.diff().tolist()
    rows = [queries * group] * size + (queries_of(split, size) * group).tolist()
    tiles = [
        -(-r // split.cuts.launch.block_m) if n else 0 for r, n in zip(rows, units, strict=True)
    ]
    lengths = [n // k for n, k in zip(units, tiles, strict=True) for _ in range(k)]
    begins = itertools.accumulate(lengths, initial=0)
    quota = max(-(-sum(lengths) // split.cuts.programs), split.cuts.min_units)
    before = [-begin % quota for begin in list(begins)[:-1]]
    return {n for n in before if 0 < n <= split.cuts.sharing.tile_units}


@pytest.mark.parametrize(
    ("name", "processors", "cuts"),
    [
        ("levels", 6, {1}),
        ("one alone", 3, {1, 2}),
        ("equal", 13, {2, 3, 4}),
        ("two groups", 5, {1, 2, 3, 4}),
        ("levels", 13, {1, 2, 3, 4}),
    ],
)
def test_a_quota_may_end_before_the_keys_of_a_tile(name, processors, cuts):
    lengths, shared = CASES[name]
    trees = random_trees(len(lengths), 4)
    sharers = Sharers(make_layer(1, dim=32), lengths, shared, page=16)
    split = attend(sharers, 4, M.TARGET_VERIFY, verify(4, trees), trees, multiprocessors=processors)
    assert split.cuts.sharing.tile_units == TILE_UNITS
    assert cuts_before_keys(split, len(lengths), 4, 4) == cuts
