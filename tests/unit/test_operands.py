"""Tensors that do not fit a pass are refused; those at odd strides are handed on readable."""

import dataclasses

import pytest
import torch
from attn_core import (
    AttentionLayer,
    ForwardBatch,
    HybridDispatcher,
    KVPool,
    LayerRequirements,
    Overrides,
    Requirements,
    load_plugins,
    parse_device,
    select,
    write_kv,
)
from attn_core.errors import BatchError, UnsupportedError
from attn_core.runtime.batch import CacheView
from attn_core.runtime.operands import fillable, readable
from recording import DV, HQ, LAYERS, TABLE, M, batch, make, qkv, recorder


def apart(t):
    """Return the same numbers with a stride of 2 in the last dimension."""
    return torch.stack([t, t], -1)[..., 0]


def fused(*parts):
    """Return the same numbers as slices of one projection."""
    sizes = [x[0].numel() for x in parts]
    wide = torch.cat([x.flatten(1) for x in parts], 1)
    return [y.view(x.shape) for x, y in zip(parts, wide.split(sizes, 1), strict=True)]


def cu(*ends):
    return torch.tensor(ends, dtype=torch.int32)


def filling(backend):
    """Let a recorder fill what it returns with 7."""
    attend = backend._attend

    def filled(q, layer, out, return_lse):
        got = attend(q, layer, out, return_lse)
        (got[0] if return_lse else got).fill_(7)
        return got

    backend._attend = filled


def call(dispatcher, q, k, v, *, ragged=False, mode=M.EXTEND, **more):
    if ragged:
        ends = cu(0, len(q))
        return dispatcher.forward_ragged(
            q, k, v, LAYERS[0], ends, ends, len(q), len(q), causal=True, **more
        )
    return dispatcher.forward(q, k, v, LAYERS[0], batch(mode), None, **more)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_backend_reads_dense_last_dimensions(ragged):
    dispatcher, pre, _ = make()
    q, k, v = qkv(4)
    call(dispatcher, *map(apart, (q, k, v)), ragged=ragged)
    seen = pre.calls[-1][1][:3]
    assert all(x.stride(-1) == 1 for x in seen)
    assert all(torch.equal(x, y) for x, y in zip(seen, (q, k, v), strict=True))
    if not ragged:
        assert torch.equal(pre.calls[-1][1][4][0], k)  # what the cache holds


@pytest.mark.parametrize(
    ("shape", "strides"), [((0, 2, 4), (16, 8, 2)), ((3, 2, 1), (2, 1, 6)), ((0, 0, 1), (1, 1, 9))]
)
def test_a_stride_that_torch_calls_contiguous_is_made_dense(shape, strides):
    x = torch.randn(32).as_strided(shape, strides)
    assert x.is_contiguous()
    assert torch.equal(readable(x), x)
    assert readable(x).stride(-1) == 1
    assert fillable(x).shape == x.shape
    assert fillable(x).stride(-1) == 1


@pytest.mark.parametrize(
    ("shape", "strides", "start"),
    [((3, 2, 8), (16, 8, 1), 1), ((1, 2, 8), (3, 8, 1), 0), ((3, 1, 8), (8, 1, 1), 0)],
    ids=["begins late", "one token", "one head"],
)
def test_kernels_store_16_bytes_at_a_time_into_what_is_handed_on(shape, strides, start):
    """torch calls these contiguous; kernels of vendors refuse them, or fault at the address."""
    out = torch.zeros(64).as_strided(shape, strides, start)
    assert out.is_contiguous()
    filled = fillable(out)
    assert filled.stride() == (shape[1] * shape[2], shape[2], 1)
    assert not filled.data_ptr() % 16


@pytest.mark.parametrize("ragged", [False, True])
def test_an_output_that_begins_late_is_filled(ragged):
    dispatcher, pre, _ = make()
    filling(pre)
    flat = torch.zeros(4 * HQ * DV + 2)
    out = flat[1:-1].view(4, HQ, DV)
    assert call(dispatcher, *qkv(4), ragged=ragged, out=out) is out
    assert not pre.calls[-1][2]["out"].data_ptr() % 16
    assert (out == 7).all()
    assert flat[[0, -1]].tolist() == [0, 0]


