"""The dispatcher sends every mode to its backend with the cache written first, and no more."""

import copy
import dataclasses
import inspect
import pickle
import sys

import pytest
import torch
from attn_core.cache.pool import KVPool
from attn_core.errors import BatchError, UnsupportedError, UsageError
from attn_core.runtime.backend import AttentionBackend
from attn_core.runtime.batch import CacheView, ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from recording import DV, HQ, LAYERS, M, Recorder, batch, make, qkv, recorder

ROUTES = [
    (M.EXTEND, "prefiller", "prefiller", "forward_extend"),
    (M.MIXED, "prefiller", "prefiller", "forward_extend"),
    (M.DECODE, "decoder", "decoder", "forward_decode"),
    (M.TARGET_VERIFY, "prefiller", "decoder", "forward_extend"),
    (M.DRAFT_DECODE, "prefiller", "decoder", "forward_decode"),
    (M.DRAFT_EXTEND, "prefiller", "decoder", "forward_extend"),
]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_dispatcher_is_not_copied(how):
    """Plans and launches hold addresses, which a copy would share or another process lack."""
    dispatcher, *_ = make()
    with pytest.raises(UnsupportedError, match=r"cannot be copied .*from_selection"):
        how(dispatcher)


def test_the_table_of_routes_is_whole():
    assert {m for m, *_ in ROUTES} | {M.IDLE} == set(ForwardMode)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("speculation", ["prefill", "decode"])
@pytest.mark.parametrize(("mode", "by_prefill", "by_decode", "method"), ROUTES)
def test_each_mode_goes_to_one_backend_with_the_cache_written(
    mode, by_prefill, by_decode, method, speculation, layer
):
    dispatcher, pre, dec = make(speculation)
    b = batch(mode)
    q, k, v = qkv(b.num_tokens)
    out = torch.empty(b.num_tokens, HQ, DV)
    name = by_prefill if speculation == "prefill" else by_decode
    chosen, other = (pre, dec) if name == "prefiller" else (dec, pre)
    metadata = dispatcher.init_forward_metadata(b)
    assert metadata == f"{name}.init_forward_metadata"
    actual = dispatcher.forward(q, k, v, layer, b, metadata, out=out, return_lse=True)
    assert actual is chosen.returned
    assert not other.calls
    (plan, (planned,), _), (called, args, kwargs) = chosen.calls
    assert (plan, called) == ("init_forward_metadata", method)
    assert planned is b
    for have, want in zip((*args[:4], *args[5:]), (q, k, v, layer, b, metadata), strict=True):
        assert have is want
    assert kwargs == {"out": out, "return_lse": True, "topk_indices": None}
    # what the backend saw in the slots of this layer's view
    assert torch.equal(args[4][0], k)
    assert torch.equal(args[4][1], v)


@pytest.mark.parametrize(
    "method", ["init_forward_metadata", "init_forward_metadata_capture_cuda_graph"]
)
@pytest.mark.parametrize("name", ["full", "window"])
def test_a_view_of_other_pages_than_the_pool_s_is_refused(name, method):
    """Its slots are other tokens' of this pool: page 1 of 2 tokens begins in slot 2, not in 4."""
    dispatcher, pre, dec = make()
    plan = getattr(dispatcher, method)
    views = batch(M.DECODE).views
    other = CacheView.build(
        page_table=torch.ones(2, 4, dtype=torch.int32), page_size=2, seq_lens=[6, 3],
        new_lens=[1, 1],
    )  # fmt: skip
    with pytest.raises(BatchError, match=f"view '{name}' .* pages of 2 tokens, the pool .* of 4"):
        plan(batch(M.DECODE, views={**views, name: other}))
    assert not pre.calls
    assert not dec.calls
    unsaid = dataclasses.replace(views[name], page_size=None)
    plan(batch(M.DECODE, views={**views, name: unsaid}))


def test_idle_asks_nobody_and_gives_empty_outputs():
    dispatcher, pre, dec = make()
    b = batch(M.IDLE)
    q, k, v = qkv(0)
    assert dispatcher.init_forward_metadata(b) is None
    out = dispatcher.forward(q.bfloat16(), k, v, LAYERS[0], b, None)
    assert (out.shape, out.dtype) == ((0, HQ, DV), torch.bfloat16)
    kwargs = torch.empty(0, HQ, DV)
    out, lse = dispatcher.forward(q, k, v, LAYERS[0], b, None, out=kwargs, return_lse=True)
    assert out is kwargs
    assert (lse.shape, lse.dtype) == ((0, HQ), torch.float32)
    assert dispatcher.init_forward_metadata_capture_cuda_graph(b) is None
    dispatcher.init_forward_metadata_replay_cuda_graph(b, None)
    assert not pre.calls + dec.calls


def test_nothing_is_written_without_k_or_where_the_kernel_writes():
    for decode, k_given in ((recorder("d"), False), (recorder("d", fused_kv_write=True), True)):
        dispatcher, _, dec = make(decode=decode)
        b = batch(M.DECODE)
        q, k, v = qkv(2)
        k, v = (k, v) if k_given else (None, None)
        dispatcher.forward(q, k, v, LAYERS[0], b, None)
        args = dec.calls[-1][1]
        assert args[1] is k
        assert not args[4][0].any()


