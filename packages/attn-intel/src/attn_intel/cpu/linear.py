"""Linear layers whose products of few rows read the weights once, where they lie."""

from __future__ import annotations

import math
from ctypes import byref
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from attn_intel.cpu.library import LEVELS, Linear, load

TYPES: Final = {torch.float32: 0, torch.bfloat16: 2}  # `type` of the header
ROWS: Final = {  # at most, of a level and a dtype; torch has the rest
    ("amx_bf16", torch.bfloat16): 32,
    ("avx512_bf16", torch.bfloat16): 8,
    ("avx512", torch.bfloat16): 8,
    ("avx512", torch.float32): 8,
    ("avx2", torch.bfloat16): math.inf,  # torch has no fast product for prompts either
    ("avx2", torch.float32): 16,
}
COLUMNS: Final = 32  # inputs are a multiple of it


class LinearOfFewRows(nn.Linear):
    """nn.Linear for inference: the same weights and, up to rounding, the same numbers.

    A step of a model with few requests does little but read the weights. torch copies them into
    another order in every call. Anything but few dense rows, as ROWS has them, is left to torch.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in_features] times the weights, plus the bias."""
        weight, bias = self.weight, self.bias
        if torch.compiler.is_compiling() or not _takes(x, weight, bias):
            return F.linear(x, weight, bias)
        kernels, (outputs, inputs) = load(), weight.shape
        out = x.new_empty((*x.shape[:-1], outputs))
        call = Linear(
            x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
            out.data_ptr(), kernels.parallel, x.numel() // inputs, inputs, outputs, TYPES[x.dtype],
            kernels.level, torch.get_num_threads(),
        )  # fmt: skip
        kernels.linear(byref(call))
        return out


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if type(x) is not Tensor or torch.is_grad_enabled():
        return False
    # subclasses of tensors and what vmap wraps have no memory of their own to read
    plain = all(type(w) in (Tensor, nn.Parameter) for w in (weight, bias) if w is not None)
    traced = torch._C._get_tracing_state() is not None
    if not plain or traced or any(map(is_functorch_wrapped_tensor, (x, weight))):
        return False
    inputs = weight.shape[1]
    return (
        weight.numel() > 0
        and x.dtype is weight.dtype
        and 0 < x.numel() <= ROWS.get((LEVELS[load().level], x.dtype), 0) * inputs
        and x.shape[-1] == inputs
        and not inputs % COLUMNS
        and (x.is_cpu and weight.is_cpu and x.is_contiguous() and weight.is_contiguous())
        and (bias is None or (bias.dtype is x.dtype and bias.is_cpu and bias.is_contiguous()))
        and not torch.is_autocast_enabled("cpu")
    )
