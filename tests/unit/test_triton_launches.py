"""One backend over one cache, pass after pass: on a GPU all launches but the first are repeated.

Each pass differs from the one before in what a launch is compiled for, or in an address.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attn_core.errors import UsageError
from attn_core.ops.kv import read_kv, write_kv
from attn_core.runtime.batch import ForwardMode, SpecInfo

pytest.importorskip("triton")

from attn_core.backends.triton import backend as module
from attn_core.backends.triton.kernel import Call, Pass
from attn_core.backends.triton.linear import launch as linear
from attn_core.ops.triton import kv
from attn_core.ops.triton.launcher import Arguments
from linear_reference import draw, make_linear_layer
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


def noted(monkeypatch, owner):
    """Collect the launches of a module's launchers, which do not run."""
    launches = []
    launcher = SimpleNamespace(launch=lambda *args: launches.append(args))
    monkeypatch.setattr(owner, "Launcher", lambda *args, **options: launcher)
    return launches


@pytest.mark.parametrize("name", ["bf16", "latent"])
def test_a_write_is_given_addresses_and_fits_the_cache(name, monkeypatch):
    requests, launches = requests_of(name), noted(monkeypatch, kv)
    cache, layer = replace(requests.cache), requests.layer
    heads = layer.num_kv_heads

    def drawn(count, heads, dim):
        return torch.zeros(count, heads, dim, dtype=torch.bfloat16, device=DEVICE)

    def write(count, *, heads=heads, dim=layer.head_dim, values=None):
        v = None if cache.v is None else drawn(values or count, heads, layer.v_head_dim)
        slots = torch.arange(count, device=DEVICE)
        kv.write_kv(cache, drawn(count, heads, dim), v, slots)

    for count in (3, 3, 700, 3):
        write(count)
        grid, given, tensors = launches.pop()
        assert given == addresses(tensors)
        assert given[-1] == count * heads
        assert grid[0] == -(-given[-1] // (2048 // 128))
    for wrong in ({"heads": heads + 1}, {"dim": layer.head_dim + 16}, {"values": 4}):
        if cache.v is not None or "values" not in wrong:
            with pytest.raises(UsageError, match=r"slots torch.int64 \[3\] of a cache"):
                write(3, **wrong)
    assert not launches


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_a_linear_decode_is_given_addresses(name, monkeypatch):
    launches = noted(monkeypatch, linear)
    layer = make_linear_layer(kind=name, gate="softplus" if name == "kda" else None)
    kept, state = linear.LinearArguments.of(layer, "sm90"), torch.zeros(5, 2, 32, 32)
    read, write = (torch.tensor(x, dtype=torch.int32) for x in ((2, 1, 0), (3, 4, -1)))
    for places in ({}, {"slots_out": write, "fresh": torch.tensor([False, True, False])}):
        for _ in range(2):
            linear.decode(kept, *draw(layer, 3).raw, state, read, **places)
            grid, given, tensors = launches.pop()
            assert given == addresses(tensors())
            assert grid == (3 * layer.num_v_heads * layer.head_v_dim // 8, 1, 1)
    assert len(kept.launchers) == 2, "one for passes with fresh requests, one for others"


def addresses(values):
    return Arguments(*values).addresses


def test_the_addresses_of_a_call_are_those_of_its_tensors():
    requests = requests_of("bf16")
    layer, q = requests.layer, spread(requests.draw(len(LENGTHS)))
    inputs = Pass.of(layer.group, requests.batch([1] * len(LENGTHS), LENGTHS, ForwardMode.DECODE))
    lse = torch.zeros(q.shape[:2], device=DEVICE)
    for out in (torch.zeros_like(q), spread(torch.zeros_like(q)), None):
        call = Call(q, layer, requests.cache, inputs, out, lse)
        assert (call.queries, call.outputs) == addresses(call.tensors())
        assert (call.outputs,) == addresses(call.output_tensors())
        assert call.out is out or call.out.is_contiguous()
        assert call.out.shape == q.shape
    dense = call.dense()
    assert dense.queries[1:] == (q.shape[1] * q.shape[2], q.shape[2])
    assert torch.equal(dense.q, q)
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    whole = Call(strided, layer, requests.cache, inputs, None, lse)
    assert whole.q.stride(-1) == 1
    assert torch.equal(whole.q, q)


@pytest.mark.parametrize(
    ("change", "copied"),
    [
        (lambda q: q, False),
        (spread, False),  # strides of 16 bytes
        (lambda q: shifted(q, 1), True),
        (lambda q: shifted(q, 8), False),
        (lambda q: torch.nn.functional.pad(q, (0, 1))[..., :-1], True),
        (lambda q: torch.nn.functional.pad(q, (0, 0, 0, 1))[:, :-1], False),
    ],
)
def test_hoppers_decode_copies_queries_that_16_byte_copies_cannot_read(change, copied, monkeypatch):
    hopper = pytest.importorskip("attn_core.backends.triton.hopper.launch")
    requests = requests_of("bf16")
    layer, q = requests.layer, change(requests.draw(len(LENGTHS)))
    inputs = Pass.of(layer.group, requests.batch([1] * len(LENGTHS), LENGTHS, ForwardMode.DECODE))
    call = Call(q, layer, requests.cache, inputs, None, torch.zeros(q.shape[:2], device=DEVICE))
    monkeypatch.setattr(hopper.SplitKernel, "make_launchers", lambda *args: hopper.Launchers(None))
    changed = hopper.HopperDecode().make_launchers(call, None, None, None).change
    assert (changed is not None) == copied
    if copied:
        assert changed(call).q.is_contiguous()
        assert torch.equal(changed(call).q, q)


@pytest.mark.parametrize("change", [lambda q: q, spread, lambda q: shifted(q, 1)])
def test_the_rows_of_a_call_are_those_of_its_queries(change):
    """TMA reads them from 16 bytes on, one after another."""
    hopper = pytest.importorskip("attn_core.backends.triton.hopper.launch")
    requests = requests_of("bf16")
    layer, q = requests.layer, change(requests.draw(len(LENGTHS)))
    inputs = Pass.of(layer.group, requests.batch([1] * len(LENGTHS), LENGTHS, ForwardMode.DECODE))
    lse = torch.zeros(q.shape[:2], device=DEVICE)
    rows = hopper._RowsCall(Call(q, layer, requests.cache, inputs, None, lse))
    descriptor = rows.query_tensors()
    where = (descriptor.base.data_ptr(), (*descriptor.shape,), (*descriptor.strides,))
    assert tuple(rows.queries) == where
    assert descriptor.base.is_contiguous()
    assert torch.equal(descriptor.base.view(q.shape), q)
    assert (rows.outputs,) == addresses(rows.output_tensors())


def test_an_lse_that_nobody_reads_is_the_plans(monkeypatch):
    """A graph keeps its plan, and so what its layers fill; eager passes of a size share one."""
    requests = requests_of("bf16")
    backend, layer, filled, make = requests.backend(), requests.layer, [], module.Call
    monkeypatch.setattr(module, "Call", lambda *a: filled.append(a[-1]) or make(*a))

    def attend(plan, batch, **more):
        q = requests.draw(batch.num_tokens)
        backend.forward(q, None, None, layer, requests.cache, batch, plan, **more)
        return filled[-1]

    one = requests.batch([1] * len(LENGTHS), LENGTHS, ForwardMode.DECODE)
    two = requests.batch([2] * len(LENGTHS), LENGTHS, ForwardMode.EXTEND)
    again = requests.batch([1] * len(LENGTHS), LENGTHS, ForwardMode.DECODE)
    plans = [backend.init_forward_metadata(batch) for batch in (one, one, two)]
    lses = [attend(plan, batch) for plan, batch in zip(plans, (one, one, two), strict=True)]
    assert lses[0] is lses[1]
    assert lses[2].shape == (two.num_tokens, layer.num_q_heads)
    assert attend(plans[0], one) is lses[0], "whatever was planned since"
    assert attend(plans[0], one, return_lse=True) is not lses[0]
    assert attend(plans[0], again) is not lses[0], "it may have other tokens"
