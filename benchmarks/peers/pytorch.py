"""PyTorch itself: SDPA through its flash and cuDNN kernels, and FlexAttention compiled."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case, Inputs
from benchmarks.contestant import Call, Contestant


def _dense(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """View q, k and v as [B, H, L, D]; all requests are of one length and new."""
    assert inputs.v is not None
    q, k, v = (
        x.view(inputs.case.batch, inputs.case.length, *x.shape[1:]).transpose(1, 2)
        for x in (inputs.q, inputs.k, inputs.v)
    )
    return q, k, v


def _sdpa(backend: str) -> Callable[[Inputs], Call]:
    def prepare(inputs: Inputs) -> Call:
        attention = importlib.import_module("torch.nn.attention")
        kernel = getattr(attention.SDPBackend, backend)
        q, k, v = _dense(inputs)
        scale = inputs.case.scale

        def call() -> Tensor:
            with attention.sdpa_kernel(kernel):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=scale, enable_gqa=True
                )
            return out.transpose(1, 2)

        return call

    return prepare


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _flex(inputs: Inputs) -> Call:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    q, k, v = _dense(inputs)
    length = inputs.case.length
    mask = flex.create_block_mask(_causal, None, None, length, length, device=q.device)
    attend: Callable[..., Tensor] = torch.compile(flex.flex_attention, dynamic=False)
    scale = inputs.case.scale
    return lambda: attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


def _refuses(case: Case) -> str:
    return "ragged lengths (takes one length)" if len(set(case.seq_lens)) > 1 else ""


def _contestant(name: str, prepare: Callable[[Inputs], Call]) -> Contestant:
    return Contestant(
        name=name,
        distribution="torch",
        module="torch",
        phases=frozenset({"prefill"}),  # it reads no pages
        prepare=prepare,
        refuses=_refuses,
    )


SDPA_FLASH = _contestant("sdpa-flash", _sdpa("FLASH_ATTENTION"))
SDPA_CUDNN = _contestant("sdpa-cudnn", _sdpa("CUDNN_ATTENTION"))
FLEX = _contestant("flex", _flex)
