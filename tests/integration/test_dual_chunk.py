"""A Qwen2 with dual_chunk_attention_config says what the definition says, computed apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from attn_core.errors import UnsupportedError
from attn_core.integrations.transformers import enable
from tiny_models import tiny

SIZE, LOCAL = 24, 8
LENGTH = SIZE - LOCAL
CHUNKS = {"chunk_size": SIZE, "local_size": LOCAL}


def model_of(**more: Any) -> Any:
    return tiny("qwen2", dual_chunk_attention_config={**CHUNKS, **more})


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate [T, H, D] to positions [T]."""
    half = x.shape[-1] // 2
    speed = 1e4 ** (-torch.arange(half) / half)
    angle = positions.float()[:, None, None] * speed
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attend(module: Any, x: Tensor, f: float) -> Tensor:
    """Attend over whole sequences [1, T, hidden] by the definition, f on queries and keys."""
    shape = (x.shape[1], -1, module.head_dim)
    q, k, v = (p(x[0]).view(shape) for p in (module.q_proj, module.k_proj, module.v_proj))
    i = torch.arange(len(q))
    group, within = q.shape[1] // k.shape[1], i % LENGTH
    k = (rotated(k, within) * f).repeat_interleave(group, 1)
    v = v.repeat_interleave(group, 1)
    apart = i[:, None] // LENGTH - i // LENGTH
    scores = torch.full((q.shape[1], len(q), len(q)), -math.inf)
    places = (
        within,
        (within + LENGTH).clamp(max=SIZE),
        torch.full_like(i, min(2 * LENGTH - 1, SIZE)),
    )
    for relation, place in enumerate(places):
        met = (apart.clamp(max=2) == relation) & (apart >= 0)
        score = torch.einsum("ihd,jhd->hij", rotated(q, place) * f, k) * module.scaling
        scores = torch.where(met, score, scores)
    scores = scores.masked_fill(i > i[:, None], -math.inf)
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
    return module.o_proj(out.flatten(1))[None]


@contextmanager
def by_definition(model: Any, f: float = 1.0) -> Iterator[None]:
    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return attend(self, hidden_states, f), None

    with mock.patch.object(type(model.model.layers[0].self_attn), "forward", forward):
        yield


PROMPTS = [3 * LENGTH + 5, LENGTH - 1, 2 * LENGTH]


def prompts() -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(3, 128, (n,), generator=rng) for n in PROMPTS]


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(x, (longest - len(x), 0)) for x in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(x)).long() for x in rows])
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def greedy(model: Any, prompt: Tensor, new: int) -> list[int]:
    tokens = prompt.tolist()
    for _ in range(new):
        with by_definition(model):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_are_those_of_the_definition(page_size: int) -> None:
    model, rows, new = model_of(), prompts(), 24
    want = [greedy(model, row, new) for row in rows]
    with enable(model, page_size=page_size) as engine:
        assert engine.layers[0].dual_chunk is not None
        out = model.generate(**padded(rows), max_new_tokens=new, do_sample=False)
    assert out[:, -new:].tolist() == want
    plain = tiny("qwen2")
    plain.load_state_dict(model.state_dict())
    with enable(plain, page_size=page_size):
        other = plain.generate(**padded(rows), max_new_tokens=new, do_sample=False)
    assert not torch.equal(other, out)  # equality would prove nothing if chunks made no difference


