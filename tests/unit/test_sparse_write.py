"""New latents and index keys of sparse MLA: one launch writes what two write, bit for bit."""

import pytest
import torch
from attn_core.cache.pool import KVPool
from attn_core.errors import UsageError
from attn_core.ops import index as torch_index
from attn_core.ops import kv as torch_kv
from attn_core.runtime.layer import AttentionLayer

pytest.importorskip("triton")

from attn_core.ops.triton import sparse_write
from attn_core.ops.triton.sparse_write import fits_one_launch, write_latents_and_index
from forms import FORMS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = (4, 11, 0, -1, 27, 9, 19, 5, 30, -1, 17)
STORES = [("bf16", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("fp16", "bf16"), ("fp8_e4m3", "bf16")]
LAYER = AttentionLayer(
    layer_id=0, num_q_heads=4, num_kv_heads=1, head_dim=288, v_head_dim=256, scale=0.1,
    index_topk=2,
)  # fmt: skip


def pool(store, index_dtype, kind="dsa"):
    return KVPool(
        [LAYER], num_pages=8, page_size=4, kv_cache_dtype=store, kind=kind, index_dim=96,
        index_dtype=index_dtype, device=DEVICE,
    ).layer(0)  # fmt: skip


def drawn(count, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(count)
    k = torch.randn(count, 1, 288, generator=generator) * 30
    keys = torch.randn(count, 96, generator=generator)
    keys[2:4] = 0
    return keys.to(dtype).to(DEVICE), k.to(dtype).to(DEVICE)


def written(cache, keys, k, slots):
    """Return a cache like this one, written by torch's operators."""
    real = slots >= 0
    torch_index._write(cache, keys[real], slots[real])
    write = torch_kv._write_latents if cache.latent_dim else torch_kv._write
    write(cache, k[real], None, slots[real])
    return cache


def same(a, b):
    return torch.equal(a.k.view(torch.uint8), b.k.view(torch.uint8)) and torch.equal(
        a.index.view(torch.uint8), b.index.view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("store", "index_dtype"), STORES)
def test_one_launch_writes_the_same_bits(store, index_dtype, dtype):
    slots = torch.tensor(SLOTS, device=DEVICE)
    for count in (len(SLOTS), 1, 8, 9, 0):
        keys, k = drawn(count, dtype)
        want = written(pool(store, index_dtype), keys, k, slots[:count])
        got = pool(store, index_dtype)
        for _ in range(2):
            write_latents_and_index(got, keys, k, slots[:count])
            assert same(got, want)


@pytest.mark.parametrize(("store", "index_dtype"), STORES[:2])
def test_tensors_of_any_strides(store, index_dtype):
    slots = torch.tensor(SLOTS, device=DEVICE)
    keys, k = drawn(len(SLOTS))
    want, got = written(pool(store, index_dtype), keys, k, slots), pool(store, index_dtype)
    for form in FORMS:
        for columns in (False, True):
            moved = [form(x.cpu()).to(DEVICE) for x in (keys, k)]
            if columns:
                moved = [x.repeat_interleave(2, -1)[..., ::2] for x in moved]
            write_latents_and_index(got, *moved, torch.stack([slots, slots], 1)[:, 0])
            assert same(got, want)


def test_a_known_form_is_written_again_at_other_addresses():
    """What is kept says no where tensors or the cache lie elsewhere than it can write."""
    cache, slots = pool("bf16", "fp8_e4m3"), torch.tensor(SLOTS, device=DEVICE)
    write_latents_and_index(cache, *drawn(len(SLOTS)), slots, form=7)
    again = cache.launchers[7]
    keys, k = drawn(8)
    assert again(keys, k, slots[:8].clone(), 8)
    want = written(pool("bf16", "fp8_e4m3"), *drawn(len(SLOTS)), slots)
    assert same(cache, written(want, keys, k, slots[:8]))
    misplaced = torch.zeros(keys.numel() + 1, dtype=keys.dtype, device=DEVICE)[1:].view(keys.shape)
    assert not again(misplaced, k, slots[:8].clone(), 8)
    cache.k.set_(cache.k.clone())
    assert not again(keys, k, slots[:8].clone(), 8)


def test_what_does_not_fit_is_refused():
    cache, slots = pool("bf16", "fp8_e4m3"), torch.tensor(SLOTS, device=DEVICE)
    keys, k = drawn(len(SLOTS))
    before = cache.k.clone()
    wrong = [
        (keys[:3], k, slots), (keys, k[:3], slots), (keys, k, slots.int()), (keys[:, 1:], k, slots),
        (keys, k[..., 1:], slots),
    ]  # fmt: skip
    for given in wrong:
        with pytest.raises(UsageError, match="expected"):
            write_latents_and_index(cache, *given)
    assert torch.equal(cache.k, before)


def test_stores_that_two_launches_write(monkeypatch):
    """Latents with one scale for all, of an MLA pool, are written apart."""
    assert fits_one_launch(pool("bf16", "bf16"))
    plain = pool("fp8_e4m3", "bf16", kind="mla")
    assert not fits_one_launch(plain)
    monkeypatch.setattr(torch_index, "has_triton", lambda device: True)
    monkeypatch.setattr(sparse_write, "write_latents_and_index", None)
    slots = torch.tensor(SLOTS[:3], device=DEVICE)
    keys, k = drawn(3)
    want = written(pool("fp8_e4m3", "bf16", kind="mla"), keys, k, slots)
    torch_index.write_latents_and_index(plain, keys, k, slots)
    assert same(plain, want)
