"""Rows that begin with the same tokens share pages, which decode reads once: the same tokens."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")

from attn_core.backends.triton import shared  # noqa: E402
from attn_core.cache.page_table import num_pages_for  # noqa: E402
from attn_core.errors import OutOfPagesError, UsageError  # noqa: E402
from attn_core.integrations.transformers import Engine, enable, select_for  # noqa: E402
from attn_core.integrations.transformers.common_prompts import (  # noqa: E402
    common_prompts,
    marks_of,
)
from attn_core.selection.result import NoBackendError, Overrides  # noqa: E402
from interpreted import interpreted  # noqa: E402
from sharers import queries_of  # noqa: E402
from tiny_models import TINY  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

PAGE = 16


@pytest.fixture(autouse=True)
def small_granule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share from 64 keys on, in models whose prompts are short."""
    monkeypatch.setattr(shared, "shared_granule", lambda *args: 64)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


def tiny(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    changes = {"num_hidden_layers": 1, **changes}
    config = transformers.AutoConfig.for_model(name, **{**TINY, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def sharing(model: Any) -> Engine:
    triton = Overrides(attention_backend="triton")
    return enable(
        model, shared_prefix=True, page_size=PAGE, overrides=triton, registry=interpreted()
    )


def prompt(n: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 110, (1, n), generator=torch.Generator().manual_seed(seed))


def watch(engine: Engine) -> list[tuple[int, list[int]]]:
    """Record the distinct pages of each pass and the requests of each group that it reads once."""
    passes: list[tuple[int, list[int]]] = []
    plan = engine.dispatcher.init_forward_metadata

    def planned(batch: Any) -> Any:
        metadata = plan(batch)
        view, size = batch.views["full"], batch.batch_size
        pairs = zip(view.page_table.tolist(), view.seq_lens_host, strict=True)
        held = {p for row, n in pairs for p in row[: num_pages_for(n, PAGE)]}
        groups: list[int] = []
        for schedule in metadata.values() if isinstance(metadata, dict) else []:
            split = schedule.split
            if split is not None and split.buffer is not None:
                units = split.work_indptr.diff()[size:]
                groups += queries_of(split, size)[units > 0].tolist()
        passes.append((len(held), groups))
        return metadata

    engine.dispatcher.init_forward_metadata = planned  # type: ignore[method-assign]
    return passes


def generate(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    how = {"max_new_tokens": 3, "do_sample": False, "attention_mask": (ids > 0).long(), **more}
    out: torch.Tensor = model.generate(ids, **how)
    return out


def test_parallel_samples_share_the_prompt(llama: Any) -> None:
    """Four samples of one prompt: its whole pages are held once, and decode reads them once."""
    how = {"do_sample": True, "num_return_sequences": 4}
    torch.manual_seed(5)
    expected = generate(llama, prompt(77), **how)
    with sharing(llama) as engine:
        passes = watch(engine)
        torch.manual_seed(5)
        actual = generate(llama, prompt(77), **how)
        gc.collect()
        assert engine.num_held == 0
    assert torch.equal(actual, expected)
    assert len({tuple(row) for row in actual.tolist()}) > 1
    assert [held for held, _ in passes] == [4 + 4, 4 + 4, 4 + 4]  # whole pages and own last pages
    assert [groups for _, groups in passes[1:]] == [[4], [4]]


def test_beams_share_the_prompt(llama: Any) -> None:
    how = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5}
    expected = generate(llama, prompt(70), **how)
    with sharing(llama) as engine:
        passes = watch(engine)
        actual = generate(llama, prompt(70), **how)
    assert torch.equal(actual, expected)
    assert passes[0][0] == 4 + 3
    assert all(groups == [3] for _, groups in passes[1:])


def test_a_batch_with_a_common_beginning(llama: Any) -> None:
    """Left padding and other lengths: the same tokens lie in other columns, at equal positions."""
    system = prompt(66)
    rows = [torch.cat([system, prompt(n, seed=n)], 1) for n in (9, 30, 1)] + [prompt(40, seed=3)]
    ids = torch.zeros(4, 96, dtype=torch.int64)
    for row, tokens in zip(ids, rows, strict=True):
        row[96 - tokens.shape[1] :] = tokens
    expected = generate(llama, ids)
    with sharing(llama) as engine:
        passes = watch(engine)
        actual = generate(llama, ids)
    assert torch.equal(actual, expected)
    assert passes[0][0] == 4 + sum(num_pages_for(n, PAGE) - 4 for n in (75, 96, 67)) + 3
    assert [groups for _, groups in passes[1:]] == [[3], [3]]


def test_positions_that_differ_share_nothing(llama: Any) -> None:
    """Keys hold their positions: without position_ids, those of the columns."""
    ids = torch.cat([prompt(40), torch.cat([prompt(1, seed=4) * 0, prompt(40)[:, :39]], 1)])
    mask = (ids > 0).long()
    with torch.no_grad():
        expected = llama(ids, attention_mask=mask).logits
        with sharing(llama) as engine:
            passes = watch(engine)
            actual = llama(ids, attention_mask=mask).logits
            torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()])
            llama(prompt(40).repeat(2, 1))
    assert [held for held, _ in passes] == [6, 4]


def test_windows_share_too() -> None:
    """Pages behind the window of one row stay those of the others."""
    model = tiny("mistral", sliding_window=20)
    ids = torch.cat([prompt(50).repeat(2, 1), prompt(50, seed=9)])
    expected = generate(model, ids, max_new_tokens=20)
    with enable(model, select(model), num_pages=16) as engine:
        actual = generate(model, ids, max_new_tokens=20)
        gc.collect()
        assert engine.num_held == 0
    assert torch.equal(actual, expected)


def select(model: Any) -> Any:
    """Return a selection of the reference backend that shares pages and reads each row alone."""
    chosen = select_for(
        model.config.to_dict(), dtype=model.dtype, device=model.device, page_size=PAGE
    )
    return replace(chosen, requirements=replace(chosen.requirements, shared_prefix=True))


def test_a_first_pass_that_failed_leaves_no_shared_pages(llama: Any) -> None:
    """Other tokens may come next: a page that they share must not be written twice."""
    both = torch.cat([prompt(40), prompt(40, seed=2)])
    with torch.no_grad(), enable(llama, select(llama)) as engine:
        cache = transformers.DynamicCache(config=llama.config)
        forward = engine.dispatcher.forward

        def fails(*args: Any) -> Any:
            raise RuntimeError("a kernel fails")

        engine.dispatcher.forward = fails  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="a kernel fails"):
            llama(prompt(40).repeat(2, 1), past_key_values=cache)
        engine.dispatcher.forward = forward  # type: ignore[method-assign]
        actual = llama(both, past_key_values=cache).logits
        assert engine.num_held == 6
        torch.testing.assert_close(actual, llama(both).logits)


