"""Launch parameters of the attention kernels: a pure function of shape and device.

Those of sm90 are the fastest that `python -m benchmarks.tune` found on an H200. What they reach is
in benchmarks/results: attention.nvidia-h200.all.json and .grid.json. Those of other architectures
are reasoned: what fits shared memory and, compiled, spills nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from attn_core.backends.triton.launch import Launch as Launch
from attn_core.backends.triton.tuning_fp4 import of_fp4

LONG = 1 << 30  # keys of the longest request, where its length must not be asked


def power_of_two(n: int, minimum: int = 16) -> int:
    """Return the smallest power of two that is no less than `n` and `minimum`."""
    return max(minimum, 1 << (n - 1).bit_length())


def head_parts(dim: int) -> tuple[int, int]:
    """Cut a head dim into two tiles, powers of two: 128 → (128, 0), 192 → (128, 64), 80 → (64, 16).

    A dim below 16, the least that a matrix instruction takes, is padded.
    """
    first = max(16, 1 << (dim.bit_length() - 1))
    return first, power_of_two(dim - first) if dim > first else 0


SPLIT_KV_MAX_ROWS = 128  # of a request whose keys are split: queries · group


def has_pdl(arch: str) -> bool:
    """Say whether a GPU can launch a kernel before the one that it waits for is complete.

    This is programmatic dependent launch; on sm120 it was not tried.
    """
    return arch in ("sm90", "sm100", "sm103")


def multiplies_e4m3(arch: str | None) -> bool:
    """Say whether a GPU multiplies e4m3 numbers as they are, as torch has them."""
    return arch in ("sm89", "sm90", "sm100", "sm103", "sm110", "sm120")


def is_hopper(arch: str | None) -> bool:
    """Say whether kernels of Hopper's own run on a GPU: wgmma and TMA."""
    return arch == "sm90"


