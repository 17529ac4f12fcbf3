"""Write, read and copy tokens of a paged KV cache, on any device and without a sync."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache as cached
from functools import partial

import torch
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache, Scale
from attn_core.cache.paged_tensor import put, take, take_pages
from attn_core.errors import UsageError
from attn_core.ops.latents import from_latents, to_latents
from attn_core.ops.quant import from_fp4, from_fp8, to_fp4, to_fp8
from attn_core.ops.write_checks import check_write, stray_pages, stray_slots

_Write = Callable[[LayerCache, Tensor, Tensor | None, Tensor, int], None]
_ReadPages = Callable[[LayerCache, Tensor, torch.dtype], tuple[Tensor, Tensor | None]]
_Gather = Callable[[Tensor, str, Tensor], Tensor]  # paged tensor, layout, index → tokens


def write_kv(
    cache: LayerCache, k: Tensor | None, v: Tensor | None, slots: Tensor, form: int = -1
) -> None:
    """Write new K and V into token slots, quantised to the format of the cache.

    k [N, Hkv, D], v [N, Hkv, Dv] (None for MLA); k None writes nothing.
    slots int64 [N] = page · page_size + offset; padding goes to slot 0. On a GPU with Triton and on
    a CPU nothing is written for a slot of -1.
    FP8 saturates. FP4 computes one e4m3 scale per 16 values, FP8 latents of sparse MLA one float32
    scale per 128 (to_latents). On a GPU with Triton this is one launch. Never syncs. Raises
    UsageError if only one of v and the V pool is present, for shapes that do not fit and, on a CPU,
    for slots that the cache has not.
    form: a number of tensors like these, but for their addresses and the number of tokens:
    cache.launchers then may have what writes such tensors again, at addresses that 16 divides.
    """
    if k is None:
        return
    if (v is None) != (cache.v is None):
        latent = "v must be None: this cache is latent and stores no values"
        raise UsageError("v is required: this cache stores values" if v is None else latent)
    write = cache.launchers.get("write")
    if write is None:
        write = cache.launchers["write"] = _writer(cache.k.device.type, cache.latent_dim > 0)
    try:
        write(cache, k, v, slots, form)
    except IndexError as error:
        raise stray_slots(cache, slots) from error


@cached
def _writer(device_type: str, latents: bool) -> _Write:
    """Return what writes on a type of device; both write the same bits.

    latents: those of sparse MLA in FP8.
    """
    if has_triton(device_type):
        if latents:
            from attn_core.ops.triton.latents import write_latents

            return write_latents
        from attn_core.ops.triton import kv

        return kv.write_kv
    return _write_latents if latents else _write


def has_triton(device_type: str) -> bool:
    """Say whether Triton's kernels run on a type of device; ROCm is "cuda" in torch."""
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


def real_slots(slots: Tensor) -> Tensor | None:
    """Return which slots are not -1, None for all of them; elsewhere than on a CPU it never syncs.

    A decode step asks in every layer, so it is one operator.
    """
    return slots >= 0 if slots.is_cpu and slots.numel() and slots.min().item() < 0 else None


def _write_latents(
    cache: LayerCache, k: Tensor, v: Tensor | None, slots: Tensor, form: int = -1
) -> None:
    check_write(cache, k, v, slots)
    if (valid := real_slots(slots)) is not None:
        k, slots = k[valid], slots[valid]
    put(cache.k, cache.layout, slots, to_latents(k.detach(), cache.latent_dim))


def _write(cache: LayerCache, k: Tensor, v: Tensor | None, slots: Tensor, form: int = -1) -> None:
    check_write(cache, k, v, slots)
    if (valid := real_slots(slots)) is not None:
        k, v, slots = k[valid], None if v is None else v[valid], slots[valid]
    rows = cache.launchers.get("rows")
    layout_key = tuple(
        (x.data_ptr(), x.shape, x.dtype) for x in (cache.k, cache.v) if x is not None
    )
    if rows is None or rows[0] != layout_key:
        rows = cache.launchers["rows"] = (layout_key, _plain_rows(cache))
    new = (k,) if v is None else (k, v)
    if rows[1] and all(x.dtype == rows[1][0].dtype for x in new):
        for row, x in zip(rows[1], new, strict=True):
            row.index_copy_(0, slots, x.detach())
        if form >= 0 and v is not None and cache.k.is_cpu:  # elsewhere a look at slots would wait
            cache.launchers[form] = partial(_write_again, cache, *rows[1])
        return
    blocks = cache.block_scales or (None, None)
    sides = ((k, cache.k, blocks[0], cache.k_scale), (v, cache.v, blocks[1], cache.v_scale))
    for values, pool, block_pool, scale in sides:
        if values is None or pool is None:
            continue
        x = values.detach()
        if block_pool is not None:
            x, block = to_fp4(x, scale)
            put(block_pool, cache.layout, slots, block)
        elif pool.dtype.itemsize == 1:
            x = to_fp8(x, pool.dtype, scale)
        put(pool, cache.layout, slots, x.to(pool.dtype))


