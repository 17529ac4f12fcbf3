"""What the Triton backend promises beyond right numbers: its plans, its determinism."""

from dataclasses import replace

import pytest
import torch
from attn_core.errors import BackendError, BatchError, UnsupportedError
from attn_core.ops import kv as torch_kv
from attn_core.runtime import backend_config
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.graphs import without_host_lengths
from attn_core.testing.inputs import mapped, to_device

pytest.importorskip("triton")

from attn_core.backends.triton import scheduler
from attn_core.backends.triton.portable.plan_splits import plan_splits
from attn_core.backends.triton.variants import kernels_of
from triton_server import (
    DEVICE,
    HKV,
    HQ,
    LONG,
    PAGE,
    D,
    M,
    Server,
    make_backend,
    make_layer,
    make_pool,
    same,
)


@pytest.fixture(autouse=True)
def small_device(monkeypatch):
    """Have three multiprocessors wherever this runs, so that short requests are cut as well."""
    if DEVICE.type == "cuda":
        properties = {**backend_config.properties_of(DEVICE), "multiprocessors": 3}
        monkeypatch.setattr(backend_config, "properties_of", lambda device: properties)
    monkeypatch.setattr(scheduler, "unsplit_keys_on", lambda device: 0)


# ---- Plans -----------------------------------------------------------------------------------


def test_layers_of_one_class_share_a_plan():
    layers = [make_layer(i, sliding_window=w) for i, w in enumerate((None, 8, None, 8))]
    backend = make_backend(*layers)
    batch, _ = Server((40, 1), (7, 1)).batch(M.DECODE)
    plans = backend.init_forward_metadata(batch)
    assert sorted((x.window for x in plans), key=str) == [8, None]
    full, windowed = (next(p.split for x, p in plans.items() if x.window == w) for w in (None, 8))
    assert full.work_indptr.data_ptr() != windowed.work_indptr.data_ptr()
    assert full.partial_out.data_ptr() == windowed.partial_out.data_ptr(), (
        "one layer runs after the other"
    )


def test_only_few_queries_are_planned():
    backend, fixed = make_backend(), make_backend(deterministic=True)
    server = Server((90, 2), (80, 70))
    (short, _), (long, _) = server.batch(M.EXTEND, [0]), server.batch(M.EXTEND)
    [few], [many] = (backend.init_forward_metadata(b).values() for b in (short, long))
    assert (few.split is not None, few.tiles) == (True, None)
    assert (many.split, many.tiles is not None) == (None, True)
    # how long the longest query is, a neighbour decides: nothing may depend on it
    [alone] = fixed.init_forward_metadata(short).values()
    assert alone.split is None


