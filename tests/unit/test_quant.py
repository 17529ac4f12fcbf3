"""FP8 saturates; FP4 rounds to the nearest e2m1 of its block, ties to even."""

import itertools

import pytest
import torch
from attn_core.ops.quant import from_fp4, from_fp8, to_fp4, to_fp8

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "top"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)]
)
@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
def test_fp8_saturates_and_keeps_nan(dtype, top, scale):
    x = torch.tensor([1e9, -1e9, top * scale * 1.01, float("inf"), float("nan"), 0.0])
    back = from_fp8(to_fp8(x, dtype, scale), scale, torch.float32)
    assert back[:4].tolist() == [top * scale, -top * scale, top * scale, top * scale]
    assert back[4].isnan()
    assert back[5] == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_error_is_half_a_unit_in_the_last_place(dtype):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    error = (from_fp8(to_fp8(x, dtype, 0.5), 0.5, torch.float32) - x).abs()
    info = torch.finfo(dtype)
    assert (error <= (x.abs() * info.eps).clamp(min=0.5 * info.smallest_normal) / 2).all()


def test_fp4_matches_a_search_over_all_codes():
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)) * 5
    x[0] *= 1e-2
    x[1] *= 300  # blocks near the largest
    codes, blocks = to_fp4(x, 0.5)
    assert codes.shape == (64, 24)
    assert blocks.shape == (64, 3)
    got = from_fp4(codes, blocks, 0.5, torch.float64)
    unit = blocks.double().repeat_interleave(16, dim=-1) * 0.5
    grid = torch.cat((-E2M1, E2M1))
    best = ((x.double() / unit)[..., None] - grid).abs().amin(-1) * unit
    torch.testing.assert_close((got - x.double()).abs(), best, rtol=1e-6, atol=1e-9)
    # the block is its largest magnitude / 6, rounded to e4m3 (half a unit: 2^-4)
    ratio = blocks.double() * 0.5 * 6 / x.double().view(64, 3, 16).abs().amax(-1)
    assert ((ratio - 1).abs() <= 2**-4 + 1e-6)[2:].all()


def test_fp4_ties_go_to_the_even_code_and_nibbles_are_low_first():
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    x = torch.zeros(16)
    x[:7], x[7:14], x[15] = middles, -middles, 6.0  # 6 makes the block 1
    codes, blocks = to_fp4(x, 1.0)
    assert blocks.float().tolist() == [1.0]
    nibbles = [n for c in codes.tolist() for n in (c & 15, c >> 4)]
    even = [i + i % 2 for i in range(7)]  # codes 0 2 2 4 4 6 6
    assert nibbles == even + [8 + c for c in even] + [0, 7]


def test_fp4_decodes_every_byte():
    codes = torch.arange(256, dtype=torch.uint8).view(32, 8)
    got = from_fp4(codes, torch.full((32, 1), 2.0).to(torch.float8_e4m3fn), 0.5, torch.float64)
    signed = torch.cat((E2M1, -E2M1))
    want = [signed[n] for c in range(256) for n in (c & 15, c >> 4)]
    assert torch.equal(got.flatten(), torch.stack(want))


def test_fp4_limits():
    zero, huge, nan = torch.zeros(16), torch.full((16,), 1e9), torch.zeros(16)
    huge[1], nan[3] = -1e9, float("nan")
    got = from_fp4(*to_fp4(torch.stack((zero, huge, nan)), 1.0), 1.0, torch.float32)
    assert not got[0].any()
    assert got[1, :3].tolist() == [2688.0, -2688.0, 2688.0]
    assert got[2].isnan().all()


@pytest.mark.parametrize(
    ("scale", "dtype"), list(itertools.product([1.0, 3.0], ["float16", "bfloat16"]))
)
def test_decoding_rounds_once(scale, dtype):
    dtype = getattr(torch, dtype)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    codes = to_fp4(x, scale)
    assert torch.equal(
        from_fp4(*codes, scale, dtype), from_fp4(*codes, scale, torch.float32).to(dtype)
    )
    stored = to_fp8(x, torch.float8_e4m3fn, scale)
    assert torch.equal(from_fp8(stored, scale, dtype), (stored.float() * scale).to(dtype))
