"""Benchmarks of dual chunk attention: right results are right, records are kept and shown."""

import json
import math

import pytest
import torch

pytest.importorskip("triton")

from attn_core.ops.vertical_slash import TORCH, VerticalSlash
from attn_core.plugins.registry import load_plugins
from attn_core.spec.dual_chunk import DualChunk

from benchmarks import dual_chunk, vertical_slash
from benchmarks.cases import Case
from benchmarks.dual_chunk_table import dual_chunk_sections
from benchmarks.ours import our_backend
from benchmarks.timing import Ceilings, Timing, WallTimer

CPU = torch.device("cpu")
CHUNKS = DualChunk(chunk_size=160, local_size=32)
SMALL = {"batch": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "v_head_dim": 32}
CASES = [
    Case(phase="extend", length=300, queries=100, **SMALL),
    Case(phase="decode", length=300, **SMALL),
]


@pytest.fixture(autouse=True)
def one_call(monkeypatch):
    """Time nothing: a call is made once."""

    class Once(WallTimer):
        def measure(self, call):
            call()
            return Timing.of([10.0])

    ceilings = Ceilings(copy_gbs=100.0, matmul_tflops=1.0)
    for module in (dual_chunk, vertical_slash):
        monkeypatch.setattr(module, "timer_for", lambda device: Once())
        monkeypatch.setattr(module, "measure_ceilings", lambda *_: ceilings)


def run(tmp_path, chunks, *arguments):
    registry, out = load_plugins(), tmp_path / "record.json"
    field = dual_chunk.Field(
        ours=[our_backend("torch_native", registry, CPU, chunks)],
        baseline=our_backend("torch_native", registry, CPU),
        dual_chunk=CHUNKS,
    )
    words = ["--device", "cpu", "--out", str(out), "--rounds", "2", *arguments]
    code = dual_chunk.main(words, all_cases=CASES, field=field)
    return code, json.loads(out.read_text())


def test_ours_is_right_and_a_ratio_is_to_the_baseline(tmp_path):
    code, record = run(tmp_path, CHUNKS)
    assert code == 0
    for case in record["cases"]:
        baseline, ours = case["entries"]
        assert "ratio" not in baseline
        assert ours["ratio"] == 1.0
        assert ours["rel_err"] < 1e-2
    _, again = run(tmp_path, CHUNKS, "--only", "decode")
    assert [x["name"] for x in again["cases"]] == [x.name for x in CASES]


def test_other_chunks_are_seen_as_wrong(tmp_path, monkeypatch):
    real = dual_chunk.reference
    monkeypatch.setattr(dual_chunk, "reference", lambda *kwargs: real(*kwargs[:-1], 192))
    code, record = run(tmp_path, CHUNKS)
    assert code == 1
    assert all(case["entries"][1]["wrong"] for case in record["cases"])


def test_lists_have_about_the_density_that_is_asked():
    n = 8192
    for requested in (0.2, 0.4):
        drawn = vertical_slash.draw_indexes(requested, 2, n, seed=1)
        assert torch.equal(drawn.slash, vertical_slash.draw_indexes(requested, 2, n, seed=1).slash)
        lists = TORCH.to_lists(VerticalSlash(*drawn), vertical_slash.Part(0, n, 0, n))
        assert math.isclose(vertical_slash.density_of([lists], n), requested, rel_tol=0.25)


def test_break_even_is_where_the_line_through_the_times_is_one():
    def case(density, us):
        entries = [
            {"name": vertical_slash.DENSE, "us": 100.0},
            {"name": vertical_slash.OURS, "us": us},
        ]
        return {"density": density, "choose_us": 5.0, "lists_us": 5.0, "entries": entries}

    assert vertical_slash.break_even([case(0.1, 10.0)]) is None
    assert vertical_slash.break_even([case(0.1, 10.0), case(0.2, 30.0)]) == 0.5


def test_the_page_has_both_records():
    text = dual_chunk_sections()
    assert "NVIDIA H100 80GB HBM3: dual chunk attention" in text
    assert "NVIDIA H100 80GB HBM3: sparse prefill" in text
