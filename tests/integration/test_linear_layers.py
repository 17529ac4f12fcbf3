"""Linear layers of a transformers model run on the selected backends, over states in a pool."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from attn_core.errors import OutOfPagesError, UnsupportedError, UsageError
from attn_core.integrations.transformers import Engine, enable
from attn_core.integrations.transformers.linear import StateLayer
from attn_core.integrations.transformers.states import NUM_DRAFTS, States
from attn_core.runtime.batch import ForwardMode
from attn_core.selection.result import Overrides
from tiny_models import LINEAR, generate, inputs_of, tiny
from transformers import DynamicCache

TWO = ("qwen3_next", "kimi_linear")  # a decay per head, and one per channel
FIRST = (TWO[0], pytest.param(TWO[1], marks=pytest.mark.long))  # `nox -s families` runs both


def modes_of(engine: Engine) -> list[tuple[ForwardMode, int]]:
    """Record the mode and the tokens of every call of a linear layer."""
    calls: list[tuple[ForwardMode, int]] = []
    forward = engine.dispatcher.forward_linear

    def called(
        q: Any, k: Any, v: Any, g: Any, beta: Any, layer: Any, batch: Any, *rest: Any
    ) -> Any:
        calls.append((batch.forward_mode, batch.num_tokens))
        return forward(q, k, v, g, beta, layer, batch, *rest)

    engine.dispatcher.forward_linear = called  # type: ignore[method-assign]
    return calls


def fail_in_the_last_layer(engine: Engine) -> Callable[[], None]:
    """Let the softmax layer, which comes last, fail until the returned function is called."""
    forward = engine.dispatcher.forward

    def fails(*args: Any) -> Any:
        raise RuntimeError("a kernel fails")

    engine.dispatcher.forward = fails  # type: ignore[method-assign]

    def mend() -> None:
        engine.dispatcher.forward = forward  # type: ignore[method-assign]

    return mend


def long_prompt(tokens: int, rows: int = 1) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randint(2, 110, (rows, tokens))


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare logits of up to 5, whose sums come in another order.

    That moves them by 1e-4; a token that is missing in a state, or one too many, by 0.1.
    """
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", LINEAR)
def test_every_linear_layer_runs_on_its_backend(name: str) -> None:
    model, inputs = tiny(name), inputs_of(name)
    with enable(model, page_size=16) as engine:
        chosen = engine.selection
        roles = [chosen.backend(r) for r in ("linear_prefill", "linear_decode", "linear_verify")]
        assert roles == ["torch_native"] * 3
        assert [x.layer_id for x in engine.layers] == [1]
        calls = modes_of(engine)
        generate(model, inputs, max_new_tokens=4)
        # one layer; padding is in no pass
        assert calls == [(ForwardMode.EXTEND, 12 + 8 + 3), *[(ForwardMode.DECODE, 3)] * 3]
        assert engine.num_states == 0
        one_row = engine.state_bytes // 3
        cache = model(inputs["input_ids"][:1]).past_key_values
        assert engine.num_states == 1
        assert engine.state_bytes == 3 * one_row
        layer = cache.layers[0]
        assert isinstance(layer, StateLayer)
        states = engine.dispatcher.linear.states.states  # type: ignore[union-attr]
        assert states.u is None, "records take no room before tokens are taken back"
        hk, hv = layer.layer.num_k_heads, layer.layer.num_v_heads
        k, v = layer.layer.head_k_dim, layer.layer.head_v_dim
        assert one_row == 4 * (hv * v * k + 3 * (2 * hk * k + hv * v))
    assert "forward" not in vars(model.model.layers[0])
    assert model._is_stateful


