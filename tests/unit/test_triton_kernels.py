"""The kernels beside attention write and merge as the torch versions do."""

import dataclasses
from itertools import product

import pytest
import torch
from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.cache.paged_tensor import take_pages
from attn_core.cache.pool import KVPool
from attn_core.errors import UsageError
from attn_core.ops import kv as torch_kv
from attn_core.runtime.layer import AttentionLayer
from attn_core.testing.inputs import mapped, to_device
from pairwise import covering, pairs

pytest.importorskip("triton")

import attn_core.ops.merge as torch_merge
from attn_core.ops.triton.kv import write_kv
from attn_core.ops.triton.merge import merge_states
from attn_core.ops.triton.read import read_pages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGES = 5
# heads, D, Dv (0: the latent alone), page size
SHAPES = {"mha": (2, 64, 32, 4), "one": (1, 128, 128, 1), "odd": (3, 48, 16, 7)}
SHAPES |= {"mla": (1, 576, 0, 16)}
FACTORS = {
    "dtype": ("float32", "float16", "bfloat16"),
    "store": tuple(TORCH_DTYPES),
    "layout": ("NHD", "HND"),
    "pool": ("apart", "interleaved"),
    "values": ("plain", "fused", "spread"),
    "scales": ((1.0, 1.0), (0.37, 1.7)),
    "shape": tuple(SHAPES),
}
ALL = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
CHOSEN = [ALL[i] for i in covering([set(pairs(case)) for case in ALL])]


def bits(t):
    """The bits of a tensor, with one NaN for all of them."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.dtype.itemsize]
    raw = t.cpu().view(width)
    return raw if t.dtype == torch.uint8 else raw.masked_fill(t.cpu().float().isnan(), -1 & 127)


def hard(*shape, seed=0):
    """Numbers of every size, ties between codes, overflow, zeros, infinities and NaNs."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-24, 22, shape, generator=g))
    ties = torch.tensor([0.25, 0.75, -1.25, 1.75, 2.5, 3.5, -5.0, 6.0, 2**-10, 464.0, -0.0, 0.0])
    place = torch.rand(shape, generator=g)
    x = torch.where(place < 0.3, ties[torch.randint(len(ties), shape, generator=g)], x)
    # of some tokens, that not all blocks hold one
    x[1::3] = torch.where(place > 0.99, torch.nan, x)[1::3]
    x[2::3] = torch.where(place > 0.99, -torch.inf, x)[2::3]
    x[3::4] *= 0
    x[4::5] *= 2**-20
    return x


def cache_of(store, shape, *, layout="NHD", scales=(1.0, 1.0), interleaved=False):
    heads, d, dv, page = shape
    layer = AttentionLayer(
        layer_id=0, num_q_heads=heads, num_kv_heads=heads, head_dim=d, v_head_dim=dv or d, scale=1.0
    )
    more = {"kv_cache_dtype": store, "layout": layout, "kind": "mha" if dv else "mla"}
    if TORCH_DTYPES[store].itemsize == 1:  # other stores have no scales
        more["scales"] = {0: scales}
    pool = KVPool([layer], num_pages=PAGES, page_size=page, **more)

    def old(t):
        both = torch.zeros(PAGES, 2, *t.shape[1:], dtype=t.dtype)
        both.view(torch.uint8).fill_(0x25)  # what is not written must stay
        return both[:, 1] if interleaved else both[:, 1].contiguous()

    return mapped(pool.layer(0), old)


def spread(x):
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


def fused(x):
    wide = torch.cat([x.flatten(1)] * 2, 1)
    return wide[:, x[0].numel() :].view(x.shape)


FORMS = {"plain": lambda x: x, "fused": fused, "spread": spread}


def check_write(make, k, v, slots):
    want, got = make(), to_device(make(), DEVICE)
    torch_kv.write_kv(want, k, v, slots)
    write_kv(got, to_device(k, DEVICE), to_device(v, DEVICE), slots.to(DEVICE))
    for (a, _), (b, _) in zip(want.parts(), got.parts(), strict=True):
        assert a.stride() == b.stride()
        assert torch.equal(bits(a), bits(b))


def slots_of(n, page, seed=0):
    order = torch.randperm((PAGES - 1) * page, generator=torch.Generator().manual_seed(seed))
    return order[:n] + page


