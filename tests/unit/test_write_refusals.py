"""New K and V, latents and index keys that do not fit are refused alike, wherever they go."""

import pytest
import torch
from attn_core.cache.pool import KVPool
from attn_core.errors import UsageError
from attn_core.ops import index, kv
from attn_core.runtime.layer import AttentionLayer

N, HEADS, D, DV = 5, 2, 32, 16
SLOTS = torch.arange(N) + 4


def writers(name):
    """Return what writes K and V, latents and index keys: by torch, or by Triton's kernels."""
    if name == "torch":
        return kv._write, kv._write_latents, index._write
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here: the tensors of these tests are the host's")
    from attn_core.ops.triton import index as triton_index
    from attn_core.ops.triton import kv as triton_kv
    from attn_core.ops.triton import latents

    return triton_kv.write_kv, latents.write_latents, triton_index.write_index


def cache(store, layout="NHD", *, heads=HEADS, d=D, dv=DV, **more):
    layer = AttentionLayer(
        layer_id=0, num_q_heads=heads, num_kv_heads=heads, head_dim=d, v_head_dim=dv, scale=1.0
    )
    pool = KVPool(
        [layer], num_pages=4, page_size=4, kv_cache_dtype=store, layout=layout, **more
    )  # fmt: skip
    return pool.layer(0)


def change(k, v, slots):
    """Yield what does not fit. Torch would spread a token, a head or a column over several."""
    yield k[:1], v[:1], slots
    yield k, v, slots[:1]
    yield k, v[:1], slots
    yield k[:, :1], v[:, :1], slots
    yield k[..., :1], v[..., :1], slots
    yield k, v[..., :1], slots
    yield torch.cat((k, k), -1), v, slots
    yield torch.cat((k, k), 1), torch.cat((v, v), 1), slots
    yield k.flatten(1), v.flatten(1), slots
    yield k, v, slots[:, None]
    yield k, v, slots.int()  # a kernel would count large pools in 32 bits
    yield k, v, slots.float()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("store", ["fp32", "bf16", "fp8_e4m3", "fp4_e2m1"])
@pytest.mark.parametrize("writer", ["torch", "triton"])
def test_new_keys_and_values_that_do_not_fit(writer, store, layout):
    write, _, _ = writers(writer)
    into = cache(store, layout)
    k, v = torch.randn(N, HEADS, D), torch.randn(N, HEADS, DV)
    for given in change(k, v, SLOTS):
        with pytest.raises(UsageError, match=r"2 heads of \[32, 16\] \(expected"):
            write(into, *given)
    assert not any(x.view(torch.uint8).any() for x, _ in into.parts())
    write(into, k, v, SLOTS)
    with pytest.raises(UsageError, match=r"expected"):  # after what fits, too
        write(into, k[:1], v[:1], SLOTS)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("writer", ["torch", "triton"])
def test_latents_that_do_not_fit(writer, layout):
    _, write, _ = writers(writer)
    into = cache("fp8_e4m3", layout, heads=1, d=160, dv=128, kind="dsa")
    k = torch.randn(N, 1, 160)
    for wrong, slots in (
        *((k[:1], SLOTS), (k, SLOTS[:1]), (k[..., :128], SLOTS), (k.expand(N, 2, 160), SLOTS)),
        *((k, SLOTS.int()), (k, SLOTS[:, None])),
    ):
        with pytest.raises(UsageError, match=r"1 heads of 160 \(expected"):
            write(into, wrong, None, slots)
    assert not into.k.any()
    write(into, k, None, SLOTS)


@pytest.mark.parametrize("index_dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("writer", ["torch", "triton"])
def test_index_keys_that_do_not_fit(writer, index_dtype):
    _, _, write = writers(writer)
    more = {"kind": "dsa", "index_dim": 32, "index_dtype": index_dtype}
    into = cache("bf16", heads=1, d=40, dv=32, **more)
    keys = torch.randn(N, 32)
    for wrong, slots in (
        *((keys[:1], SLOTS), (keys, SLOTS[:1]), (keys[:, :1], SLOTS), (keys[:, None], SLOTS)),
        *((keys, SLOTS.int()), (keys, SLOTS[:, None])),
    ):
        with pytest.raises(UsageError, match=r"index keys .*\[slots, 32\] and int64 \[slots\]"):
            write(into, wrong, slots)
    assert not into.index.any()
    write(into, keys, SLOTS)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("store", ["bf16", "fp8_e4m3", "fp4_e2m1"])
def test_slots_that_the_cache_has_not(store, layout):
    """On a CPU; the message has the slots and those that there are."""
    tokens, stray = cache(store, layout), torch.tensor([3, 16])
    k, v = torch.randn(2, HEADS, D), torch.randn(2, HEADS, DV)
    message = r"token slots 3 to 16 of a cache of 4 pages of 4 tokens \(expected 0 to 15"
    with pytest.raises(UsageError, match=message):
        kv.write_kv(tokens, k, v, stray)
    with pytest.raises(UsageError, match=message):
        kv.read_kv(tokens, stray, torch.float32)
    with pytest.raises(UsageError, match=message):
        kv.copy_slots(tokens, stray, torch.tensor([4, 5]))
    with pytest.raises(UsageError, match=r"slots torch.int64 \[2\] to copy to torch.int64 \[1\]"):
        kv.copy_slots(tokens, torch.tensor([1, 2]), torch.tensor([3]))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("store", ["bf16", "fp8_e4m3", "fp4_e2m1"])
def test_a_slot_below_0_is_not_one_from_the_end(store, layout):
    """On a CPU: only writes and copies skip padding. Of layout HND the last token was read."""
    with pytest.raises(UsageError, match="token slots -1 to 1 of a cache of 4 pages"):
        kv.read_kv(cache(store, layout), torch.tensor([1, -1]), torch.float32)


def test_later_layers_refuse_stray_slots_too():
    """Writes of a form that is known go another way, which looks at the slots itself."""
    tokens, k, v = cache("fp32"), torch.randn(1, HEADS, D), torch.randn(1, HEADS, DV)
    kv.write_kv(tokens, k, v, torch.tensor([4]), form=77)
    again = tokens.launchers[77]
    assert again(k, v, torch.tensor([15]), 1)
    assert not again(k, v, torch.tensor([16]), 1)