@pytest.mark.parametrize("name", LINEAR)
def test_turns_go_on_from_the_cache(name: str) -> None:
    model, inputs = tiny(name), inputs_of(name)
    turn = long_prompt(7, rows=3)

    def talk() -> torch.Tensor:
        first = generate(model, inputs, max_new_tokens=9, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, turn], 1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 16), value=1)
        more = {"input_ids": ids, "attention_mask": mask}
        return generate(model, more, max_new_tokens=12, past_key_values=first.past_key_values)

    expected = talk()
    with enable(model, page_size=4) as engine:
        assert torch.equal(talk(), expected)
        gc.collect()
        assert engine.num_states == 0


@pytest.mark.parametrize("name", TWO)
def test_rearranged_caches_hold_what_their_rows_say(name: str) -> None:
    """Repeat, reorder and select, then write: no row may write into another's state."""
    model, inputs = tiny(name), inputs_of(name)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad(), enable(model, page_size=4) as engine:
        cache = DynamicCache(config=model.config)
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([5, 0, 1, 0, 2, 4]))
        cache.batch_select_indices(torch.tensor([0, 1, 2, -2]))
        assert engine.num_states == 4
        rows = torch.tensor([2, 0, 0, 1])  # where each row came from
        more = long_prompt(6, rows=4)
        ids2 = torch.cat([ids[rows], more], 1)
        mask2 = torch.cat([mask[rows], torch.ones_like(more)], 1)
        got = model(more, attention_mask=mask2, past_key_values=cache).logits
        fresh = model(ids2, attention_mask=mask2, use_cache=False).logits[:, 12:]
        same(got, fresh)
        cache.reset()
        assert engine.num_states == 0