def test_short_requests_are_not_cut(monkeypatch):
    server = Server((90, 1), (1, 1), (40, 1))
    batch, rows = server.batch(M.DECODE)
    cut = make_backend()
    monkeypatch.setattr(scheduler, "unsplit_keys_on", lambda device: 256)  # as on a GPU
    whole = make_backend()
    [one], [other] = (b.init_forward_metadata(batch).values() for b in (cut, whole))
    assert not one.split.unsplit
    assert other.split.unsplit
    assert other.split.work_indptr.tolist() == [0, 1, 2, 3], "a request is one unit of work"
    for want, got in zip(*(server.attend(b, batch, rows) for b in (cut, whole)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    long, _ = Server((300, 1), (40, 1)).batch(M.DECODE)
    assert not next(iter(whole.init_forward_metadata(long).values())).split.unsplit


@pytest.fixture
def on_hopper(monkeypatch):
    """Plan with the kernels of Hopper."""
    hopper = kernels_of("sm90")
    if hopper == kernels_of("sm80"):
        pytest.skip("this Triton has no kernels of Hopper")
    monkeypatch.setattr(scheduler, "kernels_of", lambda arch: hopper)


def test_prompts_that_are_not_cut_fill_tiles_only_where_no_graph_and_no_neighbour_decides(
    on_hopper, monkeypatch
):
    monkeypatch.setattr(scheduler, "unsplit_keys_on", lambda device: 256)

    def plan(made, server, mode):
        [found] = made.init_forward_metadata(server.batch(mode)[0]).values()
        return found

    short, long = Server((90, 50), (60, 9)), Server((300, 50), (60, 9))
    assert plan(make_backend(), long, M.EXTEND).split
    assert plan(make_backend(), short, M.EXTEND).split is None, (
        "100 rows of a request are half a tile"
    )
    held = make_backend()
    held.init_cuda_graph_state(2, 100)
    batch, _ = short.batch(M.EXTEND)
    view = batch.views["full"]
    room = torch.zeros(2, 40, dtype=torch.int32, device=DEVICE)  # for 640 keys
    wide = replace(batch, views={"full": replace(view, page_table=room, max_seq_len=640)})
    [captured] = held.init_forward_metadata_capture_cuda_graph(wide).values()
    assert captured.split, "a replay may be longer"
    # as many lines a request, but all modes of one query a request cut them
    many = replace(make_layer(), num_q_heads=100, num_kv_heads=1)
    one = Server((90, 1), (60, 1), layers=[many])
    assert plan(make_backend(many, deterministic=True), one, M.DECODE).split


@pytest.mark.parametrize(
    ("is_read", "config"),
    [
        (True, {"kv_cache_dtype": "bf16"}),
        (True, {"kv_cache_dtype": "bf16", "deterministic": True}),
        (False, {"kv_cache_dtype": "fp16"}),
        (False, {"kv_cache_dtype": "fp8_e4m3"}),
        (False, {"kv_cache_dtype": "fp4_e2m1"}),
        (False, {"kv_cache_dtype": "fp32", "dtype": "fp32"}),
        (False, {"kv_cache_dtype": "bf16", "page_size": 48}),
    ],
)
def test_an_order_is_planned_only_where_a_kernel_reads_it(is_read, config, on_hopper, monkeypatch):
    """That of Hopper takes 16-bit stores of the dtype of the queries, and pages that divide."""
    filled = []
    monkeypatch.setattr(scheduler, "fill_order", lambda tiles, *a, **k: filled.append(tiles))
    layer = replace(make_layer(), head_dim=64, v_head_dim=64)
    backend = make_backend(layer, **({"dtype": "bf16"} | config))
    # trees among so many queries run the portable kernel, and so do short prompts
    trees = torch.eye(90).bool().repeat(2, 1, 1).to(DEVICE)
    passes = [
        (Server((200, 90), (180, 90)).batch(M.EXTEND), is_read),
        (Server((200, 90), (180, 90)).batch(M.TARGET_VERIFY, trees=trees), False),
        (Server((120, 90), (110, 90)).batch(M.EXTEND), is_read and "deterministic" in config),
    ]
    for (batch, _), expected in passes:
        filled.clear()
        backend.init_forward_metadata(batch)
        assert bool(filled) == expected


@pytest.mark.parametrize("size", range(1, 9))
def test_plans_of_any_batch_are_aligned_alike(size, on_hopper, monkeypatch):
    """A kernel is compiled for pointers at 16 bytes, and again for others."""
    monkeypatch.setattr(scheduler, "fill_order", lambda *args, **kwargs: None)
    layer = replace(make_layer(), head_dim=128, v_head_dim=128)
    backend = make_backend(layer, dtype="bf16", kv_cache_dtype="bf16")
    batch, _ = Server(*[(200, 90)] * size).batch(M.EXTEND)
    backend.init_cuda_graph_state(size, batch.num_tokens)
    for plan in (backend.init_forward_metadata, backend.init_forward_metadata_capture_cuda_graph):
        [schedule] = plan(batch).values()
        order = schedule.tiles
        assert order.request_order.data_ptr() % 16 == order.tile_offsets.data_ptr() % 16
        assert (order.tile_offsets.shape[0], order.request_order.shape[0]) == (size + 1, size)


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_no_length_decides_is_computed_once_for_a_batch_size(deterministic, monkeypatch):
    chosen, choose = [], scheduler.decode_launch
    monkeypatch.setattr(
        scheduler, "decode_launch", lambda *a, **k: chosen.append(a) or choose(*a, **k)
    )
    backend = make_backend(deterministic=deterministic)

    def split(*requests, of=backend):
        batch, _ = Server(*requests).batch(M.DECODE)
        [schedule] = of.init_forward_metadata(batch).values()
        return schedule.split

    first, longer = split((40, 1), (7, 1)), split((3000, 1), (9, 1))
    assert first.cuts is longer.cuts
    assert len(chosen) == 1
    assert split((40, 1)).cuts is not first.cuts
    for requests in ([(40, 1), (7, 1)], [(3000, 1), (9, 1)], [(40, 1)]):
        old, new = split(*requests), split(*requests, of=make_backend(deterministic=deterministic))
        assert old.key == new.key
        assert old.unsplit == new.unsplit
        assert old.work_indptr.tolist() == new.work_indptr.tolist()
        assert old.partial_out.shape[0] >= new.partial_out.shape[0]


def test_a_large_unit_is_enough_for_a_program():
    batch, _ = Server((300, 1)).batch(M.DECODE)
    [schedule] = make_backend().init_forward_metadata(batch).values()
    cuts = schedule.split.cuts
    launch = replace(cuts.launch, min_blocks=2)  # blocks
    assert replace(cuts, launch=launch, blocks_per_unit=1).min_units == 2
    assert replace(cuts, launch=launch, blocks_per_unit=4).min_units == 1


def test_a_request_without_keys_gets_zeros():
    """The lengths of a replayed batch may be 0 where a graph's room is not filled."""
    server = Server((90, 1), (40, 1))
    batch, rows = server.batch(M.DECODE)
    backend = make_backend()
    plans = backend.init_forward_metadata(batch)
    view = batch.views["full"]
    lengths = view.seq_lens * torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    empty = replace(batch, views={"full": replace(view, seq_lens=lengths)})
    backend.init_forward_metadata_replay_cuda_graph(empty, plans)
    layer = make_layer()
    out, lse = backend.forward(
        server.q[rows], None, None, layer, server.cache(layer), empty, plans, return_lse=True
    )
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    assert out[0].isfinite().all()


def test_nothing_is_planned_for_a_view_that_the_batch_lacks():
    own = make_layer(view="window")
    backend = make_backend(own)
    server = Server((9, 1))
    batch, rows = server.batch(M.DECODE)
    assert backend.init_forward_metadata(batch) == {}
    with pytest.raises(BackendError, match=r"layer 0 \(view 'window'\) was not planned"):
        server.attend(backend, batch, rows, own)


def test_a_layer_of_another_class_was_not_planned():
    server = Server((9, 1))
    batch, rows = server.batch(M.DECODE)
    with pytest.raises(BackendError, match=r"was not planned: .* planned: \[LayerGroup"):
        server.attend(make_backend(), batch, rows, make_layer(sliding_window=4))


def test_lengths_on_the_device_are_enough():
    server = Server((70, 1), (33, 1))
    batch, rows = server.batch(M.DECODE)
    want = server.attend(make_backend(), batch, rows)
    assert same(server.attend(make_backend(), without_host_lengths(batch), rows), want)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("new", [1, 70])
def test_the_host_reads_nothing_from_the_device(new, deterministic, monkeypatch):
    """What runs on the host runs on tensors without memory, where to read a length is an error."""
    launched = []

    def launches(kernel, grid):
        launched.append((kernel.__name__, grid))
        return lambda *args, **kwargs: None

    server = Server((90, new), (80, new))
    mode = M.DECODE if new == 1 else M.EXTEND
    batch = to_device(without_host_lengths(server.batch(mode)[0]), torch.device("meta"))
    server.q, server.k, server.v = (x.to("meta") for x in (server.q, server.k, server.v))
    cache = mapped(server.cache(make_layer()), lambda t: t.to("meta"))
    monkeypatch.setattr(server, "cache", lambda layer: cache)
    backend = make_backend(device=torch.device("meta"), deterministic=deterministic)
    monkeypatch.setattr(type(plan_splits), "__getitem__", launches)
    out, lse = server.attend(backend, batch, slice(None))
    assert out.shape == (2 * new, HQ, D)
    assert lse.shape == (2 * new, HQ)
    names = [name for name, _ in launched]
    if new == 1:
        cut = [] if deterministic else ["merge_splits"]  # 1024 keys are one state there
        assert names == ["plan_splits", "decode_splits", *cut]
    else:
        assert names == ["extend_tiles"]


def test_a_pass_without_tokens_launches_nothing(monkeypatch):
    server = Server((5, 0))
    batch, rows = server.batch(M.EXTEND)
    backend = make_backend()
    monkeypatch.setattr(type(plan_splits), "__getitem__", None)
    out, lse = server.attend(backend, batch, rows.long())
    assert (out.shape, lse.shape) == ((0, HQ, D), (0, HQ))


# ---- Captured passes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "n", "deterministic"), [(M.DECODE, 1, False), (M.TARGET_VERIFY, 3, True)]
)
def test_a_captured_plan_serves_other_lengths(mode, n, deterministic):
    """The kernels are launched again with the tensors of the capture, as a graph would."""
    layers = [make_layer(0), make_layer(1, sliding_window=20)]
    server = Server((n, n), (n, n), (LONG, n), (37, n), layers=layers)
    room = server.table.shape[1] * PAGE

    def bounded(batch):
        view = replace(without_host_lengths(batch).views["full"], max_seq_len=room)
        return replace(batch, query_lens_host=None, views={"full": view})

    backend, eager = (make_backend(*layers, deterministic=deterministic) for _ in range(2))
    backend.init_cuda_graph_state(4, 4 * n)
    static = mapped(bounded(server.batch(mode, [0, 1])[0]), torch.Tensor.clone)
    metadata = backend.init_forward_metadata_capture_cuda_graph(static)
    buffers = [schedule.split.work_indptr.data_ptr() for schedule in metadata.values()]
    for chosen in ([2, 3], [3, 1]):
        fresh, rows = server.batch(mode, chosen)
        overwrite(static, fresh)
        want = [server.attend(eager, fresh, rows, layer) for layer in layers]
        if chosen == [2, 3]:  # the plan of short requests leaves most of these keys out
            assert not same(server.attend(backend, static, rows, layers[0], metadata), want[0])
        backend.init_forward_metadata_replay_cuda_graph(static, metadata)
        got = [server.attend(backend, static, rows, layer, metadata) for layer in layers]
        assert all(map(same, got, want))
    assert buffers == [schedule.split.work_indptr.data_ptr() for schedule in metadata.values()]


def test_a_replay_of_longer_requests_than_were_captured_is_refused():
    server = Server((90, 1), (40, 1))
    batch, _ = server.batch(M.DECODE)
    backend = make_backend()
    backend.init_cuda_graph_state(2, 2)
    plans = backend.init_forward_metadata_capture_cuda_graph(batch)
    backend.init_forward_metadata_replay_cuda_graph(batch, plans)
    longer = replace(batch, views={"full": replace(batch.views["full"], max_seq_len=91)})
    with pytest.raises(BatchError, match="91 tokens in a graph that was captured for 90"):
        backend.init_forward_metadata_replay_cuda_graph(longer, plans)


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_more_requests_than_the_static_buffers_hold_are_refused(shared_prefix):
    """A plan of theirs would be written behind the end of these."""
    server = Server(*[(40, 1)] * 9)
    backend = make_backend(shared_prefix=shared_prefix)
    backend.init_cuda_graph_state(8, 8)
    backend.init_forward_metadata_capture_cuda_graph(server.batch(M.DECODE, [*range(8)])[0])
    with pytest.raises(BatchError, match="captured pass of 9 requests, and static buffers for 8"):
        backend.init_forward_metadata_capture_cuda_graph(server.batch(M.DECODE)[0])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_replay_of_more_or_fewer_requests_than_were_captured_is_refused(rows):
    """More are planned behind the end of a buffer; of fewer the others' old work is done again."""
    server = Server(*[(40, 1)] * 3)
    backend = make_backend()
    backend.init_cuda_graph_state(4, 4)
    batch, _ = server.batch(M.DECODE, [0, 1])
    plans = backend.init_forward_metadata_capture_cuda_graph(batch)
    other, _ = server.batch(M.DECODE, [*range(rows)])
    with pytest.raises(BatchError, match=f"{rows} requests in a graph that was captured for 2"):
        backend.init_forward_metadata_replay_cuda_graph(other, plans)


def overwrite(static, fresh):
    """Copy the tensors of a batch that change from pass to pass into those of the capture."""
    view, new = static.views["full"], fresh.views["full"]
    view.page_table.copy_(new.page_table)
    view.seq_lens.copy_(new.seq_lens)
    view.out_cache_loc.copy_(new.out_cache_loc)
    static.positions.copy_(fresh.positions)


# ---- Determinism -----------------------------------------------------------------------------

ANY_TOPK = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().repeat(4, 1, 1).to(DEVICE)
MODES = {
    "decode": (M.DECODE, 1, None),
    "chain": (M.TARGET_VERIFY, 3, None),
    "tree": (M.TARGET_VERIFY, 3, ANY_TOPK),
    "extend": (M.EXTEND, 3, None),
}


def alone_and_among(name, deterministic):
    """Return what a request gets alone, and what it gets among neighbours."""
    mode, n, trees = MODES[name]
    neighbour = 150 if mode is M.EXTEND else n  # many queries of one, few of the other
    server = Server((LONG, n), (LONG - 600, neighbour), (300, n))
    found = []
    for chosen in ([0], [1, 0, 2]):
        batch, rows = server.batch(mode, chosen, trees)
        got = server.attend(make_backend(deterministic=deterministic), batch, rows)
        start = int(batch.cu_seqlens_q[chosen.index(0)])
        found.append([x[start : start + n] for x in got])
    return found


@pytest.mark.parametrize("name", MODES)
def test_deterministic_bits_do_not_depend_on_neighbours(name):
    alone, among = alone_and_among(name, deterministic=True)
    assert same(alone, among)


@pytest.mark.parametrize("name", MODES)
def test_otherwise_neighbours_show_in_the_bits(name):
    """Without this the test above would show nothing: the cuts of the keys do move."""
    alone, among = alone_and_among(name, deterministic=False)
    assert not same(alone, among)
    for a, b in zip(alone, among, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# ---- What is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"is_causal": False}, {"is_causal": False, "is_cross": True}])
def test_a_window_without_causal_order_is_refused(changes):
    with pytest.raises(UnsupportedError, match="window of 8 without causal order"):
        make_backend(make_layer(sliding_window=8, **changes))


def test_a_window_of_a_ragged_pass_without_causal_order_is_refused():
    windowed = make_layer(sliding_window=8)
    backend = make_backend(windowed)
    x, cu = torch.zeros(3, HKV, D, device=DEVICE), torch.tensor([0, 3]).int().to(DEVICE)
    arguments = (x.repeat(1, HQ // HKV, 1), x, x, windowed, cu, cu, 3, 3)
    assert backend.forward_ragged(*arguments, causal=True).shape == (3, HQ, D)
    with pytest.raises(UnsupportedError, match="window of 8 without causal order"):
        backend.forward_ragged(*arguments, causal=False)


# ---- The write -------------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch):
    """Count the writes of the dispatcher, which are all that there are."""
    seen, write = [], torch_kv.write_kv

    def counted(cache, k, v, slots, form=-1):
        seen.append(slots)
        write(cache, k, v, slots, form)

    monkeypatch.setattr("attn_core.runtime.dispatcher.write_kv", counted)
    return seen


@pytest.mark.parametrize(
    ("mode", "new", "store", "layout"),
    [
        (M.DECODE, 1, "fp32", "NHD"),
        (M.DECODE, 1, "fp8_e4m3", "HND"),
        (M.EXTEND, 70, "fp32", "HND"),
        (M.EXTEND, 70, "fp4_e2m1", "NHD"),
    ],
)
def test_new_tokens_are_written_once(mode, new, store, layout, written):
    server = Server((90, new), (81, new))
    scales = {} if store == "fp32" else {0: (0.5, 2.0)}
    pages = server.pool.layer(0).num_pages
    pool = make_pool([make_layer()], pages, store, layout=layout, scales=scales)
    batch, _ = server.batch(mode)
    backend = make_backend(kv_cache_dtype=store)
    dispatcher = HybridDispatcher({"prefill": backend, "decode": backend}, pool)
    want = mapped(pool.layer(0), torch.Tensor.clone)
    torch_kv.write_kv(want, server.k, server.v, batch.views["full"].out_cache_loc)
    metadata = dispatcher.init_forward_metadata(batch)
    got = dispatcher.forward(server.q, server.k, server.v, make_layer(), batch, metadata)
    assert len(written) == 1
    pairs = zip(pool.layer(0).parts(), want.parts(), strict=True)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for (a, _), (b, _) in pairs)
    # what was written is what is read: a layer that shares the cache has nothing to write
    again = dispatcher.forward(server.q, None, None, make_layer(), batch, metadata)
    assert len(written) == 1
    assert torch.equal(got, again)
