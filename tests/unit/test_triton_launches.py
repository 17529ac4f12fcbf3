"""One backend over one cache, pass after pass: on a GPU all launches but the first are repeated.

Each pass differs from the one before in what a launch is compiled for, or in an address.
"""

from dataclasses import replace

import pytest
import torch
from attn_core.ops.kv import read_kv, write_kv
from attn_core.runtime.batch import ForwardMode, SpecInfo

pytest.importorskip("triton")

from attn_core.backends.triton import backend as module
from attn_core.backends.triton.kernel import Call
from attn_core.ops.triton import kv
from attn_core.ops.triton.launcher import Arguments
from triton_passes import DEVICE, Requests, make_layer

CUDA = DEVICE.type == "cuda"
LENGTHS = (700, 33, 300, 64) if CUDA else (70, 33, 17, 5)
STORES = {
    "bf16": {"page": 16},
    "hopper": {"page": 64},
    "page-1": {"page": 1},
    "fp8": {"page": 16, "store": "fp8_e4m3"},
    "latent": {"page": 64, "layer": {"heads": 1, "group": 16, "dim": 576, "v_dim": 512}},
}


def shifted(x, elements):
    """Return a copy of a tensor that begins so many elements behind an aligned address."""
    flat = torch.zeros(x.numel() + elements, dtype=x.dtype, device=x.device)
    return flat[elements:].view(x.shape).copy_(x)


def spread(x):
    """Return a copy whose heads lie apart, as those of a fused projection."""
    wide = torch.zeros(x.shape[0], x.shape[1] * 3, x.shape[2], dtype=x.dtype, device=x.device)
    return wide[:, x.shape[1] : 2 * x.shape[1]].copy_(x)


def requests_of(name):
    made = dict(STORES[name])
    return Requests(make_layer(**made.pop("layer", {"group": 2})), LENGTHS, **made)


