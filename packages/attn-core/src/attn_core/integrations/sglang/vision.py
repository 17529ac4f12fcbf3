"""`--mm-attention-backend attn_core`: SGLang's vision towers on the backend of role "encode"."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.vision import resolve_seqlens
from torch import Tensor, nn

from attn_core.errors import UnsupportedError
from attn_core.integrations.sglang.pool import KV_DTYPE
from attn_core.integrations.sglang.selection import choose
from attn_core.runtime.backend import AttentionBackend, BackendConfig, create_backend
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.operands import check_ragged
from attn_core.spec.requirements import LayerRequirements, Requirements

logger = logging.getLogger(__name__)
EVERYTHING = (-1, -1)  # the window of a layer without one


class Shape(NamedTuple):
    """The numbers of equal layers, with the heads of this rank."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


class VisionAttnCore(nn.Module):
    """Attention between the tokens of each image; what SGLang's VisionAttention calls.

    head_dim, num_heads, num_kv_heads: of this rank.
    softmax_scale: of the logits; None is head_dim^-0.5.
    others: what SGLang tells its other backends, which changes nothing here.
    Raises NoBackendError, before the model is loaded, where no backend encodes such a tower.
    """

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        softmax_scale: float | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__()
        if dropout:
            raise UnsupportedError(
                f"a vision tower with dropout {dropout} on attn_core (supports 0); leave out "
                "--mm-attention-backend"
            )
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.shape = Shape(num_heads, num_kv_heads, head_dim, scale)
        weights = torch.empty(0)  # as SGLang creates them now: its dtype and device
        tower(self.shape, weights.dtype, weights.device)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Any,
        bsz: int,
        seq_len: int,
        *,
        attention_mask: Tensor | None = None,
        forward_metadata: Any = None,
        max_seqlen: int | Tensor | None = None,
        window_size: tuple[int, int] = EVERYTHING,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Attend; q [T, Hq, D], k and v [T, Hkv, D] → [T, Hq, D].

        cu_seqlens: where each image begins; None: bsz images of seq_len tokens.
        forward_metadata: the same, resolved once for all layers.
        window_size, s_aux: a window and sinks, refused. attention_mask: refused.
        """
        refused = {
            "an attention mask": attention_mask is not None,
            f"a window of {window_size}": tuple(window_size) != EVERYTHING,
            "sinks": s_aux is not None,
            "CUDA graphs (unset SGLANG_VIT_ENABLE_CUDA_GRAPH)": isinstance(cu_seqlens, list),
        }
        for what, present in refused.items():
            if present:
                raise UnsupportedError(
                    f"a vision tower with {what} on attn_core; leave out --mm-attention-backend"
                )
        if forward_metadata is not None:
            cu_seqlens, longest = forward_metadata.cu_seqlens, forward_metadata.max_seqlen
        else:
            cu_seqlens = resolve_seqlens(cu_seqlens, bsz, seq_len, device=q.device)
            longest = int(cu_seqlens.diff().max() if max_seqlen is None else max_seqlen)
        cu_seqlens = cu_seqlens.to(device=q.device, dtype=torch.int32)
        lengths = (cu_seqlens, cu_seqlens, longest, longest)
        layer, backend = tower(self.shape, q.dtype, q.device)
        check_ragged(q, k, v, layer, *lengths, None)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = backend.forward_ragged(q, k, v, layer, *lengths, causal=False)
        assert isinstance(out, Tensor)  # no log-sum-exp was asked for
        return out


@cache
def tower(
    shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionLayer, AttentionBackend]:
    """Choose and create the backend that all layers of a tower share, and their layer."""
    layer = AttentionLayer(
        layer_id=0,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.head_dim,
        scale=shape.scale,
        is_causal=False,
    )
    needs = LayerRequirements.of(layer)
    requirements = Requirements(layers=(), vision=needs, dtype=KV_DTYPE[dtype])
    selection, registry = choose(requirements, device)
    logger.info("attn_core serves the vision tower\n%s", selection.explain())
    choice = selection.roles["encode"]
    config = BackendConfig(
        name=choice.backend,
        row=choice.row,
        layers=(layer,),
        page_size=1,  # there is no cache
        dtype=KV_DTYPE[dtype],
        kv_cache_dtype=KV_DTYPE[dtype],
        device=device,
        arch=selection.device.arch,
    )
    return layer, create_backend(registry.get(choice.backend, "softmax"), config)
