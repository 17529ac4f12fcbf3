"""The selection as it is compiled for a GPU, on rows that may be got wrong, at real lengths."""

import pytest
import torch
from attn_core.backends.triton.sparse import selecting
from selections import ROWS, check, rows

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

NAMES = [*ROWS]


@pytest.mark.parametrize("how", ["WIDE", "NARROW"])
@pytest.mark.parametrize("length", [2049, 5000, 32768, 65536])
def test_rows(how, length):
    scores = rows(NAMES, length, "cuda")
    check(NAMES, scores, 2048, [length] * len(NAMES), getattr(selecting, how))


def test_rows_in_pieces():
    scores = rows(NAMES, 300_000, "cuda")
    check(NAMES, scores, 2048, [300_000] * len(NAMES), selecting.WIDE)


def test_more_rows_than_programs():
    names = ["normal", "ties", "relu"] * 500
    scores = rows(names, 6000, "cuda")
    check(names, scores, 2048, [6000 - n for n in range(1500)], selecting.NARROW)
