"""The records of intel_amx: whole generations of a model, and numbers of threads."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from amx_kernels import compiled

from benchmarks import generate_calls, generate_cpu, intel_amx_cpu
from benchmarks.torch_native_cpu import Shape

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def kernels():
    """Skip where nothing can compile them."""
    compiled()


@pytest.fixture
def folder(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.long
def test_contestants_write_the_same_tokens(monkeypatch, tmp_path, folder, capsys):
    """Requests of two lengths, padded before; the record is read back."""
    rows, mask = torch.randint(2, 97, (2, 20)), torch.ones(2, 20, dtype=torch.int64)
    mask[1, :3] = 0
    monkeypatch.setattr(generate_cpu, "prompts_of", lambda *requested: (rows, mask))
    path = tmp_path / "record.json"
    words = ["--model", str(folder), "--dtypes", "fp32", "--batches", "2", "--prompts", "20"]
    words += ["--since", str(ROOT)]  # this commit stands for an earlier one
    generate_cpu.main([*words, "--new", "6", "--rounds", "2", "--output", str(path)])
    record = json.loads(path.read_text())
    [result] = record["results"]
    assert result["prompt_tokens"] == [20, 17]
    [since] = result["tokens_per_s"].keys() - set(generate_cpu.CONTESTANTS)
    assert since.startswith("torch_native of ")
    assert result["tokens_as_sdpa"] == {
        generate_calls.LINEAR: [6, 6],
        "intel_amx": [6, 6],
        "torch_native": [6, 6],
        since: [6, 6],
    }
    for name in (*generate_cpu.CONTESTANTS, since):
        low, high = result["spread"][name]
        assert 0 < low <= result["tokens_per_s"][name] <= high
        assert result["prompt_s"][name] > 0
    ratio = result["tokens_per_s"]["intel_amx"] / result["tokens_per_s"]["sdpa"]
    assert result["times_as_fast_as"]["sdpa"] == ratio
    assert record["device"].startswith("cpu")
    assert record["threads"] == torch.get_num_threads()


def test_a_folder_that_is_no_checkout_is_refused(tmp_path, folder):
    with pytest.raises(SystemExit, match="no checkout of this repository; make one with"):
        generate_cpu.main(["--model", str(folder), "--since", str(tmp_path)])


def test_weights_are_no_tensors_of_inference_mode(folder):
    with torch.inference_mode():
        model = generate_calls.read_model(folder, torch.bfloat16)
    assert not any(x.is_inference() for x in model.parameters())


def test_agreement_ends_at_the_first_difference():
    actual = torch.tensor([[1, 2, 3], [1, 9, 3], [7, 2, 3]])
    assert generate_cpu._agreement(actual, torch.tensor([[1, 2, 3]] * 3)) == [3, 1, 0]


def test_a_call_is_timed_with_each_number_of_threads(monkeypatch):
    shape = Shape(name="decode", batch=1, length=64, decode=True, q_heads=2, kv_heads=1)
    monkeypatch.setattr(intel_amx_cpu, "SHAPES", (shape,))
    monkeypatch.setattr(intel_amx_cpu, "ONE", shape)
    monkeypatch.setattr(intel_amx_cpu, "MLA", ((1, 64, 4),))
    before = torch.get_num_threads()
    try:
        result = intel_amx_cpu.scaling([2, 1], repeats=1)
    finally:
        torch.set_num_threads(before)
    assert [x["threads"] for x in result] == [2, 2, 2, 1, 1, 1]
    assert {"sdpa", "intel_amx page 16"} <= result[0]["median_ms"].keys()
    assert {"sdpa", "intel_amx"} <= result[2]["median_ms"].keys()
