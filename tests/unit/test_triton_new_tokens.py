"""Prompts without a prefix attend to the K and V of their own pass."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_core.backends.triton import backend as triton_backend
from attn_core.backends.triton import scheduler
from attn_core.backends.triton.hopper.stores import rows_fit
from attn_core.backends.triton.variants import kernels_of
from triton_server import DEVICE, HKV, HQ, M, Server, make_backend, make_layer, make_pool

WIDE = replace(make_layer(), head_dim=64, v_head_dim=64)
PROMPTS, PREFIXED = ((300, 300), (90, 90)), ((300, 200), (90, 90))
STORED = {"dtype": "bf16", "kv_cache_dtype": "bf16"}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    """Plan with the kernels of Hopper, and launch nothing: these run on a Hopper alone."""
    hopper = kernels_of("sm90")
    monkeypatch.setattr(scheduler, "kernels_of", lambda arch: hopper)
    monkeypatch.setattr(scheduler, "fill_order", lambda *args, **kwargs: None)


@pytest.fixture
def ran(monkeypatch):
    """Return the list of what would have been launched."""
    calls = []
    monkeypatch.setattr(triton_backend, "run", lambda call, part: calls.append((call, part)))
    return calls


def plan(requests, layer=WIDE, mode=M.EXTEND, **config):
    backend = make_backend(layer, **(STORED | config))
    [schedule] = backend.init_forward_metadata(Server(*requests).batch(mode)[0]).values()
    return schedule


@pytest.mark.parametrize("config", [{}, {"deterministic": True}, {"page_size": 1}])
def test_a_prompt_without_a_prefix_reads_its_own_keys(config):
    schedule = plan(PROMPTS, **config)
    inputs, tiles = schedule.new
    starts = schedule.inputs.requests.cu_seqlens_q
    assert not inputs.paged
    assert [x.data_ptr() for x in inputs.requests] == [starts.data_ptr()] * 3
    assert tiles.request_order is schedule.tiles.request_order, "as many keys, in the same order"
    assert tiles.counter is schedule.tiles.counter


@pytest.mark.parametrize(
    ("requests", "config"),
    [
        (PREFIXED, {}),
        (PROMPTS, {"kv_cache_dtype": "fp8_e4m3"}),
        (PROMPTS, {"kv_cache_dtype": "fp16"}),
        (PROMPTS, {"layer": replace(WIDE, view="cross")}),
        (PROMPTS, {"layer": make_layer()}),  # of a head dim that Hopper's kernel does not take
        (PROMPTS, {"mode": M.MIXED}),
        (((60, 60), (50, 50)), {}),  # short prompts run in small tiles
    ],
)
def test_others_read_the_cache(requests, config):
    if config.get("layer", WIDE).view == "cross":
        backend = make_backend(config["layer"], **STORED)
        batch, _ = Server(*requests).batch(M.EXTEND)
        batch = replace(batch, views={"cross": batch.views["full"]})
        [schedule] = backend.init_forward_metadata(batch).values()
    else:
        schedule = plan(requests, **config)
    assert schedule.new is None


LONG_PREFIX = ((5000, 65), (90, 20))


@pytest.mark.parametrize(
    ("requests", "config", "cut"),
    [
        (LONG_PREFIX, {}, True),
        (LONG_PREFIX, {"deterministic": True}, False),
        (LONG_PREFIX, {"layer": replace(WIDE, sliding_window=64)}, False),
        (((1000, 65), (90, 20)), {}, False),
        (((5000, 65), (4000, 40), (4000, 40)), {}, False),  # others fill the rest
        (((1500, 1500), (90, 90)), {}, False),
    ],
)
def test_keys_of_appends_to_long_prefixes_may_be_cut(requests, config, cut):
    """Three processors: two tiles of each of two heads."""
    parts = plan(requests, **config).tiles.parts
    assert (parts is not None) == cut
    if cut:
        assert parts.out.shape == (12 * 128, 64)


def test_lengths_that_the_host_does_not_know_decide_nothing():
    batch, _ = Server(*PROMPTS).batch(M.EXTEND)
    view = replace(batch.views["full"], seq_lens_host=None)
    backend = make_backend(WIDE, **STORED)
    for unknown in (replace(batch, query_lens_host=None), replace(batch, views={"full": view})):
        [schedule] = backend.init_forward_metadata(unknown).values()
        assert schedule.new is None


@pytest.mark.parametrize("buffers", [True, False])
def test_a_captured_pass_reads_the_cache_because_a_replay_may_have_a_prefix(buffers):
    backend, (batch, _) = make_backend(WIDE, **STORED), Server(*PROMPTS).batch(M.EXTEND)
    if buffers:
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
    [schedule] = backend.init_forward_metadata_capture_cuda_graph(batch).values()
    assert schedule.tiles.ordered
    assert schedule.new is None


def tokens(total, heads, dtype=torch.bfloat16, room=0):
    wide = torch.zeros(total, heads * 64 + room, dtype=dtype, device=DEVICE)
    return wide[:, : heads * 64].view(total, heads, 64)


@pytest.mark.parametrize(
    ("own", "k", "v"),
    [
        (True, {}, {}),
        (True, {"room": 8}, {"room": 4 * HQ}),  # of one projection
        (False, {"room": 4}, {}),  # 8 bytes are no distance for TMA
        (False, {"dtype": torch.float32}, {}),
        (False, {}, {"dtype": torch.float16}),
        (False, None, None),  # a layer that shares the keys of another one
        (False, {"more": 7}, {"more": 7}),  # padded: which rows are whose, nothing says
    ],
)
def test_keys_that_tma_cannot_read_are_read_in_the_cache(own, k, v, ran):
    pool = make_pool([WIDE], 60, "bf16")
    batch, _ = Server(*PROMPTS).batch(M.EXTEND)
    total = batch.num_tokens
    backend = make_backend(WIDE, **STORED)
    metadata = backend.init_forward_metadata(batch)
    [schedule] = metadata.values()

    def drawn(changes):
        changes = changes and dict(changes)
        if changes is None:
            return None
        return tokens(total + changes.pop("more", 0), HKV, **changes)

    args = (tokens(total, HQ), drawn(k), drawn(v), WIDE, pool.layer(0), batch, metadata)
    backend.forward(*args)
    [(call, part)] = ran
    assert part is (schedule.new[1] if own else schedule.tiles)
    assert call.cache is pool.layer(0), "launchers are kept with it"
    if own:
        maps = [(x.data_ptr(), (total, HKV * 64), (x.stride(0), 1)) for x in args[1:3]]
        assert [tuple(x) for x in call.rows] == maps
        *values, of_k, of_v = call.with_row_tensors((1, 2))
        assert values == [1, 2]
        assert [x.base.data_ptr() for x in (of_k, of_v)] == [x.address for x in call.rows]
        assert [tuple(x.shape) for x in (of_k, of_v)] == [x.shape for x in call.rows]


def test_another_batch_of_the_same_lengths_reads_the_cache(ran):
    """Its plan names the queries' starts of the batch that was planned."""
    pool = make_pool([WIDE], 60, "bf16")
    (batch, _), (other, _) = (Server(*PROMPTS).batch(M.EXTEND) for _ in range(2))
    backend = make_backend(WIDE, **STORED)
    metadata = backend.init_forward_metadata(batch)
    [schedule] = metadata.values()
    k, v = (tokens(batch.num_tokens, HKV) for _ in range(2))
    backend.forward(tokens(batch.num_tokens, HQ), k, v, WIDE, pool.layer(0), other, metadata)
    assert [part for _, part in ran] == [schedule.tiles]


