"""Sparse MLA's benchmark: who is prepared is said, and who takes too long is recorded."""

import time
import types

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import sparse
from benchmarks.peers.sparse import SparseContestant
from benchmarks.timing import WallTimer


@pytest.fixture
def inputs():
    """Only what the check of a write looks at."""
    case = types.SimpleNamespace(tokens=1)
    return types.SimpleNamespace(case=case, visible=torch.ones(1), chosen=torch.zeros(1, 1))


def made(prepare, inputs, limit_s=None):
    contestant = SparseContestant(name="x", part="write", module="torch", prepare=prepare)
    return sparse.entrant(contestant, inputs, WallTimer(), limit_s)


def test_what_is_prepared_is_said_and_can_be_timed(inputs, capsys):
    record, entrant = made(lambda x, library: lambda: library.ones(1), inputs, 30)
    assert record["part"] == "write"
    assert "error" not in record
    assert entrant.call() == torch.ones(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "write x: preparing"
    assert lines[1].startswith("write x: prepared in")


def test_what_takes_too_long_is_recorded(inputs):
    record, entrant = made(lambda x, library: time.sleep(30), inputs, 0.2)
    assert entrant is None
    assert record["error"] == "TimeoutError: preparing took more than 0.2 s (--prepare-limit)"


def test_a_part_of_the_contestants_is_no_record():
    for words in (["--parts", "select"], ["--prepare-limit", "5"]):
        with pytest.raises(SystemExit):
            sparse.parse(words)
        assert sparse.parse([*words, "--out", "x.json"]).out
