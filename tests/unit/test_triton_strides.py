"""Tensors of any strides, and offsets that no 32 bits hold, are read where they lie."""

from dataclasses import replace

import pytest
import torch
from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import UsageError
from attn_core.ops import kv as torch_kv
from attn_core.runtime.batch import ForwardBatch
from attn_core.spec.dual_chunk import DualChunk
from attn_core.testing.inputs import mapped

pytest.importorskip("triton")

from attn_core.runtime.layer import LayerGroup
from triton_server import DEVICE, HKV, HQ, D, M, Server, make_backend, make_layer, make_pool

LENGTHS = (20, 7, 33)
TOKENS = sum(LENGTHS)


def fused(x):
    """Return x as one of three parts of a projection: a token has the others beside it."""
    return torch.stack((torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)), 1)[:, 1]


def heads_first(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def split(x):
    wide = torch.cat((x, torch.full_like(x, torch.nan)), 1)
    return wide.split(x.shape[1], 1)[0]


def padded(x):
    """Columns beside those of each head."""
    return torch.cat((x, torch.full_like(x, torch.nan)), -1)[..., : x.shape[-1]]


def spread(x):
    """Columns that are not adjacent."""
    return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]


FORMS = [fused, heads_first, split, padded, spread]


def indptr(*lengths, step=1):
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    return torch.stack([starts] * step, 1)[:, 0]


def ragged(q, k, v, *, out=None, step=1, keys=LENGTHS, **changes):
    layer = make_layer(**changes)
    cu = (indptr(*LENGTHS, step=step), indptr(*keys, step=step))
    arguments = (q, k, v, layer, *cu, max(LENGTHS), max(keys))
    backend = make_backend(layer)
    return backend.forward_ragged(*arguments, causal=False, out=out, return_lse=True)


def tokens(*heads, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(TOKENS, h, D, generator=rng).to(DEVICE) for h in heads]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_queries_keys_and_values_without_a_cache_may_be_slices(form):
    """A vision tower hands over the parts of one fused projection."""
    q, k, v = tokens(HQ, HKV, HKV)
    want = ragged(q, k, v)
    assert equal(ragged(form(q), form(k), form(v)), want)
    assert equal(ragged(q, form(k), v), want), "K and V of different strides"


