"""Linear attention layers (GDN, KDA) and the gates that their backends may compute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, cast

import torch
from torch import Tensor

from attn_core.errors import UsageError
from attn_core.spec.requirements import LayerRequirements, check_type, is_count

LOWEST_BOUND = -5.0  # of a bounded gate: kernels factor its decay over 16 tokens in fp32


@dataclass(frozen=True, kw_only=True, eq=False)
class Gate:
    """Turn a layer's raw gates, f and b, into g and beta; in float32, with natural logarithms.

    A_log: floats [Hv].
    dt_bias: floats [Hv], or [Hv, K] of a "kda" layer.
    lower_bound: None is g = -exp(A_log) · softplus(f + dt_bias), where softplus(x) is x above 20.
    A number in [-5, 0) is the bounded gate: g = lower_bound · sigmoid(exp(A_log) · (f + dt_bias)).
    neg_eigval: beta is 2 · sigmoid(b) instead of sigmoid(b).
    """

    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None = None
    neg_eigval: bool = False

    def __post_init__(self) -> None:
        for name, x, dims in (("A_log", self.A_log, (1,)), ("dt_bias", self.dt_bias, (1, 2))):
            check_type(f"gate: {name}", x, Tensor, "a tensor of floats")
            if x.dim() not in dims or not x.is_floating_point() or not x.is_contiguous():
                raise UsageError(
                    f"gate: {name} is {x.dtype} {list(x.shape)} of strides {x.stride()} (expected "
                    f"contiguous floats {'[Hv] or [Hv, K]' if len(dims) > 1 else '[Hv]'})"
                )
        bound = self.lower_bound
        if bound is not None and not (isinstance(bound, Real) and LOWEST_BOUND <= bound < 0):
            raise UsageError(
                f"gate: lower_bound {bound!r} (expected a number in [{LOWEST_BOUND:g}, 0), or None "
                "for a softplus gate)"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearLayer:
    """One linear attention layer, with this rank's heads. The short convolution is not part of it.

    kind: "gdn" decays a state by one number per head, "kda" by one per head and key channel.
    num_k_heads Hk, num_v_heads Hv: value head h has key head h // (Hv / Hk).
    head_k_dim K, head_v_dim V.
    scale: multiplies the output; K ** -0.5 by default.
    qk_norm: the eps of q / sqrt(Σq² + eps), and of k alike, computed in float32 before the scale;
    None means that q and k are normalised already.
    gate: None means that g is the log decay, natural and at most 0, and beta is used as it is;
    both are float32, g [T, Hv] or, for "kda", [T, Hv, K], and beta [T, Hv]. With a gate, g and
    beta are the raw f and b in the dtype of q, of the same shapes.
    """

    layer_id: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    kind: Literal["gdn", "kda"] = "gdn"
    scale: float = cast("float", None)  # filled below, so that who reads it has a number
    qk_norm: float | None = None
    gate: Gate | None = None

    def __post_init__(self) -> None:
        name, heads, dims = f"layer {self.layer_id}", self.num_v_heads, self.g_dims
        for field_name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"):
            value = getattr(self, field_name)
            if not is_count(value):
                raise UsageError(
                    f"{name}: {field_name} {value!r} (expected an integer of 1 or more)"
                )
        if self.kind not in ("gdn", "kda"):
            raise UsageError(f"{name}: kind {self.kind!r} (expected 'gdn' or 'kda')")
        if heads % self.num_k_heads:
            raise UsageError(
                f"{name}: {heads} value heads are no multiple of {self.num_k_heads} key heads"
            )
        if self.scale is None:
            object.__setattr__(self, "scale", self.head_k_dim**-0.5)
        elif not isinstance(self.scale, Real) or not 0 < self.scale < math.inf:
            raise UsageError(f"{name}: scale {self.scale!r} (expected a finite number above 0)")
        eps = self.qk_norm
        if eps is not None and not (isinstance(eps, Real) and 0 < eps < 1):
            raise UsageError(f"{name}: qk_norm {eps!r} (expected an eps like 1e-6, or None)")
        if self.gate is not None:
            check_type(f"{name}: gate", self.gate, Gate, "a Gate, or None")
            shapes = (tuple(self.gate.A_log.shape), tuple(self.gate.dt_bias.shape))
            if shapes != ((heads,), dims):
                raise UsageError(
                    f"{name}: a gate with A_log {list(shapes[0])}, dt_bias {list(shapes[1])} "
                    f"(expected [{heads}] and {list(dims)}, as the layer is of kind {self.kind!r})"
                )

    @property
    def requirements(self) -> LayerRequirements:
        """What select() and a row compare: the kind, the dims and this rank's heads."""
        return LayerRequirements(
            kind=self.kind,
            head_dim=self.head_k_dim,
            v_head_dim=self.head_v_dim,
            num_q_heads=self.num_k_heads,
            num_kv_heads=self.num_v_heads,
        )

    @property
    def g_dims(self) -> tuple[int, ...]:
        """The dimensions of g after the tokens: (Hv,), or (Hv, K) of a "kda" layer."""
        heads = (self.num_v_heads,)
        return (*heads, self.head_k_dim) if self.kind == "kda" else heads


def gated(layer: LinearLayer, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return log decay and beta of a layer's g and beta, both float32. Never syncs."""
    gate = layer.gate
    if gate is None:
        return g, beta
    a = gate.A_log.float().exp()
    a = a if layer.kind == "gdn" else a[:, None]
    f = g.float() + gate.dt_bias.float()
    if gate.lower_bound is None:
        decay = -a * torch.nn.functional.softplus(f)  # its threshold is 20
    else:
        decay = gate.lower_bound * torch.sigmoid(a * f)
    beta = torch.sigmoid(beta.float())
    return decay, 2 * beta if gate.neg_eigval else beta


def normalised(layer: LinearLayer, x: Tensor) -> Tensor:
    """Return a layer's q or k in float32, normalised if the layer says so. Never syncs."""
    x = x.float()
    if layer.qk_norm is None:
        return x
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + layer.qk_norm)
