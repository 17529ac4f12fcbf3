"""What a program does with an enabled model around its passes: copies, modes, threads, moves."""

from __future__ import annotations

import copy
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from attn_core.errors import UnsupportedError, UsageError  # noqa: E402
from attn_core.integrations.transformers import Engine, enable, select_for  # noqa: E402
from tiny_models import generate, inputs_of, tiny  # noqa: E402

FEW = {"max_new_tokens": 6}


@pytest.mark.parametrize("first", ["inference_mode", "no_grad"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v32", "kimi_linear"])
def test_passes_in_inference_mode_and_outside_share_a_pool(name: str, first: str) -> None:
    """The pool is made, grown and written in either mode."""
    model, inputs = tiny(name), inputs_of(name)
    expected = generate(model, inputs, **FEW)
    inference = first == "inference_mode"
    with torch.inference_mode(inference):
        engine = enable(model, page_size=4)
    for mode in (inference, not inference, inference):
        with torch.inference_mode(mode):
            assert torch.equal(generate(model, inputs, **FEW), expected)
    engine.disable()


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "kimi_linear"])
def test_an_enabled_model_is_not_copied(name: str, tmp_path: Path) -> None:
    """Its copy would run the layers of the original; saved weights are as always."""
    model, inputs = tiny(name), inputs_of(name)
    expected = generate(model, inputs, **FEW)
    with enable(model):
        for how in (copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(UnsupportedError, match=r"copied or pickled.*disable\(\)"):
                how(model)
        model.save_pretrained(tmp_path)
        assert torch.equal(generate(model, inputs, **FEW), expected)
    saved = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert torch.equal(generate(saved, inputs, **FEW), expected)
    assert torch.equal(generate(copy.deepcopy(model), inputs, **FEW), expected)


def test_of_threads_that_enable_a_model_one_does() -> None:
    model, inputs = tiny("llama"), inputs_of("llama")
    expected = generate(model, inputs, **FEW)
    together, handles, refused = threading.Barrier(4), [], []

    def work() -> None:
        together.wait()
        try:
            handles.append(enable(model))
        except UsageError as error:
            refused.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(handles), len(refused)) == (1, 3)
    assert torch.equal(generate(model, inputs, **FEW), expected)
    engine: Engine = handles[0]
    engine.disable()
    assert model.config._attn_implementation == "eager"
    assert "forward" not in vars(model.get_decoder())
    enable(model).disable()


def test_a_model_that_was_converted_since_is_refused() -> None:
    """Its pages hold another dtype than its keys."""
    model, inputs = tiny("llama"), inputs_of("llama")
    expected = generate(model, inputs, **FEW)
    with enable(model) as engine:
        model.to(torch.bfloat16)
        with pytest.raises(UnsupportedError, match=r"bfloat16 on cpu.*enabled for torch.float32"):
            generate(model, inputs, **FEW)
        model.to(torch.float32)
        model.load_state_dict(tiny("llama").state_dict())  # its numbers were rounded
        assert torch.equal(generate(model, inputs, **FEW), expected)
        assert engine.num_held == 0


def test_a_selection_for_another_dtype_than_the_models_is_refused() -> None:
    model = tiny("llama")
    selection = select_for(model.config.to_dict(), dtype=model.dtype, device=model.device)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float64, "torch.float64")):
        with pytest.raises(UsageError, match=f"in fp32, this one is in {name}; select again"):
            enable(model.to(dtype), selection)
    enable(model.float(), selection).disable()


def test_a_trace_is_refused() -> None:
    """It would be of one pass, with its pages and lengths."""
    model, ids = tiny("llama"), inputs_of("llama")["input_ids"]
    with torch.no_grad(), enable(model) as engine:
        with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace"):
            torch.jit.trace(lambda x: model(x, use_cache=False).logits, ids)
        assert engine.num_held == 0
        model(ids)


def test_a_pool_of_no_pages_is_refused() -> None:
    """It is no pool of one page, the dummy, in which nothing fits."""
    model = tiny("llama")
    for pages in (0, {"full": 0}):
        with pytest.raises(UsageError, match="0 pages for its view 'full'"):
            enable(model, num_pages=pages)


@pytest.mark.parametrize("rows", [[-1, 2], [0, 3], [-1]])
def test_rows_that_a_cache_has_not_are_refused_and_change_nothing(rows: list[int]) -> None:
    """A row counted from the end would go on from the pages of another, or from none."""
    model, ids = tiny("llama"), inputs_of("llama")["input_ids"]
    with torch.no_grad(), enable(model, page_size=4):
        cache = model(ids).past_key_values
        with pytest.raises(IndexError):  # as transformers' own cache
            cache.reorder_cache(torch.tensor(rows))
        actual = model(ids[:, :2], past_key_values=cache).logits
        expected = model(torch.cat([ids, ids[:, :2]], 1)).logits[:, -2:]
        torch.testing.assert_close(actual, expected)
        cache.reset()
        for choose in (cache.reorder_cache, cache.batch_select_indices):
            choose(torch.tensor([0, 0]))  # of an empty cache: nothing, as transformers' own


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_new_weights_are_seen_at_once(name: str) -> None:
    model, inputs = tiny(name), inputs_of(name)
    with enable(model):
        before = generate(model, inputs, **FEW)
        model.load_state_dict({k: x * 1.2 for k, x in model.state_dict().items()})
        actual = generate(model, inputs, **FEW)
    assert torch.equal(actual, generate(model, inputs, **FEW))
    assert not torch.equal(actual, before)


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_assistant_that_exits_after_the_first_layers(page_size: int) -> None:
    """transformers drafts with a cache of these layers alone."""
    model = tiny("llama", num_hidden_layers=3)
    one = {"input_ids": inputs_of("llama")["input_ids"][:1]}
    expected = generate(model, one)
    with enable(model, page_size=page_size) as engine:
        passes: list[int] = []
        forward = engine.dispatcher.forward

        def counted(*args: Any, **more: Any) -> Any:
            passes.append(args[3].layer_id)
            return forward(*args, **more)

        engine.dispatcher.forward = counted  # type: ignore[method-assign]
        assert torch.equal(generate(model, one, assistant_early_exit=1), expected)
        assert passes.count(0) > passes.count(2)
        assert engine.num_held == 0


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next", "kimi_linear"])
def test_autocast_is_as_near_to_the_truth_as_eager(name: str) -> None:
    """Under autocast queries and gates come in bf16, to weights and states in fp32."""
    model, ids = tiny(name), inputs_of(name)["input_ids"][:1]

    def logits() -> torch.Tensor:
        first = model(ids[:, :9])
        rest = model(ids[:, 9:], past_key_values=first.past_key_values)
        return torch.cat([first.logits, rest.logits], 1).float()

    with torch.no_grad():
        truth = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            budget = 2 * (logits() - truth).abs().max()
            with enable(model, page_size=4):
                assert (logits() - truth).abs().max() <= budget
