"""Attention of one tile of dense keys on a torch device, with the log-sum-exp where asked."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_core.backends.torch_native.plan import Tile
from attn_core.cache.layer_cache import Scale
from attn_core.ops.softmax import softmax_lse

# Scores that exist at once where they must be formed (256 MiB in float32).
_MAX_SCORES = 1 << 26
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default
_SHORT, _MOST_DIM = (torch.bfloat16, torch.float16), 256  # what the first of the two takes
_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
# That of torch 2.8 gives wrong numbers in some shapes: windows, long queries without a mask.
_FLASH_CPU_WRONG = torch.__version__.startswith("2.8.")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    tile: Tile,
    *,
    v_dim: int,
    scale: Scale,
    logit_cap: float | None,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend to one tile: q [R, H, rows, D], k [R, Hkv, keys, D], v [R, Hkv, keys, Dv] or None.

    v None: the values are the first v_dim of k. Returns out [R, H, rows, v_dim] in q's dtype and
    the natural log-sum-exp float32 [R, H, rows] (None where neither asked for nor free). A row
    that sees nothing gives zeros and -inf. On a CPU a key that a row does not see has no part in
    it, whatever the key and its value are; elsewhere they must be finite.
    """
    mask = None if tile.mask is None else tile.mask.to(q.dtype)
    on_cpu = q.device.type == "cpu"
    formed = logit_cap is not None or (_FLASH_CPU_WRONG if on_cpu else need_lse)
    if formed or isinstance(scale, Tensor):  # torch's kernels take the scale from the host
        values = k[..., :v_dim] if v is None else v
        return _formed(q, k, values, mask, tile.causal, scale, logit_cap)
    lse: Tensor | None = None
    if on_cpu:
        out, lse = _flash_cpu(q, k, v, mask, tile.causal, scale)
        out = out[..., :v_dim]
        if (tile.causal or mask is not None) and not _finite(out):
            values = k[..., :v_dim] if v is None else v
            return _formed(q, k, values, mask, tile.causal, scale, logit_cap)
    else:
        values = k[..., :v_dim] if v is None else v
        if _prefers_cudnn(q, values):
            out = _cuda(q, k, values, mask, tile.causal, scale)
        else:
            out = F.scaled_dot_product_attention(
                q,
                k,
                values,
                mask,
                is_causal=tile.causal,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
    if tile.dead is not None:
        out = out.masked_fill(tile.dead[..., None], 0.0)
        lse = None if lse is None else lse.masked_fill(tile.dead, -torch.inf)
    return out, lse


def _prefers_cudnn(q: Tensor, v: Tensor) -> bool:
    """Say whether torch would turn to cuDNN, which builds a plan for every new length.

    A plan takes far longer than a pass. Torch's other kernels are compiled.
    """
    if q.device.type != "cuda" or torch.version.hip is not None or q.dtype not in _SHORT:
        return False
    if torch.cuda.get_device_capability(q.device)[0] < 9:  # Turing has no flash kernel at all
        return False
    d = q.shape[-1]
    return d == v.shape[-1] and d <= _MOST_DIM and d % 8 == 0


def _cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    if mask is None:
        return _FLASH(q, k, v, 0.0, causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    groups, keys = q.shape[1] // k.shape[1], k.shape[2]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    if keys % 8:  # the kernel reads eight biases at a time
        mask = F.pad(mask, (0, -keys % 8))[..., :keys]
    bias = mask.expand(*q.shape[:3], keys)
    return _EFFICIENT(q, k, v, bias, False, scale=scale)[0]  # type: ignore[no-any-return]


def _flash_cpu(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    # Called by name: scaled_dot_product_attention drops the log-sum-exp and turns, unsaid, to a
    # kernel 40 times slower where K and V differ in their last dimension.
    d = q.shape[-1]
    v = k if v is None else v
    if v.shape[-1] < d:
        v = F.pad(v, (0, d - v.shape[-1]))
    elif v.shape[-1] > d:
        q, k = (F.pad(x, (0, v.shape[-1] - d)) for x in (q, k))
    out, lse = _FLASH_CPU(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def _formed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: Scale,
    logit_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Form the scores in float32, some rows at a time: what torch's own kernels do not do."""
    r, h, rows, _ = q.shape
    keys, groups = k.shape[2], h // k.shape[1]
    kt, vf = k.float().transpose(-1, -2), v.float()
    out = q.new_empty(r, h, rows, v.shape[-1])
    lse = torch.empty(r, h, rows, dtype=torch.float32, device=q.device)
    step = max(1, _MAX_SCORES // (r * h * keys))
    for a in range(0, rows, step):
        part = q[:, :, a : a + step].float() * scale
        n = part.shape[2]
        scores = part.reshape(r, -1, groups * n, part.shape[-1]) @ kt
        if logit_cap is not None:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        scores = scores.view(r, h, n, keys)
        hidden = None if mask is None else mask[:, :, a : a + step] == -torch.inf
        if causal:
            i = torch.arange(a, a + n, device=q.device)[:, None]
            later = torch.arange(keys, device=q.device) > i
            hidden = later if hidden is None else hidden | later
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        p, total = softmax_lse(scores)
        weighted = (p.view(r, -1, groups * n, keys) @ vf).view(r, h, n, -1)
        if hidden is not None and q.device.type == "cpu" and not _finite(weighted):
            weighted = _seen_values(p, vf, hidden)
        out[:, :, a : a + step] = weighted
        lse[:, :, a : a + step] = total
    return out, lse


def _finite(x: Tensor) -> bool:
    """Say whether all numbers are finite; it waits for the device."""
    # a sum in 16 bits is many times as fast, and may overflow in float16
    return math.isfinite(x.sum().item()) or math.isfinite(x.sum(dtype=torch.float32).item())


def _seen_values(p: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Weigh values by p [R, H, rows, keys], those of hidden keys not at all: 0 · inf is NaN.

    v float32 [R, Hkv, keys, Dv]; hidden bool, as p or broadcast to it.
    """
    groups, wild = p.shape[1] // v.shape[1], ~v.isfinite()
    p = torch.unflatten(p, 1, (-1, groups))  # [R, Hkv, group, rows, keys]
    hidden = torch.broadcast_to(hidden, (p.shape[0], 1, *p.shape[3:])).unsqueeze(1)
    total = p @ v.masked_fill(wild, 0.0).unsqueeze(2)
    for key in wild.any(-1).any(1).any(0).nonzero()[:, 0].tolist():
        value = v[:, :, key].masked_fill(~wild[:, :, key], 0.0)[:, :, None, None]
        part = p[..., key, None] * value
        total += part.masked_fill_(hidden[..., key, None], 0.0)
    return total.flatten(1, 2)
