"""Layers of a pass are compared with its first one: what differs is checked and served anew."""

import copy
import dataclasses
import pickle

import pytest
import torch
from attn_core.cache.pool import KVPool
from attn_core.errors import BatchError, UnsupportedError
from attn_core.ops import forms
from attn_core.ops.kv import read_kv
from attn_core.runtime.dispatcher import HybridDispatcher
from recording import DV, HQ, LAYERS, M, batch, make, qkv, recorder

LAYER = LAYERS[0]


@pytest.fixture(params=["guards", "attributes"], autouse=True)
def way(request, monkeypatch):
    """With torch's guards and without them."""
    if request.param == "attributes":
        monkeypatch.setattr(forms, "_GUARDS", None)


@pytest.fixture
def known():
    """Return a dispatcher, its backend, a decode pass, and tensors that it has seen."""
    dispatcher, _, backend = make()
    b = batch(M.DECODE)
    tensors = qkv(2)
    for _ in range(2):
        dispatcher.forward(*tensors, LAYER, b, None)
    assert len(b.known) == 1
    return dispatcher, backend, b, tensors


def stored(dispatcher, slots):
    return read_kv(dispatcher.caches.layer(0), slots, torch.float32)


def test_a_like_call_is_not_checked_again_and_is_served_alike(known, monkeypatch):
    dispatcher, backend, b, (q, k, v) = known
    monkeypatch.setattr("attn_core.runtime.dispatcher.check_pass", None)
    others = [x + 1 for x in (q, k, v)]
    got = dispatcher.forward(*others, LAYER, b, None)
    assert got is backend.returned
    args = backend.calls[-1][1]
    assert all(have is want for have, want in zip(args[:3], others, strict=True))
    assert torch.equal(args[4][0], k + 1)
    assert torch.equal(args[4][1], v + 1)


