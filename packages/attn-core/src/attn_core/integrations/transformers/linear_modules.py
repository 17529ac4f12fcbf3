"""The linear attention layers (GDN, KDA) of each family: what surrounds convolution and rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attn_core.errors import UnsupportedError
from attn_core.runtime.linear import Gate, LinearLayer

_EPS = 1e-6  # inside the root of the norm of q and k, in every family


class Projected(NamedTuple):
    """What a layer makes of its hidden states [B, T, hidden].

    qkv: [B, T, channels], before the short convolution. f: [B, T, Hv], or [B, T, Hv, K] of KDA, and
    b: [B, T, Hv], the raw gates. z: [B, T, Hv · V] or [B, T, Hv, V], the gate of the output.
    """

    qkv: Tensor
    f: Tensor
    b: Tensor
    z: Tensor


def _qwen3_next(module: Any, x: Tensor) -> Projected:
    mixed = module.in_proj_qkvz(x), module.in_proj_ba(x)
    q, k, v, z, b, a = module.fix_query_key_value_ordering(*mixed)
    return Projected(torch.cat([y.flatten(2) for y in (q, k, v)], -1), a, b, z)


def _qwen3_5(module: Any, x: Tensor) -> Projected:
    return Projected(
        module.in_proj_qkv(x), module.in_proj_a(x), module.in_proj_b(x), module.in_proj_z(x)
    )


def _kimi_linear(module: Any, x: Tensor) -> Projected:
    qkv = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
    f = module.forget_gate.f_b_proj(module.forget_gate.f_a_proj(x))
    f = f.unflatten(-1, (-1, module.head_dim))
    return Projected(qkv, f, module.b_proj(x), module.g_b_proj(module.g_a_proj(x)))


_PROJECTIONS: Mapping[str, Callable[[Any, Tensor], Projected]] = {
    "Qwen3NextGatedDeltaNet": _qwen3_next,
    "Qwen3_5GatedDeltaNet": _qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": _qwen3_5,
    "KimiLinearDeltaAttention": _kimi_linear,
}


def is_linear(module: nn.Module) -> bool:
    """Say whether a module is a linear attention layer that runs here."""
    return type(module).__name__ in _PROJECTIONS


def project(module: nn.Module, hidden: Tensor) -> Projected:
    """Return what a layer makes of its hidden states [B, T, hidden]."""
    return _PROJECTIONS[type(module).__name__](module, hidden)


def to_hidden(module: Any, out: Tensor, z: Tensor) -> Tensor:
    """Norm the output [B, T, Hv, V] of the rule, gate it by z, and return [B, T, hidden]."""
    kda = hasattr(module, "o_norm")
    norm, projection = (module.o_norm, module.o_proj) if kda else (module.norm, module.out_proj)
    rows = (-1, out.shape[-1])
    hidden: Tensor = projection(norm(out.reshape(rows), z.reshape(rows)).view(*out.shape[:2], -1))
    return hidden


def linear_layer(layer_id: int, module: Any) -> LinearLayer:
    """Read a layer off its module; the parameters of its gate stay the module's own.

    Raises UnsupportedError for another activation of the short convolution than SiLU.
    """
    if module.activation not in ("silu", "swish"):
        raise UnsupportedError(
            f"layer {layer_id}: {module.activation} after the short convolution (supports silu)"
        )
    gate = _gate(module)
    if gate.dt_bias.dim() == 2:
        heads, dim = gate.dt_bias.shape
        return LinearLayer(
            layer_id=layer_id,
            kind="kda",
            num_k_heads=heads,
            num_v_heads=heads,
            head_k_dim=dim,
            head_v_dim=dim,
            qk_norm=_EPS,
            gate=gate,
        )
    return LinearLayer(
        layer_id=layer_id,
        num_k_heads=module.num_k_heads,
        num_v_heads=module.num_v_heads,
        head_k_dim=module.head_k_dim,
        head_v_dim=module.head_v_dim,
        qk_norm=_EPS,
        gate=gate,
    )


def refuse_changes(layers: Sequence[LinearLayer], modules: Sequence[Any]) -> None:
    """Raise UnsupportedError where a module no longer has the parameters of its layer's gate."""
    for layer, module in zip(layers, modules, strict=True):
        parameters, gate = getattr(module, "forget_gate", module), layer.gate
        assert gate is not None
        addresses = (parameters.A_log.data_ptr(), parameters.dt_bias.data_ptr())
        if addresses != (gate.A_log.data_ptr(), gate.dt_bias.data_ptr()):
            raise UnsupportedError(
                f"layer {layer.layer_id}: A_log or dt_bias was replaced or moved after attn-core "
                "was enabled; disable() it and enable() it again"
            )


def _gate(module: Any) -> Gate:
    """Return a module's gate, whose tensors share the memory of its parameters."""
    if not hasattr(module, "forget_gate"):
        return Gate(A_log=module.A_log.detach(), dt_bias=module.dt_bias.detach())
    parameters, heads = module.forget_gate, module.num_heads
    return Gate(
        A_log=parameters.A_log.detach().view(heads),
        dt_bias=parameters.dt_bias.detach().view(heads, -1),
    )
