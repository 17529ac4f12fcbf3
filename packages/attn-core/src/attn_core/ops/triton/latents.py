"""Write new latents of sparse MLA into an FP8 cache, quantised as it stores them, in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache, split_latents
from attn_core.dtypes import LATENT_BLOCK
from attn_core.ops.quant import BELOW_1_75, EIGHT, INFINITY, SMALLEST
from attn_core.ops.triton.kv import fp8_bits
from attn_core.ops.triton.launcher import Launcher, Pointers, alike, moved, pointers
from attn_core.ops.write_checks import check_write

_BLOCK = tl.constexpr(LATENT_BLOCK)
_INFINITY, _BELOW_1_75 = tl.constexpr(INFINITY), tl.constexpr(BELOW_1_75)
_EIGHT, _SMALLEST = tl.constexpr(EIGHT), tl.constexpr(SMALLEST)


@triton.jit
def write_latent(
    k, slots, k_token, k_dim, slots_token, values, scales, rope,
    values_page, values_token, scales_page, scales_token, rope_page, rope_token,
    PAGE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the 128 values of one block of a token and their scale or, last, its rope part."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + token * slots_token)
    if slot < 0:  # -1 is padding
        return
    page = slot // PAGE
    inner = slot % PAGE
    k += token * k_token
    if block < LATENT // _BLOCK:
        d = block * _BLOCK + tl.arange(0, _BLOCK)
        x = tl.load(k + d * k_dim).to(tl.float32)
        # as integers NaN is the largest magnitude
        top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        bits = tl.maximum(((top + _BELOW_1_75) & _INFINITY) - _EIGHT, _SMALLEST)
        bits = tl.where(top >= _INFINITY, top, bits)  # as power_of_two_scale
        scale = bits.to(tl.float32, bitcast=True)
        code = fp8_bits(tl.div_rn(x, scale + tl.zeros_like(x)), 3, 7, 448.0)
        tl.store(values + page * values_page + inner * values_token + d, code.to(tl.uint8))
        tl.store(scales + page * scales_page + inner * scales_token + block, scale)
    else:
        r = tl.arange(0, ROPE_BLOCK)
        y = tl.load(k + (LATENT + r) * k_dim, mask=r < ROPE, other=0.0)
        rope_ptrs = rope + page * rope_page + inner * rope_token + r
        tl.store(rope_ptrs, y.to(tl.bfloat16), mask=r < ROPE)


class _Writer(NamedTuple):
    """Writes latents of one dtype, with these strides, into one cache that lies at these pointers.

    dim: columns of a latent. blocks: programs of a token.
    """

    launcher: Launcher
    pointers: Pointers
    dim: int
    blocks: int

    def again(self, k: Tensor, v: Tensor | None, slots: Tensor, tokens: int) -> bool:
        """Write tensors of one form, as many tokens; False: they or the cache lie elsewhere."""
        at_k, at_slots = args = (k.data_ptr(), slots.data_ptr())
        if (at_k | at_slots) % 16 or moved(self.pointers):
            return False
        self.launcher.launch((tokens, self.blocks, 1), args, (k, slots))
        return True


def write_latents(
    cache: LayerCache, k: Tensor, v: Tensor | None, slots: Tensor, form: int = -1
) -> None:
    """Write latents k [N, 1, D] of any strides into token slots int64 [N]; v is None.

    A slot of -1 is padding: nothing is written for it.
    Bit for bit what attn_core.ops.latents.to_latents writes; only the payload of a NaN may differ.
    Never syncs. Raises UsageError for shapes that do not fit.
    form: see attn_core.ops.kv.write_kv.
    """
    at_k, at_slots, count = k.data_ptr(), slots.data_ptr(), slots.shape[0]
    key = ("latents", alike(k, at_k), alike(slots, at_slots), k.stride(), slots.stride())
    writer = cache.launchers.get(key)
    if writer is None or moved(writer.pointers):
        writer = cache.launchers[key] = _writer(cache, k, slots)
    if k.shape != (count, 1, writer.dim):
        check_write(cache, k, None, slots)
    if form >= 0 and count and not (at_k | at_slots) % 16:
        cache.launchers[form] = writer.again
    if count:
        writer.launcher.launch((count, writer.blocks, 1), (at_k, at_slots), (k, slots))


def _writer(cache: LayerCache, k: Tensor, slots: Tensor) -> _Writer:
    check_write(cache, k, None, slots)
    values, scales, rope = split_latents(cache.k, cache.latent_dim)
    inner, width = 2 if cache.layout == "HND" else 1, rope.shape[-1]
    launcher = Launcher(
        write_latent,
        *(k.stride(0), k.stride(-1), slots.stride(0), values.view(torch.uint8), scales, rope),
        *(x.stride(axis) for x in (values, scales, rope) for axis in (0, inner)),
        *(cache.page_size, cache.latent_dim, width, triton.next_power_of_2(max(1, width))),
        num_warps=1,
    )
    blocks = cache.latent_dim // LATENT_BLOCK + 1
    return _Writer(launcher, pointers(cache.k), cache.latent_dim + width, blocks)