@pytest.mark.parametrize("case", CHOSEN, ids=lambda c: "-".join(map(str, c.values())))
def test_the_same_bits_are_written(case):
    shape = heads, d, dv, page = SHAPES[case["shape"]]
    n = min(13, (PAGES - 1) * page)
    form, dtype = FORMS[case["values"]], getattr(torch, case["dtype"])
    k, v = (form(hard(n, heads, x, seed=x).to(dtype)) if x else None for x in (d, dv))
    assert case["values"] != "spread" or k.stride(-1) == 2

    def make():
        return cache_of(
            case["store"],
            shape,
            layout=case["layout"],
            scales=case["scales"],
            interleaved=case["pool"] == "interleaved",
        )

    check_write(make, k, v, slots_of(n, page))


@pytest.mark.parametrize("store", ["bf16", "fp8_e4m3", "fp4_e2m1"])
def test_nothing_is_written_for_a_slot_of_minus_one(store):
    k, v = (hard(6, 2, 32, seed=x) for x in (1, 2))
    slots = slots_of(6, 4)
    slots[[0, 3, 5]] = -1
    check_write(lambda: cache_of(store, (2, 32, 32, 4)), k, v, slots)
    everything = torch.full((6,), -1)
    check_write(lambda: cache_of(store, (2, 32, 32, 4)), k, v, everything)


