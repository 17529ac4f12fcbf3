"""FP8 latents of sparse MLA: their bytes, their scales, and the two writers of the same bits."""

import copy
import math
import pickle
import struct

import pytest
import torch
from attn_core.cache.layer_cache import LayerCache
from attn_core.cache.page_table import split_cache
from attn_core.cache.pool import KVPool
from attn_core.errors import UnsupportedError, UsageError
from attn_core.ops.index import read_index, write_index
from attn_core.ops.kv import copy_slots, read_kv, read_pages, write_kv
from attn_core.ops.latents import from_latents, to_latents
from attn_core.runtime.layer import AttentionLayer

PAGE, PAGES = 16, 5
SLOTS = torch.tensor([17, 4, 79, 33, 34])


def layer(layer_id=0, dim=576, latent=512):
    return AttentionLayer(
        layer_id=layer_id, num_q_heads=2, num_kv_heads=1, head_dim=dim, v_head_dim=latent, scale=0.1
    )


def pool(layers=None, **more):
    more = {"kv_cache_dtype": "fp8_e4m3", "num_pages": PAGES, "page_size": PAGE, **more}
    return KVPool(layers or [layer()], kind="dsa", **more)


def latents(n, dim=576, seed=0):
    """Blocks of many sizes, so that each has a scale of its own."""
    rng = torch.Generator().manual_seed(seed)
    size = 2.0 ** torch.randint(-12, 12, (n, 1, -(-dim // 64)), generator=rng)
    return torch.randn(n, 1, dim, generator=rng) * size.repeat_interleave(64, -1)[..., :dim]


def scale_of(values):
    return 2.0 ** math.ceil(math.log2(max(values.abs().max().item() / 448, 1e-4)))


def test_a_token_is_656_bytes():
    """Byte for byte: 512 values, 4 scales of 128 values each, 64 numbers of rope in bf16."""
    cache = pool().layer(0)
    assert cache.k.shape == (PAGES, PAGE, 1, 656)
    new = latents(5)
    write_kv(cache, new, None, SLOTS)
    for x, slot in zip(new[:, 0], SLOTS.tolist(), strict=True):
        token = cache.k[slot // PAGE, slot % PAGE, 0]
        scales = struct.unpack("<4f", bytes(token[512:528].tolist()))
        for block, scale in enumerate(scales):
            values = x[128 * block : 128 * (block + 1)]
            assert scale == scale_of(values)
            stored = token[128 * block : 128 * (block + 1)].view(torch.float8_e4m3fn)
            assert torch.equal(stored.float(), (values / scale).to(torch.float8_e4m3fn).float())
        assert torch.equal(token[528:].view(torch.bfloat16), x[512:].bfloat16())
    unwritten = torch.ones(PAGES * PAGE, dtype=torch.bool)
    unwritten[SLOTS] = False
    assert not cache.k.view(-1, 656)[unwritten].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_read_is_near_what_was_written(dtype):
    """Half a step of e4m3 apart: 2^-4 of a number, 2^-10 of the scale below its normal ones."""
    x = latents(64).to(dtype)
    stored = to_latents(x, 512)
    y = from_latents(stored, 512, torch.float32)
    scale = torch.tensor([[scale_of(b) for b in t[0, :512].float().split(128)] for t in x])
    allowed = (x[..., :512].float().abs() * 2**-4).maximum(
        scale[:, None].repeat_interleave(128, -1) * 2**-10
    )
    assert ((x[..., :512].float() - y[..., :512]).abs() <= allowed).all()
    assert torch.equal(y[..., 512:], x[..., 512:].bfloat16().float())
    # a power of two: bfloat16 holds what was read, and writing it again changes nothing
    assert torch.equal(from_latents(stored, 512, torch.bfloat16).float(), y)
    again = from_latents(to_latents(y, 512), 512, torch.float32)
    assert torch.equal(again, y)


@pytest.mark.parametrize("exponent", [-40, -12, -5, 0, 7, 100])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_scales_at_powers_of_two(exponent, beside):
    """448 · 2^n fits the scale 2^n exactly; a larger quotient takes twice as much."""
    x = torch.zeros(1, 1, 128)
    top = torch.tensor(448 * 2.0**exponent)
    top = top if not beside else torch.nextafter(top, torch.tensor(beside * torch.inf))
    x[..., 3] = -top
    scale = to_latents(x, 128)[..., 128:132].view(torch.float32).item()
    mantissa, power = math.frexp(max(top.item() / 448, 1e-4))
    assert scale == 2.0 ** (power - (mantissa == 0.5))
    assert scale >= top.item() / 448


def test_zeros_are_zeros_and_what_is_no_number_stays_in_its_block():
    x = latents(4)
    x[0] = 0
    x[1, 0, 5], x[2, 0, 200], x[3, 0, 570] = torch.nan, -torch.inf, torch.nan
    y = from_latents(to_latents(x, 512), 512, torch.float32)
    assert not y[0].any()
    assert y[1, 0, 5].isnan()
    assert y[1, 0, 128:].isfinite().all()
    assert not y[1, 0, :128].isfinite().any()
    assert y[2, 0, 200].isnan()
    assert y[2, 0, :128].isfinite().all()
    assert y[2, 0, 256:].isfinite().all()
    assert y[3, 0, :570].isfinite().all()
    assert y[3, 0, 570].isnan()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_tokens_are_read_and_copied_whole(layout):
    cache = pool(layout=layout).layer(0)
    everywhere = torch.arange(PAGES * PAGE)
    write_kv(cache, latents(len(everywhere)), None, everywhere)
    want, none = read_kv(cache, everywhere, torch.float32)
    assert none is None
    pages, _ = read_pages(cache, torch.tensor([[4], [1]]), torch.float32)
    assert torch.equal(pages[:, 0], want.view(PAGES, PAGE, 1, 576)[[4, 1]])
    src, dst = torch.tensor([20, 21, 40]), torch.tensor([21, 22, 79])
    want[dst] = want[src]
    copy_slots(cache, src, dst)
    assert torch.equal(read_kv(cache, everywhere, torch.float32)[0], want)


def test_padding_writes_nothing():
    caches = [pool().layer(0) for _ in range(2)]
    new = latents(5)
    write_kv(caches[0], new, None, torch.tensor([17, -1, 4, -3, 79]))
    write_kv(caches[1], new[::2], None, SLOTS[:3])
    assert torch.equal(caches[0].k, caches[1].k)


def test_pages_are_split():
    cache = pool().layer(0)
    write_kv(cache, latents(5), None, SLOTS)
    half = split_cache(cache, 8)
    assert (half.page_size, half.latent_dim) == (8, 512)
    assert torch.equal(
        read_kv(half, SLOTS, torch.float32)[0], read_kv(cache, SLOTS, torch.float32)[0]
    )


def test_memory():
    layers = [layer(0), layer(1)]
    asked = {"page_size": PAGE, "kv_cache_dtype": "fp8_e4m3", "kind": "dsa"}
    assert KVPool.bytes_per_page(layers, **asked) == 2 * PAGE * 656
    more = {"index_dim": 128, "index_dtype": "fp8_e4m3"}
    assert KVPool.bytes_per_page(layers, **asked, **more) == 2 * PAGE * (656 + 132)
    assert KVPool.bytes_per_page([layer(0, 288, 256)], **asked) == PAGE * (256 + 8 + 64)


def test_plain_latents_are_as_they_were():
    cache = pool(kv_cache_dtype="bf16").layer(0)
    assert (cache.k.shape, cache.k.dtype) == ((PAGES, PAGE, 1, 576), torch.bfloat16)
    assert cache.latent_dim == 0


@pytest.mark.parametrize(("dim", "latent"), [(576, 500), (48, 32), (515, 512), (512, 640)])
def test_latents_that_fp8_does_not_divide(dim, latent):
    with pytest.raises(UnsupportedError, match=rf"layer 0: latents of {latent} values and .* bf16"):
        pool([layer(0, dim, latent)])


def test_scales_of_a_tensor_are_refused():
    with pytest.raises(UsageError, match=r"k_scale 0.5 .* each token carries the scales"):
        pool(scales={0: (0.5, 1.0)})
    k = pool().layer(0).k
    with pytest.raises(UsageError, match=r"k_scale tensor.* each token carries the scales"):
        LayerCache(k=k, v=None, k_scale=torch.ones(1), latent_dim=512)


class TestWriter:
    """Triton's writer, on a GPU or in its interpreter, against torch's."""

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @pytest.fixture(autouse=True)
    def _triton(self):
        pytest.importorskip("triton")

    def check(self, k, slots, dims=(576, 512), **more):
        from attn_core.ops.triton.latents import write_latents

        caches = [pool([layer(0, *dims)], **more).layer(0) for _ in range(2)]
        for cache in caches:
            cache.k.fill_(0xA5)
        write_kv(caches[0], k, None, slots)
        moved = LayerCache(
            k=caches[1].k.to(self.device), v=None, latent_dim=dims[1], layout=caches[1].layout
        )
        device_k = torch.empty_strided(k.shape, k.stride(), dtype=k.dtype, device=self.device)
        device_slots = torch.empty_strided(
            slots.shape, slots.stride(), dtype=slots.dtype, device=self.device
        )
        write_latents(moved, device_k.copy_(k), None, device_slots.copy_(slots))
        assert torch.equal(moved.k.cpu(), caches[0].k)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_both_write_the_same_bits(self, dtype, layout):
        x = latents(5).to(dtype)
        x[0, 0, 7], x[1, 0, 130] = torch.inf, 448.0
        x[2] = 0
        self.check(x, SLOTS, layout=layout)

    def test_of_other_widths(self):
        self.check(latents(5, 450), SLOTS, (450, 384))
        self.check(latents(5, 128), SLOTS, (128, 128))

    def test_of_any_strides(self):
        wide = latents(10, 2 * 576)
        self.check(wide[::2, :, ::2], torch.arange(1, 11)[::2])
        self.check(wide[:5, :, 100:676], SLOTS)
        self.check(latents(5).transpose(0, 2).contiguous().transpose(0, 2), SLOTS)

    def test_none_and_padding(self):
        self.check(latents(0), SLOTS[:0])
        self.check(latents(5), torch.tensor([-1, 4, -17, 79, 33]))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_pool_is_copied_after_it_was_used(how):
    """The views that a cache keeps of its bytes are not part of a copy, which makes its own."""
    used = pool(index_dim=32, index_dtype="fp8_e4m3")
    write_kv(used.layer(0), latents(5), None, SLOTS)
    write_index(used.layer(0), torch.ones(5, 32), SLOTS)
    other = how(used).layer(0)
    assert torch.equal(other.k, used.layer(0).k)
    new = latents(5, seed=1)
    write_kv(other, new, None, SLOTS)
    write_index(other, -torch.ones(5, 32), SLOTS)
    assert torch.equal(other.k.view(-1, 656)[SLOTS], to_latents(new[:, 0], 512))
    for cache, sign in ((other, -1), (used.layer(0), 1)):
        assert (read_index(cache, SLOTS, torch.float32) == sign).all()


def test_what_fp8_rounds_beyond_fp16_is_its_largest_number():
    x = torch.ones(2, 192)
    x[0, 5], x[1, 7], x[1, 9] = 64000.0, -64000.0, torch.nan
    y = from_latents(to_latents(x.half(), 128), 128, torch.float16)
    assert y[0, 5] == 65504
    assert y[1, :128].isnan().all(), "a NaN makes its 128 values NaN, and is not hidden"
    x[1, 9] = 1.0
    assert from_latents(to_latents(x.half(), 128), 128, torch.float16)[1, 7] == -65504
