"""Where the time of a decode step goes: parts add up to the step, and nothing stays replaced."""

from __future__ import annotations

import json

import pytest
import torch
from amx_kernels import compiled
from attn_intel.cpu.backend import IntelAMX
from torch import nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from benchmarks import generate_parts


def test_what_a_part_calls_is_not_its_own():
    now = [0.0]

    def takes(seconds, then=lambda: None):
        def call():
            now[0] += seconds
            then()

        return call

    parts = generate_parts.Parts(lambda: now[0])
    inner = parts.timed("inner", takes(2.0))
    parts.timed("outer", takes(1.0, lambda: (inner(), inner())))()
    inner()
    assert parts.seconds == {"outer": 1.0, "inner": 6.0}


def test_an_error_is_timed_too():
    parts = generate_parts.Parts(lambda: 0.0)
    with pytest.raises(ZeroDivisionError):
        parts.timed("fails", lambda: 1 / 0)()
    assert parts.seconds.keys() == {"fails"}


def test_parts_add_up_to_the_step(monkeypatch, tmp_path):
    compiled()
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    rows = torch.randint(2, 97, (2, 9))
    monkeypatch.setattr(
        generate_parts, "prompts_of", lambda *requested: (rows, torch.ones_like(rows))
    )
    replaced = (nn.Linear.forward, IntelAMX._attend, AttentionInterface._global_mapping["sdpa"])
    path = tmp_path / "record.json"
    words = ["--model", str(tmp_path), "--dtypes", "bf16", "--batches", "2", "--prompts", "9"]
    generate_parts.main([*words, "--new", "5", "--rounds", "1", "--output", str(path)])
    [result] = json.loads(path.read_text())["results"]
    for name, parts in result["ms"].items():
        step = parts.pop("step")
        assert ("kernels" in parts) == name.startswith("intel_amx")
        assert all(ms > 0 for ms in parts.values())
        assert sum(parts.values()) == pytest.approx(step)
    assert result["at_most"]["intel_amx"] > 1
    assert result["products_ms"] > 0
    assert result["few_rows_ms"] > 0
    assert result["reading_ms"] > 0
    left = (nn.Linear.forward, IntelAMX._attend, AttentionInterface._global_mapping["sdpa"])
    assert left == replaced