@pytest.mark.parametrize("of_k", [True, False])
@pytest.mark.parametrize("store", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
def test_a_scale_in_a_tensor_writes_the_same_bits(store, of_k):
    shape = heads, d, dv, page = next(x for x in SHAPES.values() if x[2] and not x[1] % 16)
    n = min(13, (PAGES - 1) * page)
    k, v = (hard(n, heads, x, seed=x) for x in (d, dv))

    def make():
        cache = cache_of(store, shape, scales=(0.37, 1.7))
        tensor = {"k_scale": torch.tensor([0.37])} if of_k else {"v_scale": torch.tensor(1.7)}
        return dataclasses.replace(cache, **tensor)

    check_write(make, k, v, slots_of(n, page))


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("store", ["fp8_e4m3", "fp8_e5m2"])
def test_every_float8_and_every_tie_between_two_is_exact(store, scale):
    dtype = TORCH_DTYPES[store]
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = every[every.isfinite()].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    beside = torch.cat([between.nextafter(finite[1:]), between.nextafter(finite[:-1])])
    x = torch.cat([finite, between, beside, every[~every.isfinite()]])
    x = torch.nn.functional.pad(x * scale, (0, -len(x) % 128)).view(-1, 1, 128)
    shape = (1, 128, 0, len(x))
    scales = (scale, 1.0)
    check_write(
        lambda: cache_of(store, shape, scales=scales), x, None, torch.arange(len(x)) + len(x)
    )


def test_every_tie_between_two_fp4_codes_is_exact():
    """With every scale of a block, beside the next float32 numbers and those that become 0."""
    unit = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
    tie = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * unit
    x = torch.cat([tie, tie.nextafter(tie + 1), tie.nextafter(tie * 0)], 1)
    tiny = torch.tensor([1.0, 2.0, 3.0, 100.0, 224.0, 225.0]) * 2.0**-149
    x = torch.cat([x, tiny.expand(len(unit), -1), torch.zeros(len(unit), 1)], 1)
    x = torch.cat([x, -x], 1).view(len(unit), 4, 14)
    x = torch.cat([x, 6 * unit[:, None].expand(-1, 4, 1), 0 * x[..., :1]], 2)  # the largest of each
    x = x.reshape(len(unit), 1, 64)
    shape = (1, 64, 0, len(x))
    check_write(lambda: cache_of("fp4_e2m1", shape), x, None, torch.arange(len(x)) + len(x))


def test_more_tokens_than_one_program_writes_and_none():
    shape = (2, 80, 13, 64)
    for n in (0, 1, 150):
        k, v = torch.randn(n, 2, 80), torch.randn(n, 2, 13)
        for store in ("bf16", "fp8_e4m3"):
            check_write(lambda store=store: cache_of(store, shape), k, v, slots_of(n, 64))


QUANTISED = ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1")


def check_read(cache, pages, dtype=torch.bfloat16):
    want = torch_kv._read(cache, pages, dtype, take_pages)
    got = read_pages(to_device(cache, DEVICE), pages.to(DEVICE), dtype)
    for a, b in zip(want, got, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (b.shape, b.is_contiguous()) == (a.shape, True)
        assert a is None or torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("store", QUANTISED)
def test_pages_of_every_code_are_read_to_the_bit(store, shape, layout):
    """Stores are full of every byte: all codes, both zeros, subnormals, infinities and NaN."""
    shape = heads, d, dv, page = SHAPES[shape]
    if store == "fp4_e2m1" and (d % 16 or dv % 16):
        shape = heads, d, dv, page = (heads, 48, 16, page)
    tensor, number = torch.tensor([0.37]), 1.7
    for interleaved, scales in ((False, (1.0, 1.0)), (True, (tensor, number if dv else 1.0))):
        cache = cache_of(store, shape, layout=layout, interleaved=interleaved)
        cache = dataclasses.replace(cache, k_scale=scales[0], v_scale=scales[1])
        rng = torch.Generator().manual_seed(page)
        for part, _ in cache.parts():
            every = torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=rng)
            part.view(torch.uint8).copy_(every)
        check_read(cache, torch.tensor([[4, 1], [0, 4]], dtype=torch.int32))
        check_read(cache, torch.tensor([3, 2, 0, 1])[::2], torch.float16)
        check_read(cache, torch.tensor([], dtype=torch.int32), torch.float32)


def test_pages_beyond_32_bit_offsets_are_read():
    page, heads, d = 16, 8, 128
    pages = 2**31 // (page * heads * d) + 2
    pool = torch.empty(pages, page, heads, d, dtype=torch.uint8, device=DEVICE)
    pool[-1] = 0x38  # 1 in e4m3
    got, _ = read_pages(
        LayerCache(k=pool.view(torch.float8_e4m3fn), v=None, k_scale=0.5),
        torch.tensor([pages - 1], device=DEVICE),
        torch.bfloat16,
    )
    assert (got == 0.5).all()


def test_a_pool_with_gaps_between_numbers_is_refused():
    cache = to_device(cache_of("fp8_e4m3", SHAPES["mla"]), DEVICE)
    odd = LayerCache(k=cache.k[..., ::2], v=None)
    with pytest.raises(UsageError, match=r"stride 2 in its last dimension \(supports 1\)"):
        read_pages(odd, torch.tensor([1], device=DEVICE), torch.bfloat16)


def test_a_pool_beyond_32_bit_offsets():
    """The page lies past element 2^31; a virtual pool has room for it without taking memory."""
    page, heads, d = 16, 8, 128
    pages = 2**31 // (page * heads * d) + 2
    pool = torch.empty(pages, page, heads, d, dtype=torch.uint8, device=DEVICE)
    cache = LayerCache(k=pool.view(torch.float8_e5m2), v=None)
    k = torch.randn(2, heads, d)
    slots = torch.tensor([(pages - 1) * page + 3, page + 1])
    write_kv(cache, k.to(DEVICE), None, slots.to(DEVICE))
    want = k.to(torch.float8_e5m2).view(torch.uint8)
    assert torch.equal(pool[-1, 3].cpu(), want[0])
    assert torch.equal(pool[1, 1].cpu(), want[1])


def test_what_does_not_fit_the_cache_is_refused():
    cache = to_device(cache_of("bf16", SHAPES["mha"]), DEVICE)
    k, slots = torch.randn(2, 2, 64, device=DEVICE), torch.tensor([4, 5], device=DEVICE)
    with pytest.raises(UsageError, match=r"v None for slots torch.int64 \[2\] of a cache"):
        write_kv(cache, k, None, slots)
    latent = LayerCache(k=cache.k, v=None)
    with pytest.raises(UsageError, match=r"v \[2, 2, 64\] for slots torch.int64 \[2\] of a cache"):
        write_kv(latent, k, k, slots)
    assert torch.equal(bits(cache.k), bits(cache_of("bf16", SHAPES["mha"]).k))
    odd = LayerCache(k=cache.k[..., ::2], v=None)
    with pytest.raises(UsageError, match=r"stride 2 in its last dimension \(supports 1\)"):
        write_kv(odd, k[..., ::2], None, slots)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("store", ["bf16", "fp8_e4m3", "fp4_e2m1"])
def test_shapes_that_the_kernel_would_read_beyond_are_refused(store, layout):
    cache = to_device(cache_of(store, SHAPES["mha"], layout=layout), DEVICE)
    k, v = torch.randn(2, 2, 64, device=DEVICE), torch.randn(2, 2, 32, device=DEVICE)
    slots = torch.tensor([4, 5], device=DEVICE)
    write_kv(cache, k, v, slots)
    before = bits(cache.k).clone()
    for k_bad, v_bad, slots_bad in (
        (k[:1], v, slots),
        (k, v[:1], slots),
        (k, v, slots[:1]),
        (k, v[:, :1], slots),
        (k[:, :1], v[:, :1], slots),
        (k[..., :32], v, slots),
        (k, v[..., :16], slots),
        (k[0], v, slots),
    ):
        with pytest.raises(UsageError, match=r"of a cache with 2 heads of \[64, 32\]"):
            write_kv(cache, k_bad, v_bad, slots_bad)
    assert torch.equal(bits(cache.k), before)


def states(n, tokens, heads, dim, dtype=torch.float32):
    g = torch.Generator().manual_seed(n)
    out = torch.randn(n, tokens, heads, dim, generator=g)
    lse = torch.randn(n, tokens, heads, generator=g) * 30
    gone = torch.rand(lse.shape, generator=g) < 0.2
    gone[:, 0] = True  # a token that no part has seen
    lse[gone], out[gone] = -torch.inf, torch.nan
    return out.to(dtype).to(DEVICE), lse.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3, 2, 64), (2, 70, 4, 128), (5, 9, 3, 80), (40, 2, 1, 512)])
