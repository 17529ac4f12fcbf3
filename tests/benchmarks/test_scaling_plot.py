"""The plot over the number of threads."""

import json
import xml.etree.ElementTree as ET

import pytest

from benchmarks import scaling_plot

DECODE = {"name": "decode", "batch": 8, "length": 4096}
MLA = {"name": "mla decode", "batch": 1, "length": 16384, "heads": 16, "page": 16}


def result(shape, threads, ms):
    return {"shape": shape, "threads": threads, "median_ms": {"sdpa": 9.0, "intel_amx": ms}}


REPORT = {
    "results": [
        *(result(DECODE, n, 8.0 / n) for n in (1, 2, 16)),
        *(result(MLA, n, ms) for n, ms in ((1, 4.0), (2, 5.0), (16, 1.0))),
    ]
}


def test_a_speedup_is_over_the_fewest_threads():
    assert scaling_plot.speedups(REPORT) == {
        "decode, 8 x 4096": {1: 1.0, 2: 2.0, 16: 16.0},
        "mla decode, 1 x 16384, 16 heads": {1: 1.0, 2: pytest.approx(0.8), 16: 4.0},
    }


def test_a_line_for_each_case_beside_the_dashed_one():
    lines = ET.fromstring(scaling_plot.plot(REPORT)).findall("{*}polyline")
    dashed, decode, mla = (line.get("points").split() for line in lines)
    assert decode == dashed, "twice as fast with twice as many"
    assert mla[0] == decode[0]
    heights = [float(point.split(",")[1]) for point in mla]
    assert heights[2] < heights[0] < heights[1], "up is faster"


def test_the_record_of_the_most_threads_is_drawn(tmp_path):
    assert scaling_plot.newest(tmp_path) is None
    for level, threads in (("avx512_bf16", 2), ("amx_bf16", 16)):
        report = {"level": level, "results": [result(DECODE, threads, 1.0)]}
        (tmp_path / f"intel_amx_cpu.{level}.scaling.json").write_text(json.dumps(report))
    assert scaling_plot.newest(tmp_path)["level"] == "amx_bf16"
