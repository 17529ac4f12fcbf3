"""Passes over requests that each own three pages of every view, and what may be captured."""

import dataclasses

import torch
from attn_core import CacheView, ForwardBatch, SpecInfo
from recording import M, recorder

SIZE, REQUESTS, PAGES = 4, 4, 3  # tokens a page, requests at most, pages of each
ROOM, DRAFTS, FILL = SIZE * PAGES, 3, 3  # FILL is the recorder's
PASSES = [(M.DECODE, 1), (M.DRAFT_DECODE, 1), (M.TARGET_VERIFY, DRAFTS), (M.DRAFT_EXTEND, 2)]
TREE = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)


def passing(mode, requests, lengths, *, new=1, tree=None, views=("full", "window")):
    """Build a pass of these requests, in this order; request r owns three pages of each view."""

    def table(shift):
        rows = [[1 + (r * PAGES + i + shift) % (REQUESTS * PAGES) for i in range(PAGES)]
                for r in requests]  # fmt: skip
        return torch.tensor(rows, dtype=torch.int32).reshape(-1, PAGES)

    new_lens = [new] * len(requests)
    more = {
        name: CacheView.build(
            page_table=table(5), page_size=SIZE, seq_lens=lengths, new_lens=new_lens
        )
        for name in views
        if name != "full"
    }
    spec = None
    if mode is M.TARGET_VERIFY:
        mask = None if tree is None else tree.expand(len(requests), -1, -1).contiguous()
        spec = SpecInfo(topk=1 if tree is None else 2, num_draft_tokens=new, tree_mask=mask)
    return ForwardBatch.build(
        mode,
        query_lens=new_lens,
        seq_lens=lengths,
        page_table=table(0),
        page_size=SIZE,
        spec=spec,
        views=more,
    )


def recorded(name="decoder", *, topk=1, drafts=0, **row):
    made = recorder(name, **row)
    made.config = dataclasses.replace(made.config, topk=topk, num_draft_tokens=drafts)
    return made


def nothing(batch, metadata, *inputs):
    return None