@pytest.mark.parametrize("name", STORES if CUDA else ("bf16", "fp8"))  # slow in the interpreter
def test_passes_over_one_cache(name):
    requests = requests_of(name)
    backend, layer = requests.backend(), requests.layer

    def attend(queries, lengths, mode, *, q_of=lambda q: q, out=None, spec=None, views=None, **to):
        batch = requests.batch(queries, lengths, mode, spec)
        batch = replace(batch, **(views(batch) if views else {}))
        q = q_of(requests.draw(sum(queries), seed=len(to) + sum(queries)))
        plan = backend.init_forward_metadata(batch)
        got = backend.forward(
            q, None, None, layer, requests.cache, batch, plan, out=out, return_lse=True
        )
        requests.check(got, q, queries, lengths, **to)

    one, decode = [1] * len(LENGTHS), ForwardMode.DECODE
    attend(one, LENGTHS, decode)
    attend(one, LENGTHS, decode)
    attend(one, [n // 2 for n in LENGTHS], decode)
    attend(one, LENGTHS, decode, q_of=spread)
    attend(one, LENGTHS, decode, q_of=lambda q: shifted(q, 8))
    attend(one, LENGTHS, decode, q_of=lambda q: shifted(q, 1))
    shape = (len(one), layer.num_q_heads, layer.v_head_dim)
    room = torch.zeros(len(one) + 1, *shape[1:], dtype=torch.bfloat16, device=DEVICE)
    attend(one, LENGTHS, decode, out=room[1:])
    attend(one, LENGTHS, decode, out=shifted(room[1:], 4))

    def wider(batch):
        view = batch.views["full"]
        table = torch.cat((view.page_table, torch.zeros_like(view.page_table)), 1)
        lengths = shifted(view.seq_lens, 1)
        return {
            "views": {"full": replace(view, page_table=table, seq_lens=lengths)},
            "cu_seqlens_q": shifted(batch.cu_seqlens_q, 3),
        }

    attend(one, LENGTHS, decode, views=wider)
    for pool in (requests.cache.k, requests.cache.v):
        if pool is not None:
            pool.set_(pool.clone())
            attend(one, LENGTHS, decode)
    attend([7, 1, 16, 5], LENGTHS, ForwardMode.EXTEND)
    attend([7, 1, 16, 5], LENGTHS, ForwardMode.EXTEND, q_of=lambda q: shifted(spread(q), 0))
    attend([1, 9, 1, 2], LENGTHS, ForwardMode.EXTEND)
    if name != "latent":
        trees = torch.eye(3, dtype=torch.bool, device=DEVICE).repeat(len(LENGTHS), 1, 1)
        trees[:, :, 0] = True
        for mask in (trees, shifted(trees, 1)):
            spec = SpecInfo(topk=2, num_draft_tokens=3, tree_mask=mask)
            attend([3] * len(LENGTHS), LENGTHS, ForwardMode.TARGET_VERIFY, spec=spec, trees=trees)
    attend(one, LENGTHS, decode)


@pytest.mark.parametrize("name", ["bf16", "fp8", "latent"])
def test_writes_into_one_cache(name):
    requests = requests_of(name)
    layer, cache = requests.layer, requests.cache
    dims = (layer.head_dim, layer.v_head_dim)

    def in_a_moved_pool(x):
        cache.k.set_(cache.k.clone())
        return x

    for count, change in (
        (3, lambda x: x),
        (3, lambda x: x),
        (3, in_a_moved_pool),
        (16, spread),
        (1, lambda x: shifted(x, 8)),
        (5, lambda x: shifted(x, 1)),
        (2, lambda x: x.float()),
    ):
        slots = torch.randperm(32, device=DEVICE)[:count] + requests.page
        for at in (slots, shifted(slots, 1)):
            k, v = (
                change(torch.randn(count, layer.num_kv_heads, d, device=DEVICE).bfloat16())
                for d in dims
            )
            write_kv(cache, k, None if cache.v is None else v, at)
            got = read_kv(cache, at, torch.float32)
            for stored, new in zip(got, (k, v), strict=True):
                if stored is not None:
                    torch.testing.assert_close(stored, new.float(), atol=2e-3, rtol=0.07)


def test_a_writer_is_made_again_for_a_pool_that_moved(monkeypatch):
    """In the interpreter, which is given tensors, only this tells."""
    requests, made = requests_of("bf16"), []
    # its own writers: on a GPU the requests' keys were written by one of this cache already
    cache, layer = replace(requests.cache), requests.layer
    launcher = kv.Launcher
    monkeypatch.setattr(kv, "Launcher", lambda *a, **k: made.append(a) or launcher(*a, **k))
    k = torch.randn(1, layer.num_kv_heads, layer.head_dim, device=DEVICE).bfloat16()
    slots = torch.tensor([requests.page], device=DEVICE)
    kv.write_kv(cache, k, k, slots)
    kv.write_kv(cache, k * 2, k, slots)
    assert len(made) == 1
    for pool in (cache.k, cache.v):
        pool.set_(torch.zeros_like(pool))
        kv.write_kv(cache, k, k, slots)
    assert len(made) == 3
    torch.testing.assert_close(read_kv(cache, slots, k.dtype), (k, k), rtol=0, atol=0)


@pytest.mark.parametrize("form", ["as it is", "rows"])
def test_the_addresses_of_a_call_are_those_of_its_tensors(form):
    requests = requests_of("bf16")
    q = spread(requests.draw(len(LENGTHS)))
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], device=DEVICE)
    call = Call(q, requests.layer, requests.cache, None, out, lse)
    if form == "rows":
        hopper = pytest.importorskip("attn_core.backends.triton.hopper.launch")
        call = hopper._RowsCall(call)
        rows, _ = call.addresses
        assert rows.base.is_contiguous()
        assert torch.equal(rows.base.view(q.shape), q)
    assert call.addresses == Arguments(*call.values).addresses
    assert call.outputs.addresses == call.addresses[1:]
    outputs = Arguments(*call.outputs.values).addresses
    assert outputs == ((out.data_ptr(), lse.data_ptr(), *out.stride()[:2]),)
    dense = call.dense()
    assert dense.addresses[0][1:] == (q.shape[1] * q.shape[2], q.shape[2])
    assert torch.equal(dense.q, q)


def test_a_graph_has_an_lse_of_its_own(monkeypatch):
    """One that was made before the capture may be freed while the graph still fills it."""
    requests = requests_of("bf16")
    backend, layer, filled = requests.backend(), requests.layer, []
    one, outputs = [1] * len(LENGTHS), backend._outputs
    monkeypatch.setattr(
        backend, "_outputs", lambda *a, **k: filled.append(outputs(*a, **k)) or filled[-1]
    )
    batch = requests.batch(one, LENGTHS, ForwardMode.DECODE)
    plan, q = backend.init_forward_metadata(batch), requests.draw(len(one))
    for capturing in (False, False, True, True, False):
        monkeypatch.setattr(module, "_is_captured", lambda _q, now=capturing: now)
        backend.forward(q, None, None, layer, requests.cache, batch, plan)
    warm, again, first, second, after = [lse for _, _, lse in filled]
    assert warm is again is after, "kept from pass to pass"
    assert len({id(x) for x in (warm, first, second)}) == 3
