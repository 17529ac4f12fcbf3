"""The soft cap of the Triton kernels keeps the error bound that its docstring states."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from attn_core.backends.triton.portable.common import soft_cap

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def _capped(x, out, cap, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, soft_cap(tl.load(x + at), cap))


@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_the_relative_error_is_below_its_bound(cap):
    """Most of the scores lie around 0.1 · cap, where the two formulas meet."""
    sizes = (torch.logspace(-30, 2, 1 << 12, base=2), torch.linspace(0.05, 0.2, 1 << 12))
    y = torch.cat(sizes).float()
    x = cap * torch.cat((y, -y)).to(DEVICE)
    got = torch.empty_like(x)
    _capped[(x.numel() // 1024,)](x, got, cap, N=1024)
    want = cap * (x.double() / cap).tanh()
    error = ((got.double() - want) / want).abs()
    assert error.max() < 2**-19, float(error.max())
    assert error.max() > 2**-24, "float32 cannot do better: nothing was compared"
    assert torch.equal(got[: y.numel()], -got[y.numel() :])
