"""Reports survive the disk, and pages say what they hold."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import pytest

from benchmarks import linear_table, tables
from benchmarks.plots import Bar, place, plot
from benchmarks.results import (
    FOLDER,
    PATTERN,
    Entry,
    Measured,
    Report,
    command_of,
    default_path,
    load,
    load_all,
)


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
REFUSED, X_FAILS = entry("y", error="refuses pages"), entry("x", error="Boom: `b`")
REPORT = Report(
    suite="all",
    date="2026-01-02T03:04:05+00:00",
    device="Some GPU",
    versions={"torch": "2.11", "triton": None},
    ceilings={"copy_gbs": 4242.0, "matmul_tflops": 800.0},
    cases=(
        case("B1", "decode", entry("triton", 110.0), FA3, entry("x", 50.0, wrong=True), REFUSED),
        case("B2", "decode", entry("triton", 90.0), FA3, X_FAILS, entry("y", error="Boom: `a`")),
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


def test_a_page_says_which_cases_are_of_an_earlier_commit(tmp_path):
    older = [dataclasses.replace(m, commit="a1b2c3") for m in REPORT.cases[:2]]
    report = dataclasses.replace(REPORT, cases=(*older, *REPORT.cases[2:]))
    path = tmp_path / "attention.g.all.json"
    report.save(path)
    assert load(path) == report
    assert "\n2 cases were timed at commit a1b2c3.\n" in tables.page({path.name: report})
    assert "were timed at" not in tables.page({path.name: REPORT})


def test_ratios_count_right_results_only():
    assert [m.ratio for m in REPORT.cases] == [1.1, 0.9, None, None]
    assert REPORT.cases[0].best_peer.name == "fa3", "the wrong one was faster"
    assert [round(r, 2) for r, _ in REPORT.ranked] == [1.1, 0.9]


def test_a_case_with_an_untimed_peer_has_no_ratio(tmp_path):
    """Which peer is the best is not known, so nothing is said of it, in a file or on a page."""
    skipped = entry("xqa", error="skipped: the 3 s of this case were spent")
    ours, xqa = entry("triton", 11.5), entry("xqa", 12.0)
    both = case("B1", "decode", ours, FA3, xqa)
    assert both.ratio == pytest.approx(11.5 / 12)
    for part in (case("B2", "decode", ours, FA3, skipped), case("B2", "decode", ours, FA3)):
        report = dataclasses.replace(REPORT, cases=(both, part))
        path = tmp_path / "attention.g.all.json"
        report.save(path)
        kept = load(path)
        assert [m.ratio for m in kept.cases] == [both.ratio, None]
        assert kept.cases[1].untimed == ("xqa",)
        raw = json.loads(path.read_text())
        assert raw["cases"][1]["ratio"] is None
        assert raw["worst"]["of"] == 1
        text = tables.page({path.name: kept})
        assert "</a>B2 | 11.5; 4000 | 100; 4000 | not timed | - | - | 50% |" in text
        assert "no ratio: xqa not timed" in text
        assert "B2 | **" not in text, "nobody is known to be the fastest"


def test_a_peer_that_refuses_or_fails_takes_no_ratio_away():
    others = (entry("fa4", error="refuses page_size 1"), entry("y", error="ValueError: no kernel"))
    result = case("B1", "decode", entry("triton", 90.0), FA3, *others)
    assert result.untimed == ()
    assert result.ratio == 0.9


def test_recorded_ratios_are_those_of_the_recorded_figures():
    for path in FOLDER.glob(PATTERN):
        report = load(path)
        assert path.read_text() == report.to_json(), f"{path.name}: load it and save it again"
        for m in report.cases:
            assert m.ratio is None or not m.untimed, m.name


def test_the_page_says_what_was_measured():
    text = tables.page({"attention.some-gpu.all.json": REPORT})
    lines = [re.sub("<[^>]*>", "", line) for line in text.splitlines()]
    rows = {line.split(" |")[0]: line for line in lines if line.startswith("| B")}
    assert rows["| B1"] == "| B1 | 110; 4000 | **100; 4000** | wrong | - | fa3 | 1.100 | 50% |"
    assert rows["| B2"] == "| B2 | **90.0; 4000** | 100; 4000 | - | - | fa3 | 0.900 | 50% |"
    assert rows["| B3"] == "| B3 | - | **5.2; 500** | fa3 | - | - |"
    assert rows["| B4"] == "| B4 | **7.0; 500** | - | - | - | 50% |"
    assert "2026-01-02, torch 2.11. Copy 4242 GB/s, matmul 800 TFLOP/s" in text
    assert "Recorded in `attention.some-gpu.all.json`.\n" in text
    run = dataclasses.replace(REPORT, command="python -m benchmarks.attention --phase all")
    said = tables.page({"attention.some-gpu.all.json": run})
    assert "all.json` by `python -m benchmarks.attention --phase all`.\n" in said
    assert "not installed: fa4." in text
    assert "- x: a wrong result (decode B1)" in text
    assert "- y: `Boom: 'a'` (decode B2)" in text
    assert "- triton: `E: no` (prefill B3)" in text
    assert "refuses trees" not in text
    assert "No GPU result is recorded yet" not in text


def test_a_plot_shows_both_times_and_leads_to_the_table():
    text = tables.page({"attention.some-gpu.all.json": REPORT})
    first, second = re.findall(r'<p><span><a href="#(.*?)">(.*?)</a>(.*)', text)[:2]
    assert first[1] == "B1"
    assert f'<a id="{first[0]}"></a>B1 |' in text
    assert "<b>1.10</b> 110 µs, fa3 100 µs" in first[2]
    assert 'class="slower"' in first[2]
    assert "<b>0.90</b> 90.0 µs, fa3 100 µs" in second[2]
    assert 'class="faster"' in second[2]


def test_a_bar_lies_between_its_ratio_and_one():
    assert [round(place(r), 1) for r in (0.25, 0.5, 1.0, 2.0)] == [0.0, 33.3, 66.7, 100.0]
    assert (place(0.01), place(50.0)) == (0.0, 100.0)
    drawn = plot([Bar(label="<b>", ratio=0.5, text="t"), Bar(label="x", ratio=None, text="none")])
    assert 'class="faster" style="left:33.3%;width:33.3%"' in drawn
    assert "&lt;b&gt;" in drawn
    assert drawn.count('class="bar"') == 2


def test_the_home_page_sums_up_each_phase():
    text = tables.summary({"attention.g.all.json": REPORT})
    assert "Some GPU, 2026-01-02" in text
    assert "reference/performance.html#g-all-decode" in text
    assert "<b>0.99</b> 0.90 to 1.10, 2 shapes" in text  # the geometric mean
    assert "prefill" not in text, "a phase without a ratio has no line"
    assert tables.summary({"attention.g.grid.json": REPORT}) == ""


def test_the_grid_is_summed_up():
    text = tables.page({"attention.g.grid.json": dataclasses.replace(REPORT, suite="grid")})
    assert (
        "2 of 4 shapes have a ratio: ours is as fast or faster on 1, the median of ours / best is "
        "1.00, the worst 1.10 (decode B1)." in text
    )


def test_without_results_the_page_says_so():
    assert "No GPU result is recorded yet." in tables.page({})


def test_the_recorded_pages_are_current():
    for path, text in tables.pages().items():
        assert path.read_text() == text, "run `python -m benchmarks.tables`"


def test_names_of_results():
    assert default_path("NVIDIA H200", "grid").name == "attention.nvidia-h200.grid.json"


def test_reading_results_needs_no_torch():
    """The documentation is generated where no torch is: these modules may not import it."""
    folder = pathlib.Path(tables.__file__).parent
    for name in ("tables", "results", "plots"):
        text = (folder / f"{name}.py").read_text()
        assert not re.search(r"^(import|from) (torch|attn_core|matplotlib)", text, re.M), name


def linear_case(**ours):
    entries = [
        {"name": "ours", "graph_us": 10.0, "us": 12.0, **ours},
        {"name": "fla", "graph_us": 20.0, "us": 21.0},
        {"name": "sglang", "error": "RuntimeError: no kernel"},
    ]
    name = "gdn decode 1x1 heads 16/32 fp32"
    shown = {"ratio": 0.5, "best_peer": "fla"} if "wrong" not in ours else {}
    return {"name": name, "op": "decode", "floor_us": 5.0, "entries": entries, **shown}


def linear_page(monkeypatch, tmp_path, case):
    report = {
        "device": "A GPU", "date": "2026-01-01", "versions": {"torch": "2.11"}, "rounds": 3,
        "ceilings": {"copy_gbs": 4000.0}, "cases": [case],
    }  # fmt: skip
    (tmp_path / "linear.a-gpu.json").write_text(json.dumps(report))
    monkeypatch.setattr(linear_table, "FOLDER", tmp_path)
    return linear_table.linear_sections()


def test_linear_attention_has_a_table_of_each_operation(monkeypatch, tmp_path):
    page = linear_page(monkeypatch, tmp_path, linear_case())
    assert "## A GPU: linear attention" in page
    assert "| gdn 1x1 heads 16/32 fp32 | **10.0** | 20.0 | - | 0.500 | 5.0 |" in page
    assert "<b>0.50</b> 10.0 µs, fla 20.0 µs" in page
    assert "- sglang: `RuntimeError: no kernel` (gdn decode 1x1 heads 16/32 fp32)" in page


def test_a_wrong_result_of_linear_attention_has_no_time(monkeypatch, tmp_path):
    page = linear_page(monkeypatch, tmp_path, linear_case(wrong=True))
    assert "| gdn 1x1 heads 16/32 fp32 | - | **20.0** | - | - | 5.0 |" in page
    assert "- ours: `a wrong result`" in page


def test_a_command_repeats_all_of_a_run_and_says_no_place():
    arguments = ["--cases", "a|b c", "--out", "f.json", "--part=1/2", "--resume", "--out=g"]
    assert command_of("benchmarks.x", arguments) == "python -m benchmarks.x --cases 'a|b c'"
