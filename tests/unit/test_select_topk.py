"""The selection's kernel, held to few scores at once, on rows that may be got wrong."""

import pytest
import torch

pytest.importorskip("triton")

from attn_core.backends.triton.sparse import selecting
from selections import ROWS, check, rows


def short(sample, segment, at_once):
    """Return constants for short rows; candidates have the least room that there may be."""
    constants = selecting.SelectConstants(
        SAMPLE=sample, SEGMENT=segment, AT_ONCE=at_once, CAPACITY=4
    )
    return selecting.Selecting(constants, 4, 64)


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_fill_their_candidates(name, monkeypatch):
    """Candidates fill up and are selected from, or are too few, and programs have more rows."""
    monkeypatch.setattr(selecting, "SELECT_PROGRAMS", 2)
    scores = rows([name] * 3, 450)
    check([name] * 3, scores, 40, [450, 41, 333], short(64, 256, 64))


@pytest.mark.parametrize("name", ["ties", "ascending", "tail of -inf", "bits"])
def test_rows_in_pieces(name, monkeypatch):
    """A row is longer than a program takes: its pieces keep their own greatest."""
    monkeypatch.setattr(selecting, "ROW", 128)
    scores = rows([name] * 3, 700)
    check([name] * 3, scores, 20, [700, 130, 20], short(32, 128, 32))


@pytest.mark.parametrize("topk", [1, 33])
def test_lengths_around_the_selection(topk):
    visible = [topk - 1, topk, topk + 1, 100]
    check(["ties"] * 4, rows(["ties"] * 4, 100), topk, visible, short(16, 128, 32))


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("stride", [300, 301])
def test_rows_that_do_not_begin_where_loads_are_wide(stride, offset):
    """A view of scores that were computed elsewhere: rows at any address, NaN between them."""
    store = torch.full((3 * stride + 8,), torch.nan)
    scores = store[offset:][: 3 * stride].view(3, stride)[:, :290]
    scores.copy_(rows(["relu"] * 3, 290))
    check(["relu"] * 3, scores, 30, [290, 289, 130], short(32, 128, 64))


def test_a_limit_that_is_too_high_is_taken_back(monkeypatch):
    """The sample says nothing of the rest: the row is read anew."""
    scores = rows(["normal"], 400)
    scores[0, ::4] += 100.0
    group = torch.arange(16)[:, None] * (400 // 16 // 4 * 4) + torch.arange(4)
    scores[0, group.flatten()] = 1000.0 + torch.arange(64)  # what is sampled is far above
    check(["normal"], scores, 70, [400], short(64, 128, 32))