@pytest.mark.parametrize("trained", [0, 20])
def test_logits_of_a_prompt_beyond_the_trained_length(trained: int) -> None:
    model, row = (
        model_of(original_max_position_embeddings=trained) if trained else model_of(),
        prompts()[0],
    )
    f = 0.1 * math.log(len(row) / trained) + 1 if trained else 1.0
    with torch.no_grad():
        with by_definition(model, f):
            want = model(row[None], use_cache=False).logits
        with enable(model, page_size=4):
            actual = model(row[None]).logits
    torch.testing.assert_close(actual, want, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("option", [{"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 3}])
def test_prompts_in_parts_and_drafts_are_refused_beyond_the_trained_length(option: Any) -> None:
    rows = {"input_ids": prompts()[0][None], "max_new_tokens": 4, "do_sample": False}
    with enable(model_of(original_max_position_embeddings=20), page_size=4) as engine:
        with pytest.raises(UnsupportedError, match="it cannot be cut"):
            engine._model.generate(**rows, **option)
        assert engine.num_held == 0
    with enable(model_of(original_max_position_embeddings=200), page_size=4) as engine:
        full, cut = (engine._model.generate(**rows, **more) for more in ({}, option))
    assert torch.equal(full, cut)  # nothing is scaled there


def test_a_prompt_after_tokens_of_the_cache_is_refused_beyond_the_trained_length() -> None:
    model, row = model_of(original_max_position_embeddings=20), prompts()[0][None]
    with enable(model, page_size=4), torch.no_grad():
        cache = model(row[:, :16]).past_key_values
        model(row[:, 16:19], past_key_values=cache)
        with pytest.raises(UnsupportedError, match=r"2 tokens at once, after 19 in"):
            model(row[:, 19:21], past_key_values=cache)
        actual = [model(row[:, i : i + 1], past_key_values=cache).logits for i in (19, 20)]
    with enable(model, page_size=4), torch.no_grad():
        cache = model(row[:, :19]).past_key_values
        want = [model(row[:, i : i + 1], past_key_values=cache).logits for i in (19, 20)]
    torch.testing.assert_close(actual, want)  # the cache goes on from where it was


def test_padding_and_missing_position_ids_change_nothing() -> None:
    model, rows = model_of(), prompts()
    with enable(model, page_size=4), torch.no_grad():
        together = model(**padded(rows)).logits
        for row, logits in zip(rows, together, strict=True):
            torch.testing.assert_close(model(row[None]).logits[0], logits[-len(row) :])


def test_position_ids_of_another_count_are_refused() -> None:
    """They were replaced by the places in chunks, silently."""
    model, ids = model_of(), torch.arange(3, 13).expand(2, -1)
    positions = torch.arange(10)[None]
    with torch.no_grad(), enable(model):
        expected = model(ids).logits
        torch.testing.assert_close(model(ids, position_ids=positions).logits, expected)
        for other in (positions + 5, 2 * positions):
            with pytest.raises(UnsupportedError, match="position_ids that do not count"):
                model(ids, position_ids=other, attention_mask=torch.ones_like(ids))


def test_another_family_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="dual_chunk_attention_config in a llama model"):
        enable(tiny("llama", dual_chunk_attention_config=CHUNKS))
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    model = tiny("qwen2", dual_chunk_attention_config=CHUNKS, rope_parameters=scaled)
    with pytest.raises(UnsupportedError, match=r"rope_type .linear. .supports qwen2"):
        enable(model)


def sparse_model(verticals: int, slashes: int) -> Any:
    heads = tiny("qwen2").config.num_attention_heads
    layers = tiny("qwen2").config.num_hidden_layers
    head = {str(h): ["vertical_and_slash", verticals, slashes, 1.0] for h in range(heads)}
    lists = {"sparse_attention_config": [head] * layers, "sparse_attention_threshold": 20}
    return model_of(**lists)


def test_a_sparse_prompt_with_all_lines_is_dense_and_with_few_is_not() -> None:
    rng = torch.Generator().manual_seed(2)
    row = torch.randint(3, 128, (1, 150), generator=rng)
    logits = []
    for lines in (1000, 15):
        model = sparse_model(lines, lines + 35)
        with torch.no_grad(), by_definition(model):
            want = model(row, use_cache=False).logits
        with enable(model, page_size=4) as engine, torch.no_grad():
            assert engine.layers[0].query_shape[0] == 5
            actual = model(row).logits
        logits.append((actual, want))
    torch.testing.assert_close(*logits[0], atol=2e-3, rtol=1e-4)
    assert not torch.allclose(*logits[1], atol=2e-3, rtol=1e-4)
