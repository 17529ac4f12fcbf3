"""What a verified pass needs of SGLang's trees and of records: one launch each on a GPU."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernels: a parameter is a pointer or a constant, which no annotation says.

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor


def fill_tree_mask(children: Tensor, siblings: Tensor, masks: Tensor) -> None:
    """Write which drafts each draft sees: itself and its ancestors.

    children, siblings: int [B, n], a draft's first child and its next sibling, both behind it; any
    other number is none. masks: bool [B, n, n], contiguous; masks[b, i, j] = draft i sees j.
    """
    requests, drafts = children.shape
    if masks.is_cuda and importlib.util.find_spec("triton"):
        _tree_kernel()[(requests,)](
            children,
            siblings,
            masks.view(torch.uint8),
            drafts,
            children.stride(0),
            siblings.stride(0),
            BLOCK=max(2, 1 << (drafts - 1).bit_length()),
        )
        return
    parents = torch.full_like(children, -1)
    masks.copy_(torch.eye(drafts, dtype=torch.bool, device=masks.device))
    draft = torch.arange(drafts, device=masks.device)
    for i in range(drafts):
        parent = parents[:, i : i + 1]
        masks[:, i] |= (parent >= 0) & masks.gather(
            1, parent.clamp(min=0).long()[..., None].expand(-1, 1, drafts)
        ).squeeze(1)
        behind = draft > i
        parents = torch.where((children[:, i : i + 1] == draft) & behind, i, parents)
        parents = torch.where((siblings[:, i : i + 1] == draft) & behind, parent, parents)


def move_records(
    records: tuple[Tensor, ...], slots: Tensor, targets: Tensor, taken: Tensor
) -> None:
    """Copy the records of requests whose `taken` is not negative from their slots to targets.

    records: [layers, slots, n, …], each slot contiguous. slots, targets, taken: int [B].
    """
    if records[0].is_cuda and importlib.util.find_spec("triton"):
        block = 1024
        for x in records:
            size = x[0, 0].numel()
            _move_kernel()[(slots.shape[0], x.shape[0])](
                x, slots, targets, taken, size, x.stride(0), x.stride(1), BLOCK=block
            )
        return
    some = (taken >= 0) & (slots >= 0)
    for x in records:
        x[:, targets[some].long()] = x[:, slots[some].long()]


@cache
def _tree_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["drafts"])
    def fill(
        children,
        siblings,
        masks,
        drafts,
        child_stride,
        sibling_stride,
        BLOCK: tl.constexpr,
    ):
        b = tl.program_id(0).to(tl.int64)
        draft = tl.arange(0, BLOCK)
        parents = tl.full([BLOCK], -1, tl.int32)
        sees = (draft[:, None] == draft[None, :]).to(tl.int32)
        for i in range(drafts):
            parent = tl.sum(tl.where(draft == i, parents, 0), 0)
            of_parent = tl.sum(tl.where(draft[:, None] == parent, sees, 0), 0)
            sees = tl.where(draft[:, None] == i, sees | of_parent[None, :], sees)
            child = tl.load(children + b * child_stride + i).to(tl.int32)
            sibling = tl.load(siblings + b * sibling_stride + i).to(tl.int32)
            parents = tl.where((draft == child) & (draft > i), i, parents)
            parents = tl.where((draft == sibling) & (draft > i), parent, parents)
        at = masks + b * drafts * drafts + draft[:, None] * drafts + draft[None, :]
        real = (draft[:, None] < drafts) & (draft[None, :] < drafts)
        tl.store(at, sees.to(tl.uint8), mask=real)

    return fill


@cache
def _move_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["size", "layer_stride", "slot_stride"])
    def move(
        records, slots, targets, taken, size, layer_stride, slot_stride, BLOCK: tl.constexpr
    ):  # fmt: skip
        b = tl.program_id(0)
        slot = tl.load(slots + b).to(tl.int64)
        if (tl.load(taken + b) < 0) | (slot < 0):
            return
        at = records + tl.program_id(1).to(tl.int64) * layer_stride
        target = tl.load(targets + b).to(tl.int64)
        for first in range(0, size, BLOCK):
            number = first + tl.arange(0, BLOCK)
            x = tl.load(at + slot * slot_stride + number, mask=number < size)
            tl.store(at + target * slot_stride + number, x, mask=number < size)

    return move