def drafters(name: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    yield "prompt lookup", lambda: {"prompt_lookup_num_tokens": 5}
    yield "softmax", lambda: {"assistant_model": tiny("llama", num_hidden_layers=1)}
    yield "linear", lambda: {"assistant_model": tiny(name, initializer_range=0.15)}


@pytest.mark.parametrize("drafter", ["prompt lookup", "softmax", "linear"])
@pytest.mark.parametrize("name", FIRST)
def test_assisted_generation_equals_eager(name: str, drafter: str) -> None:
    """Rejected drafts are taken back, which transformers' own cache of states refuses to do."""
    model, how = tiny(name), dict(drafters(name))[drafter]()
    one = {"input_ids": inputs_of(name)["input_ids"][:1].repeat(1, 4)}  # 48 tokens with n-grams
    expected = generate(model, one)
    with pytest.raises(ValueError, match="stateful"):
        generate(model, one, **how)
    assistant = how.get("assistant_model", tiny("llama"))
    with enable(model, page_size=4) as engine, enable(assistant) as drafting:
        calls = modes_of(engine)
        assert torch.equal(generate(model, one, **how), expected)
        assert {mode for mode, _ in calls} >= {ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY}
        gc.collect()
        assert engine.num_states == drafting.num_states == 0


@pytest.mark.parametrize("name", FIRST)
def test_a_crop_takes_recorded_tokens_back(name: str) -> None:
    model, ids = tiny(name), long_prompt(90, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad(), enable(model, page_size=4) as engine:
        whole = model(ids, attention_mask=mask).logits
        gc.collect()
        for lengths, back in (
            ((70,), 5),  # some drafts of a prompt that is longer than the records
            ((70,), NUM_DRAFTS),  # all of them
            ((20,), 15),  # the shorter row is one chain of drafts, from nothing
            ((70, 71, 72), 2),  # passes of one token
            ((70, 71, 72), 6),  # these and drafts of the one before
            ((70, 78, 79), 9),  # up to where a chain began
            ((70, 70 + NUM_DRAFTS // 2, 89), 0),
        ):
            cache = DynamicCache(config=model.config)
            cache.activate_past_recording()
            for start, end in zip((0, *lengths), lengths, strict=False):
                part = {"attention_mask": mask[:, :end], "past_key_values": cache}
                out = model(ids[:, start:end], **part).logits
                same(out, whole[:, start:end])
            cache.crop(-back)
            length = cache.get_seq_length()
            assert length == lengths[-1] - back
            assert engine.num_states == 2
            rest = model(ids[:, length:], attention_mask=mask, past_key_values=cache).logits
            same(rest, whole[:, length:])
            cache.crop(-1)
            last = model(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits
            same(last, whole[:, -1:])
            del cache, part
            gc.collect()
            assert engine.num_states == 0


def test_a_crop_beyond_what_is_recorded_is_refused_and_changes_nothing() -> None:
    model, ids = tiny("qwen3_next"), long_prompt(60)
    with torch.no_grad(), enable(model, page_size=4):
        whole = model(ids).logits
        cache = model(ids[:, :50]).past_key_values
        with pytest.raises(UnsupportedError, match=r"crop of 2 tokens.*activate_past_recording"):
            cache.crop(-2)
        cache.crop(0)
        cache.activate_past_recording()
        with pytest.raises(UnsupportedError, match="crop of 1 tokens"):
            cache.crop(-1)  # these came before
        model(ids[:, 50:55], past_key_values=cache)
        with pytest.raises(UnsupportedError, match="crop of 6 tokens"):
            cache.crop(-6)
        got = model(ids[:, 55:], past_key_values=cache).logits
        same(got, whole[:, 55:])

        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(ids, past_key_values=cache)
        with pytest.raises(UnsupportedError, match=f"the last {NUM_DRAFTS} of a pass"):
            cache.crop(-NUM_DRAFTS - 1)
        assert cache.get_seq_length() == 60


def test_recording_without_crops_holds_a_bounded_number_of_slots() -> None:
    model, ids = tiny("qwen3_next"), long_prompt(3)
    with torch.no_grad(), enable(model) as engine:
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        most = 0
        for token in long_prompt(80)[0]:
            got = model(token.view(1, 1), past_key_values=cache).logits
            most = max(most, engine.num_states)
        assert NUM_DRAFTS < most <= NUM_DRAFTS + 2
        same(got, model(long_prompt(80), use_cache=False).logits[:, -1:])
    del ids


@pytest.mark.parametrize("name", FIRST)
def test_what_free_slots_hold_does_not_matter(name: str) -> None:
    model, inputs = tiny(name), inputs_of(name)
    one = {"input_ids": inputs["input_ids"][:1].repeat(1, 4)}
    hows: tuple[tuple[Any, dict[str, Any]], ...] = (
        (inputs, {}),
        (inputs, {"num_beams": 3}),
        (one, {"prompt_lookup_num_tokens": 5}),
    )
    with enable(model) as engine:
        for prompts, how in hows:
            expected = generate(model, prompts, **how)
            gc.collect()
            assert engine.num_states == 0
            for x in vars(engine.dispatcher.linear.states.states).values():  # type: ignore[union-attr]
                if x is not None:
                    x.fill_(float("nan"))
            assert torch.equal(generate(model, prompts, **how), expected)


def test_what_no_backend_takes_back_is_refused() -> None:
    model, one = tiny("qwen3_next"), {"input_ids": long_prompt(12)}
    chosen = enable(model)
    chosen.disable()
    roles = {r: c for r, c in chosen.selection.roles.items() if r != "linear_verify"}
    expected = generate(model, one, max_new_tokens=6)
    with torch.no_grad(), enable(model, replace(chosen.selection, roles=roles)):
        assert torch.equal(generate(model, one, max_new_tokens=6), expected)
        with pytest.raises(ValueError, match="stateful"):
            generate(model, one, prompt_lookup_num_tokens=5)
        cache = model(**one).past_key_values
        assert not cache.is_croppable
        with pytest.raises(UnsupportedError, match=r"verifies drafts .* torch_native; name"):
            cache.activate_past_recording()


def test_a_selection_without_linear_backends_is_refused() -> None:
    model = tiny("qwen3_next")
    with enable(model) as engine:
        chosen = engine.selection
    roles = {r: c for r, c in chosen.roles.items() if not r.startswith("linear")}
    with pytest.raises(UsageError, match="no backends for the model's linear layers; select"):
        enable(model, replace(chosen, roles=roles))
    with pytest.raises(UsageError, match=r"linear layers \(the model keeps its own"):
        enable(model, overrides=Overrides(allow=("flex_attention",)))
    assert model.config._attn_implementation == "eager"
    assert "forward" not in vars(model.model.layers[0].linear_attn)


def test_the_named_backend_runs() -> None:
    with enable(tiny("qwen3_next"), overrides=Overrides(linear_attn_backend="triton")) as engine:
        chosen = engine.selection
        assert chosen.backend("linear_decode") == "triton"
        assert chosen.backend("linear_verify") == "torch_native"  # triton's row for a CPU does not
        assert chosen.backend("decode") in ("torch_native", "intel_amx")


@pytest.mark.parametrize("name", TWO)
def test_a_failed_pass_loses_no_more_than_it_has_overwritten(name: str) -> None:
    model, ids = tiny(name), long_prompt(9)
    with torch.no_grad(), enable(model, page_size=4) as engine:
        whole = model(ids).logits
        gc.collect()
        mend = fail_in_the_last_layer(engine)
        new = DynamicCache(config=model.config)
        with pytest.raises(RuntimeError, match="a kernel fails"):
            model(ids, past_key_values=new)
        mend()
        assert engine.num_states == 0
        same(model(ids, past_key_values=new).logits, whole)
        new.reset()

        recorded = DynamicCache(config=model.config)
        recorded.activate_past_recording()
        model(ids[:, :4], past_key_values=recorded)
        for end in (5, 9):  # a pass of one token, and one of drafts
            mend = fail_in_the_last_layer(engine)
            with pytest.raises(RuntimeError, match="a kernel fails"):
                model(ids[:, 4:end], past_key_values=recorded)
            mend()
        got = model(ids[:, 4:], past_key_values=recorded).logits
        same(got, whole[:, 4:])

        plain = model(ids[:, :4]).past_key_values
        mend = fail_in_the_last_layer(engine)
        with pytest.raises(RuntimeError, match="a kernel fails"):
            model(ids[:, 4:], past_key_values=plain)
        mend()
        with pytest.raises(UnsupportedError, match="overwritten their states; start a new cache"):
            model(ids[:, 4:], past_key_values=plain)
        plain.reset()
        same(model(ids, past_key_values=plain).logits, whole)
        del plain, recorded, new
        gc.collect()
        assert engine.num_states == engine.num_held == 0


@pytest.mark.parametrize("records", [False, True])
def test_a_pass_that_cannot_be_planned_takes_no_slots(records: bool) -> None:
    model, ids = tiny("qwen3_next"), long_prompt(9)
    with torch.no_grad(), enable(model) as engine:
        whole = model(ids).logits
        gc.collect()
        cache = DynamicCache(config=model.config)
        if records:
            cache.activate_past_recording()
        model(ids[:, :4], past_key_values=cache)
        plan = engine.dispatcher.init_forward_metadata

        def fails(batch: Any) -> Any:
            raise RuntimeError("no workspace")

        engine.dispatcher.init_forward_metadata = fails  # type: ignore[method-assign]
        for end in (5, 9):
            with pytest.raises(RuntimeError, match="no workspace"):
                model(ids[:, 4:end], past_key_values=cache)
        engine.dispatcher.init_forward_metadata = plan  # type: ignore[method-assign]
        got = model(ids[:, 4:], past_key_values=cache).logits
        same(got, whole[:, 4:])
        cache.crop(0)
        assert engine.num_states == 1


def test_rows_of_padding_have_no_slots() -> None:
    model, ids = tiny("kimi_linear"), long_prompt(6, rows=2)
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    mask[1, :4] = 0
    with torch.no_grad(), enable(model) as engine:
        whole = model(ids, attention_mask=mask).logits[:, -1:]
        gc.collect()
        cache = DynamicCache(config=model.config)
        held = []
        for start, end in ((0, 2), (2, 4), (4, 6)):
            part = {"attention_mask": mask[:, :end], "past_key_values": cache}
            got = model(ids[:, start:end], **part).logits
            cache.reorder_cache(torch.tensor([0, 1]))
            held.append(engine.num_states)
        assert held == [0, 1, 2]
        same(got[:, -1:], whole)


def test_rows_of_padding_that_are_repeated_have_states_of_their_own() -> None:
    model, ids = tiny("qwen3_next"), long_prompt(9, rows=4)
    mask = torch.ones_like(ids)
    mask[:2, 0] = 0
    ids[3, 0] = ids[2, 0]
    with torch.no_grad(), enable(model) as engine:
        whole = model(ids, attention_mask=mask).logits[:, -1:]
        gc.collect()
        cache = DynamicCache(config=model.config)
        model(ids[[0, 2], :1], attention_mask=mask[[0, 2], :1], past_key_values=cache)
        cache.batch_repeat_interleave(2)
        got = model(ids[:, 1:], attention_mask=mask, past_key_values=cache).logits
        assert engine.num_states == 4
        same(got[:, -1:], whole)
        more = {"attention_mask": torch.cat([mask, mask[:, -2:]], 1), "past_key_values": cache}
        got = model(ids[:, :2], **more).logits
        ids = torch.cat([ids, ids[:, :2]], 1)
        same(got, model(ids, attention_mask=more["attention_mask"]).logits[:, -2:])


def test_threads_share_a_pool_of_states() -> None:
    model = tiny("qwen3_next")
    prompts = [{"input_ids": long_prompt(n)} for n in (3, 40, 5, 12)]
    hows: list[dict[str, Any]] = [{}, {"prompt_lookup_num_tokens": 4}, {"num_beams": 2}, {}]
    cases = list(zip(prompts, hows, strict=True))
    expected = [generate(model, x, **(h if "num_beams" in h else {})) for x, h in cases]
    got: dict[int, torch.Tensor] = {}
    with enable(model, page_size=4) as engine:

        def work(i: int) -> None:
            got[i] = generate(model, cases[i][0], **cases[i][1])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(got[i], expected[i]) for i in range(4))
        gc.collect()
        assert engine.num_states == engine.num_held == 0


def test_the_pool_grows_under_a_live_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("qwen3_next"), long_prompt(9)
    with torch.no_grad(), enable(model) as engine:
        whole = model(ids).logits
        gc.collect()
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(ids[:, :6], past_key_values=cache)
        before = engine.state_bytes
        other = model(long_prompt(5, rows=7)).past_key_values
        assert engine.state_bytes > before
        cache.crop(-3)  # what was recorded has moved too
        same(model(ids[:, 3:], past_key_values=cache).logits, whole[:, 3:])

        def full(*args: Any, **more: Any) -> Any:
            raise RuntimeError("out of memory")

        monkeypatch.setattr("attn_core.integrations.transformers.states.StatePool", full)
        with pytest.raises(OutOfPagesError, match=r"states of \d+ requests in 1 linear layers"):
            other.batch_repeat_interleave(3)
        monkeypatch.undo()
        assert other.get_seq_length() == 5
        other.batch_repeat_interleave(3)


def test_states_outside_of_their_model_are_refused() -> None:
    model, ids = tiny("qwen3_next"), long_prompt(4)
    with torch.no_grad():
        with enable(model) as engine:
            cache = model(ids).past_key_values
            with pytest.raises(UnsupportedError, match="cannot be copied"):
                copy.deepcopy(cache)
            with pytest.raises(UnsupportedError, match="cannot be offloaded"):
                cache.layers[0].offload()
            with pytest.raises(UnsupportedError, match="call the model, not its layers"):
                model.model.layers[0].linear_attn(torch.zeros(1, 1, 64))
        for tokens in (1, 2):
            with pytest.raises(UnsupportedError, match="after disable"):
                model(ids[:, :tokens], past_key_values=cache)
        gone = weakref.ref(engine.dispatcher)
        del engine, cache
        gc.collect()
        assert gone() is None, "a disabled model keeps no pool"


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"])
def test_packed_sequences_are_refused_before_a_state_is_overwritten(name: str) -> None:
    """What FlashAttention's collators give; a state would run from one sequence into the next."""
    model, ids = tiny("qwen3_next"), long_prompt(9)
    marks = torch.tensor([[0, 0, 1, 1]] if name == "seq_idx" else [0, 2, 4], dtype=torch.int32)
    with torch.no_grad(), enable(model):
        cache = model(ids[:, :5]).past_key_values
        with pytest.raises(UnsupportedError, match=f"{name}: several sequences packed in a row"):
            model(ids[:, 5:], past_key_values=cache, **{name: marks})
        got = model(ids[:, 5:], past_key_values=cache).logits
        same(got, model(ids).logits[:, 5:])


@pytest.mark.parametrize("name", TWO)
def test_a_gate_that_changed_since_is_refused(name: str) -> None:
    model, ids = tiny(name), long_prompt(4)
    layer = model.model.layers[0]
    gate = layer.linear_attn if name == "qwen3_next" else layer.self_attn.forget_gate
    with torch.no_grad(), enable(model):
        before = model(ids).logits
        gate.dt_bias.add_(0.5)  # in place: it is read when it is used
        assert not torch.equal(model(ids).logits, before)
        gate.A_log = torch.nn.Parameter(gate.A_log.clone())
        with pytest.raises(UnsupportedError, match="layer 0: A_log or dt_bias was replaced"):
            model(ids)


def test_another_activation_of_the_convolution_is_refused() -> None:
    model = tiny("qwen3_next", hidden_act="gelu")
    with pytest.raises(UnsupportedError, match="layer 0: gelu after the short convolution"):
        enable(model)


def test_a_forward_that_another_tool_has_set_comes_back() -> None:
    model, ids = tiny("qwen3_5_text"), long_prompt(4)
    module = model.model.layers[0].linear_attn
    own = module.forward = lambda **named: type(module).forward(module, **named)
    with torch.no_grad():
        expected = model(ids).logits
        with enable(model):
            same(model(ids).logits, expected)
        assert module.forward is own


@pytest.mark.long
@pytest.mark.parametrize("name", TWO)
def test_a_compiled_decoder_has_each_linear_layer_as_one_operator(name: str) -> None:
    graphs: list[int] = []

    def aot_eager(graph: Any, inputs: Any) -> Any:
        graphs.append(sum(str(x.target) == "attn_core.attention" for x in graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model, inputs = tiny(name), inputs_of(name)
    with enable(model, page_size=4) as engine, torch.no_grad():
        expected = generate(model, inputs, max_new_tokens=6)
        model.forward = torch.compile(model.forward, backend=aot_eager)
        assert torch.equal(generate(model, inputs, max_new_tokens=6), expected)
        assert max(graphs) == 2, "the linear and the softmax layer are in one graph"
        made = len(graphs)
        assert torch.equal(generate(model, inputs, max_new_tokens=6), expected)
        assert len(graphs) == made, "another cache, the same graphs"
        gc.collect()
        assert engine.num_states == 0, "no graph holds a cache"
    del model.forward
    torch.compiler.reset()


def test_slots_are_whole() -> None:
    """Every slot is free or held, and by one row alone."""
    taken: list[int] = []
    model = tiny("qwen3_next")
    with torch.no_grad(), enable(model) as engine:
        states: States = engine._memory.states  # type: ignore[assignment]
        a = model(long_prompt(3, rows=2)).past_key_values
        b = model(long_prompt(3, rows=3)).past_key_values
        a.reorder_cache(torch.tensor([1, 1]))
        for cache in (a, b):
            taken += [x for row in cache.layers[0].requests._states._slots for x in row]
        assert sorted(taken + states._free) == list(range(states.pool.num_slots))
        assert len(set(taken)) == engine.num_states == 5
