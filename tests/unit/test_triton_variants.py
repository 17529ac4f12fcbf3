"""Which kernels run what: asked of the table of an architecture, without a device."""

from dataclasses import replace

import pytest
import torch
from attn_core.cache.layer_cache import LayerCache
from attn_core.runtime.layer import AttentionLayer, LayerGroup

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_core.backends.triton.kernel import Shape
from attn_core.backends.triton.masks import MASK_CAUSAL, MASK_TREE
from attn_core.backends.triton.tuning import LONG, Launch
from attn_core.backends.triton.variants import Kernels, kernels_of

LAYER = AttentionLayer(
    layer_id=0, num_q_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, scale=0.1
)
LATENT = replace(LAYER, num_q_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512)
SQUARE = Launch(block_m=64, block_n=64, warps=4, stages=2, ctas_per_sm=2)


def shape(layer=LAYER, **changes):
    facts = {
        "arch": "sm90",
        "processors": 132,
        "group": LayerGroup.of(layer),
        "dtype": "bf16",
        "kv_cache_dtype": "bf16",
        "page_size": 16,
        "mask": MASK_CAUSAL.value,
        "longest": LONG,
        "tiles": 10_000,
    }
    return Shape(**(facts | changes))


def first(kernels, asked, launch=None):
    """Return the name of the first kernel that takes a shape."""
    return next(type(k).__name__ for k in kernels if k.choose(asked, launch) is not None)


def cache_of(*shape, v=True, dtype=torch.bfloat16):
    k = torch.zeros(shape, dtype=dtype)
    return LayerCache(k=k, v=k.clone() if v else None)


@pytest.mark.parametrize("arch", ["sm80", "sm100", "gfx942", "interpreter"])
def test_every_other_architecture_has_the_portable_kernels(arch):
    assert kernels_of(arch) == Kernels()
    assert kernels_of("sm90") != Kernels()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("HopperPrefill", {}),
        ("HopperPrefill", {"page_size": 0}),
        ("HopperPrefill", {"page_size": 256}),
        ("PortablePrefill", {"page_size": 48}),
        ("PortablePrefill", {"kv_cache_dtype": "fp8_e4m3"}),
        ("PortablePrefill", {"dtype": "fp32", "kv_cache_dtype": "fp32"}),
        ("PortablePrefill", {"mask": MASK_TREE.value}),
        ("PortablePrefill", {"longest": 100, "tiles": 100}),
        ("PortablePrefill", {"group": LayerGroup.of(replace(LAYER, head_dim=80, v_head_dim=80))}),
    ],
)
def test_prompts_on_hopper(name, changes):
    assert first(kernels_of("sm90").prefill, shape(**changes)) == name


def test_short_prompts_on_hopper_run_in_small_tiles():
    *_, portable = kernels_of("sm90").prefill
    assert portable.choose(shape(longest=100, tiles=100), None).block_m == 64
    assert portable.choose(shape(), None).block_m == 128


@pytest.mark.parametrize(
    ("name", "asked", "launch"),
    [
        ("HopperDecode", shape(), SQUARE),
        ("PortableDecode", shape(), replace(SQUARE, block_m=16)),
        ("PortableDecode", shape(kv_cache_dtype="fp16"), SQUARE),
        ("HopperDecode", shape(mask=MASK_TREE.value), SQUARE),
        ("PortableDecode", shape(replace(LAYER, sliding_window=9), mask=MASK_TREE.value), SQUARE),
        ("HopperMlaDecode", shape(LATENT), SQUARE),
        ("PortableDecode", shape(LATENT, page_size=4), SQUARE),
        ("PortableDecode", shape(LATENT, mask=MASK_TREE.value), SQUARE),
    ],
)
def test_split_keys_on_hopper(name, asked, launch):
    assert first(kernels_of("sm90").decode, asked, launch) == name


def bound(kernel, layer, cache, dtype=torch.bfloat16):
    return kernel.bind(layer, cache, dtype) is not None


def test_hopper_reads_only_rows_that_tma_can():
    decode, (prefill, portable) = kernels_of("sm90").decode[1], kernels_of("sm90").prefill
    even = cache_of(5, 16, 8, 128)
    gaps = LayerCache(k=torch.zeros(5, 2, 16, 8, 128).bfloat16()[:, 1], v=even.v)
    for kernel in (decode, prefill):
        assert bound(kernel, LAYER, even)
        assert not bound(kernel, LAYER, gaps)
        assert not bound(kernel, LAYER, even, torch.float16), "the queries are of another dtype"
        assert not bound(kernel, LAYER, LayerCache(k=even.k, v=even.v.half()))
    assert bound(portable, LAYER, gaps)


def test_the_latent_kernel_of_hopper_has_no_sinks():
    mla, cache = kernels_of("sm90").decode[0], cache_of(5, 64, 1, 576, v=False)
    assert bound(mla, LATENT, cache)
    assert not bound(mla, replace(LATENT, sinks=torch.zeros(128)), cache)
