"""A transformers model on paged pools gives the tokens that it gives by its own eager attention."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from attn_core.errors import (  # noqa: E402
    BatchError,
    OutOfPagesError,
    UnsupportedError,
    UsageError,
)
from attn_core.integrations.transformers import Engine, enable  # noqa: E402
from attn_core.integrations.transformers.forwards import (  # noqa: E402
    CACHE_NAMES,
    take_cache,
)
from attn_core.runtime.batch import ForwardMode  # noqa: E402
from attn_core.selection.result import Overrides  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache  # noqa: E402

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,  # far from uniform, so that a wrong token shows at once
}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 8}}
NEW = 44


def tiny(name: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**TINY, **MODELS[name], **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def prompts() -> dict[str, torch.Tensor]:
    """Three prompts of 12, 8 and 3 tokens, padded on the left."""
    torch.manual_seed(1)
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[1, :4] = 0
    mask[2, :9] = 0
    return {"input_ids": torch.randint(2, 110, (3, 12)) * mask, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, torch.Tensor], **more: Any) -> torch.Tensor:
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **more})


def spy(engine: Engine) -> tuple[list[Any], list[int]]:
    """Record every planned batch and the layer of every call."""
    batches: list[Any] = []
    calls: list[int] = []
    plan, forward = engine.dispatcher.init_forward_metadata, engine.dispatcher.forward

    def planned(batch: Any) -> Any:
        batches.append(batch)
        return plan(batch)

    def called(q: Any, k: Any, v: Any, layer: Any, *rest: Any) -> Any:
        calls.append(layer.layer_id)
        assert q.shape[0] == k.shape[0] == v.shape[0] == rest[0].num_tokens
        return forward(q, k, v, layer, *rest)

    engine.dispatcher.init_forward_metadata = planned
    engine.dispatcher.forward = called
    return batches, calls


def test_one_plan_per_pass_with_exact_lengths(llama: Any, prompts: dict[str, torch.Tensor]) -> None:
    with enable(llama, page_size=16) as engine:
        batches, calls = spy(engine)
        generate(llama, prompts, max_new_tokens=4)
    assert [b.forward_mode for b in batches] == [ForwardMode.EXTEND] + [ForwardMode.DECODE] * 3
    assert calls == [0, 1] * 4
    prompt = batches[0]
    assert prompt.query_lens_host == (12, 8, 3)  # padding is in no request
    assert prompt.positions.tolist() == [*range(12), *range(8), *range(3)]
    assert [b.views["full"].seq_lens_host for b in batches[1:]] == [
        (13, 9, 4),
        (14, 10, 5),
        (15, 11, 6),
    ]


@pytest.mark.parametrize("side", ["left", "right", "none", "all of a row"])
def test_forward_gives_the_logits_of_eager(
    llama: Any, prompts: dict[str, torch.Tensor], side: str
) -> None:
    ids, mask = prompts["input_ids"], prompts["attention_mask"].clone()
    if side == "right":
        mask = mask.flip(1)
    if side == "none":
        mask = torch.ones_like(mask)
    if side == "all of a row":
        mask[1] = 0
    real = mask.bool()
    with torch.no_grad():
        expected = llama(ids, attention_mask=mask).logits
        with enable(llama, page_size=16) as engine:
            actual = llama(ids, attention_mask=None if side == "none" else mask)
            assert actual.past_key_values is not None
            uncached = llama(ids, attention_mask=mask, use_cache=False)
            assert uncached.past_key_values is None
            as_tuple = llama(ids, attention_mask=mask, use_cache=False, return_dict=False)
            assert len(as_tuple) == 1
            # the pages of the one cache that was kept
            assert engine.num_held == sum(-(-n // 16) for n in mask.sum(1).tolist())
        exact = copy.deepcopy(llama).double()
        alone = [row[keep][None] for row, keep in zip(ids, real, strict=True) if keep.any()]
        truth = torch.cat([exact(request).logits[0] for request in alone])
    budget = 2 * (expected[real] - truth).abs().max() + 1e-6
    for logits in (actual.logits, uncached.logits, as_tuple[0]):
        assert (logits[real] - truth).abs().max() <= budget


@pytest.mark.parametrize("page_size", [1, 16])
def test_turns_go_on_from_the_cache(
    llama: Any, prompts: dict[str, torch.Tensor], page_size: int
) -> None:
    torch.manual_seed(2)
    turn = torch.randint(2, 110, (3, 7))

    def talk() -> tuple[torch.Tensor, Any]:
        first = generate(llama, prompts, max_new_tokens=9, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, turn], 1)
        mask = torch.nn.functional.pad(prompts["attention_mask"], (0, 16), value=1)
        inputs = {"input_ids": ids, "attention_mask": mask}
        cache = first.past_key_values
        return generate(llama, inputs, max_new_tokens=20, past_key_values=cache), cache

    expected, _ = talk()
    with enable(llama, page_size=page_size) as engine:
        batches, _ = spy(engine)
        actual, cache = talk()
        assert torch.equal(actual, expected)
        second = next(b for b in batches[1:] if b.forward_mode is ForwardMode.EXTEND)
        # the last token of a turn is not in the cache yet: one more than the new ones
        assert second.query_lens_host == (8, 8, 8)
        assert second.views["full"].seq_lens_host == (12 + 16, 8 + 16, 3 + 16)
        assert engine.num_held > 0
        del cache
        assert engine.num_held == 0


def test_a_prompt_in_chunks_is_the_prompt(llama: Any, prompts: dict[str, torch.Tensor]) -> None:
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    with torch.no_grad(), enable(llama, page_size=16):
        full = llama(ids, attention_mask=mask).logits[:, -1]
        cache = DynamicCache(config=llama.config)
        for end in (1, 5, 11, 12):  # the first chunks of the short prompts are padding only
            start = cache.get_seq_length()
            out = llama(
                ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache
            ).logits
        assert cache.get_seq_length() == 12
    torch.testing.assert_close(out[:, -1], full)


def test_the_cache_of_a_call_is_found_by_each_of_its_names(llama: Any) -> None:
    """transformers 5.24 calls it "cache"; a decoder that is called by the older name goes on."""
    for name in CACHE_NAMES:
        cache = DynamicCache()  # an empty one is false
        arguments = {**dict.fromkeys(CACHE_NAMES), name: cache, "use_cache": True}
        assert take_cache(arguments) is cache
        assert arguments == {"use_cache": True}
    assert take_cache({}) is None
    ids = torch.randint(2, 110, (1, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        full = llama.model(ids).last_hidden_state[:, -1]
        with enable(llama, page_size=4):
            for name in CACHE_NAMES[:2]:
                cache = DynamicCache(config=llama.config)
                llama.model(ids[:, :7], **{name: cache})
                out = llama.model(ids[:, 7:], **{name: cache}).last_hidden_state
                assert cache.get_seq_length() == 12
                torch.testing.assert_close(out[:, -1], full)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_beam_search_equals_eager(
    name: str, prompts: dict[str, torch.Tensor], page_size: int
) -> None:
    model = tiny(name)
    how = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 24}
    expected = generate(model, prompts, **how)
    with enable(model, page_size=page_size) as engine:
        assert torch.equal(generate(model, prompts, **how), expected)
        assert engine.num_held == 0


def test_assisted_generation_equals_eager(llama: Any, prompts: dict[str, torch.Tensor]) -> None:
    drafter = tiny(num_hidden_layers=1)  # another model: most drafts are rejected and cropped
    one = {"input_ids": prompts["input_ids"][:1]}
    expected = generate(llama, one)
    for page_size in (1, 16):
        with enable(llama, page_size=page_size) as a, enable(drafter, page_size=page_size) as b:
            assert torch.equal(generate(llama, one, assistant_model=drafter), expected)
            assert a.num_held == b.num_held == 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rearranged_caches_hold_what_their_rows_say(
    llama: Any, prompts: dict[str, torch.Tensor], page_size: int
) -> None:
    """Crop, repeat, reorder and select, then write: no row may write into another's page."""
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    with torch.no_grad(), enable(llama, page_size=page_size) as engine:
        cache = DynamicCache(config=llama.config)
        llama(ids, attention_mask=mask, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([5, 0, 1, 0, 2, 4]))
        cache.crop(-3)
        cache.batch_select_indices(torch.tensor([0, 1, 2, -2]))
        rows = torch.tensor([2, 0, 0, 1])  # where each row came from
        assert cache.get_seq_length() == 9
        more = torch.randint(2, 110, (4, 6))
        ids2 = torch.cat([ids[rows, :9], more], 1)
        mask2 = torch.cat([mask[rows, :9], torch.ones_like(more)], 1)
        actual = llama(more, attention_mask=mask2, past_key_values=cache).logits
        fresh = llama(ids2, attention_mask=mask2, use_cache=False).logits[:, 9:]
        torch.testing.assert_close(actual, fresh)
        cache.reset()
        assert engine.num_held == 0
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("rows", [[False, True, True], [True, False, True], [False, False, False]])
def test_a_mask_selects_rows_as_it_does_of_tensors(
    llama: Any, prompts: dict[str, torch.Tensor], rows: list[bool]
) -> None:
    ids, mask, kept = prompts["input_ids"], prompts["attention_mask"], torch.tensor(rows)
    more = torch.randint(2, 110, (int(kept.sum()), 3))
    full = torch.cat([mask[kept], torch.ones_like(more)], 1)

    def logits() -> torch.Tensor:
        cache = llama(ids, attention_mask=mask, use_cache=True).past_key_values
        cache.batch_select_indices(kept)
        if not kept.any():
            return torch.zeros(0)
        return llama(more, attention_mask=full, past_key_values=cache).logits

    with torch.no_grad():
        expected = logits()
        with enable(llama, page_size=4) as engine:
            torch.testing.assert_close(logits(), expected)
            assert engine.num_held == 0


