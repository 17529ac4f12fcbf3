"""Normalises q and k in fp16 before GDN's prefill, whose kernels take raw ones in other dtypes.

They multiply each update of the state by what normalises its key, and round the product to the
dtype of the tokens. Where keys are small the product exceeds 65504, which is infinite in fp16.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_core.backends.triton.linear.arguments import Constants
from attn_core.backends.triton.linear.launch import LinearArguments
from attn_core.backends.triton.linear.operands import placed, rows_of
from attn_core.ops.triton.launcher import Launcher

_ROWS = 32  # heads of tokens of a program


@triton.jit(do_not_specialize=["rows", "eps"])
def normalize_rows(x, out, rows, eps, H: tl.constexpr, K: tl.constexpr, BM: tl.constexpr):
    """Store x / sqrt(|x|² + eps) of BM heads of tokens, of Rows [T, H, K]. Grid: (T · H / BM)."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, K)
    token, head = row // H, row % H
    inside = (row < rows)[:, None]
    at = token * x.token_stride + head * x.head_stride
    wide = tl.load(x.ptr + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 1) + eps)[:, None]
    at = token * out.token_stride + head * out.head_stride
    tl.store(out.ptr + at[:, None] + d[None, :], wide.to(out.ptr.dtype.element_ty), mask=inside)


def normalizes_first(common: Constants, dtype: torch.dtype) -> bool:
    """Say whether prefill over tokens of a dtype normalises q and k before its other kernels."""
    return common.NORM and not common.PER_CHANNEL and dtype == torch.float16


def normalized(layer: LinearArguments, x: Tensor) -> Tensor:
    """Return q or k [T, Hk, K] of a layer normalised, contiguous and in its dtype."""
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (at_x, like_x), (at_out, like_out) = placed(x), placed(out)
    key = ("normalize", like_x, like_out)
    entry = layer.launchers.get(key)
    if entry is None:
        launcher = Launcher(normalize_rows, heads, dim, _ROWS, num_warps=4)
        entry = layer.launchers[key] = (launcher, 1)
    rows, eps = tokens * heads, layer.numbers.eps
    if rows:
        entry[0].launch(
            (-(-rows // _ROWS), 1, 1),
            (at_x, at_out, rows, eps),
            lambda: (rows_of(x), rows_of(out), rows, eps),
        )
    return out