def _write_again(
    cache: LayerCache,
    keys: Tensor,
    values: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    tokens: int,
) -> bool:
    """Write tensors of a known form into rows; False where they cannot be written so any more."""
    assert cache.v is not None
    moved = keys.data_ptr() != cache.k.data_ptr() or values.data_ptr() != cache.v.data_ptr()
    low, high = (x.item() for x in slots.aminmax())
    if moved or low < 0 or high >= keys.shape[0]:
        return False
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)
    return True


def _plain_rows(cache: LayerCache) -> tuple[Tensor, ...]:
    """Return K and V as rows [slots, Hkv, D] of one dtype, empty where they are not stored so.

    They are kept with the cache: a decode step of a small model feels each operator.
    """
    stores = [cache.k] if cache.v is None else [cache.k, cache.v]
    same = len({x.dtype for x in stores}) == 1 and stores[0].dtype.itemsize > 1
    if cache.layout != "NHD" or not same or not all(x.is_contiguous() for x in stores):
        return ()
    with torch.inference_mode(False):  # else they could not be written outside of it
        return tuple(x.flatten(0, 1) for x in stores)


def read_kv(cache: LayerCache, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Gather token slots, int64 of any shape S, as k [*S, Hkv, D] and v [*S, Hkv, Dv] in `dtype`.

    FP8 and FP4 are dequantised in float32. For MLA v is None; the values are k[..., :v_head_dim].
    """
    try:
        return _read(cache, slots, dtype, take)
    except IndexError as error:
        raise stray_slots(cache, slots) from error


def read_pages(
    cache: LayerCache, pages: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Gather whole pages, int of any shape S, as k [*S, page_size, Hkv, D], and v likewise.

    The result is token-major in both layouts ("HND" returns a transposed view). Otherwise it
    behaves like read_kv. On a GPU with Triton, FP8 and FP4 are one launch for K and one for V.
    """
    quantised = cache.k.dtype.itemsize == 1 and not cache.latent_dim
    try:
        return _page_reader(cache.k.device.type, quantised)(cache, pages, dtype)
    except IndexError as error:
        raise stray_pages(cache, pages) from error


@cached
def _page_reader(device_type: str, quantised: bool) -> _ReadPages:
    """Return what gathers pages on a type of device; both give the same bits."""
    if quantised and has_triton(device_type):
        from attn_core.ops.triton import read

        return read.read_pages
    return partial(_read, gather=take_pages)


def _read(
    cache: LayerCache, index: Tensor, dtype: torch.dtype, gather: _Gather
) -> tuple[Tensor, Tensor | None]:
    def side(pool: Tensor, block_pool: Tensor | None, scale: Scale) -> Tensor:
        stored = gather(pool, cache.layout, index)
        scale = scale.reshape(()) if isinstance(scale, Tensor) else scale  # it adds no dimension
        if block_pool is not None:
            return from_fp4(stored, gather(block_pool, cache.layout, index), scale, dtype)
        return from_fp8(stored, scale, dtype) if pool.dtype.itemsize == 1 else stored.to(dtype)

    if cache.latent_dim:
        return from_latents(gather(cache.k, cache.layout, index), cache.latent_dim, dtype), None
    blocks = cache.block_scales or (None, None)
    k = side(cache.k, blocks[0], cache.k_scale)
    return k, None if cache.v is None else side(cache.v, blocks[1], cache.v_scale)


def copy_slots(cache: LayerCache, src: Tensor, dst: Tensor) -> None:
    """Copy tokens between slots, int64 [N] each, as if all were read before any is written.

    It copies the partial last page of a draft branch, and compacts the accepted tokens of a tree.
    On a CPU nothing is copied from or to a slot of -1.
    """
    if src.shape != dst.shape or not src.dtype == dst.dtype == torch.int64:
        raise UsageError(
            f"slots {src.dtype} {list(src.shape)} to copy to {dst.dtype} {list(dst.shape)} "
            "(expected as many, int64)"
        )
    if (real := real_slots(torch.minimum(src, dst))) is not None:
        src, dst = src[real], dst[real]
    try:
        for t, layout in cache.parts():
            put(t, layout, dst, take(t, layout, src))
    except IndexError as error:
        raise stray_slots(cache, src, dst) from error