def test_shared_pages_are_not_stored_twice(llama: Any, prompts: dict[str, torch.Tensor]) -> None:
    with torch.no_grad(), enable(llama, page_size=4) as engine:
        cache = llama(prompts["input_ids"][:1]).past_key_values  # 12 tokens, 3 whole pages
        cache.batch_repeat_interleave(5)
        assert engine.num_held == 3
        del cache
        assert engine.num_held == 0


def test_out_of_pages_loses_nothing(llama: Any, prompts: dict[str, torch.Tensor]) -> None:
    with enable(llama, page_size=16, num_pages=7) as engine:
        with pytest.raises(OutOfPagesError, match=r"1 more pages of 16 .* 0 of 6 are free"):
            generate(llama, prompts)
        gc.collect()
        assert engine.num_held == 0
        short = generate(llama, prompts, max_new_tokens=16)
    assert torch.equal(short, generate(llama, prompts, max_new_tokens=16))


def test_a_cache_whose_first_pass_failed_takes_fewer_rows(
    llama: Any, prompts: dict[str, torch.Tensor]
) -> None:
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    with torch.no_grad(), enable(llama, page_size=4, num_pages=6) as engine:
        cache = DynamicCache(config=llama.config)
        with pytest.raises(OutOfPagesError):
            llama(ids, attention_mask=mask, past_key_values=cache)
        actual = llama(ids[:1], attention_mask=mask[:1], past_key_values=cache).logits
        assert engine.num_held == 3
        with pytest.raises(BatchError, match="2 rows for a cache of 1"):
            llama(ids[:2, :1], past_key_values=cache)
        cache.crop(-12)
        llama(ids[1:, -4:], attention_mask=mask[1:, -4:], past_key_values=cache)
        assert engine.num_held == 2
    with torch.no_grad():
        torch.testing.assert_close(actual, llama(ids[:1]).logits)