WRONG = {
    "q heads": lambda q, k, v: (q[:, 1:], k, v),
    "q tokens": lambda q, k, v: (q[:1], k, v),
    "k heads": lambda q, k, v: (q, k[:, 1:], v),
    "k tokens": lambda q, k, v: (q, k[:1], v[:1]),
    "v dim": lambda q, k, v: (q, k, k),
    "v alone": lambda q, k, v: (q, None, v),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_still_refused(name, known):
    dispatcher, backend, b, tensors = known
    calls = len(backend.calls)
    with pytest.raises(BatchError, match="layer 0"):
        dispatcher.forward(*WRONG[name](*tensors), LAYER, b, None)
    with pytest.raises(BatchError, match=r"layer 0: out is \[2, 4, 3\]"):
        dispatcher.forward(*tensors, LAYER, b, None, out=torch.empty(2, HQ, DV - 1))
    assert len(backend.calls) == calls


def test_tensors_that_are_copied_for_a_backend_are_copied_again(known):
    """Also where the first layer's were: what was not handed on as it is, is not known."""
    dispatcher, backend, b, (q, k, v) = known
    spread = [x.repeat_interleave(2, -1)[..., ::2] for x in (q, k, v)]
    for _ in range(2):
        dispatcher.forward(*spread, LAYER, b, None)
        assert all(x.is_contiguous() for x in backend.calls[-1][1][:3])
        assert torch.equal(backend.calls[-1][1][4][0], k)
    dispatcher.forward(q, k, v, LAYER, b, None)
    assert backend.calls[-1][1][0] is q


def test_an_output_is_filled_where_it_lies(known):
    dispatcher, backend, b, tensors = known
    flat = torch.empty(2 * HQ * DV + 1)
    aligned, shifted = flat[:-1].view(2, HQ, DV), flat[1:].view(2, HQ, DV)
    strided = torch.empty(2, HQ, 2 * DV)[..., ::2]
    for out, own in ((aligned, True), (aligned, True), (shifted, False), (strided, False)) * 2:
        got = dispatcher.forward(*tensors, LAYER, b, None, out=out)
        assert got is out
        assert (backend.calls[-1][2]["out"] is out) is own


def test_other_slots_are_written(known):
    """Views may be a dict, in which a caller puts another view; tensors may get other memory."""
    dispatcher, _, b, (q, k, v) = known
    view = b.views["full"]
    b.views["full"] = dataclasses.replace(view, out_cache_loc=torch.tensor([17, 18]))
    dispatcher.forward(q, k + 1, v, LAYER, b, None)
    assert torch.equal(stored(dispatcher, torch.tensor([17, 18]))[0], k + 1)
    assert torch.equal(stored(dispatcher, view.out_cache_loc)[0], k)
    b.views["full"] = dataclasses.replace(view, out_cache_loc=torch.tensor([17, 18, 19]))
    with pytest.raises(BatchError, match="3 slots for the 2 tokens"):
        dispatcher.forward(q, k, v, LAYER, b, None)


def test_layers_of_other_views_and_shapes_are_others(known):
    dispatcher, backend, b, (q, k, v) = known
    dispatcher.forward(q, k, v, LAYERS[1], b, None)
    assert torch.equal(backend.calls[-1][1][4][0], k)
    smaller = dataclasses.replace(LAYER, num_q_heads=2)
    assert smaller.form not in {x.form for x in LAYERS}
    with pytest.raises(BatchError, match=r"q is \[2, 4, 8\] \(expected \[2, 2, 8\]"):
        dispatcher.forward(q, k, v, smaller, b, None)
    twin = dataclasses.replace(LAYER, layer_id=1)
    assert twin.form == LAYER.form
    assert dataclasses.replace(LAYER, index_topk=3).form != LAYER.form


def test_a_batch_may_be_shared_by_dispatchers():
    """What one backend supports says nothing of another one."""
    first, _, _ = make()
    other = recorder("other", lse=False)
    second, _, _ = make(decode=other)
    b, tensors = batch(M.DECODE), qkv(2)
    for _ in range(2):
        first.forward(*tensors, LAYER, b, None, return_lse=True)
        with pytest.raises(UnsupportedError, match="other returns no log-sum-exp"):
            second.forward(*tensors, LAYER, b, None, return_lse=True)
        second.forward(*tensors, LAYER, b, None)
    with pytest.raises(UnsupportedError, match="topk_indices"):
        first.forward(*tensors, LAYER, b, None, topk_indices=torch.zeros(2, 3, dtype=torch.int32))


def test_gradients_are_still_refused(known):
    dispatcher, _, b, (q, k, v) = known
    trained = q.clone().requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            dispatcher.forward(trained, k, v, LAYER, b, None)
        loss = dispatcher.forward(trained, k, v, LAYER, b, None).sum()
        with pytest.raises(UnsupportedError, match="backward"):
            loss.backward()
        with pytest.raises(UnsupportedError, match="require gradients"):
            dispatcher.forward(trained, k, v, LAYER, b, None, out=torch.empty(2, HQ, DV))
        dispatcher.forward(q, k, v, LAYER, b, None)


def test_a_pass_may_go_on_in_another_mode_of_autograd(known):
    dispatcher, backend, b, (q, k, v) = known
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            for tensors in ((q, k, v), [x.clone() for x in (q, k, v)]):
                dispatcher.forward(*tensors, LAYER, b, None)
                assert backend.calls[-1][1][0] is tensors[0]


def test_a_batch_is_copied_without_what_is_known(known):
    _, _, b, _ = known
    for other in (copy.deepcopy(b), pickle.loads(pickle.dumps(b)), copy.copy(b)):
        assert not other.known
        assert torch.equal(other.positions, b.positions)
    assert not dataclasses.replace(b).known


def test_another_pool_of_the_same_form_is_written(known):
    dispatcher, _, b, (q, k, v) = known
    old = dispatcher.caches
    dispatcher.caches = KVPool(LAYERS, num_pages=5, page_size=4, kv_cache_dtype="fp32")
    slots = b.views["full"].out_cache_loc
    dispatcher.forward(q, k + 1, v, LAYER, b, None)
    assert torch.equal(stored(dispatcher, slots)[0], k + 1)
    assert torch.equal(read_kv(old.layer(0), slots, torch.float32)[0], k)


def test_a_first_output_that_breaks_the_contract_is_found_in_each_layer():
    dispatcher, _, backend = make()
    b, tensors = batch(M.DECODE), qkv(2)
    dispatcher.forward(*tensors, LAYER, b, None)
    backend.forward_decode = lambda *args, **more: torch.zeros(1)
    twin = dataclasses.replace(LAYER, layer_id=1)
    assert isinstance(dispatcher, HybridDispatcher)
    with pytest.raises(Exception, match="breaks the contract"):
        dispatcher.forward(*tensors, twin, b, None)
