"""The record of linear attention on a CPU: what is timed is right, and its GB/s."""

import dataclasses
import json
import sys

import pytest
import torch

pytest.importorskip("transformers.models.kimi_linear")

from benchmarks import linear_cpu


def test_gb_per_s_are_the_bytes_that_a_call_has_to_move(monkeypatch, tmp_path, capsys):
    shape = linear_cpu.Shape(name="decode", batch=2, key_heads=2, value_heads=4, head_dim=16)
    kda = dataclasses.replace(shape, kind="kda")
    monkeypatch.setattr(linear_cpu, "SHAPES", (shape, kda))
    monkeypatch.delitem(linear_cpu.PEERS, ("kda", True))  # as older versions have none
    path = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["linear_cpu", "--repeats", "2", "--output", str(path)])
    linear_cpu.main()
    [result] = json.loads(path.read_text())["results"]
    states = 2 * (2 * 4 * 16 * 16) * 4  # read and written, float32
    tokens = 2 * (2 * 2 * 16 + 4 * 16) * 2 + 2 * (4 + 4) * 4 + 2 * 4 * 16 * 2
    for name, ms in result["median_ms"].items():
        assert result["gb_per_s"][name] == pytest.approx((states + tokens) / ms / 1e6)
    assert result["times_as_fast"] > 0
    assert json.loads(capsys.readouterr().out)["results"] == [result]


def test_wrong_numbers_are_not_timed():
    wanted = torch.ones(3, dtype=torch.float64)
    with pytest.raises(SystemExit, match="nothing was timed"):
        linear_cpu.check("decode", wanted.float() * 1.1, wanted)
