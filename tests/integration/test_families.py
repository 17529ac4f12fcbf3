"""Every supported model family on paged pools says what it says by its own eager attention."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from attn_core import cli  # noqa: E402
from attn_core.errors import OutOfPagesError, UnsupportedError, UsageError  # noqa: E402
from attn_core.integrations.transformers import SUPPORTED, Engine, enable  # noqa: E402
from attn_core.plugins.registry import Registry, load_plugins  # noqa: E402
from attn_core.runtime.batch import DECODE_MODES  # noqa: E402
from attn_core.selection.result import NoBackendError, Overrides  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_models import (  # noqa: E402
    FAMILIES,
    LINEAR,
    LINEAR_AND_VISION,
    NEW,
    SPARSE_MLA,
    TINY,
    WINDOWED,
    W,
    generate,
    inputs_of,
    tiny,
)
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer  # noqa: E402


def test_every_supported_architecture_is_tested() -> None:
    assert set(FAMILIES) == SUPPORTED


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_eager(name: str) -> None:
    model, inputs = tiny(name), inputs_of(name)
    assert not inputs["attention_mask"].all()
    expected = generate(model, inputs)
    assert len(set(expected[0, -NEW:].tolist())) > 10  # a model that says one word proves nothing
    for page_size in (1, 16, 64):
        with enable(model, page_size=page_size) as engine:
            assert torch.equal(generate(model, inputs), expected), page_size
            assert engine.page_size == page_size
            assert engine.num_held == 0
    assert torch.equal(generate(model, inputs), expected)  # disable() gave the model back


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_is_as_near_to_the_truth_as_eager(name: str) -> None:
    """Budget: twice the error of the model's own eager attention in bfloat16, root mean square."""
    model, inputs = tiny(name).bfloat16(), inputs_of(name)
    real = inputs["attention_mask"].bool()

    def logits(dtype: torch.dtype) -> torch.Tensor:
        cast = {k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}
        with torch.no_grad():
            return model(**cast).logits[real].float()

    eager = logits(torch.bfloat16)
    with enable(model, page_size=16):
        actual = logits(torch.bfloat16)
    model.float()
    truth = logits(torch.float32)
    errors = [(x - truth).square().mean().sqrt() for x in (actual, eager)]
    assert 0 < errors[0] <= 2 * errors[1]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("mistral", "sliding_window", None),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "query_pre_attn_scalar", 32),
        ("gemma2", "sliding_window", 2 * W),
        ("gemma3_text", "sliding_window", 2 * W),
        ("gpt_oss", "sliding_window", 2 * W),
    ],
)
def test_what_a_family_adds_makes_the_difference(name: str, key: str, value: Any) -> None:
    """Equality would prove nothing if the tiny model did not feel its window, cap or scale."""
    model, other = tiny(name), tiny(name, **{key: value})
    other.load_state_dict(model.state_dict())
    with enable(model, page_size=16), enable(other, page_size=16):
        assert not torch.equal(*(generate(m, inputs_of(name)) for m in (model, other)))


def test_sinks_are_read_when_they_are_used() -> None:
    model, inputs = tiny("gpt_oss"), inputs_of("gpt_oss")
    with enable(model, page_size=16) as engine:
        with_sinks = generate(model, inputs)
        for layer in model.model.layers:
            torch.nn.init.constant_(layer.self_attn.sinks, -1e4)
        without = generate(model, inputs)
        model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
        with pytest.raises(UnsupportedError, match="known sinks"):
            generate(model, inputs)
        gc.collect()
        assert engine.num_held == 0
    assert not torch.equal(with_sinks, without)


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("gemma2", "attn_logit_softcapping", 7.0),
        ("gemma2", "sliding_window", 2 * W),
        ("gemma3_text", "scaling", 0.5),
        ("deepseek_v3", "scaling", 0.5),
        ("gpt_oss", "sliding_window", None),
    ],
)
def test_a_layer_that_changed_since_is_refused(name: str, attribute: str, value: Any) -> None:
    model = tiny(name)
    with enable(model, page_size=16):
        setattr(model.model.layers[0].self_attn, attribute, value)
        with pytest.raises(UnsupportedError, match=r"layer 0 was called with .* enabled for"):
            generate(model, inputs_of(name))


