"""The benchmark of a layer's call times what it names; kernels are not run here."""

import dataclasses
import functools
import json

import pytest
import torch

pytest.importorskip("triton")

from attn_core.ops import index, kv
from frozen_launches import recorded_launches

from benchmarks import added, backend_calls, layer_calls, layer_calls_table


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_each_call_is_recorded_with_its_launches(tmp_path, monkeypatch, every):
    for module in (kv, index):
        module._writer.cache_clear()
        monkeypatch.setattr(module, "has_triton", lambda device: True)
    few = functools.partial(added.host_us, rounds=1, calls_each=2)
    monkeypatch.setattr(layer_calls, "host_us", few)
    cases = {x: getattr(layer_calls, x) for x in ("SPARSE", "LINEAR")}
    if not every:
        cases["SPARSE"] = [x for x in cases["SPARSE"] if x.phase == "decode"]
        cases["LINEAR"] = [x for x in cases["LINEAR"] if x.kind == "gdn" or x.op == "decode"]
    small = {"SPARSE": {"batch": 2, "length": 4096}, "LINEAR": {"batch": 2}}
    for name, more in small.items():
        reduced = tuple({dataclasses.replace(x, **more) for x in cases[name]})
        monkeypatch.setattr(layer_calls, name, reduced)
    path = tmp_path / "calls.json"
    arguments = ["--device", "cpu", "--only", "dsa|gdn|kda", "--out", str(path)]
    try:
        with recorded_launches():
            assert layer_calls.main(arguments) == 0
    finally:
        for module in (kv, index):
            module._writer.cache_clear()
    calls = {x["name"]: x for x in json.loads(path.read_text())["calls"]}
    assert len(calls) == len(cases["SPARSE"]) * 8 + len(cases["LINEAR"])
    for name, x in calls.items():
        assert 0 < x["us"] == min(x["rounds"])
        assert len(x["rounds"]) == 3
        assert x["by_triton"] == 0, "all were launched before"
        if name.endswith(": attend"):
            assert x["launches"] >= 1, "the attention"
        elif not name.endswith(": plan"):
            assert x["launches"] >= 1


def test_a_launch_that_triton_binds_is_told_apart(monkeypatch):
    torch.manual_seed(0)
    from attn_core.ops.triton import merge

    monkeypatch.setattr(merge, "_LAUNCHERS", {})  # what is recorded is no launch for later tests
    out, lse = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 4)
    with recorded_launches():
        x = layer_calls.measure("merge", lambda: merge.merge_states(out, lse), torch.device("cpu"))
    assert (x["launches"], x["by_triton"]) == (1, 0)


def test_the_fastest_round_counts(monkeypatch):
    """What else runs on a host slows a round, and only adds."""
    times = iter([(30.0, 29.0), (20.0, 19.0), (25.0, 24.0)])

    def timed(calls, device):
        us, p20 = next(times)
        return [dataclasses.replace(added.Timing.of([us]), p20=p20)]

    monkeypatch.setattr(layer_calls, "host_us", timed)
    result = {"rounds": []}
    for _ in range(3):
        layer_calls.measure_again(result, lambda: None, torch.device("cpu"))
    assert (result["us"], result["p20"], result["rounds"]) == (20.0, 19.0, [30.0, 20.0, 25.0])


@pytest.mark.parametrize("number", range(len(backend_calls.TIMED)))
def test_each_case_of_the_backends_runs(number, capsys):
    """By the reference on a CPU; what a backend cannot serve is said on standard error."""
    requested = backend_calls.TIMED[number]
    small = dataclasses.replace(requested.case, batch=2, length=requested.case.page_size * 2)
    requested = dataclasses.replace(requested, case=small)
    [(name, call)] = backend_calls._call("torch_native", requested, torch.device("cpu"))
    assert call().shape == (small.tokens, small.q_heads, small.v_head_dim)
    assert name == f"torch_native {requested.name}"
    assert [*backend_calls._call("cutlass_mla", requested, torch.device("cpu"))] == []
    assert "cutlass_mla" in capsys.readouterr().err


def test_names_of_cases_are_their_own():
    names = [name for name, _ in backend_calls.backend_calls(torch.device("cpu"))]
    assert len({*names}) == len(names)
    assert {x.split()[0] for x in names} >= {"triton", "fa3", "fa4", "flashinfer", "flashmla"}
    assert sum("dual chunk" in x for x in names) == 4
    assert sum("mla-extend" in x for x in names) == 3


def test_the_page_has_a_table_of_the_calls(tmp_path, monkeypatch):
    times = {"us": 31.5, "p20": 30.25, "p80": 33.0, "launches": 3, "by_triton": 0}
    record = {
        "device": "A GPU", "date": "2026-01-01T02:03:04", "versions": {"torch": "2.11"},
        "command": "python -m benchmarks.layer_calls --out x.json", "limit_us": 30.0,
        "calls": [{"name": "mla B16", **times, "rounds": [31.5, 40.0]}],
    }  # fmt: skip
    (tmp_path / "layer_calls.a-gpu.json").write_text(json.dumps(record))
    monkeypatch.setattr(layer_calls_table, "FOLDER", tmp_path)
    page = layer_calls_table.layer_calls_sections()
    assert "| mla B16 | 31.5 | 30.2 to 33.0 | 3 |" in page
    assert "by `python -m benchmarks.layer_calls`" in page
    assert "The fastest of 2 rounds" in page
    del record["calls"][0]["rounds"]
    (tmp_path / "layer_calls.a-gpu.json").write_text(json.dumps(record))
    assert "rounds over" not in layer_calls_table.layer_calls_sections()
