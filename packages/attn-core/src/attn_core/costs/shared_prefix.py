"""When requests that share keys read them together: the bytes that are saved against the lines."""

from __future__ import annotations

LEAST_SHARED_KEYS = 256
SHARED_TILE_ROWS = 64  # of tiles, where requests may share keys
LARGE_TILE_ROWS = 128  # of tiles where a request fills half of that or more, on a Hopper
_STEP_KEYS = 128  # which TMA reads page by page, or part by part, for such tiles
MAX_REQUESTS = 1024  # one program plans all requests in its registers


def largest_tile(
    arch: str | None,
    head_dim: int,
    v_head_dim: int,
    store_bytes: int,
    page_size: int,
    requests: int,
) -> int:
    """Return the rows of the largest tile that requests may fill together.

    A Hopper has a kernel for tiles whose halves two groups of warps hold, over 16 bits and a head
    dim of 128, for pages of 16 tokens or more that TMA reads and 16 requests or more.
    """
    pages = page_size >= 16 and 0 in (page_size % _STEP_KEYS, _STEP_KEYS % page_size)
    fits = arch == "sm90" and (head_dim, v_head_dim, store_bytes) == (128, 128, 2)
    return LARGE_TILE_ROWS if fits and pages and requests >= 16 else SHARED_TILE_ROWS


def fits_tile(rows: int, tile_rows: int = SHARED_TILE_ROWS) -> bool:
    """Say whether two requests of so many query rows a KV head fit a tile.

    A tile of two members would otherwise read what a tile of each reads.
    """
    return 2 * rows <= tile_rows


def shared_tile_rows(rows: int, v_head_dim: int, store: str, tree: bool, largest: int) -> int:
    """Return the rows of a tile that requests of so many query rows a KV head fill together.

    Two of them fit it, see fits_tile. Where two fill 64 rows or more, the tile has `largest` rows,
    see largest_tile: it is faster by then. Over FP8 and FP4 the products and exponentials of rows
    that nobody has bound a program, where keys of a request alone are read: tiles are no larger
    than two requests need. store: the dtype of a cache.
    """
    if not store.startswith(("fp8", "fp4")) or v_head_dim > 256 or tree:
        return largest if 2 * rows >= SHARED_TILE_ROWS else SHARED_TILE_ROWS
    return min(SHARED_TILE_ROWS, max(16, 1 << (2 * rows - 1).bit_length()))


def shared_granule(rows: int, head_dim: int, v_head_dim: int, store_bytes: int) -> int:
    """Return the least keys that a group shares beyond the group that it is in.

    A member of a group writes and reads two partials of its `rows` more: float32 [rows, v_head_dim]
    and their LSE. Two members read so many keys less that they save at least four times these bytes
    of each. The number is a power of two.
    """
    keys = 8 * partial_bytes(rows, v_head_dim) // (token_values(head_dim, v_head_dim) * store_bytes)
    return max(LEAST_SHARED_KEYS, 1 << max(0, keys - 1).bit_length())


def partial_bytes(rows: int, v_head_dim: int) -> int:
    """Return what a member writes and reads of two partials of its rows."""
    return 2 * 2 * rows * (v_head_dim + 1) * 4


def token_values(head_dim: int, v_head_dim: int) -> int:
    """Return the values that the cache holds of a token and KV head."""
    return head_dim + (0 if is_latent(head_dim, v_head_dim) else v_head_dim)


def is_latent(head_dim: int, v_head_dim: int) -> bool:
    """Say whether values are the first columns of the keys."""
    return v_head_dim > 256 and head_dim > v_head_dim
