"""Multi-head latent attention (MLA) with kv_b_proj absorbed: keys stay latent, in every pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attn_core.errors import UnsupportedError

# k = W_k c and v = W_v c for the latent c of a token, so q·k = (W_k^T q)·c and the attention's
# output is W_v (sum p c): DeepSeek-V2, section 2.1.2. Heads then share one key [c, rope] of
# kv_lora_rank + qk_rope_head_dim numbers, the values are its first kv_lora_rank.


def keep_latent(modules: Iterable[nn.Module]) -> None:
    """Make MLA modules hand the latent and the rotated key on as they are."""
    for module in modules:
        vars(module)["expand_kv"] = _as_they_are


def expand_again(modules: Iterable[nn.Module]) -> None:
    """Undo keep_latent."""
    for module in modules:
        vars(module).pop("expand_kv", None)


def _as_they_are(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    return latent, rope


def check_projections(modules: Iterable[Any]) -> None:
    """Raise UnsupportedError for a kv_b_proj that computes more than its weight says.

    Absorbing reads the weight alone: what an adapter or a hook adds would be lost.
    """
    for module in modules:
        projection, layer = module.kv_b_proj, f"layer {module.layer_idx}"
        if not isinstance(projection, nn.Linear):
            raise UnsupportedError(
                f"{layer}: kv_b_proj is a {type(projection).__name__} by now, absorbing it needs a "
                "Linear; merge its adapter, or disable() attn-core"
            )
        hooked = projection._forward_hooks or projection._forward_pre_hooks
        # accelerate replaces every forward of a model on several devices, only to move tensors
        replaced = "forward" in vars(projection) and not hasattr(projection, "_hf_hook")
        if hooked or replaced:
            raise UnsupportedError(
                f"{layer}: kv_b_proj has a hook or a replaced forward, and absorbing it reads its "
                "weight only; remove that, or disable() attn-core"
            )


def absorb(module: Any, query: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Move a query [B, H, T, nope + R] to the space of latents.

    latent [B, 1, T, C], rope [B, 1, T, R]. Returns the query [B, H, T, C + R] and the one key
    [B, 1, T, C + R].
    """
    nope = module.qk_nope_head_dim
    to_keys = _weights(module)[:, :nope]
    absorbed = torch.einsum("bhtn,hnc->bhtc", query[..., :nope], to_keys)
    return torch.cat([absorbed, query[..., nope:]], -1), torch.cat([latent, rope], -1)


def project(module: Any, out: Tensor) -> Tensor:
    """Bring an output [B, T, H, C] in the space of latents to the values', [B, T, H, Dv]."""
    to_values = _weights(module)[:, module.qk_nope_head_dim :]
    return torch.einsum("bthc,hvc->bthv", out, to_values)


def _weights(module: Any) -> Tensor:
    """[H, nope + Dv, C], a view of what kv_b_proj holds now."""
    weight: Tensor = module.kv_b_proj.weight
    return weight.view(module.num_heads, -1, module.kv_lora_rank)