def test_one_value_a_head_at_a_wide_stride_is_read_where_it_lies():
    layer = AttentionLayer(
        layer_id=0, num_q_heads=2, num_kv_heads=2, head_dim=1, v_head_dim=128, scale=1.0
    )
    pool = KVPool([layer], num_pages=5, page_size=4, kv_cache_dtype="bf16")
    selection = select(
        Requirements(layers=(LayerRequirements.of(layer),), dtype="bf16", page_size=4),
        parse_device("cpu"),
        load_plugins(),
        {},
        Overrides(attention_backend="torch_native"),
    )
    dispatcher = HybridDispatcher.from_selection(selection, load_plugins(), [layer], pool)
    keys, values = (torch.randn(16, 2, d, dtype=torch.bfloat16) for d in (1, 128))
    q = torch.randn(2, dtype=torch.bfloat16).as_strided((1, 2, 1), (1, 1, 2))
    assert q.is_contiguous()
    write_kv(pool.layer(0), keys[:15], values[:15], torch.arange(4, 19))
    table = torch.arange(1, 5, dtype=torch.int32)[None]
    now = ForwardBatch.build(M.DECODE, query_lens=[1], seq_lens=[16], page_table=table, page_size=4)
    plan = dispatcher.init_forward_metadata(now)
    out = dispatcher.forward(q, keys[15:], values[15:], layer, now, plan)
    weights = (q[0].double()[:, None, 0] * keys.double()[..., 0].T).softmax(-1)  # [2, 16]
    expected = torch.einsum("hs,shd->hd", weights, values.double())
    rounding = 2**-7 * float(values.abs().max())  # of weights and of the output, in bf16
    torch.testing.assert_close(out[0].double(), expected, atol=rounding, rtol=0)


def test_a_pass_without_tokens_reads_and_fills_dense_last_dimensions():
    dispatcher, pre, _ = make()
    q, k, v = (apart(x[:0]) for x in qkv(4))
    out = apart(torch.zeros(0, HQ, DV))
    assert call(dispatcher, q, k, v, ragged=True, out=out) is out
    assert all(x.stride(-1) == 1 for x in pre.calls[-1][1][:3])


@pytest.mark.parametrize("ragged", [False, True])
def test_slices_of_a_fused_projection_are_not_copied(ragged):
    dispatcher, pre, _ = make()
    parts = fused(*qkv(4))
    assert not any(x.is_contiguous() for x in parts)
    call(dispatcher, *parts, ragged=ragged)
    assert all(x is y for x, y in zip(pre.calls[-1][1][:3], parts, strict=True))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_strided_out_is_filled_through_a_dense_one(ragged, return_lse):
    dispatcher, pre, _ = make()
    filling(pre)
    wide = torch.zeros(4, 2 * HQ, DV)
    out = wide[:, ::2]
    got = call(dispatcher, *qkv(4), ragged=ragged, out=out, return_lse=return_lse)
    assert pre.calls[-1][2]["out"].is_contiguous()
    assert (got[0] if return_lse else got) is out
    if return_lse:
        assert got[1] is pre.returned[1]
    assert (out == 7).all()
    assert not wide[:, 1::2].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"q": a["q"][:, :2]}, r"layer 0: q is \[4, 2, 8\] \(expected \[4, 4, 8\]"),
        (lambda a: {"k": a["k"][..., :4]}, r"k is \[4, 2, 4\] \(expected \[4, 2, 8\]"),
        (lambda a: {"v": a["v"][:, :1]}, r"v is \[4, 1, 4\]"),
        (lambda a: {"v": torch.cat([a["v"]] * 2)}, r"v is \[8, 2, 4\]"),
        (lambda a: {"out": torch.zeros(5, HQ, DV)}, r"out is \[5, 4, 4\] \(expected \[4, 4, 4\]"),
        (lambda a: {"out": torch.zeros(4, HQ * DV)}, r"out is \[4, 16\]"),
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_shapes_that_are_not_this_pass_s_are_refused(change, message, ragged):
    dispatcher, pre, _ = make()
    args = dict(zip("qkv", qkv(4), strict=True))
    with pytest.raises(BatchError, match=message):
        call(dispatcher, ragged=ragged, **args | change(args))
    assert not pre.calls
    assert not dispatcher.caches.layer(0).k.any()


@pytest.mark.parametrize(("name", "n"), [("q", 3), ("q", 5), ("k", 3), ("k", 1)])
def test_tokens_are_those_of_the_pass(name, n):
    """One key would be broadcast to every slot."""
    dispatcher, pre, _ = make()
    args = dict(zip("qkv", qkv(4), strict=True))
    args[name] = dict(zip("qkv", qkv(n), strict=True))[name]
    with pytest.raises(BatchError, match=rf"{name} is \[{n}, .* \(expected \[4, "):
        call(dispatcher, **args)
    assert not pre.calls


def test_new_keys_need_a_slot_each():
    dispatcher, pre, _ = make()
    q, k, v = qkv(4)
    b = batch(M.EXTEND)
    full = b.views["full"]
    for n in (3, 0, 5):
        loc = torch.arange(n) + 4
        views = {"full": dataclasses.replace(full, out_cache_loc=loc)}
        wrong = dataclasses.replace(b, views=views)
        with pytest.raises(
            BatchError, match=rf"out_cache_loc of view 'full' has {n} slots for .* 4"
        ):
            dispatcher.forward(q, k, v, LAYERS[0], wrong, None)
        dispatcher.forward(q, None, None, LAYERS[0], wrong, None)  # nothing to write
    with pytest.raises(BatchError, match="v without k"):
        dispatcher.forward(q, None, v, LAYERS[0], b, None)
    assert len(pre.calls) == 3