def test_few_pages_serve_many_samples(llama: Any) -> None:
    many = prompt(64).repeat(8, 1)
    with torch.no_grad():
        with enable(llama, select(llama), num_pages=5) as engine:
            llama(many)
            assert engine.num_held == 0
            with pytest.raises(OutOfPagesError, match="5 more pages"):
                llama(torch.cat([many, prompt(1).repeat(8, 1)], 1)[:1])
        with (
            enable(llama, page_size=PAGE, num_pages=5),
            pytest.raises(OutOfPagesError, match="32 more pages"),
        ):
            llama(many)


def test_rows_go_apart_after_a_crop(llama: Any) -> None:
    """A cropped row whose last page was shared writes into a copy."""
    with torch.no_grad(), enable(llama, select(llama)):
        cache = llama(prompt(64).repeat(3, 1)).past_key_values
        cache.crop(-9)
        new = torch.cat([prompt(9, seed=s) for s in (1, 2, 3)])
        actual = llama(new, past_key_values=cache).logits
        full = torch.cat([prompt(64)[:, :55].repeat(3, 1), new], 1)
        torch.testing.assert_close(actual, llama(full).logits[:, 55:])


def test_the_switch_is_obeyed(llama: Any) -> None:
    with pytest.raises(NoBackendError, match="shared_prefix"):
        enable(llama, shared_prefix=True, overrides=Overrides(attention_backend="torch_native"))
    with pytest.raises(UsageError, match="shared_prefix"):
        enable(llama, select(llama), shared_prefix=True)
    with torch.no_grad(), enable(llama, page_size=PAGE) as engine:
        cache = llama(prompt(64).repeat(3, 1)).past_key_values
        assert engine.num_held == 3 * 4
        del cache


@pytest.mark.parametrize("seed", range(4))
def test_prompts_are_found_as_a_plain_comparison_finds_them(seed: int) -> None:
    rng = random.Random(seed)
    rows, columns, page = 9, 40, rng.choice([1, 3, 8])
    ids = torch.zeros(rows, columns, dtype=torch.int64)
    real = torch.zeros(rows, columns, dtype=torch.bool)
    texts: list[list[int]] = []
    for i in range(rows):
        n = rng.randint(0, columns)
        text = [rng.randint(1, 3) for _ in range(n)]
        if texts and rng.random() < 0.8:  # begins as an earlier one
            first = rng.choice(texts)
            cut = rng.randint(0, min(n, len(first)))
            text[:cut] = first[:cut]
        texts.append(text)
        at = rng.randint(0, columns - n)
        ids[i, at : at + n], real[i, at : at + n] = torch.tensor(text, dtype=torch.int64), True

    def common(a: list[int], b: list[int]) -> int:
        n = 0
        while n < min(len(a), len(b)) and a[n] == b[n]:
            n += 1
        return n // page * page

    result = common_prompts(ids[..., None], real, page)
    for i, (source, shared_tokens) in enumerate(result):
        best = max((common(texts[i], texts[j]) for j in range(i)), default=0)
        assert shared_tokens == best
        assert common(texts[i], texts[source]) >= best
        assert source < i or (source == i and best == 0)


POSITIONS: Sequence[tuple[torch.Tensor | None, tuple[int, ...]]] = [
    (None, (2, 5, 2)),
    (torch.arange(5)[None], (2, 5, 2)),
    (torch.arange(10).view(2, 5), (2, 5, 2)),
    (torch.arange(30).view(3, 2, 5), (2, 5, 4)),
]


@pytest.mark.parametrize(("position_ids", "shape"), POSITIONS)
def test_a_mark_holds_every_position(
    position_ids: torch.Tensor | None, shape: tuple[int, ...]
) -> None:
    ids = torch.arange(100, 110).view(2, 5)
    marks = marks_of(ids, position_ids)
    assert marks.shape == shape
    assert torch.equal(marks[..., 0], ids)
    expected = torch.arange(5)[None] if position_ids is None else position_ids
    assert (marks[1, 4, 1:] == expected.reshape(-1, expected.shape[-2], 5)[:, -1, 4]).all()
