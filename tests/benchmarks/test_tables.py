"""Reports survive the disk, and pages say what they hold."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from benchmarks import tables
from benchmarks.plots import plot
from benchmarks.results import Entry, Measured, Report, default_path, load, load_all


def entry(name, us=None, **more):
    rates = {} if us is None else {"tflops": 500.0, "gbs": 4000.0, "roofline": 0.5, "rel_err": 1e-3}
    return Entry(name=name, us=us, p20=us, p80=us, reps=None if us is None else 30, **rates, **more)


def case(name, phase, ours, *peers):
    return Measured(
        name=f"{phase} {name}",
        phase=phase,
        shape={"batch": 1},
        kv_bytes=8,
        bytes=16,
        flops=32,
        floor_us=1.0,
        tolerance=1e-2,
        ours=ours,
        peers=peers,
    )


FA3 = entry("fa3", 100.0)
REPORT = Report(
    suite="all",
    date="2026-01-02T03:04:05+00:00",
    device="Some GPU",
    versions={"torch": "2.11", "triton": None},
    ceilings={"copy_gbs": 4242.0, "matmul_tflops": 800.0},
    cases=(
        case("B1", "decode", entry("triton", 110.0), FA3, entry("x", 50.0, wrong=True)),
        case("B2", "decode", entry("triton", 90.0), FA3, entry("y", error="Boom: `a`")),
        case("B3", "prefill", entry("triton", error="E: no"), entry("fa3", 5.25)),
        case("B4", "prefill", entry("triton", 7.0), entry("fa3", error="refuses trees")),
    ),
    notes=("not installed: fa4",),
)  # fmt: skip


def test_a_report_is_read_back_as_it_was_written(tmp_path):
    path = tmp_path / "attention.some-gpu.all.json"
    REPORT.save(path)
    assert load(path) == REPORT
    assert load_all(tmp_path) == {path.name: REPORT}
    path.write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="schema 0"):
        load(path)


def test_ratios_count_right_results_only():
    assert [m.ratio for m in REPORT.cases] == [1.1, 0.9, None, None]
    assert REPORT.cases[0].best_peer.name == "fa3", "the wrong one was faster"
    assert [round(r, 2) for r, _ in REPORT.ranked] == [1.1, 0.9]


def test_the_page_says_what_was_measured():
    text = tables.page({"attention.some-gpu.all.json": REPORT})
    rows = {line.split(" |")[0]: line for line in text.splitlines() if line.startswith("| B")}
    assert rows["| B1"] == "| B1 | 110; 4000 | **100; 4000** | wrong | - | fa3 | 1.100 | 50% |"
    assert rows["| B2"] == "| B2 | **90.0; 4000** | 100; 4000 | - | - | fa3 | 0.900 | 50% |"
    assert rows["| B3"] == "| B3 | - | **5.2; 500** | fa3 | - | - |"
    assert rows["| B4"] == "| B4 | **7.0; 500** | - | - | - | 50% |"
    assert "2026-01-02, torch 2.11. Copy 4242 GB/s, matmul 800 TFLOP/s" in text
    assert "not installed: fa4." in text
    assert "- x: a wrong result (decode B1)" in text
    assert "- y: `Boom: 'a'` (decode B2)" in text
    assert "- triton: `E: no` (prefill B3)" in text
    assert "refuses trees" not in text
    assert "performance/attention.some-gpu.all.svg" in text
    assert "No GPU result is recorded yet" not in text


def test_the_grid_is_summed_up():
    text = tables.page({"attention.g.grid.json": dataclasses.replace(REPORT, suite="grid")})
    assert (
        "2 of 4 shapes have a peer: ours is as fast or faster on 1, the median of ours / best is "
        "1.00, the worst 1.10 (decode B1)." in text
    )


def test_without_results_the_page_says_so():
    assert "No GPU result is recorded yet." in tables.page({})


def test_the_recorded_page_and_images_are_current():
    for path, text in tables.pages().items():
        assert path.read_text() == text, "run `python -m benchmarks.tables`"
    assert tables.stale_images() == [], "run `python -m benchmarks.tables`"


def test_names_of_results():
    assert default_path("NVIDIA H200", "grid").name == "attention.nvidia-h200.grid.json"


def test_an_image_is_current_only_for_the_numbers_it_was_drawn_from(tmp_path):
    file, images = "attention.g.all.json", tmp_path / "images"
    REPORT.save(tmp_path / file)
    assert tables.stale_images(tmp_path, images) == [file]
    images.mkdir()
    image = images / "attention.g.all.svg"
    image.write_text(f"<svg>{tables.digest(tmp_path / file)}</svg>")
    assert tables.stale_images(tmp_path, images) == []
    dataclasses.replace(REPORT, date="2027").save(tmp_path / file)
    assert tables.stale_images(tmp_path, images) == [file]


@pytest.mark.parametrize("suite", ["all", "grid"])
def test_plots_are_drawn_and_reproducible(tmp_path, suite):
    pytest.importorskip("matplotlib")
    texts = []
    for name in ("a.svg", "b.svg"):
        plot(dataclasses.replace(REPORT, suite=suite), tmp_path / name, "sha256 abc")
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    assert "sha256 abc" in texts[0]
    for word in ("decode", "prefill") if suite == "grid" else ("triton", "fa3", "B1"):
        assert word in re.sub(r"<[^>]*>", "|", texts[0]), word


def test_reading_results_needs_no_torch():
    """The documentation is generated where no torch is: these two modules may not import it."""
    folder = pathlib.Path(tables.__file__).parent
    for name in ("tables", "results", "plots"):
        text = (folder / f"{name}.py").read_text()
        assert not re.search(r"^(import|from) (torch|attn_core|matplotlib)", text, re.M), name
