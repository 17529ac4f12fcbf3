"""Page tables and lengths of a pass from SGLang's token table: one launch on a GPU."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a constant, which no annotation says.

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What a view of a batch points at: int32 [B, pages] and int32 [B]."""

    page_table: Tensor
    lengths: Tensor

    def rows(self, count: int) -> Tables:
        """Return the first rows."""
        return Tables(page_table=self.page_table[:count], lengths=self.lengths[:count])


@dataclass(frozen=True, kw_only=True)
class Branches:
    """The tables of a draft model's S decode steps over R branches; all steps share the pages.

    page_table: int32 [R, pages]. lengths: int32 [S, R]. slots, positions: int64 [S, R], of the
    token that each step takes in.
    """

    page_table: Tensor
    lengths: Tensor
    slots: Tensor
    positions: Tensor

    @classmethod
    def create(cls, branches: int, pages: int, steps: int, device: torch.device) -> Branches:
        """Create tables of the dummy page, for branches of no tokens."""

        def zeros(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, columns, dtype=dtype, device=device)

        return cls(
            page_table=zeros(branches, pages, torch.int32),
            lengths=zeros(steps, branches, torch.int32),
            slots=zeros(steps, branches, torch.int64),
            positions=zeros(steps, branches, torch.int64),
        )

    def first(self, branches: int) -> Branches:
        """Return the tables of the first branches."""
        return Branches(
            page_table=self.page_table[:branches],
            lengths=self.lengths[:, :branches],
            slots=self.slots[:, :branches],
            positions=self.positions[:, :branches],
        )


def fill_branches(
    req_to_token: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    topk: int,
    page_size: int,
    branches: Branches,
    slot_map: Tensor | None = None,
) -> None:
    """Write the tables of B · topk branches, those of a request together.

    SGLang keeps a request's drafts behind its tokens, topk runs of S + 1 slots. With larger pages
    each run begins on a page of its own, whose head is a copy of the request's last page.
    req_to_token, rows, slot_map: those of fill_page_table. seq_lens: int [B], without drafts.
    """
    steps, page_table = branches.lengths.shape[0], branches.page_table
    if page_table.is_cuda and importlib.util.find_spec("triton"):
        block = 256
        _branch_kernel()[(page_table.shape[0], -(-page_table.shape[1] // block))](
            req_to_token,
            rows,
            seq_lens,
            req_to_token if slot_map is None else slot_map,
            page_table,
            branches.lengths,
            branches.slots,
            branches.positions,
            page_table.shape[1],
            req_to_token.stride(0),
            page_table.stride(0),
            branches.lengths.stride(0),
            TOPK=topk,
            STEPS=steps,
            PAGE_SIZE=page_size,
            MAPPED=slot_map is not None,
            BLOCK=block,
        )
        return
    branch = torch.arange(page_table.shape[0], device=page_table.device) % topk
    rows, prefix = (x.long().repeat_interleave(topk) for x in (rows, seq_lens))
    tail = prefix % page_size
    run = -(-(tail + steps + 1) // page_size) * page_size * branch

    def slots_at(positions: Tensor) -> Tensor:
        moved = positions + run.where(positions >= prefix - tail, 0)
        slots = req_to_token[rows, moved.clamp(max=req_to_token.shape[1] - 1)].long()
        return slots if slot_map is None else slot_map[slots].long()

    positions = prefix + torch.arange(steps, device=prefix.device)[:, None]
    branches.positions.copy_(positions)
    branches.lengths.copy_(positions + 1)
    branches.slots.copy_(slots_at(positions))
    first = torch.arange(page_table.shape[1], device=prefix.device)[:, None] * page_size
    pages = (slots_at(first) // page_size).clamp_(min=0)
    page_table.copy_(pages.where(first < prefix + steps, 0).T)


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


@cache
def _branch_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["columns", "row_stride", "table_stride", "step_stride"])
    def fill(
        req_to_token,
        rows,
        seq_lens,
        slot_map,
        page_table,
        lengths,
        slots,
        positions,
        columns,
        row_stride,
        table_stride,
        step_stride,
        TOPK: tl.constexpr,
        STEPS: tl.constexpr,
        PAGE_SIZE: tl.constexpr,
        MAPPED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        b = tl.program_id(0)
        prefix = tl.load(seq_lens + b // TOPK).to(tl.int32)
        tail = prefix % PAGE_SIZE
        run = tl.cdiv(tail + STEPS + 1, PAGE_SIZE) * PAGE_SIZE * (b % TOPK)
        tokens = req_to_token + tl.load(rows + b // TOPK).to(tl.int64) * row_stride
        if tl.program_id(1) == 0:
            for step in tl.static_range(STEPS):
                slot = tl.load(tokens + prefix + step + run)
                if MAPPED:
                    slot = tl.load(slot_map + slot)
                at = step * step_stride + b
                tl.store(slots + at, slot.to(tl.int64))
                tl.store(positions + at, (prefix + step).to(tl.int64))
                tl.store(lengths + at, prefix + step + 1)
        if tl.program_id(1) * BLOCK * PAGE_SIZE < prefix + STEPS:
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            token = column * PAGE_SIZE
            used = (token < prefix + STEPS) & (column < columns)
            token += tl.where(token < prefix - tail, 0, run)
            slot = tl.load(tokens + token, mask=used, other=0)
            if MAPPED:
                slot = tl.load(slot_map + slot, mask=used, other=0)
            page = tl.maximum(slot // PAGE_SIZE, 0).to(tl.int32)
            tl.store(page_table + b.to(tl.int64) * table_stride + column, page, mask=used)

    return fill