def test_a_pool_beyond_the_memory_is_refused(llama: Any) -> None:
    with pytest.raises(OutOfPagesError, match="does not fit on cpu"):
        enable(llama, page_size=16, num_pages=10**13)
    assert llama.config._attn_implementation == "eager"


def test_a_failed_pass_leaves_the_cache_as_it_was(
    llama: Any, prompts: dict[str, torch.Tensor]
) -> None:
    one = prompts["input_ids"][:1]
    with torch.no_grad(), enable(llama, page_size=4) as engine:
        cache = llama(one[:, :6]).past_key_values
        forward = engine.dispatcher.forward

        def fails(*args: Any) -> Any:
            if args[3].layer_id == 1:
                raise RuntimeError("a kernel fails")
            return forward(*args)

        engine.dispatcher.forward = fails
        with pytest.raises(RuntimeError, match="a kernel fails"):
            llama(one[:, :9], past_key_values=cache)
        engine.dispatcher.forward = forward
        assert cache.get_seq_length() == 6
        actual = llama(one[:, 6:], past_key_values=cache).logits
        torch.testing.assert_close(actual, llama(one).logits[:, 6:])


def test_the_pool_grows_under_a_live_cache(llama: Any, prompts: dict[str, torch.Tensor]) -> None:
    one = prompts["input_ids"][:1]
    with torch.no_grad(), enable(llama, page_size=16) as engine:
        cache = llama(one[:, :9]).past_key_values
        before = engine.pages["full"].total
        big = torch.randint(2, 110, (8, 300))
        other = llama(big).past_key_values
        assert engine.pages["full"].total > before
        actual = llama(one[:, 9:], past_key_values=cache).logits
        torch.testing.assert_close(actual, llama(one).logits[:, 9:])
        assert engine.num_held == 8 * 19 + 1
        del other


