"""The tables of a draft model's steps whose branches attend as one tree: one launch on a GPU."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a constant, which no annotation says.

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TreeTables:
    """The tables of S decode steps over R requests of topk branches; all steps share the pages.

    page_table: int32 [R, pages], a request's tokens, then the drafts of each step, branch by
    branch. lengths: int32 [S, R]. slots: int64 [S, R · topk], of the tokens that a step takes in.
    positions: int64 [S, R · topk · S], of a step's drafts, request by request, in its first places.
    """

    page_table: Tensor
    lengths: Tensor
    slots: Tensor
    positions: Tensor
    topk: int

    @classmethod
    def create(
        cls, requests: int, pages: int, steps: int, topk: int, device: torch.device
    ) -> TreeTables:
        """Create tables of the dummy page, for requests of no tokens."""

        def zeros(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, columns, dtype=dtype, device=device)

        return cls(
            page_table=zeros(requests, pages, torch.int32),
            lengths=zeros(steps, requests, torch.int32),
            slots=zeros(steps, requests * topk, torch.int64),
            positions=zeros(steps, requests * topk * steps, torch.int64),
            topk=topk,
        )

    def first(self, requests: int) -> TreeTables:
        """Return the tables of the first requests."""
        return TreeTables(
            page_table=self.page_table[:requests],
            lengths=self.lengths[:, :requests],
            slots=self.slots[:, : requests * self.topk],
            positions=self.positions,
            topk=self.topk,
        )


def branch_masks(requests: int, topk: int, steps: int, device: torch.device) -> list[Tensor]:
    """Return the tree mask of each step, bool [requests, n, n]: drafts of the same branch."""
    masks = []
    for step in range(steps):
        draft = torch.arange(topk * (step + 1), device=device)
        seen = (draft[:, None] % topk == draft % topk) & (draft[:, None] >= draft)
        masks.append(seen.expand(requests, -1, -1).contiguous())
    return masks


def fill_trees(
    req_to_token: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    tables: TreeTables,
    slot_map: Tensor | None = None,
) -> None:
    """Write the tables of B requests with pages of one token.

    SGLang keeps a request's drafts behind its tokens, topk runs of S + 1 slots.
    req_to_token, rows, slot_map: those of fill_page_table. seq_lens: int [B], without drafts.
    """
    steps, topk, page_table = tables.lengths.shape[0], tables.topk, tables.page_table
    if page_table.is_cuda and importlib.util.find_spec("triton"):
        block = 256
        _kernel()[(page_table.shape[0], -(-page_table.shape[1] // block))](
            req_to_token,
            rows,
            seq_lens,
            req_to_token if slot_map is None else slot_map,
            page_table,
            tables.lengths,
            tables.slots,
            tables.positions,
            page_table.shape[1],
            req_to_token.stride(0),
            page_table.stride(0),
            tables.lengths.stride(0),
            tables.slots.stride(0),
            tables.positions.stride(0),
            TOPK=topk,
            STEPS=steps,
            DRAFTS=1 << (topk * steps - 1).bit_length(),
            MAPPED=slot_map is not None,
            BLOCK=block,
        )
        return
    count, device = page_table.shape[0], page_table.device
    prefix = seq_lens.long()[:, None]
    draft = torch.arange(topk * steps, device=device)
    step, branch = draft // topk, draft % topk

    def slots_at(columns: Tensor) -> Tensor:
        slots = req_to_token[rows[:, None], columns.clamp(max=req_to_token.shape[1] - 1)].long()
        return slots if slot_map is None else slot_map[slots].long()

    slots = slots_at(prefix + branch * (steps + 1) + step)  # [B, topk · S]
    column = torch.arange(page_table.shape[1], device=device)
    behind = (column - prefix).clamp(0, topk * steps - 1)
    pages = slots_at(column.expand(count, -1)).where(column < prefix, slots.gather(1, behind))
    page_table.copy_(pages.clamp(min=0).where(column < prefix + topk * steps, 0))
    tables.slots.copy_(slots.view(count, steps, topk).transpose(0, 1).reshape(steps, -1))
    for i in range(steps):
        n = topk * (i + 1)
        tables.lengths[i].copy_(seq_lens + n)
        tables.positions[i, : count * n].copy_((prefix + step[:n]).flatten())


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit(
        do_not_specialize=[
            "columns", "row_stride", "table_stride", "length_stride", "slot_stride",
            "position_stride",
        ]
    )  # fmt: skip
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
        length_stride,
        slot_stride,
        position_stride,
        TOPK: tl.constexpr,
        STEPS: tl.constexpr,
        DRAFTS: tl.constexpr,
        MAPPED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        b = tl.program_id(0)
        prefix = tl.load(seq_lens + b).to(tl.int32)
        tokens = req_to_token + tl.load(rows + b).to(tl.int64) * row_stride
        table = page_table + b.to(tl.int64) * table_stride
        if tl.program_id(1) == 0:
            draft = tl.arange(0, DRAFTS)
            step, branch = draft // TOPK, draft % TOPK
            used = draft < TOPK * STEPS
            slot = tl.load(tokens + prefix + branch * (STEPS + 1) + step, mask=used, other=0)
            if MAPPED:
                slot = tl.load(slot_map + slot, mask=used, other=0)
            at = step * slot_stride + b * TOPK + branch
            tl.store(slots + at, slot.to(tl.int64), mask=used)
            page = tl.maximum(slot, 0).to(tl.int32)
            tl.store(table + prefix + draft, page, mask=used & (prefix + draft < columns))
            for i in tl.static_range(STEPS):
                tl.store(lengths + i * length_stride + b, prefix + TOPK * (i + 1))
                at = i * position_stride + b * (TOPK * (i + 1)) + draft
                tl.store(positions + at, (prefix + step).to(tl.int64), mask=draft < TOPK * (i + 1))
        if tl.program_id(1) * BLOCK < prefix:
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            used = (column < prefix) & (column < columns)
            slot = tl.load(tokens + column, mask=used, other=0)
            if MAPPED:
                slot = tl.load(slot_map + slot, mask=used, other=0)
            tl.store(table + column, tl.maximum(slot, 0).to(tl.int32), mask=used)

    return fill
