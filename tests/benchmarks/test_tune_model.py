"""What `attn tune` takes for a model is recorded from its own words, compiling apart."""

from __future__ import annotations

import json

import pytest

from benchmarks import tune_model
from benchmarks.engines.configurations import CONFIGURATIONS
from benchmarks.tune_table import section


def test_attn_tune_is_told_pages_stores_drafts_and_requests(tmp_path):
    told = {}
    for name in ("lognormal", "lognormal-fp8", "lognormal-eagle"):
        (tmp_path / name).mkdir()
        told[name] = tune_model.flags(CONFIGURATIONS[name], tmp_path / name, "1")
        config = json.loads((tmp_path / name / "model" / "config.json").read_text())
        assert config["num_key_value_heads"] == 8
        assert told[name][told[name].index("--page-size") + 1] == "1"
        requests = json.loads(told[name][told[name].index("--workload") + 1])["requests"]
        assert "64" in requests
    assert "--kv-cache-dtype" not in told["lognormal"]
    assert told["lognormal-fp8"][-2:] == ["--kv-cache-dtype", "fp8_e4m3"]
    assert told["lognormal-eagle"][-6:] == [
        "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8",
        "--speculative-attention-mode", "decode",
    ]  # fmt: skip
    (tmp_path / "all").mkdir()
    assert "--page-size" not in tune_model.flags(CONFIGURATIONS["bf16"], tmp_path / "all", "all")


@pytest.mark.long
def test_a_tiny_model_is_compiled_measured_and_recorded(tmp_path, monkeypatch, capsys):
    """Two calls of the real command on this machine; the second only measures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ATTN_ALLOW", "torch_native")  # nothing that compiles for long
    out, profile = tmp_path / "r.json", tmp_path / "p.json"
    words = ["vllm-cpu", "--profile", str(profile), "--out", str(out), "--minutes", "0.03"]
    tune_model.main([*words, "--compile"])
    assert not profile.exists()
    tune_model.main(words)
    (found,) = json.loads(out.read_text()).values()
    before = found["compiled_before"]
    assert before["seconds"] >= before["compile_s"] > 0
    assert 0 < found["measure_s"] < found["seconds"]
    assert 0 < found["passes"]["measured"] <= found["passes"]["listed"]
    assert found["points"] >= found["passes"]["measured"]
    assert found["minutes"] == 0.03
    assert "of" in capsys.readouterr().out
    text = section(out.name, {"vllm-cpu": found, "only compiled": {"compiled_before": before}})
    assert f"| vllm-cpu | {found['passes']['measured']} of" in text
    assert "only compiled" not in text
    assert section(out.name, {"a": {"compiled_before": before}}) == ""
    tune_model.save(out, "another", found)
    assert sorted(json.loads(out.read_text())) == ["another", "vllm-cpu"]


def test_a_command_that_fails_ends_the_run(tmp_path):
    with pytest.raises(SystemExit, match="exit code 2"):
        tune_model.tune(["--minutes", "0", "--out", str(tmp_path / "p.json")])