def test_fp8_takes_a_quarter_of_fp32(llama: Any) -> None:
    with enable(llama, page_size=16, kv_cache_dtype="fp8_e4m3", num_pages=9) as small:
        assert small.selection.kv_cache_dtype == "fp8_e4m3"
    with enable(llama, page_size=16, num_pages=9) as engine:
        assert engine.kv_bytes == 4 * small.kv_bytes == 9 * 16 * 2 * 2 * 2 * 32 * 4


def test_the_selection_is_obeyed(llama: Any) -> None:
    with enable(llama, page_size=8, overrides=Overrides(decode_attention_backend="sdpa")) as one:
        assert one.selection.backend("decode") == "torch_native"
        assert one.selection.roles["decode"].reason == "named by --decode-attention-backend"
    with enable(llama, one.selection) as two:
        assert two.page_size == 8
    with pytest.raises(UsageError, match="belong to the selection"):
        enable(llama, one.selection, page_size=16)


def test_disable_gives_the_model_back(prompts: dict[str, torch.Tensor]) -> None:
    model = tiny()
    forward, before = model.model.forward, generate(model, prompts)
    with pytest.raises(RuntimeError, match="inside"), enable(model) as engine:  # noqa: PT012
        cache = model(prompts["input_ids"]).past_key_values
        with pytest.raises(UsageError, match="is enabled"):
            enable(model)
        raise RuntimeError("inside")
    assert model.config._attn_implementation == "eager"
    assert model.model.forward == forward
    assert "forward" not in vars(model.model)
    assert torch.equal(generate(model, prompts), before)
    with pytest.raises(UnsupportedError, match="after disable"):
        model(prompts["input_ids"], past_key_values=cache)
    engine.disable()  # twice is harmless
    wrapped = model.model.forward = lambda **kwargs: forward(**kwargs)
    enable(model).disable()
    assert model.model.forward is wrapped


