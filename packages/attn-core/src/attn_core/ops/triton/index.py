"""Write new index keys of sparse MLA into a cache, quantised as it stores them, in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.quant import INDEX_SMALLEST, INDEX_UNIT
from attn_core.ops.triton.kv import fp8_bits
from attn_core.ops.triton.launcher import Launcher, Pointers, alike, moved, pointers
from attn_core.ops.write_checks import check_index_write

_ROWS = 8  # keys that a program writes
_SMALLEST, _UNIT = tl.constexpr(INDEX_SMALLEST), tl.constexpr(INDEX_UNIT)


@triton.jit(do_not_specialize=["rows"])
def write_index_rows(
    keys, slots, rows, values, scales, slots_token, keys_token, keys_dim,
    values_page, values_token, scales_page, scales_token,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    slot = tl.load(slots + row * slots_token, mask=row_mask, other=-1)
    row_mask &= slot >= 0  # -1 is padding
    page = slot // PAGE
    inner = slot % PAGE
    d = tl.arange(0, BLOCK)
    tile = row_mask[:, None] & (d < DIM)[None, :]
    x = tl.load(keys + row[:, None] * keys_token + d[None, :] * keys_dim, mask=tile, other=0.0)
    out_ptrs = values + (page * values_page + inner * values_token)[:, None] + d[None, :]
    if FP8:
        x = x.to(tl.float32)
        # as integers NaN is the largest magnitude
        top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
        scale = tl.where(top < _SMALLEST, _SMALLEST, top) * _UNIT
        code = fp8_bits(tl.div_rn(x, scale[:, None] + tl.zeros_like(x)), 3, 7, 448.0)
        tl.store(out_ptrs, code.to(tl.uint8), mask=tile)
        tl.store(scales + page * scales_page + inner * scales_token, scale, mask=row_mask)
    else:
        tl.store(out_ptrs, x.to(values.dtype.element_ty), mask=tile)


class _Writer(NamedTuple):
    """Writes keys of one dtype, with these strides, into one cache that lies at these pointers."""

    launcher: Launcher
    pointers: Pointers
    dim: int

    def again(self, keys: Tensor, slots: Tensor, tokens: int) -> bool:
        """Write tensors of one form, as many tokens; False: they or the cache lie elsewhere."""
        at_keys, at_slots = keys.data_ptr(), slots.data_ptr()
        if (at_keys | at_slots) % 16 or moved(self.pointers):
            return False
        grid, numbers = (-(-tokens // _ROWS), 1, 1), (at_keys, at_slots, tokens)
        self.launcher.launch(grid, numbers, (keys, slots, tokens))
        return True


def write_index(cache: LayerCache, keys: Tensor, slots: Tensor, form: int = -1) -> None:
    """Write index keys [N, dim] into token slots int64 [N], both of any strides; -1 is padding.

    Bit for bit what attn_core.ops.index.write_index writes; only the payload of a NaN may differ.
    Never syncs. Raises UsageError for shapes that do not fit, UnsupportedError without index keys.
    form: see attn_core.ops.kv.write_kv.
    """
    at_keys, at_slots = keys.data_ptr(), slots.data_ptr()
    key = (
        "index", alike(keys, at_keys), alike(slots, at_slots), keys.stride(), slots.stride(),
    )  # fmt: skip
    writer = cache.launchers.get(key)
    if writer is None or moved(writer.pointers):
        writer = cache.launchers[key] = _writer(cache, keys, slots)
    rows = slots.shape[0]
    if keys.shape != (rows, writer.dim):
        check_index_write(writer.dim, keys, slots)
    if form >= 0 and rows and not (at_keys | at_slots) % 16:
        cache.launchers[form] = writer.again
    if rows:
        grid = (-(-rows // _ROWS), 1, 1)
        writer.launcher.launch(grid, (at_keys, at_slots, rows), (keys, slots, rows))


def _writer(cache: LayerCache, keys: Tensor, slots: Tensor) -> _Writer:
    values, scales = cache.split_index()
    fp8, dim = scales is not None, values.shape[-1]
    check_index_write(dim, keys, slots)
    # without scales nothing is written there
    scales = values if scales is None else scales
    launcher = Launcher(
        write_index_rows,
        *(values.view(torch.uint8) if fp8 else values, scales),
        *(slots.stride(0), *keys.stride(), *values.stride()[:2], *scales.stride()[:2]),
        *(dim, triton.next_power_of_2(dim), cache.page_size, fp8, _ROWS),
        num_warps=4,
    )
    return _Writer(launcher, pointers(cache.index), dim)