def test_a_shared_kv_layer_needs_no_view_to_write():
    dispatcher, pre, _ = make()
    b = batch(M.EXTEND, views={})
    q, k, v = qkv(4)
    dispatcher.forward(q, None, None, LAYERS[1], b, None)
    with pytest.raises(BatchError, match=r"layer 1 needs view 'window', the batch has \['full'\]"):
        dispatcher.forward(q, k, v, LAYERS[1], b, None)
    assert len(pre.calls) == 1


@pytest.mark.parametrize("mode", [M.TARGET_VERIFY, M.DRAFT_DECODE, M.DRAFT_EXTEND])
def test_without_speculation_nobody_drafts(mode):
    dispatcher, _, _ = make(None)
    with pytest.raises(UnsupportedError, match=r"without speculation.*--speculative-eagle-topk"):
        dispatcher.init_forward_metadata(batch(mode))


def test_every_public_method_of_the_contract_is_routed():
    dispatcher, pre, dec = make("prefill", encode=recorder("encoder"))
    q, k, v = qkv(2)
    cu = torch.tensor([0, 2], dtype=torch.int32)
    extend, decode = batch(M.EXTEND), batch(M.DECODE)
    dispatcher.init_forward_metadata(extend)
    dispatcher.forward(*qkv(4), LAYERS[0], extend, None)
    dispatcher.forward(q, k, v, LAYERS[0], decode, None)
    dispatcher.forward_ragged(q, k, v, LAYERS[0], cu, cu, 2, 2, causal=True)
    dispatcher.init_cuda_graph_state(8, 16)
    dispatcher.init_forward_metadata_capture_cuda_graph(decode)
    dispatcher.init_forward_metadata_replay_cuda_graph(decode, "plan")
    assert dispatcher.get_cuda_graph_seq_len_fill_value() == 3
    contract = {
        name
        for name, _ in inspect.getmembers(AttentionBackend, inspect.isfunction)
        if not name.startswith("_")
    }
    # test_sparse has the dispatcher's index_topk, which also writes, and test_shared_keys the other
    contract -= {"index_topk", "shared_keys", "linear_class"}  # the last is no part of a pass
    assert {name for name, *_ in pre.calls + dec.calls} == contract - {"forward"}, "its pair"
    # and the dispatcher offers each under its own name, with the contract's parameters
    for name in contract - {"forward", "forward_extend", "forward_decode"}:
        theirs = list(inspect.signature(getattr(AttentionBackend, name)).parameters)
        ours = list(inspect.signature(getattr(HybridDispatcher, name)).parameters)
        assert ours[: len(theirs)] == theirs, name


def test_ragged_goes_to_prefill_or_to_the_encoder():
    encoder = recorder("encoder")
    dispatcher, pre, _ = make(encode=encoder)
    q, k, v = qkv(2)
    cu, out = torch.tensor([0, 2], dtype=torch.int32), torch.empty(2, HQ, DV)
    args = (q, k, v, LAYERS[0], cu, cu, 2, 2)
    more = {"causal": False, "out": out, "return_lse": True}
    assert dispatcher.forward_ragged(*args, **more) is pre.returned
    assert dispatcher.forward_ragged(*args, **more, role="encode") is encoder.returned
    for b in (pre, encoder):
        ((_, actual, kwargs),) = b.calls
        assert all(x is y for x, y in zip(actual, args, strict=True))
        assert kwargs == more
    with pytest.raises(UnsupportedError, match=r"no backend for encode: .*vision config"):
        make()[0].forward_ragged(*args, causal=True, role="encode")


@pytest.mark.parametrize(
    ("speculation", "prefill", "decode", "captured"),
    [
        (None, "uniform", "uniform", ["decoder"]),
        (None, "uniform", "never", []),
        ("prefill", "uniform", "uniform", ["decoder", "prefiller"]),
        ("prefill", "never", "uniform", ["decoder"]),
        ("prefill", "uniform", "never", []),  # no graphs for the pair
        ("decode", "uniform", "uniform", ["decoder"]),
        ("decode", "uniform", "decode", ["decoder"]),
    ],
)
def test_what_is_captured(speculation, prefill, decode, captured):
    dispatcher, pre, dec = make(
        speculation,
        recorder("prefiller", cuda_graph=prefill),
        recorder("decoder", cuda_graph=decode),
    )
    assert [b.config.name for b in dispatcher.captured] == captured
    dispatcher.init_cuda_graph_state(8, 16)
    for b in (pre, dec):
        want = [("init_cuda_graph_state", (8, 16), {})] if b.config.name in captured else []
        assert b.calls == want


def test_one_backend_for_both_is_captured_once():
    one = recorder("one")
    dispatcher, _, _ = make("prefill", one, one)
    assert dispatcher.captured == (one,)