def refusals(model: Any, ids: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """What is not honoured, each with the words of its refusal."""
    config, t = model.config, ids.shape[1]
    filled = DynamicCache(config=config)
    filled.update(torch.zeros(3, 2, 4, 32), torch.zeros(3, 2, 4, 32), 0)
    offloaded = DynamicCache()
    offloaded.offloading = True  # its constructor makes a stream: torch for CUDA wants a driver
    packed = torch.arange(t).remainder(5)[None]
    seen = model(ids).past_key_values
    changed = torch.ones(3, t + 1, dtype=torch.int64)
    changed[0, 3] = 0
    yield "without attn-core", lambda: model(ids, past_key_values=filled)
    yield "StaticCache", lambda: model(ids, past_key_values=StaticCache(config, max_cache_len=32))
    yield "StaticCache", lambda: generate(model, {"input_ids": ids}, cache_implementation="static")
    yield "offloaded", lambda: model(ids, past_key_values=offloaded)
    yield "attention weights", lambda: model(ids, output_attentions=True)
    yield r"attention_mask of \(3, 1", lambda: model(ids, attention_mask=torch.ones(3, 1, t, t))
    yield "restart", lambda: model(ids, position_ids=packed)
    yield "causal", lambda: model(ids, is_causal=False)
    yield "differs from", lambda: model(ids[:, :1], attention_mask=changed, past_key_values=seen)
    yield r"crop\(5\)", lambda: seen.crop(5)


@pytest.mark.parametrize("number", range(10))
def test_refusals(prompts: dict[str, torch.Tensor], number: int) -> None:
    model = tiny()
    with torch.no_grad(), enable(model) as engine:
        cases = list(refusals(model, prompts["input_ids"]))
        assert len(cases) == 10
        words, call = cases[number]
        with pytest.raises(UnsupportedError, match=words):
            call()
        del cases, call
        gc.collect()
        assert engine.num_held == 0


def test_refusals_of_use(llama: Any, prompts: dict[str, torch.Tensor]) -> None:
    ids = prompts["input_ids"]
    other = copy.deepcopy(llama)
    with torch.no_grad(), enable(llama), enable(other):
        cache = llama(ids).past_key_values
        with pytest.raises(UnsupportedError, match="pool of another model"):
            other(ids, past_key_values=cache)
        with pytest.raises(BatchError, match="2 rows for a cache of 3"):
            llama(ids[:2], past_key_values=cache)
        with pytest.raises(BatchError, match="attention_mask of shape"):
            llama(ids[:, :1], attention_mask=torch.ones(3, 5), past_key_values=cache)
    other.train()
    with enable(other), pytest.raises(UnsupportedError, match="training mode"):
        other(ids)


def in_threads(work: Callable[[int], None], number: int = 4) -> None:
    """Run work(i) in threads of their own; raise the first error of any."""
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_share_a_model(llama: Any) -> None:
    torch.manual_seed(3)
    prompts = [torch.randint(2, 110, (1, n)) for n in range(3, 9)]
    expected = [generate(llama, {"input_ids": ids}, max_new_tokens=16) for ids in prompts]
    same: list[bool] = []
    with enable(llama, page_size=4) as engine:  # the pool grows meanwhile

        def work(i: int) -> None:
            for k in (i, i + 1, i + 2):
                actual = generate(llama, {"input_ids": prompts[k]}, max_new_tokens=16)
                same.append(torch.equal(actual, expected[k]))

        in_threads(work)
        assert same == [True] * 12
        assert engine.num_held == 0


def test_disable_waits_for_a_pass_of_another_thread(llama: Any) -> None:
    inside, later, layers = threading.Event(), threading.Event(), []
    ids = torch.tensor([[3, 4, 5]])
    engine = enable(llama, page_size=16)
    forward = engine.dispatcher.forward

    def slow(*args: Any) -> Any:
        layers.append(args[3].layer_id)
        inside.set()
        later.wait(0.2)  # not set while disable() waits
        return forward(*args)

    engine.dispatcher.forward = slow

    def work(i: int) -> None:
        if i == 0:
            generate(llama, {"input_ids": ids}, max_new_tokens=1)
        else:
            assert inside.wait(30)
            engine.disable()
            later.set()

    in_threads(work, 2)
    assert layers == [0, 1]
    assert llama.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "what", [pytest.param(x, marks=pytest.mark.long) for x in ("the model", "a layer", "before")]
)
def test_a_compiled_model_says_what_it_says(what: str) -> None:
    model, inputs = tiny(num_hidden_layers=1), {"input_ids": torch.tensor([[3, 4, 5, 6]])}
    expected = generate(model, inputs, max_new_tokens=3)
    compiled = model.model.layers[0] if what == "a layer" else model
    if what == "before":  # compiled and run before enable()
        model.forward = torch.compile(model.forward, backend="eager")
        generate(model, inputs, max_new_tokens=3)
    with enable(model, page_size=16) as engine:
        batches, _ = spy(engine)
        if what != "before":
            compiled.forward = torch.compile(compiled.forward, backend="eager")
        assert torch.equal(generate(model, inputs, max_new_tokens=3), expected)
        assert len(batches) == 3
    assert torch.equal(generate(model, inputs, max_new_tokens=3), expected)
    torch.compiler.reset()


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_compiled_decoder_is_one_graph_with_each_attention_whole(
    name: str, prompts: dict[str, torch.Tensor]
) -> None:
    graphs: list[list[str]] = []

    def aot_eager(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model = tiny(name)
    with enable(model, page_size=4) as engine, torch.no_grad():
        logits = model(**prompts).logits
        expected = generate(model, prompts, max_new_tokens=12)
        model.forward = torch.compile(model.forward, backend=aot_eager)
        torch.testing.assert_close(model(**prompts).logits, logits)
        attends = [graph.count("attn_core.attention") for graph in graphs]
        assert sorted(n for n in attends if n) == [model.config.num_hidden_layers]
        assert torch.equal(generate(model, prompts, max_new_tokens=12), expected)
        made = len(graphs)
        assert torch.equal(generate(model, prompts, max_new_tokens=12), expected)
        assert len(graphs) == made, "another cache, the same graphs"
        gc.collect()
        assert engine.num_held == 0, "no graph holds a cache"
    del model.forward
    torch.compiler.reset()


def test_a_failure_in_a_compiled_pass_leaves_the_cache_as_it_was() -> None:
    model, ids = tiny(num_hidden_layers=1), torch.tensor([[3, 4, 5, 6]])
    with enable(model, page_size=16) as engine, torch.no_grad():
        expected = model(ids).logits
        forward, fails = engine.dispatcher.forward, [True]

        def failing(*args: Any, **more: Any) -> Any:
            if fails:
                raise BatchError("on purpose")
            return forward(*args, **more)

        engine.dispatcher.forward = failing  # type: ignore[method-assign]
        model.forward = torch.compile(model.forward, backend="eager")
        cache = DynamicCache(config=model.config)
        with pytest.raises(BatchError, match="on purpose"):
            model(ids, past_key_values=cache)
        fails.clear()
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected)
        assert cache.get_seq_length() == 4
    del model.forward
    torch.compiler.reset()


