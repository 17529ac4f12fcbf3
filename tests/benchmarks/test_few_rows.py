"""The benchmark of linear layers of few rows: both contestants over the same weights."""

from __future__ import annotations

import json

from amx_kernels import compiled
from attn_intel.cpu import linear
from attn_intel.cpu.library import LEVELS, load

from benchmarks import few_rows


def test_rows_that_a_level_leaves_to_torch_are_not_timed(monkeypatch, tmp_path):
    compiled()
    level = LEVELS[load().level]
    monkeypatch.setattr(few_rows, "LAYERS", ((64, 48, 2),))
    limits = {(level, few_rows.DTYPES["bf16"]): 4}
    for module in (few_rows, linear):
        monkeypatch.setattr(module, "ROWS", limits)
    products, path = [], tmp_path / "record.json"
    kernels = load()
    multiply = kernels.linear
    monkeypatch.setattr(kernels, "linear", lambda call: products.append(1) or multiply(call))
    few_rows.main(["--rows", "1", "4", "5", "--repeats", "3", "--output", str(path)])
    results = json.loads(path.read_text())["results"]
    assert [(x["dtype"], x["rows"]) for x in results] == [("bf16", 1), ("bf16", 4)]
    assert len(products) == 2 * (2 * (3 + 1) + 1)  # layers, repeats, and one call for the error
    for result in results:
        assert all(ms > 0 for ms in result["median_ms"].values())
        assert all(0 < error < 0.02 for error in result["largest_error"].values())