def test_capture_and_replay_go_to_the_backend_of_the_mode():
    dispatcher, pre, dec = make("prefill")
    for mode, owner in ((M.DECODE, dec), (M.TARGET_VERIFY, pre), (M.DRAFT_DECODE, pre)):
        b = batch(mode)
        metadata = dispatcher.init_forward_metadata_capture_cuda_graph(b)
        assert metadata.startswith(owner.config.name)
        dispatcher.init_forward_metadata_replay_cuda_graph(b, metadata)
        replayed = owner.calls[-1]
        assert replayed == ("init_forward_metadata_replay_cuda_graph", (b, metadata), {})
    dispatcher, pre, _ = make("prefill", recorder("prefiller", cuda_graph="never"))
    with pytest.raises(
        UnsupportedError, match=r"target_verify passes run on prefiller.*captured: decoder"
    ):
        dispatcher.init_forward_metadata_capture_cuda_graph(batch(M.TARGET_VERIFY))
    assert not pre.calls


@pytest.mark.parametrize(
    ("mode", "level"),
    [
        (M.DECODE, "decode"),
        (M.DRAFT_DECODE, "decode"),
        (M.TARGET_VERIFY, "uniform"),
        (M.DRAFT_EXTEND, "uniform"),
    ],
)
@pytest.mark.parametrize("has", ["decode", "uniform"])
def test_a_pass_beyond_the_graph_level_of_its_row_is_not_captured(mode, level, has):
    dispatcher, _, dec = make("decode", decode=recorder("decoder", cuda_graph=has))
    if level in (has, "decode"):
        dispatcher.init_forward_metadata_capture_cuda_graph(batch(mode))
        assert len(dec.calls) == 1
        return
    message = (
        f"this {mode.value} pass in a CUDA graph needs cuda_graph 'uniform', .*decoder has 'decode'"
    )
    with pytest.raises(UnsupportedError, match=message):
        dispatcher.init_forward_metadata_capture_cuda_graph(batch(mode))
    assert not dec.calls


def test_lengths_on_the_host_are_those_of_the_tensor():
    """Backends read the one or the other, so that the wrong one is wrong for some of them alone."""
    dispatcher, *_ = make()
    made = batch(M.EXTEND)
    view = made.views["full"]
    lengths, queries = view.seq_lens_host, made.query_lens_host

    def plan(host, on_device):
        seq_lens = torch.tensor(on_device, dtype=torch.int32)
        changed = dataclasses.replace(view, seq_lens=seq_lens, seq_lens_host=tuple(host))
        views = {**made.views, **dict.fromkeys(made.views.keys() - {"cross"}, changed)}
        return dispatcher.init_forward_metadata(dataclasses.replace(made, views=views))

    rest = lengths[1:]
    said = f"request 0: seq_lens_host {lengths[0]}, seq_lens {lengths[0] + 1}; give the same"
    with pytest.raises(BatchError, match=said):
        plan(lengths, [lengths[0] + 1, *rest])
    assert plan(lengths, lengths)
    assert plan([queries[0], *rest], [0, *rest])  # the first only pads the batch


def test_a_layer_that_no_config_lists_is_held_to_the_row_too():
    dispatcher, pre, _ = make()
    windowed = dataclasses.replace(LAYERS[0], sliding_window=3)
    with pytest.raises(UnsupportedError, match=r"layer 0 needs sliding_window 3 .* prefiller does"):
        dispatcher.forward(*qkv(4), windowed, batch(M.EXTEND), None)
    q, k, v = qkv(4)
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"layer 0 needs sliding_window 3 .* prefiller does"):
        dispatcher.forward_ragged(q, k, v, windowed, lengths, lengths, 4, 4, causal=True)
    assert not pre.calls
    assert not dispatcher.caches.layer(0).k.any()


def test_prefill_and_decode_are_required():
    with pytest.raises(UsageError, match=r"no backend for 'decode' \(routes: \['prefill'\]\)"):
        HybridDispatcher(
            {"prefill": recorder("p")}, KVPool([], num_pages=1, page_size=1, kv_cache_dtype="fp32")
        )


class Nothing(Recorder):
    """Does nothing, so that a call costs what the dispatcher costs."""

    def forward(self, q, k, v, layer, cache, batch, metadata, *, out, **kwargs):
        return out


def test_a_layer_costs_the_host_a_dozen_calls():
    """What the 2 µs a layer are spent on, counted: a clock on a busy machine says nothing."""
    dispatcher, _, _ = make(decode=Nothing(recorder("nothing").config))
    b, q, out = batch(M.DECODE), qkv(2)[0], torch.empty(2, HQ, DV)
    calls = []

    def note(frame, event, function):
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "c_call":
            calls.append(function.__name__)

    dispatcher.forward(q, None, None, LAYERS[0], b, None, out=out)  # what is done once a pass
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        dispatcher.forward(q, None, None, LAYERS[0], b, None, out=out)
    finally:
        sys.setprofile(before)
    assert "forward" in calls
    assert len(calls) <= 12, calls