def use_split_kv(queries: int, group: int, *, latent: bool, unsplit: bool = False) -> bool:
    """Say whether a pass splits the keys of its requests, the longest of which has `queries`.

    unsplit: no request has so many keys that they are split. A tile of a prompt is then faster
    from half of its rows on (verify and prefill of suite "grid").
    """
    if latent:
        return queries <= 16
    return queries * group <= (SPLIT_KV_MAX_ROWS // 2 if unsplit else SPLIT_KV_MAX_ROWS)


# KiB of shared memory that a program may take, where it is not Hopper's 227.
_SHARED = {"sm75": 64, "sm80": 163, "sm86": 99, "sm89": 99, "sm120": 99, "gfx90a": 64}
_SHARED |= {"gfx942": 64, "gfx950": 160}
_SMALL = ("sm75", "sm80", "sm86", "sm89", "sm120")  # 128 rows of matrix registers spill there


@cache
def decode_launch(
    arch: str,
    rows: int,
    head_dim: int,
    v_dim: int,
    store_bytes: int,
    *,
    page_size: int = 1,
    short: bool = False,
    tree: bool = False,
    fp4: bool = False,
    shared: bool = False,
    requests: int = LONG,
    query_bytes: int = 2,
) -> Launch:
    """Choose for `decode_splits`: `rows` is queries · group of the longest request.

    shared: several requests fill a tile of `rows`. short: no request is split. tree: a request's
    last block is masked by what is loaded, which more programs hide. fp4: see of_fp4. A Hopper has
    kernels of its own for tiles of 64 rows, and of 128 (hopper/launch.py); full ones of 64 run
    faster in steps of 128 keys, of which shared memory has one, than of 64. requests: few of them
    run faster in that of latents than in tiles of 16 rows, 64 do not; of large steps they have too
    few for all processors. query_bytes: of a number of the queries.
    """
    if arch == "sm90" and store_bytes == 2:
        few_requests = requests <= 16 and page_size >= 8 and not tree
        if head_dim == 576 and (rows > 16 or few_requests):
            return Launch(block_m=64, block_n=64, warps=8, stages=2, min_blocks=2)
        if head_dim == v_dim == 256:
            if rows <= 16 and short:
                return Launch(block_m=16, block_n=64, warps=4, stages=2, ctas_per_sm=2)
            return Launch(block_m=64, block_n=64, warps=8, stages=2)
        if head_dim == v_dim and head_dim in (64, 128):
            large_pages = page_size >= 8
            large_steps = head_dim == 128 and large_pages and requests >= 16 and not short
            if shared and rows > 64:
                return Launch(block_m=128, block_n=128, warps=8, stages=2)
            if large_steps and (shared or rows > 32):
                return Launch(block_m=64, block_n=128, warps=8, stages=1, ctas_per_sm=2)
            if rows > 16 or (page_size >= 64 and not short):
                return Launch(block_m=64, block_n=64, warps=4, stages=2, ctas_per_sm=2)
            if short or tree:
                return Launch(block_m=16, block_n=128, warps=4, stages=3, ctas_per_sm=3)
            if head_dim == 64:
                return Launch(block_m=16, block_n=128, warps=4, stages=5, ctas_per_sm=2)
            return Launch(block_m=16, block_n=64, warps=4, stages=5, ctas_per_sm=2, min_blocks=2)
    if arch == "sm75":
        launch = replace(_turing(rows, head_dim, v_dim), ctas_per_sm=2)
        return _fitting(launch, arch, head_dim, v_dim, store_bytes)
    launch = _decode(rows, head_dim, v_dim, store_bytes)
    if shared and v_dim <= 256 and launch.block_m > 16:
        # the masks of trees spill beside more keys, and with four warps
        warps = 8 if launch.block_m == 64 else launch.warps
        launch = replace(launch, warps=warps, block_n=32 if tree else min(64, launch.block_n))
    if arch == "sm90" and (launch.block_m, launch.block_n) == (16, 128) and not fp4:
        launch = replace(launch, stages=3, ctas_per_sm=4, max_registers=128)
    if fp4:
        launch = of_fp4(launch, arch, head_dim, v_dim, tree=tree)
    elif arch == "sm90" and store_bytes == 1 and v_dim > 256 and not (shared or tree):
        # one program fits a processor; tried on an NVIDIA H100 beside nine other launches
        few_requests = launch.block_m == 16
        launch = replace(launch, block_n=128 if few_requests else 64, ctas_per_sm=1)
    small = arch in ("sm86", "sm89", "sm120")
    if v_dim > 256 and (small or arch.startswith("gfx")):
        warps = 8 if small and store_bytes == 1 else 4
        launch = replace(launch, block_m=16, block_n=32, warps=warps)
    if v_dim > 256 and small:
        launch = replace(launch, ctas_per_sm=1)  # two would not fit shared memory
    if v_dim > 256 and launch.block_m == 16 and arch in ("sm100", "sm103"):
        launch = replace(launch, block_n=32)  # beside 64 keys some registers spill
    return _fitting(launch, arch, head_dim, v_dim, store_bytes, query_bytes)


def merge_tile(tiles: int, tile_rows: int, programs: int, width: int) -> tuple[int, int, int, int]:
    """Choose columns, rows, partials at once and warps of a program of `merge_splits`.

    tiles: of all requests. tile_rows: the rows of each that are used. programs: of `decode_splits`.
    width: columns of a partial. Where all tiles are as long, a tile is split into programs / tiles
    partials and at most two more; several rows take one at a time. One warp sums up to 1024 values
    in its registers; several have to synchronise. Of latents each warp sums 128 columns, or up to
    2048 values: their plan splits tiles that are as long into no more partials.
    """
    few_rows, latent = tiles * tile_rows <= 512, width > 256
    partials = min(64, power_of_two(programs // tiles + (0 if few_rows and latent else 2), 2))
    columns = min(128, width) if few_rows else width  # few: more programs, each with fewer columns
    rows = 1 if tiles * tile_rows < 4096 else 2 if tiles * tile_rows < 8192 else 4
    warps = partials * columns // (2048 if latent else 1024)
    if latent and not few_rows:
        warps = columns // 128
    return columns, rows, partials, max(1, min(4, warps))


def extend_launch(
    arch: str,
    head_dim: int,
    v_dim: int,
    store_bytes: int,
    *,
    longest: int = LONG,
    tiles: int = LONG,
    processors: int = 1,
) -> Launch:
    """Choose for `extend_tiles`. longest, tiles: see hopper_launch, of a Hopper alone."""
    if arch == "sm90" and store_bytes == 2 and hopper_block(head_dim, v_dim) is not None:
        launch = hopper_launch(head_dim, longest, tiles, processors)
        if launch.block_m < 128:
            return launch
    return _extend_launch(arch, head_dim, v_dim, store_bytes)


@cache
def _extend_launch(arch: str, head_dim: int, v_dim: int, store_bytes: int) -> Launch:
    if arch == "sm75":
        return _fitting(_turing(32, head_dim, v_dim), arch, head_dim, v_dim, store_bytes)
    launch = _extend(head_dim, v_dim, store_bytes)
    if v_dim > 256 and arch in ("sm86", "sm89", "sm120"):
        launch = replace(launch, block_m=16)  # beside 32 rows the last kilobyte lacks
    if launch.block_n == 64:
        if arch == "sm90":
            launch = replace(launch, block_n=128, stages=2)
        elif arch in _SMALL:
            launch = replace(launch, block_m=64, block_n=32, warps=4, stages=3)
    return _fitting(launch, arch, head_dim, v_dim, store_bytes)


def _fitting(
    launch: Launch, arch: str, head_dim: int, v_dim: int, store_bytes: int, query_bytes: int = 2
) -> Launch:
    """Take fewer stages, keys and rows until queries, keys and values fit shared memory."""
    launch = replace(launch, ptx=arch.startswith("sm"))
    capacity = _SHARED.get(arch, 227) * 1024
    parts, width = head_parts(head_dim), power_of_two(v_dim)
    latent = v_dim > 256 and head_dim > v_dim and parts[0] == width  # values are keys
    key_bytes = sum(parts) * store_bytes
    kv_bytes = key_bytes if latent else key_bytes + width * store_bytes
    # latents of 8 bits become as wide there as 32-bit queries
    wide_bytes = sum(parts) * query_bytes if latent and 2 < query_bytes > store_bytes else 0

    def needed() -> int:
        rows = launch.block_n + launch.block_m
        stages = launch.stages * launch.block_n * kv_bytes
        return stages + launch.block_m * key_bytes + rows * wide_bytes

    smallest = {"stages": 2, "block_n": 32, "block_m": 32}
    while needed() > capacity:
        if launch.stages > smallest["stages"]:
            launch = replace(launch, stages=launch.stages - 1)
        elif launch.block_n > smallest["block_n"]:
            launch = replace(launch, block_n=launch.block_n // 2)
        elif launch.block_m > smallest["block_m"]:
            launch = replace(launch, block_m=launch.block_m // 2)
        elif smallest["stages"] > 1:
            smallest = {"stages": 1, "block_n": 16, "block_m": 16}
        else:
            break  # it may fit still: this is an upper bound
    return launch


def _decode(rows: int, head_dim: int, v_dim: int, store_bytes: int) -> Launch:
    if v_dim > 256:  # the latent of MLA: its accumulator fills the registers
        if rows <= 16:  # keys of 8 bits become 16 in registers
            warps = 8 if store_bytes == 1 else 4
            return Launch(
                block_m=16, block_n=64, warps=warps, stages=2, ctas_per_sm=2, min_blocks=2
            )
        return Launch(block_m=32, block_n=32, warps=8, stages=2)
    block_m = power_of_two(rows)
    if block_m >= 64:
        small = head_dim > 128
        return Launch(block_m=64, block_n=32 if small else 64, warps=4, stages=2, ctas_per_sm=2)
    if head_dim > 128:
        return Launch(block_m=block_m, block_n=32, warps=4, stages=2, ctas_per_sm=2)
    if store_bytes == 1:
        return Launch(block_m=block_m, block_n=128, warps=4, stages=2, ctas_per_sm=3)
    return Launch(block_m=block_m, block_n=64, warps=4, stages=3, ctas_per_sm=2)


def _turing(rows: int, head_dim: int, v_dim: int) -> Launch:
    """Choose for sm75, where Triton has no matrix instructions: operands fill the registers."""
    keys = 32 if max(head_dim, v_dim) <= 128 else 16
    return Launch(block_m=min(32, power_of_two(rows)), block_n=keys, warps=8, stages=1)


def _extend(head_dim: int, v_dim: int, store_bytes: int) -> Launch:
    if v_dim > 256:
        rows = 32 if store_bytes == 1 else 64
        return Launch(block_m=rows, block_n=32, warps=8, stages=2)
    if max(head_dim, v_dim) > 128:
        return Launch(block_m=128, block_n=32, warps=8, stages=2)
    return Launch(block_m=128, block_n=64, warps=8, stages=3)


def hopper_block(head_dim: int, v_dim: int) -> int | None:
    """Return the keys a step of `extend_hopper`, None for head dims that it does not take."""
    if head_dim != v_dim:
        return None
    return {64: 128, 128: 128, 256: 64}.get(head_dim)


def hopper_launch(head_dim: int, longest: int, tiles: int, processors: int) -> Launch:
    """Choose for `extend_hopper`, or for `extend_tiles` by a block_m of less than 128 rows.

    longest: keys of the longest request: short ones lose less at the edges of small blocks. tiles:
    of all requests and KV heads. Warps and registers of extend_hopper are part of the kernel.
    """
    block = hopper_block(head_dim, head_dim)
    assert block is not None  # extend_fits was asked
    few_tiles = head_dim == 128 and tiles <= 2 * processors
    if longest <= 128 and (head_dim == 64 or few_tiles):
        return Launch(block_m=64, block_n=32, warps=4, stages=2, ptx=True)
    many_tiles = head_dim < 256 and tiles >= 4 * processors
    if (longest <= 2048 and many_tiles) or (longest <= 1024 and head_dim == 128):
        return Launch(block_m=128, block_n=64, warps=4, stages={64: 6, 128: 4}[head_dim])
    return Launch(block_m=128, block_n=block, warps=4, stages=2)


# Bytes of keys and values that stay in the L2 cache of a Hopper; reasoned: a third of its 50 MB,
# which queries and outputs pass through as well.
_L2_BYTES = 1 << 24


@cache
def heads_at_once(heads: int, longest: int, key_bytes: int) -> int:
    """Return how many KV heads take turns: a divisor of `heads` whose longest request is cached.

    longest: keys of it; key_bytes: of one key and value of one head.
    """
    fits = max(1, _L2_BYTES // max(1, longest * key_bytes))
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= fits)
