"""Page tables and lengths of a pass from SGLang's token table: one launch on a GPU."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a constant, which no annotation says.

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor


def fill_page_table(
    req_to_token: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    new_tokens: int,
    page_size: int,
    page_table: Tensor,
    lengths: Tensor,
    slot_map: Tensor | None = None,
    starts: Tensor | None = None,
) -> None:
    """Write the page ids and the lengths of B requests; never reads a length on the host.

    req_to_token: int32 [requests, context], the slot of each token. rows: int64 [B], the requests'
    rows in it. seq_lens: int [B], tokens without the `new_tokens` of a verify pass.
    page_table: int32 [B, pages], filled as far as a request's tokens go; what lies behind stays a
    valid page. lengths: int32 [B], filled with seq_lens + new_tokens. slot_map: int64, slot → slot
    of another pool. starts: int [B], the columns of req_to_token where the requests' tokens begin;
    page_size is 1 then.
    """
    if page_table.is_cuda and importlib.util.find_spec("triton"):
        block = 256
        grid = (page_table.shape[0], -(-page_table.shape[1] // block))
        _kernel()[grid](
            req_to_token,
            rows,
            seq_lens,
            req_to_token if slot_map is None else slot_map,
            rows if starts is None else starts,
            page_table,
            lengths,
            new_tokens,
            page_table.shape[1],
            req_to_token.stride(0),
            page_table.stride(0),
            PAGE_SIZE=page_size,
            MAPPED=slot_map is not None,
            STARTED=starts is not None,
            BLOCK=block,
        )
        return
    lengths.copy_(seq_lens + new_tokens)
    if starts is None:
        slots = req_to_token[rows, : page_table.shape[1] * page_size : page_size].long()
    else:
        column = starts.long()[:, None] + torch.arange(page_table.shape[1], device=rows.device)
        slots = req_to_token[rows[:, None], column.clamp_(max=req_to_token.shape[1] - 1)].long()
    slots = slots if slot_map is None else slot_map[slots]
    pages = (slots // page_size).clamp_(min=0).int()
    first = torch.arange(pages.shape[1], device=pages.device) * page_size
    page_table[:, : pages.shape[1]].copy_(pages.where(first < lengths[:, None], 0))


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["new_tokens", "columns", "row_stride", "table_stride"])
    def fill(
        req_to_token,
        rows,
        seq_lens,
        slot_map,
        starts,
        page_table,
        lengths,
        new_tokens,
        columns,
        row_stride,
        table_stride,
        PAGE_SIZE: tl.constexpr,
        MAPPED: tl.constexpr,
        STARTED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        b = tl.program_id(0)
        length = tl.load(seq_lens + b).to(tl.int32) + new_tokens
        if tl.program_id(1) == 0:
            tl.store(lengths + b, length)
        if tl.program_id(1) * BLOCK * PAGE_SIZE < length:
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            used = (column * PAGE_SIZE < length) & (column < columns)
            row = tl.load(rows + b).to(tl.int64) * row_stride
            if STARTED:
                row += tl.load(starts + b).to(tl.int64)
            slot = tl.load(req_to_token + row + column * PAGE_SIZE, mask=used, other=0)
            if MAPPED:
                slot = tl.load(slot_map + slot, mask=used, other=0)
            page = tl.maximum(slot // PAGE_SIZE, 0).to(tl.int32)
            tl.store(page_table + b.to(tl.int64) * table_stride + column, page, mask=used)

    return fill


def drafts_of_full_mask(mask: Tensor, prefix: Tensor, drafts: int) -> Tensor:
    """Return the drafts' part of SGLang's full tree mask, bool [B, n, n].

    mask: flat, request after request, each [n, prefix + n]. prefix: int [B]. drafts: n.
    """
    width = (prefix.long() + drafts)[:, None, None]
    i = torch.arange(drafts, device=mask.device)
    begin = (width.cumsum(0) - width) * drafts
    at = begin + i[:, None] * width + prefix[:, None, None] + i
    return mask[at.clamp_(max=mask.numel() - 1)].bool()
