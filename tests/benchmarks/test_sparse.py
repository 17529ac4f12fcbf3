"""Sparse MLA's benchmark: who is prepared is said, and who takes too long is recorded."""

import time
import types

import pytest
import torch

pytest.importorskip("triton")

from attn_core.backends.triton.sparse import selecting

from benchmarks import sparse
from benchmarks.peers import selections
from benchmarks.peers.sparse import CONTESTANTS, SparseContestant
from benchmarks.timing import WallTimer


@pytest.fixture
def inputs():
    """Only what the check of a write looks at."""
    case = types.SimpleNamespace(tokens=1)
    return types.SimpleNamespace(case=case, visible=torch.ones(1), chosen=torch.zeros(1, 1))


def made(prepare, inputs, limit_s=None, late=None, **more):
    own = {"name": "x", "part": "write", "module": "torch"} | more
    contestant = SparseContestant(**own, prepare=prepare)
    return sparse.entrant(contestant, inputs, WallTimer(), limit_s, set() if late is None else late)


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


def test_a_library_that_was_late_is_not_waited_for_again(inputs):
    """In this part: its other functions may have been compiled, and so may other libraries'."""
    late, calls = set(), []
    made(lambda x, library: time.sleep(30), inputs, 0.2, late, module="json.decoder")
    record, entrant = made(
        lambda x, library: calls.append(1), inputs, 5, late, name="ties", module="json"
    )
    assert entrant is None
    assert not calls
    assert "over --prepare-limit" in record["error"]
    for more in ({"part": "select", "module": "json"}, {"module": "math"}):
        prepare = lambda x, library: calls.append(1) or (lambda: None)  # noqa: E731
        made(prepare, inputs, 5, late, **more)
    assert len(calls) == 2
    assert late == {("write", "json")}


def test_a_part_of_the_contestants_is_no_record():
    for words in (
        ["--parts", "select"],
        ["--peers", "sgl"],
        ["--ways", "4x128"],
        ["--prepare-limit", "5"],
    ):
        with pytest.raises(SystemExit):
            sparse.parse(words)
        assert sparse.parse([*words, "--out", "x.json"]).out


def test_peers_that_are_left_out_and_ways_that_are_added():
    words = ["--out", "x.json", "--peers", "^(?!flashinfer)", "--parts", "^select$"]
    args = sparse.parse([*words, "--ways", "4x128", "8x80"])
    names = [x.name for x in sparse.requested(args, CONTESTANTS)]
    assert names == ["triton", "sgl_kernel", "triton 4x128", "triton 8x80"]


@pytest.mark.parametrize("text", ["4", "5x128", "4x", "4x128x1"])
def test_a_way_is_warps_and_registers(text):
    with pytest.raises(SystemExit):
        sparse.parse(["--out", "x.json", "--ways", text])


def test_a_way_selects_by_as_many_warps_and_registers(monkeypatch):
    """Its rows are loaded as triton's are: 32 scores a thread at once."""
    [way] = sparse.parse(["--out", "x.json", "--ways", "4x96"]).ways
    passed = []
    monkeypatch.setattr(selecting, "SparsePass", lambda *_, **more: None)
    monkeypatch.setattr(selecting, "select", lambda *args, **_: passed.append(args[-1]))
    monkeypatch.setattr(
        selections, "backend_of", lambda *_: (None, types.SimpleNamespace(requests=0))
    )
    batch = types.SimpleNamespace(max_q_len=4096, cu_seqlens_q=None)
    case = types.SimpleNamespace(tokens=1)
    x = types.SimpleNamespace(
        chosen=torch.zeros(1, 1), batch=batch, case=case, drawn_scores=None, view=None
    )
    way.prepare(x, way.load())()
    [how] = passed
    assert (how.warps, how.registers, how.constants.AT_ONCE) == (4, 96, 4096)


def test_compiling_ahead_measures_nothing(monkeypatch):
    called = []
    monkeypatch.setattr(sparse, "compile_topk", lambda: called.append("compiled"))
    monkeypatch.setattr(sparse, "measure_ceilings", lambda *_: called.append("measured"))
    assert sparse.main(["--compile"]) == 0
    assert called == ["compiled"]