def test_a_backward_pass_is_refused() -> None:
    model, ids = tiny(), torch.tensor([[3, 4, 5, 6]])
    with enable(model):
        loss = model(ids, labels=ids).loss
        with pytest.raises(UnsupportedError, match="inference only"):
            loss.backward()
        embeds = torch.randn(1, 4, 64, requires_grad=True)
        with pytest.raises(UnsupportedError, match="inputs_embeds that require gradients"):
            model(inputs_embeds=embeds)
        hidden = model(ids, output_hidden_states=True, return_dict=False)[-1]
        with pytest.raises(UnsupportedError, match="inference only"):
            hidden[0].sum().backward()
        model.requires_grad_(False)
        with pytest.raises(UnsupportedError, match="inference only"):
            model(inputs_embeds=embeds * 2).logits.sum().backward()
        assert not model(ids).logits.requires_grad


def test_a_paged_cache_is_not_copied(llama: Any) -> None:
    with torch.no_grad(), enable(llama):
        cache = llama(torch.tensor([[3, 4, 5]])).past_key_values
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="cannot be copied"):
                attempt(cache)
        for read in (lambda: cache.layers[0].values, lambda: DynamicCache(list(cache))):
            with pytest.raises(UnsupportedError, match="lie in pages"):  # they were None
                read()


def test_unsupported_architectures_say_what_is_possible() -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    with pytest.raises(UnsupportedError, match=r"'gpt2'.*supports .*llama, mistral"):
        enable(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("name", ["bloom", "gpt_neox_japanese", "xglm"])
def test_a_model_that_attends_by_itself_is_refused_by_name(name: str) -> None:
    """Such a model asks for a mask by name; with none at all, its tokens saw later ones."""
    keys = {**TINY, "d_model": 64, "attention_heads": 4, "ffn_dim": 64, "num_layers": 1}
    config = transformers.AutoConfig.for_model(name, **keys)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="attn_core").eval()
    with torch.no_grad(), pytest.raises(UnsupportedError, match=f"{name!r} does not run"):
        model(torch.tensor([[1, 5, 9, 4]]))


def test_another_implementation_that_is_set_under_enable_is_refused(
    llama: Any, prompts: dict[str, torch.Tensor]
) -> None:
    """It would attend to the new tokens alone: a paged cache hands on no others."""
    expected = generate(llama, prompts, max_new_tokens=4)
    with enable(llama):
        llama.set_attn_implementation("eager")
        with pytest.raises(UnsupportedError, match="attn_implementation is 'eager' by now"):
            generate(llama, prompts, max_new_tokens=4)
        llama.set_attn_implementation("attn_core")
        assert torch.equal(generate(llama, prompts, max_new_tokens=4), expected)
