"""The attention tests that SGLang ships, on a CPU: sparse MLA and dual chunk attention."""

import json
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "engine_kit.py"
FAULT = "import engine_kit; from benchmarks.engines import kit_sparse; {}; engine_kit.main()"


def outcomes(environment, folder, *, only, cases, fault=None):
    """Return case → what was said of it; several groups may have a case of one name."""
    out = folder / "kit.json"
    script = [str(SCRIPT)] if fault is None else ["-c", FAULT.format(fault)]
    arguments = ["--device", "cpu", "--out", str(out), "--only", *only, "--cases", *cases]
    command = [sys.executable, *script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert out.exists(), done.stderr[-3000:]
    rows = json.loads(out.read_text())["rows"]
    return {(row["group"], row["case"]): row["outcome"] for row in rows}


def test_sparse_mla_attends_to_the_positions_that_the_kit_names(tmp_path, engine_environment):
    """Longer and shorter than the selection, eager and as a graph replays it."""
    said = outcomes(engine_environment, tmp_path, only=["dsa"], cases=["decode_ragged_prefix"])
    assert set(said.values()) == {"passed"}
    assert {group for group, _ in said} == {"dsa", "dsa graph"}


def test_positions_taken_as_slots_fail(tmp_path, engine_environment):
    """With the kit's own tolerance they pass."""
    said = outcomes(
        engine_environment,
        tmp_path,
        only=["dsa"],
        cases=["decode_short_prefix"],
        fault="kit_sparse.slots_of = lambda positions, batch: positions",
    )
    assert said
    assert all(what.startswith("failed: AssertionError") for what in said.values())


def test_dual_chunk_attention_over_three_chunks(tmp_path, engine_environment):
    """Eager and replayed; a sparse prompt in two parts is refused."""
    said = outcomes(
        engine_environment,
        tmp_path,
        only=["dual chunk"],
        cases=["inter_chunk", "succ_chunk", "sparse"],
    )
    parts = {what for (_, case), what in said.items() if "cross_page_first_chunk" in case}
    assert len(parts) == 1
    assert parts.pop().startswith("refused: request 0 hands over 1 of 16 tokens")
    others = [what for (_, case), what in said.items() if "cross_page_first_chunk" not in case]
    assert len(others) > 8
    assert set(others) == {"passed"}
