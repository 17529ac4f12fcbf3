"""Poisoned pools: random tokens in scattered pages, and NaN everywhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.cache.layer_cache import (
    TORCH_DTYPES,
    latent_bytes,
    split_latents,
)
from attn_core.dtypes import LATENT_BLOCK

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
ORDERS = ("shuffled", "consecutive", "interleaved", "descending")

# The poison of each store and, for rows that want finite tails, the largest finite number.
_NAN = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7F, "fp4_e2m1": 0x77}
_LARGE = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B, "fp4_e2m1": 0x77}
_BLOCK_NAN, _BLOCK_LARGE = 0x7F, 0x7E


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the tokens of a batch lie: table int32 [rows, width], per request (page, offset).

    behind: the pages that lie before the first token that a query of their request sees.
    """

    table: Tensor
    slots: tuple[tuple[Tensor, Tensor], ...]
    num_pages: int
    behind: Tensor


@dataclass(frozen=True, eq=False)
class Side:
    """K or V of one layer: the pool, FP4's block scales, per request its numbers in float64."""

    pool: Tensor
    blocks: Tensor | None
    truth: tuple[Tensor, ...]


def place(
    lens: Sequence[int],
    page_size: int,
    padding: int,
    order: str,
    rng: torch.Generator,
    *,
    seen_from: Sequence[int],
) -> Placement:
    """Give each request its pages; `padding` more rows are all page 0.

    order: one of ORDERS. seen_from: per request the first token that a query sees. Some pages
    belong to nobody, and the entries past a request's pages name any page, also another request's.
    """
    need = [-(-s // page_size) for s in lens]
    total = 1 + sum(need) + 3  # the dummy page, and some that nobody owns
    ids = torch.arange(1, total)
    if order == "shuffled":
        ids = ids[torch.randperm(total - 1, generator=rng)]
    elif order == "descending":
        ids = ids.flip(0)
    turns = [(b, j) for b, n in enumerate(need) for j in range(n)]
    if order == "interleaved":
        turns.sort(key=lambda turn: (turn[1], turn[0]))
    table = torch.randint(0, total, (len(lens) + padding, max(need) + 2), generator=rng)
    table[len(lens) :] = 0
    for (b, j), page in zip(turns, ids.tolist(), strict=False):
        table[b, j] = page
    slots = []
    for b, s in enumerate(lens):
        token = torch.arange(s)
        slots.append((table[b, token // page_size], token % page_size))
    # a slice of a wider table, as static buffers hand it out
    padded_table = torch.cat([table, torch.zeros_like(table)], 1).int()
    unseen_pages = [table[b, : first // page_size] for b, first in enumerate(seen_from)]
    return Placement(
        padded_table[:, : table.shape[1]], tuple(slots), total, torch.cat(unseen_pages)
    )


def fill(
    stored: str,
    place: Placement,
    page_size: int,
    heads: int,
    dim: int,
    scale: float,
    rng: torch.Generator,
    *,
    layout: str,
    requires_finite_padding: bool,
    written_from: torch.dtype | None = None,
) -> Side:
    """Draw a pool: random where a request owns a token, poison everywhere else.

    What lies behind a window is poison too: it was given back, and may hold anything.
    written_from: draw only numbers that a write from this dtype gives back exactly.
    """
    shape, fp4 = (place.num_pages, page_size, heads), stored == "fp4_e2m1"
    pool = poison(stored, (*shape, dim // 2 if fp4 else dim), large=False)
    blocks = poison_blocks((*shape, dim // 16), large=False) if fp4 else None
    if requires_finite_padding:
        large = poison(stored, (1, *pool.shape[1:]), large=True)
        owned = sorted({int(p) for pages, _ in place.slots for p in pages})
        raw(pool)[owned] = raw(large)
        if blocks is not None:
            raw(blocks)[owned] = _BLOCK_LARGE
    truth = []
    for page, offset in place.slots:
        tokens = (len(page), heads, dim)
        if blocks is not None:
            codes = torch.randint(0, 16, tokens, generator=rng)
            if written_from is not None:
                codes[codes == 8] = 0  # -0 is written as 0
                codes[..., ::16] = 7  # a write takes the largest magnitude for 6
            unit = torch.rand(*tokens[:2], dim // 16, generator=rng).add(0.1).to(blocks.dtype)
            raw(pool)[page, offset] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
            raw(blocks)[page, offset] = raw(unit)
            truth.append(E2M1[codes] * unit.double().repeat_interleave(16, -1) * scale)
            continue
        x = torch.randn(tokens, generator=rng)
        x = (x if written_from is None else x.to(written_from)).to(pool.dtype)
        raw(pool)[page, offset] = raw(x)
        truth.append(x.double() * (scale if stored in _NAN else 1.0))
    raw(pool)[place.behind] = raw(
        poison(stored, (1, *pool.shape[1:]), large=requires_finite_padding)
    )
    if blocks is not None:
        raw(blocks)[place.behind] = raw(poison_blocks((1,), large=requires_finite_padding))
    if layout == "HND":
        pool = pool.transpose(1, 2).contiguous()
        blocks = None if blocks is None else blocks.transpose(1, 2).contiguous()
    return Side(pool, blocks, tuple(truth))


def fill_latents(
    place: Placement,
    page_size: int,
    dims: tuple[int, int],
    rng: torch.Generator,
    *,
    requires_finite_padding: bool,
) -> Side:
    """Draw a pool of FP8 latents of sparse MLA, poison where no request owns a token.

    Scales are of three sizes, so that one of other values or of another token is seen.
    """
    dim, latent_dim = dims
    pool = poison_latents(dims, large=False).repeat(place.num_pages, page_size, 1, 1)
    if requires_finite_padding:
        owned = sorted({int(p) for pages, _ in place.slots for p in pages})
        pool[owned] = poison_latents(dims, large=True)
    stored, scales, rope = split_latents(pool, latent_dim)
    truth = []
    for page, offset in place.slots:
        tokens, groups = (len(page), 1), latent_dim // LATENT_BLOCK
        values = (8 * torch.randn(*tokens, latent_dim, generator=rng)).to(stored.dtype)
        scale = 2.0 ** torch.randint(-4, -1, (*tokens, groups), generator=rng)
        rope_part = torch.randn(*tokens, dim - latent_dim, generator=rng).bfloat16()
        raw(stored)[page, offset] = raw(values)
        scales[page, offset], rope[page, offset] = scale, rope_part
        dequantized = values.double() * scale.double().repeat_interleave(LATENT_BLOCK, -1)
        truth.append(torch.cat([dequantized, rope_part.double()], -1))
    pool[place.behind] = poison_latents(dims, large=requires_finite_padding)
    return Side(pool, None, tuple(truth))


def poison_latents(dims: tuple[int, int], *, large: bool) -> Tensor:
    """Return the bytes of a token of FP8 latents [bytes] that is NaN or, where asked, large."""
    dim, latent_dim = dims
    token = torch.full((latent_bytes(dim, latent_dim),), 0xFF, dtype=torch.uint8)  # all are NaN
    if large:
        values, scales, rope = split_latents(token, latent_dim)
        raw(values).fill_(_LARGE["fp8_e4m3"])
        scales.fill_(1.0)
        rope.fill_(1e4)
    return token


def poison(stored: str, shape: Sequence[int], *, large: bool) -> Tensor:
    """Return a tensor of `stored` full of NaN or, where asked, of its largest finite number.

    FP4 itself is always finite: its block scales carry the poison.
    """
    if stored in _NAN:
        code = (_LARGE if large else _NAN)[stored]
        return torch.full(tuple(shape), code, dtype=torch.uint8).view(TORCH_DTYPES[stored])
    return torch.full(tuple(shape), 1e4 if large else torch.nan, dtype=TORCH_DTYPES[stored])


def poison_blocks(shape: Sequence[int], *, large: bool) -> Tensor:
    """Return FP4 block scales full of NaN or of their largest finite number."""
    code = _BLOCK_LARGE if large else _BLOCK_NAN
    return torch.full(tuple(shape), code, dtype=torch.uint8).view(torch.float8_e4m3fn)


def raw(t: Tensor) -> Tensor:
    """View one-byte numbers as bytes: not every device indexes float8, and NaN equals itself."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def changed(before: Sequence[Tensor], after: Sequence[Tensor]) -> Iterator[int]:
    """Yield the pages, page 0 apart, in which two versions of the same tensors differ in a bit."""
    for old, new in zip(before, after, strict=True):
        a, b = (t.contiguous().view(torch.uint8).flatten(1)[1:] for t in (old, new))
        yield from ((a != b).any(1).nonzero().flatten() + 1).tolist()