def test_a_soft_cap_that_gemma_3_does_not_apply_is_not_applied() -> None:
    model, inputs = tiny("gemma3_text", attn_logit_softcapping=0.5), inputs_of("gemma3_text")
    with torch.no_grad():
        expected = model(**inputs).logits
        with enable(model):
            actual = model(**inputs).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(actual[real], expected[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "key", "off"),
    [
        ("mistral", "sliding_window", 0),
        ("mistral", "sliding_window", -1),
        ("gemma2", "attn_logit_softcapping", 0.0),
    ],
)
def test_off_is_spelled_in_several_ways(name: str, key: str, off: Any) -> None:
    plain, model = tiny(name, **{key: None}), tiny(name, **{key: off})
    expected = generate(plain, inputs_of(name), max_new_tokens=12)
    with enable(model, page_size=16) as engine:
        assert all(x.logit_cap is None or x.logit_cap > 0 for x in engine.layers)
        assert all(x.sliding_window is None or x.sliding_window > 0 for x in engine.layers)
        assert torch.equal(generate(model, inputs_of(name), max_new_tokens=12), expected)


class Rounding:
    """Let transformers' own cache layers round what they store, as an FP8 cache does."""

    def __init__(self, patch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
        for layer in (DynamicLayer, DynamicSlidingWindowLayer):
            patch.setattr(layer, "update", self._rounding(layer.update, dtype))

    @staticmethod
    def _rounding(update: Any, dtype: torch.dtype) -> Any:
        def rounded(self: Any, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> Any:
            return update(self, *(x.to(dtype).to(x.dtype) for x in (k, v)), *rest, **named)

        return rounded


@pytest.mark.parametrize(
    ("name", "store"),
    [
        # see test_sparse_mla
        *((name, "fp8_e4m3") for name in FAMILIES if name not in SPARSE_MLA),
        *(("gemma2", "fp8_e5m2"), ("llama", "fp8_e5m2")),
    ],
)
def test_fp8_is_the_rounding_and_nothing_else(
    name: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bound: 5 % of what the rounding does to the logits of the prompt, in every later pass too.

    That leaves room for a number that lies on an edge of two FP8 numbers and falls the other way.
    Behind a linear layer, whose sums come in another order, several do: 10 %.
    """
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[store]
    model, inputs = tiny(name), inputs_of(name)
    how = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 24}
    plain = generate(model, inputs, **how)
    with monkeypatch.context() as patch:
        Rounding(patch, dtype)
        rounded = generate(model, inputs, **how)
    bound = (0.1 if name in (*LINEAR, *LINEAR_AND_VISION) else 0.05) * (
        plain.logits[0] - rounded.logits[0]
    ).abs().max()
    assert bound > 0
    with enable(model, page_size=16, kv_cache_dtype=store) as engine:
        actual = generate(model, inputs, **how)
        assert engine.dispatcher.caches.layer(engine.layers[0].layer_id).k.dtype == dtype
    assert torch.equal(actual.sequences, rounded.sequences)
    for a, b in zip(actual.logits, rounded.logits, strict=True):
        assert (a - b).abs().max() <= bound


def with_twin() -> Registry:
    """The installed backends, and torch_native once more under another name."""
    registry = load_plugins()
    twin = replace(registry.get("torch_native"), name="twin", aliases=())
    return replace(registry, backends={**registry.backends, ("softmax", "twin"): twin})


def modes_by_backend(engine: Engine) -> dict[str, set[bool]]:
    """Record which backend plans decode passes (True) and which the others (False)."""
    seen: dict[str, set[bool]] = {}

    def watch(backend: Any) -> None:
        plan = backend.init_forward_metadata

        def planned(batch: Any) -> Any:
            decodes = batch.forward_mode in DECODE_MODES
            seen.setdefault(backend.config.name, set()).add(decodes)
            return plan(batch)

        backend.init_forward_metadata = planned

    for role in ("prefill", "decode"):
        watch(engine.dispatcher.backend(role))
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_and_decode_on_different_backends(name: str) -> None:
    model, inputs = tiny(name), inputs_of(name)
    expected = generate(model, inputs)
    pair = ("twin", "torch_native")
    for prefill, decode in (pair, pair[::-1]):
        names = Overrides(prefill_attention_backend=prefill, decode_attention_backend=decode)
        with enable(model, page_size=16, overrides=names, registry=with_twin()) as engine:
            seen = modes_by_backend(engine)
            assert torch.equal(generate(model, inputs), expected)
        assert seen == {prefill: {False}, decode: {True}}


@pytest.mark.long  # test_hybrid_backends.py has two pairs by default
@pytest.mark.parametrize(
    "name", ["gemma2", "llama", "mistral", "qwen3", "gemma3_text", "qwen3_next", "qwen2_vl"]
)
def test_flex_attention_beside_torch_native(name: str) -> None:
    model, inputs, pair = tiny(name), inputs_of(name), ("flex_attention", "torch_native")
    expected = generate(model, inputs)
    for prefill, decode in (pair, pair[::-1]):
        names = Overrides(prefill_attention_backend=prefill, decode_attention_backend=decode)
        with enable(model, page_size=16, overrides=names) as engine:
            seen = modes_by_backend(engine)
            assert torch.equal(generate(model, inputs), expected)
        assert seen == {prefill: {False}, decode: {True}}


@pytest.mark.parametrize(("name", "why"), [("gpt_oss", "sinks"), ("deepseek_v3", "mla")])
def test_a_backend_that_lacks_a_need_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(NoBackendError, match=why):
        enable(tiny(name), overrides=Overrides(prefill_attention_backend="flex_attention"))


def poison_what_is_free(engine: Engine) -> None:
    """Write NaN into the dummy page and every page that no request holds."""
    for x in engine.layers:
        pages = engine.pages[x.view]
        held = {p for key in pages._pages for p in pages.pages(key)}
        free = [p for p in range(pages.total + 1) if p not in held - {0}]
        cache = engine.dispatcher.caches.layer(x.layer_id)
        for pool in (cache.k, cache.v, cache.index):
            if pool is not None:
                pool[free] = float("nan")


def watch_passes(engine: Engine, look: Any) -> None:
    """Call look(batch) before every pass, when its pages are there."""
    plan = engine.dispatcher.init_forward_metadata

    def planned(batch: Any) -> Any:
        look(batch)
        return plan(batch)

    engine.dispatcher.init_forward_metadata = planned


@pytest.mark.parametrize("page_size", [1, pytest.param(4, marks=pytest.mark.long), 16])
@pytest.mark.parametrize("name", WINDOWED)
def test_pages_behind_the_window_go_back(name: str, page_size: int) -> None:
    model, inputs = tiny(name), inputs_of(name)
    lens = inputs["attention_mask"].sum(1).tolist()
    expected = generate(model, inputs)

    def pages(first: int, end: int) -> int:
        return -(-end // page_size) - first // page_size

    with enable(model, page_size=page_size) as engine:
        counts: list[dict[str, int]] = []

        def look(batch: Any) -> None:
            poison_what_is_free(engine)
            counts.append({view: x.num_held for view, x in engine.pages.items()})

        watch_passes(engine, look)
        assert torch.equal(generate(model, inputs), expected)
        assert engine.num_held == 0
    # the prompt needs all of its pages; a pass with one more token those that it sees
    wanted = [sum(pages(0, n) for n in lens)]
    wanted += [sum(pages(max(0, n + step - W), n + step) for n in lens) for step in range(1, NEW)]
    assert [count["window"] for count in counts] == wanted
    if "full" in counts[0]:
        assert counts[-1]["full"] == sum(pages(0, n + NEW - 1) for n in lens)
        assert counts[-1]["full"] > counts[-1]["window"]
    else:
        assert name == "mistral"


def test_a_small_view_serves_a_long_text() -> None:
    """The window's view runs in pages that would not hold the text; the full one cannot."""
    model, inputs = tiny("gemma2"), inputs_of("gemma2")
    expected = generate(model, inputs)
    enough = {"window": 1 + 9, "full": 1 + 3 * 13}  # 3 rows: W + 3 tokens in pages of 4, or all
    with enable(model, page_size=4, num_pages=enough):
        assert torch.equal(generate(model, inputs), expected)
    with (
        enable(model, page_size=4, num_pages=10) as engine,
        pytest.raises(OutOfPagesError, match=r'of view "full" are asked, 0 of 9 are free'),
    ):
        generate(model, inputs)
    gc.collect()
    assert engine.num_held == 0
    with pytest.raises(
        UsageError, match=r"num_pages for the views \['window'\] .*'full', 'window'"
    ):
        enable(model, page_size=4, num_pages={"window": 10})
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3", *SPARSE_MLA, *LINEAR])
def test_beam_search_equals_eager(name: str) -> None:
    model, inputs = tiny(name), inputs_of(name)
    how = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 24}
    expected = generate(model, inputs, **how)
    for page_size in (1, 4):
        with enable(model, page_size=page_size) as engine:
            watch_passes(engine, lambda batch, engine=engine: poison_what_is_free(engine))
            assert torch.equal(generate(model, inputs, **how), expected), page_size
            assert engine.num_held == 0


@pytest.mark.parametrize(
    "name", ["gemma2", "gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.long), *SPARSE_MLA]
)
def test_assisted_generation_equals_eager(name: str) -> None:
    """Rejected drafts crop the cache, behind the window too."""
    model, drafter = tiny(name), tiny("llama", num_hidden_layers=1)
    one = {"input_ids": inputs_of(name)["input_ids"][:1]}
    expected = generate(model, one)
    for page_size in (1, 4):
        with enable(model, page_size=page_size) as engine:
            assert torch.equal(generate(model, one, assistant_model=drafter), expected)
            assert engine.num_held == 0


def test_a_crop_behind_the_window_needs_its_pages() -> None:
    model, ids = tiny("gemma2"), inputs_of("gemma2")["input_ids"][:1]
    with torch.no_grad(), enable(model, page_size=4) as engine:
        full = model(ids).logits
        cache = model(ids).past_key_values
        gc.collect()
        assert engine.pages["window"].num_held == 2  # tokens 4 to 12
        cache.crop(-1)  # the next token, the 12th, sees 5 to 12
        actual = model(ids[:, 11:], past_key_values=cache).logits
        torch.testing.assert_close(actual, full[:, 11:])
        before = engine.num_held
        with pytest.raises(UnsupportedError, match=r"crop to 10 of 12 .* window of 8 were given"):
            cache.crop(-2)
        assert (cache.get_seq_length(), engine.num_held) == (12, before)

        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(ids, past_key_values=cache)
        cache.crop(-6)
        actual = model(ids[:, 6:], past_key_values=cache).logits
        torch.testing.assert_close(actual, full[:, 6:])
        cache.crop(0)  # as in transformers: what is behind the window now goes
        assert engine.pages["window"].num_held == 2


def test_latents_are_all_that_is_stored() -> None:
    model, inputs = tiny("deepseek_v3"), inputs_of("deepseek_v3")
    expand = type(model.model.layers[0].self_attn).expand_kv
    with enable(model, page_size=16) as engine:
        assert engine.dispatcher.caches.kind == "mla"
        cache = engine.dispatcher.caches.layer(0)
        assert cache.v is None
        assert cache.k.shape[1:] == (16, 1, 32 + 16)  # latent and rotated key, for all heads
        shapes = set()
        forward = engine.dispatcher.forward

        def called(q: Any, k: Any, v: Any, *rest: Any) -> Any:
            shapes.add((*q.shape[1:], *k.shape[1:], v))
            return forward(q, k, v, *rest)

        engine.dispatcher.forward = called
        generate(model, inputs, max_new_tokens=3)
        assert shapes == {(4, 48, 1, 48, None)}  # in prefill and decode alike
    assert model.model.layers[0].self_attn.expand_kv.__func__ is expand
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Identity()
    with pytest.raises(UnsupportedError, match="layer 1: kv_b_proj is a Identity"):
        enable(model)


def test_what_is_added_to_an_absorbed_projection_after_enable_is_refused() -> None:
    """An adapter or a hook of kv_b_proj never ran: its part was missing from the logits."""
    model, ids = tiny("deepseek_v3"), torch.tensor([[1, 5, 9]])
    module = model.model.layers[1].self_attn
    plain = module.kv_b_proj
    with torch.no_grad(), enable(model):
        expected = model(ids).logits
        module.kv_b_proj = torch.nn.Sequential(plain)  # as an adapter wraps a layer
        with pytest.raises(UnsupportedError, match="layer 1: kv_b_proj is a Sequential"):
            model(ids)
        module.kv_b_proj = plain
        hook = plain.register_forward_hook(lambda _module, _inputs, out: out + 1)
        with pytest.raises(UnsupportedError, match="layer 1: kv_b_proj has a hook"):
            model(ids)
        hook.remove()
        hooks = pytest.importorskip("accelerate.hooks")
        hooks.add_hook_to_module(plain, hooks.ModelHook())  # as device_map places a model
        torch.testing.assert_close(model(ids).logits, expected)


def test_the_vision_tower_attends_ragged() -> None:
    model, inputs = tiny("qwen2_vl"), inputs_of("qwen2_vl")
    with enable(model, page_size=16) as engine:
        assert engine.selection.backend("encode") in ("torch_native", "intel_amx")
        calls: list[tuple[Any, ...]] = []
        ragged = engine.dispatcher.forward_ragged

        def called(q: Any, k: Any, v: Any, layer: Any, lens: Any, *rest: Any, **how: Any) -> Any:
            calls.append((layer.layer_id, tuple(q.shape), lens.tolist(), how))
            return ragged(q, k, v, layer, lens, *rest, **how)

        engine.dispatcher.forward_ragged = called
        generate(model, inputs, max_new_tokens=4)
        how = {"causal": False, "role": "encode"}
        # both images in one call of each layer, in the pass of the prompt only
        assert calls == [(i, (24, 4, 16), [0, 16, 24], how) for i in range(2)]
        roles = {r: c for r, c in engine.selection.roles.items() if r != "encode"}
        blind = replace(engine.selection, roles=roles)
    assert model.config.vision_config._attn_implementation == "eager"
    with pytest.raises(UnsupportedError, match="no backend for encode"):
        enable(model, blind)
    assert model.config._attn_implementation == "eager"


def test_threads_take_turns_in_the_vision_tower() -> None:
    model, inputs = tiny("qwen2_vl"), inputs_of("qwen2_vl")
    expected, inside, most, actual = generate(model, inputs, max_new_tokens=4), [], [0], []
    with enable(model, page_size=16) as engine:
        ragged = engine.dispatcher.forward_ragged

        def slow(*args: Any, **how: Any) -> Any:
            inside.append(1)
            most[0] = max(most[0], len(inside))
            time.sleep(0.05)
            out = ragged(*args, **how)
            inside.pop()
            return out

        engine.dispatcher.forward_ragged = slow
        threads = [
            threading.Thread(
                target=lambda: actual.append(generate(model, inputs, max_new_tokens=4))
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1]
    assert len(actual) == 2
    assert all(torch.equal(x, expected) for x in actual)


def test_the_vision_tower_refuses_a_backward_pass() -> None:
    model, inputs = tiny("qwen2_vl"), inputs_of("qwen2_vl")
    with enable(model, page_size=16):
        features = model.model.visual(inputs["pixel_values"], inputs["image_grid_thw"])
        with pytest.raises(UnsupportedError, match="inference only"):
            features[0].sum().backward()
        ids = inputs["input_ids"]
        loss = model(**inputs, labels=ids).loss
        with pytest.raises(UnsupportedError, match="inference only"):
            loss.backward()


def test_positions_of_images_are_no_packing() -> None:
    model, inputs = tiny("qwen2_vl"), inputs_of("qwen2_vl")
    inputs["input_ids"][inputs["input_ids"] == 0] = 7
    del inputs["attention_mask"]  # no mask: packed sequences would show in the positions only
    tokens = inputs["input_ids"].shape[1]
    packed = torch.arange(tokens).remainder(5).expand(4, 2, -1)
    with torch.no_grad():
        expected = model(**inputs).logits
        with enable(model, page_size=16):
            torch.testing.assert_close(model(**inputs).logits, expected)
            with pytest.raises(UnsupportedError, match="restart"):
                model(**inputs, position_ids=packed)


def test_a_prompt_in_chunks_is_the_prompt() -> None:
    for name in ("gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "kimi_linear"):
        model, inputs = tiny(name), inputs_of(name)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        with torch.no_grad(), enable(model, page_size=4):
            full = model(ids, attention_mask=mask).logits[:, -1]
            cache = DynamicCache(config=model.config)
            for end in (5, 11, 12):
                start = cache.get_seq_length()
                part = {"attention_mask": mask[:, :end], "past_key_values": cache}
                out = model(ids[:, start:end], **part).logits
        torch.testing.assert_close(out[:, -1], full, msg=lambda text, name=name: name + text)


def unsupported() -> Iterator[tuple[str, Any]]:
    yield "'gpt2'", transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    both = {**TINY, **FAMILIES["gemma3_text"], "use_bidirectional_attention": True}
    yield "both directions", transformers.Gemma3TextConfig(**both)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("right", [False, True])
def test_padding_stays_hidden_in_a_pass_without_a_mask(name: str, right: bool) -> None:
    """A row goes on as it does alone; transformers' own cache attends to the padding then."""
    torch.manual_seed(3)
    model, ids = tiny(name), torch.randint(2, 110, (2, 14))
    mask, real = torch.ones(2, 8, dtype=torch.int64), slice(0, 4) if right else slice(4, 8)
    mask[1, 4 - real.start : 8 - real.start] = 0
    positions = torch.tensor([[*range(real.start, real.stop), *range(8, 14)]])
    with torch.no_grad():
        alone = torch.cat([ids[1:, real], ids[1:, 8:]], 1)
        every = torch.ones_like(alone)  # else positions with a gap would mean packed sequences
        expected = model(alone, attention_mask=every, position_ids=positions).logits[0, 4:]
        with enable(model, page_size=4):
            cache = model(ids[:, :8], attention_mask=mask).past_key_values
            got = model(ids[:, 8:], past_key_values=cache).logits[1]
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("number", [0, 1])
def test_unsupported_models_say_why(number: int) -> None:
    words, config = list(unsupported())[number]
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedError, match=words):
        enable(model)
    assert model.config._attn_implementation != "attn_core"


def as_published(path: Path) -> None:
    """Change a directory to what a Qwen3.5 has: a dtype in its part for text, a draft layer."""
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["dtype"] = config.pop("dtype")
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    weights["mtp.fc.weight"] = torch.zeros(4, 4)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_vl", "qwen3_5_text", *LINEAR_AND_VISION])
def test_attn_generate_runs_the_family(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny(name)
    model.save_pretrained(tmp_path)
    if name in LINEAR_AND_VISION:
        as_published(tmp_path)
    words = ["<pad>", "<unk>", *"abcdefgh", *(f"w{i} " for i in range(118))]
    vocabulary = {word.replace(" ", "\u0120"): i for i, word in enumerate(words)}
    # characters by BPE: transformers 5.23 reads every tokenizer of Qwen3.5 as its own, which is BPE
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(tmp_path)
    prompt = torch.tensor([[6, 3, 9, 5, 2]])
    expected = generate(model, {"input_ids": prompt}, max_new_tokens=20)[0, 5:]
    argv = ["attn", "generate", "--model-path", tmp_path, "ebhda", "--page-size", 16]
    monkeypatch.setattr(sys, "argv", [*map(str, argv), "--max-new-tokens", "20"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    captured = capsys.readouterr()
    assert not end.value.code, captured.err
    assert captured.out.split("\n")[0] == "".join(words[i] for i in expected if i)
    report = captured.out + captured.err
    linear = name in (*LINEAR, *LINEAR_AND_VISION)
    assert ("linear     torch_native: " in report) == linear
    assert ("states     fp32, 0.0 MB on cpu" in report) == linear