def test_a_cache_of_any_strides_serves_as_the_home_of_its_launchers():
    kernel = kernels_of("sm90").new_tokens
    store = make_pool([WIDE], 4, "bf16").layer(0)
    gaps = replace(store, k=torch.stack([store.k, store.k], 1)[:, 0])
    assert not rows_fit(gaps.k, "NHD")
    assert kernel.bind(WIDE, gaps, torch.bfloat16) is not None


def test_own_keys_lie_side_by_side_whatever_the_layout_of_the_cache():
    kernel = kernels_of("sm90").new_tokens
    cache = make_pool([WIDE], 60, "bf16", layout="HND").layer(0)
    assert cache.layout == "HND"
    inputs, tiles = plan(PROMPTS).new
    [choice] = tiles.choices
    total = inputs.tokens
    q, k, v = (tokens(total, heads) for heads in (HQ, HKV, HKV))
    lse = torch.empty(total, HQ, device=DEVICE)
    call = kernel.call(q, k, v, WIDE, cache, inputs, None, lse, choice.launch)
    kept = kernel.bind(WIDE, cache, torch.bfloat16)
    config = kernel.make_launchers(call, kept, choice.launch, tiles).attend._last[-1]
    assert (config.PAGE, config.HND, config.GATHERS) == (0, False, False)
