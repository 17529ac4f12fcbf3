"""Write the new latents and index keys of sparse MLA into a cache, in one launch."""

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
from attn_core.ops.triton.index import write_index_rows
from attn_core.ops.triton.kv import PLAIN, Side, write_side
from attn_core.ops.triton.latents import write_latent
from attn_core.ops.triton.launcher import Launcher, Pointers, alike, moved, pointers
from attn_core.ops.write_checks import check_index_write, check_write

_COLUMNS = 128  # of a latent that a program writes
_ROWS = 8  # tokens of a program, where latents are stored as they are


@triton.jit(do_not_specialize=["rows"])
def write_both(
    k, keys, slots, rows, slots_token, k_token, k_dim, keys_token, keys_dim,
    latents, scales, rope, latents_page, latents_token, scales_page, scales_token, rope_page,
    rope_token, index, index_scales, index_page, index_token, index_scales_page,
    index_scales_token,
    PAGE: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SIDE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Program (i, BLOCKS) writes index keys of ROWS tokens, the others blocks of their latents.

    SIDE: of a store of plain latents; LATENT > 0: they are packed with scales, and ROWS is 1.
    """
    if tl.program_id(1) == BLOCKS:
        write_index_rows(
            keys, slots, rows, index, index_scales, slots_token, keys_token, keys_dim,
            index_page, index_token, index_scales_page, index_scales_token,
            DIM, DIM_BLOCK, PAGE, FP8, ROWS,
        )  # fmt: skip
    elif LATENT > 0:
        write_latent(
            k, slots, k_token, k_dim, slots_token, latents, scales, rope, latents_page,
            latents_token, scales_page, scales_token, rope_page, rope_token,
            PAGE, LATENT, ROPE, ROPE_BLOCK,
        )  # fmt: skip
    else:
        write_side(
            k, latents, latents, slots, 1.0, rows, slots_token, k_token, 0, k_dim,
            SIDE, 1, PAGE, PLAIN, ROWS, COLUMNS,
        )  # fmt: skip


class _Writer(NamedTuple):
    """Writes latents and keys of one form into one cache that lies at these pointers."""

    launcher: Launcher
    pointers: Pointers
    rows: int
    blocks: int

    def again(self, keys: Tensor, k: Tensor, slots: Tensor, tokens: int) -> bool:
        """Write tensors of one form, as many tokens; False: they or the cache lie elsewhere."""
        at_k, at_keys, at_slots = k.data_ptr(), keys.data_ptr(), slots.data_ptr()
        if (at_k | at_keys | at_slots) % 16 or moved(self.pointers):
            return False
        grid = (-(-tokens // self.rows), self.blocks + 1, 1)
        args = (at_k, at_keys, at_slots, tokens)
        self.launcher.launch(grid, args, lambda: (k, keys, slots, tokens))
        return True


def fits_one_launch(cache: LayerCache) -> bool:
    """Say whether latents and index keys of a cache are written by one kernel."""
    plain = cache.k.dtype.itemsize > 1 and cache.block_scales is None
    return cache.layout == "NHD" and (plain or cache.latent_dim > 0) and cache.v is None


def write_latents_and_index(
    cache: LayerCache, keys: Tensor, k: Tensor, slots: Tensor, form: int = -1
) -> None:
    """Write index keys [N, dim] and latents k [N, 1, D] into token slots int64 [N].

    Bit for bit what write_kv and write_index write, for a cache of which fits_one_launch is true.
    form: see attn_core.ops.kv.write_kv. Raises UsageError for shapes that do not fit.
    """
    tensors = (k, keys, slots)
    check_write(cache, k, None, slots)
    key = ("latents and index", *map(alike, tensors), *(x.stride() for x in tensors))
    writer: _Writer | None = cache.launchers.get(key)
    if writer is None or moved(writer.pointers):
        writer = cache.launchers[key] = _writer(cache, keys, k, slots)
    values, _ = cache.split_index()
    check_index_write(values.shape[-1], keys, slots)
    tokens = slots.shape[0]
    if not tokens:
        return
    addresses = tuple(x.data_ptr() for x in tensors)
    if form >= 0 and not any(address % 16 for address in addresses):
        cache.launchers[form] = writer.again
    grid = (-(-tokens // writer.rows), writer.blocks + 1, 1)
    writer.launcher.launch(grid, (*addresses, tokens), (*tensors, tokens))


def _writer(cache: LayerCache, keys: Tensor, k: Tensor, slots: Tensor) -> _Writer:
    values, scales = cache.split_index()
    fp8, dim, packed = scales is not None, values.shape[-1], cache.latent_dim > 0
    index = (values.view(torch.uint8) if fp8 else values, values if scales is None else scales)
    if packed:
        latents, of_values, rope = split_latents(cache.k, cache.latent_dim)
        stores = (latents.view(torch.uint8), of_values, rope)
        blocks, rows, width = cache.latent_dim // LATENT_BLOCK + 1, 1, rope.shape[-1]
    else:
        stores = (cache.k, cache.k, cache.k)
        blocks, rows, width = -(-cache.k.shape[-1] // _COLUMNS), _ROWS, 0
    page, token, head, _ = cache.k.stride()
    index_side = Side(cache.k.shape[-1], False, page, token, head, 0, 0, 0)
    launcher = Launcher(
        write_both,
        *(slots.stride(0), k.stride(0), k.stride(-1), *keys.stride()),
        *(*stores, *(x.stride(axis) for x in stores for axis in (0, 1))),
        *(*index, *index[0].stride()[:2], *index[1].stride()[:2]),
        *(cache.page_size, blocks, rows, _COLUMNS, index_side, cache.latent_dim, width),
        *(triton.next_power_of_2(max(1, width)), dim, triton.next_power_of_2(dim), fp8),
        num_warps=1 if packed else 4,
    )
    return _Writer(launcher, pointers(cache.k, cache.index), rows, blocks)