def test_keys_of_one_token_or_of_none():
    q, k, v = tokens(HQ, HKV, HKV)
    out, lse = ragged(q, fused(k[:1]), fused(v[:1]), keys=(1, 0, 0))
    assert equal((out, lse), ragged(q, k[:1], v[:1], keys=(1, 0, 0)))
    assert torch.allclose(out[: LENGTHS[0]], v[:1].repeat_interleave(HQ // HKV, 1))
    assert not out[LENGTHS[0] :].any()
    assert (lse[LENGTHS[0] :] == -torch.inf).all()
    assert not ragged(q, k[:0], v[:0], keys=(0, 0, 0))[0].any()
    assert not ragged(q, spread(k)[:0], spread(v)[:0], keys=(0, 0, 0))[0].any()


def test_one_key_for_every_head_and_token():
    q, k, v = tokens(HQ, HKV, HKV)
    one = k[:1, :1].expand(TOKENS, HKV, D)
    assert equal(ragged(q, one, v), ragged(q, one.contiguous(), v))


def test_lengths_without_a_cache_may_be_a_column():
    q, k, v = tokens(HQ, HKV, HKV)
    assert equal(ragged(q, k, v, step=2), ragged(q, k, v))


def test_an_output_of_any_rows_is_filled_and_one_of_spread_columns_refused():
    q, k, v = tokens(HQ, HKV, HKV)
    want, _ = ragged(q, k, v)
    for form in (fused, heads_first, padded):
        out = form(torch.full_like(want, torch.nan))
        assert ragged(q, k, v, out=out)[0] is out
        assert torch.equal(out, want)
    with pytest.raises(UsageError, match=r"out with stride 2 in its last dimension \(supports 1\)"):
        ragged(q, k, v, out=spread(want))


# ---- Passes over a cache ---------------------------------------------------------------------

PASSES = {"decode": (M.DECODE, 1), "extend": (M.EXTEND, 70)}


def served(name, form):
    """Return out and LSE of a pass with q, k, v of that form, and the cache that it wrote."""
    mode, new = PASSES[name]
    server = Server((90, new), (75, new))
    server.q, server.k, server.v = (replaced(x, form) for x in (server.q, server.k, server.v))
    batch, _ = server.batch(mode)
    return server.attend(make_backend(), batch, slice(None)), server.cache(make_layer())


def replaced(x, form):
    got = form(x)
    assert torch.equal(got, x)
    return got


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("form", FORMS)
def test_new_tokens_may_be_slices(name, form):
    got, cache = served(name, form)
    want, written = served(name, torch.clone)
    assert equal(got, want)
    assert equal((cache.k, cache.v), (written.k, written.v))


@pytest.mark.parametrize("name", PASSES)
def test_a_page_table_may_be_a_part_of_a_larger_one(name):
    mode, new = PASSES[name]
    server = Server((90, new), (75, new))
    batch, _ = server.batch(mode)
    want = server.attend(make_backend(), batch, slice(None))
    table = torch.zeros(5, 64, dtype=torch.int32, device=DEVICE)
    table[:2, : server.table.shape[1]] = server.table
    view = replace(batch.views["full"], page_table=table[:2, : server.table.shape[1]])
    assert equal(
        server.attend(make_backend(), replace(batch, views={"full": view}), slice(None)), want
    )


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("store", ["fp32", "fp8_e5m2", "fp4_e2m1"])
def test_the_pages_of_a_cache_may_be_parts_of_a_larger_tensor(name, layout, store):
    """K and V beside each other in one page; rows of an odd number of bytes."""
    mode, new = PASSES[name]
    server = Server((90, new), (75, new))
    server.pool = make_pool([make_layer()], server.pool.layer(0).num_pages, store, layout=layout)
    batch, _ = server.batch(mode)
    cache = server.cache(make_layer())
    torch_kv.write_kv(cache, server.k, server.v, batch.views["full"].out_cache_loc)
    backend = make_backend(kv_cache_dtype=store)
    tokens = (server.q, None, None, make_layer())

    def attend(form):
        store = mapped(cache, form)
        metadata = backend.init_forward_metadata(batch)
        return backend.forward(*tokens, store, batch, metadata, return_lse=True)

    def beside(t):
        both = torch.zeros(t.shape[0], 2, *t.shape[1:], dtype=t.dtype, device=DEVICE)
        both[:, 1] = t
        return both[:, 1]

    def odd(t):
        both = torch.zeros(*t.shape[:-1], t.shape[-1] + 1, dtype=t.dtype, device=DEVICE)
        both[..., 1:] = t
        return both[..., 1:]

    want = attend(torch.clone)
    assert equal(attend(beside), want)
    for a, b in zip(attend(odd), want, strict=True):  # FP8 is read in halves, or is not: rounding
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_cache_of_spread_columns_is_refused():
    server = Server((9, 1))
    batch, _ = server.batch(M.DECODE)
    cache = mapped(server.cache(make_layer()), spread)
    backend = make_backend()
    with pytest.raises(UsageError, match=r"a cache with stride 2 in its last dimension"):
        backend.forward(
            server.q, None, None, make_layer(), cache, batch, backend.init_forward_metadata(batch)
        )


@pytest.mark.parametrize("form", [padded, spread, lambda x: x.mT.contiguous().mT])
def test_the_three_queries_of_a_token_may_be_slices(form):
    """Heads may lie closer to each other than the numbers of a head."""
    layer = make_layer(dual_chunk=DualChunk(chunk_size=20, local_size=4))
    server = Server((90, 40), layers=[layer])
    batch, _ = server.batch(M.EXTEND)
    backend, [q, *_] = make_backend(layer), tokens(3 * HQ)
    q = q[:40].view(40, 3, HQ, D)
    metadata = backend.init_forward_metadata(batch)

    def attend(q):
        cache = server.cache(layer)
        return backend.forward(q, None, None, layer, cache, batch, metadata, return_lse=True)

    assert equal(attend(replaced(q, form)), attend(q))


# ---- Offsets beyond 32 bits ------------------------------------------------------------------

FAR = (1 << 30) + 4096  # numbers between neighbours: the third is beyond 2^31, in few real pages


def far(t, axis):
    """Return a copy of `t` with neighbours of one axis, of three, that lie FAR apart."""
    assert t.shape[axis] == 3
    strides = [0] * t.dim()
    step = 1
    for i in reversed(range(t.dim())):
        strides[i] = FAR if i == axis else step
        step *= 1 if i == axis else t.shape[i]
    memory = torch.empty(2 * FAR + step, dtype=t.dtype, device=DEVICE)  # virtual: few are touched
    return memory.as_strided(t.shape, strides).copy_(t)


@pytest.mark.parametrize("axis", [0, 1])
def test_queries_keys_and_values_that_lie_far_apart(axis):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 3, D, generator=rng).half().to(DEVICE) for _ in range(3))
    layer = replace(make_layer(), num_q_heads=3, num_kv_heads=3)
    backend = make_backend(layer, dtype="fp16")

    def attend(*tokens):
        return backend.forward_ragged(
            *tokens, layer, indptr(3), indptr(3), 3, 3, causal=True, return_lse=True
        )

    want = attend(q, k, v)
    assert equal(attend(far(q, axis), k, v), want)
    assert equal(attend(q, far(k, axis), v), want)
    assert equal(attend(q, k, far(v, axis)), want)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize(("layout", "axis"), [("NHD", 0), ("NHD", 1), ("NHD", 2), ("HND", 1)])
def test_a_cache_that_lies_far_apart(name, layout, axis):
    """What counts is where the last page lies, not how many numbers the pages hold."""
    page = 3
    mode, new = PASSES[name]
    new = min(new, 2 * page)
    heads = {"num_q_heads": 72 if name == "extend" else 3, "num_kv_heads": 3}
    layer = replace(make_layer(), **heads)
    backend = make_backend(layer, kv_cache_dtype="fp8_e5m2", page_size=page)
    rng = torch.Generator().manual_seed(0)
    shape = (3, page, 3, D)
    k, v = (torch.randn(shape, generator=rng).to(torch.float8_e5m2).to(DEVICE) for _ in range(2))
    q = torch.randn(new, heads["num_q_heads"], D, generator=rng).to(DEVICE)
    batch = ForwardBatch.build(
        mode,
        query_lens=[new],
        seq_lens=[2 * page],
        page_table=torch.tensor([[2, 1]], dtype=torch.int32, device=DEVICE),
        page_size=page,
    )
    metadata = backend.init_forward_metadata(batch)
    assert (metadata[LayerGroup.of(layer)].split is None) == (name == "extend"), (
        "many queries or few"
    )

    def attend(k, v):
        cache = LayerCache(k=k, v=v, layout=layout)
        return backend.forward(q, None, None, layer, cache, batch, metadata, return_lse=True)

    want = attend(k, v)
    assert equal(attend(far(k, axis), v), want)
    assert equal(attend(k, far(v, axis)), want)
