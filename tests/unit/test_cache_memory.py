"""Caches are zeros that any mode may write, and lie in huge pages where a CPU has them."""

import mmap
import pathlib
import re

import pytest
import torch
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.memory import zeros
from attn_core.cache.pool import KVPool
from attn_core.runtime.layer import AttentionLayer

LAYER = AttentionLayer(
    layer_id=0, num_q_heads=8, num_kv_heads=8, head_dim=128, v_head_dim=128, scale=1.0
)


def flags_at(address):
    """Return what the kernel says of the mapping of this process that holds an address."""
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.parametrize("dtype", dict.fromkeys([*TORCH_DTYPES.values(), torch.uint8]), ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 70_000])
def test_a_cache_is_zeros(dtype, tokens):
    cache = zeros((tokens, 2, 32), dtype, "cpu")
    assert (cache.shape, cache.dtype) == ((tokens, 2, 32), dtype)
    assert not cache.view(torch.uint8).any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_a_large_cache_is_advised_to_huge_pages():
    pool = KVPool([LAYER], num_pages=512, page_size=16, kv_cache_dtype="bf16")
    cache = pool.layer(0)
    for x in (cache.k, cache.v):
        assert "hg" in flags_at(x.data_ptr() + x.nbytes // 2)
    plain = torch.zeros(8 << 20)
    assert "hg" not in flags_at(plain.data_ptr() + plain.nbytes // 2)


def test_a_cache_made_in_inference_mode_is_written_outside_of_it():
    with torch.inference_mode():
        cache = zeros((4, 4), torch.float32, "cpu")
    cache[1] = 2.0
    assert cache.sum() == 8


def test_a_cache_on_no_device_takes_no_memory():
    assert zeros((1 << 40,), torch.uint8, "meta").numel() == 1 << 40
    with torch._subclasses.FakeTensorMode():
        assert zeros((1 << 40,), torch.uint8, "cpu").numel() == 1 << 40