def test_cross_attention_writes_the_tokens_of_the_encoder():
    dispatcher, pre, _ = make(prefill=recorder("prefiller", cross_attention=True))
    cross = dataclasses.replace(LAYERS[0], view="cross", is_cross=True)
    view = CacheView.build(page_table=TABLE, page_size=4, seq_lens=[5, 3], new_lens=[5, 3])
    b = batch(M.EXTEND, views={"cross": view})
    q, (_, k, v) = qkv(4)[0], qkv(8)
    dispatcher.forward(q, k, v, cross, b, None)
    assert torch.equal(pre.calls[-1][1][4][0], k)
    with pytest.raises(BatchError, match=r"k is \[7, 2, 8\] \(expected \[8, 2, 8\]"):
        dispatcher.forward(q, k[:7], v[:7], cross, b, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_q": cu(0, 2, 4).long()}, r"cu_seqlens_q is torch.int64 \[3\].*contiguous int32"),
        ({"cu_k": cu(0, 0, 2, 2, 4, 4)[::2]}, r"cu_seqlens_k is torch.int32 \[3\] of strides \(2,"),
        ({"cu_k": cu(0, 4)}, r"cu_seqlens_k is \[2\] on cpu \(expected \[3\], as cu_seqlens_q"),
        ({"cu_q": cu(0, 2, 4)[None]}, r"cu_seqlens_q is torch.int32 \[1, 3\]"),
        ({"cu_q": cu(0, 2, 4).to("meta")}, "cu_seqlens_q is .* on meta"),
        ({"max_q": 1}, "4 tokens of q in 2 requests: more than max_q 1 each"),
        ({"max_k": 0}, "4 tokens of k in 2 requests: more than max_k 0 each"),
    ],
)
def test_ragged_lengths_are_checked(change, message):
    dispatcher, pre, _ = make()
    lengths = {"cu_q": cu(0, 2, 4), "cu_k": cu(0, 1, 4), "max_q": 2, "max_k": 3}
    with pytest.raises(BatchError, match=message):
        dispatcher.forward_ragged(*qkv(4), LAYERS[0], *(lengths | change).values(), causal=True)
    assert not pre.calls
    dispatcher.forward_ragged(*qkv(4), LAYERS[0], *lengths.values(), causal=True)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_backward_pass_is_refused(which, with_lse):
    """Keys and values end at the cache: their gradients would be missing without a word."""
    dispatcher, x, tensors = attending()
    tensors[which].requires_grad_()
    metadata = dispatcher.init_forward_metadata(x)
    with torch.no_grad():
        want = dispatcher.forward(*tensors, ATTENDS, x, metadata)
    got = dispatcher.forward(*tensors, ATTENDS, x, metadata, return_lse=with_lse)
    out = got[0] if with_lse else got
    assert torch.equal(out, want)
    for part in got if with_lse else (got,):
        with pytest.raises(UnsupportedError, match=r"inference only.*torch\.no_grad"):
            part.sum().backward(retain_graph=True)


def test_an_out_that_autograd_would_have_to_follow_is_refused():
    dispatcher, x, tensors = attending()
    tensors[0].requires_grad_()
    metadata, out = dispatcher.init_forward_metadata(x), torch.empty(3, 2, 8)
    with pytest.raises(UnsupportedError, match=r"`out` and tensors that require gradients"):
        dispatcher.forward(*tensors, ATTENDS, x, metadata, out=out)
    with torch.no_grad():
        assert dispatcher.forward(*tensors, ATTENDS, x, metadata, out=out) is out


ATTENDS = AttentionLayer(
    layer_id=0, num_q_heads=2, num_kv_heads=2, head_dim=8, v_head_dim=8, scale=0.4
)


def attending():
    """Return a dispatcher of torch_native over a pool, a pass of 3 tokens, and its q, k and v."""
    needs = Requirements(layers=(LayerRequirements(head_dim=8),), dtype="fp32", page_size=4)
    registry, overrides = load_plugins(), Overrides(attention_backend="torch_native")
    chosen = select(needs, parse_device("cpu"), registry, {}, overrides)
    pool = KVPool([ATTENDS], num_pages=3, page_size=4, kv_cache_dtype="fp32")
    dispatcher = HybridDispatcher.from_selection(chosen, registry, [ATTENDS], pool)
    x = ForwardBatch.build(
        M.EXTEND,
        query_lens=[3],
        seq_lens=[3],
        page_table=torch.tensor([[1]], dtype=torch.int32),
        page_size=4,
    )
    return dispatcher, x, list(torch.randn(3, 3, 2, 8).unbind(0))