def test_states_are_merged_as_torch_merges_them(shape, dtype):
    out, lse = states(*shape, dtype)
    want, want_lse = torch_merge.merge_states(out, lse)
    got, got_lse = merge_states(out, lse)
    assert (got.dtype, got_lse.dtype) == (dtype, torch.float32)
    # both round the same sum once; in float32 the order of adding shows as well
    ulp = torch.finfo(dtype).eps if dtype != torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=ulp, atol=ulp * 2**-3)
    torch.testing.assert_close(got_lse, want_lse, rtol=1e-6, atol=1e-6)
    assert not got[0].any()
    assert (got_lse[0] == -torch.inf).all()


def test_states_of_any_strides_are_merged_into_given_buffers():
    out, lse = states(3, 6, 4, 48)
    want, want_lse = merge_states(out, lse)
    out = out.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    lse = lse.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    room = torch.full((4, 6, 2 * 48), 7.0, device=DEVICE)
    into = room.transpose(0, 1)[..., ::2], torch.full((4, 6), 7.0, device=DEVICE).t()
    got = merge_states(out, lse, into=into)
    assert got is into
    assert torch.equal(into[0], want)
    assert torch.equal(into[1], want_lse)
    assert (room[..., 1::2] == 7).all()


def test_a_part_that_is_broken_is_not_hidden():
    out, lse = states(3, 2, 2, 16)
    lse[:], out[:] = 1.0, 2.0
    out[0, 0] = torch.nan
    lse[0] -= 300  # its weight rounds to zero, the NaN must still show
    assert merge_states(out, lse)[0][0].isnan().all()
    lse[1, 1] = torch.nan
    got, total = merge_states(out, lse)
    assert got[1].isnan().all()
    assert total[1].isnan().all()


def test_a_part_of_infinite_weight_wins_wholly():
    out, lse = states(3, 5, 2, 16)
    lse[1, 1] = lse[0, 2] = lse[2, 2] = torch.inf
    out[:, 1:3], out[0, 1] = out[:, 1:3].nan_to_num(), torch.nan  # which does not count
    want, want_lse = torch_merge.merge_states(out, lse)
    got, total = merge_states(out, lse)
    assert torch.equal(got[1:3], want[1:3])
    assert torch.equal(got[1], out[1, 1])
    assert not got.isnan().any()
    assert (total[1:3] == torch.inf).all()
    torch.testing.assert_close(total, want_lse, rtol=1e-6, atol=1e-6)


def test_low_precision_is_accumulated_in_float32():
    out = torch.cat((torch.full((1, 1, 1, 16), 256.0), torch.ones(255, 1, 1, 16))).bfloat16()
    got, _ = merge_states(out.to(DEVICE), torch.zeros(256, 1, 1, device=DEVICE))
    assert torch.equal(got.cpu(), torch.full((1, 1, 16), (256 + 255) / 256).bfloat16())
