"""Models of sparse MLA (DSA): what their indexers select is what their layers attend to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from attn_core.errors import OutOfPagesError, UnsupportedError  # noqa: E402
from attn_core.integrations.transformers import Engine, enable  # noqa: E402
from attn_core.runtime.batch import ForwardMode  # noqa: E402
from attn_core.selection.result import NoBackendError  # noqa: E402
from tiny_models import NEW, SPARSE_MLA, generate, inputs_of, tiny  # noqa: E402

TOPK = 5
ULP = 2**-23


@pytest.fixture(params=SPARSE_MLA)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def text_of(name: str, rows: int = 2, tokens: int = 40) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(2, 110, (rows, tokens))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bound: 64 roundings of the largest logit; another selection is off by a million."""
    assert (got - expected).abs().max() <= 64 * ULP * expected.abs().max()


def in_chunks(model: Any, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    cache, logits, start = None, [], 0
    with torch.no_grad():
        for size in sizes:
            out = model(ids[:, start : start + size], past_key_values=cache, use_cache=True)
            cache, start = out.past_key_values, start + size
            logits.append(out.logits)
    return torch.cat(logits, 1)


def eager_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
    return logits


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_a_prompt_in_chunks_gives_the_logits_of_eager(name: str, page_size: int) -> None:
    """The first chunk attends to all keys, later ones select, and so do passes of one token."""
    model, ids = tiny(name), text_of(name)
    expected = eager_logits(model, ids)
    with enable(model, page_size=page_size):
        for sizes in ([40], [3, 2, 1, 20, 1, 13], [5, 35], [6, 1, 1, 32]):
            close(in_chunks(model, ids, sizes), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_neither_stored_nor_selected(name: str, side: str) -> None:
    model, ids, lens = tiny(name), text_of(name, rows=3, tokens=20), (20, 11, 2)
    alone = [eager_logits(model, ids[i : i + 1, :n])[0] for i, n in enumerate(lens)]
    mask = torch.zeros_like(ids)
    padded = torch.zeros_like(ids)
    places = [slice(20 - n, 20) if side == "left" else slice(0, n) for n in lens]
    for i, (n, place) in enumerate(zip(lens, places, strict=True)):
        mask[i, place], padded[i, place] = 1, ids[i, :n]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), enable(model, page_size=4) as engine:
        out = model(padded, attention_mask=mask, position_ids=positions, use_cache=True)
        assert engine.num_held == sum(-(-n // 4) for n in lens)
    for actual, place, expected in zip(out.logits, places, alone, strict=True):
        close(actual[place], expected)


def test_the_selection_makes_the_difference(name: str) -> None:
    """Equality would prove nothing if the tiny model did not feel what is left out."""
    model, other = tiny(name), tiny(name, index_topk=TOPK + 1)
    other.load_state_dict(model.state_dict())
    with enable(model, page_size=16), enable(other, page_size=16):
        assert not torch.equal(*(generate(m, inputs_of(name)) for m in (model, other)))


def test_each_family_rotates_its_index_keys_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3.2 rotates halves, GLM-5 neighbours; the other way gives other tokens."""
    from attn_core.integrations.transformers import indexers

    model = tiny("deepseek_v32")
    with enable(model, page_size=16):
        expected = generate(model, inputs_of("deepseek_v32"))
        other = {"DeepseekV32Indexer": "apply_rotary_pos_emb_interleave"}
        monkeypatch.setattr(indexers, "_ROTATIONS", other)
        assert not torch.equal(generate(model, inputs_of("deepseek_v32")), expected)


class Watch:
    """Record what the layers of an engine select and attend to."""

    def __init__(self, engine: Engine) -> None:
        self.selected: list[tuple[ForwardMode, int, torch.Tensor | None]] = []
        self.attended: list[tuple[ForwardMode, int, torch.Tensor | None]] = []
        choose, forward = engine.dispatcher.index_topk, engine.dispatcher.forward

        def index_topk(q: Any, k: Any, w: Any, layer: Any, batch: Any, plan: Any) -> Any:
            result = choose(q, k, w, layer, batch, plan)
            self.selected.append((batch.forward_mode, layer.layer_id, result))
            return result

        def attend(q: Any, k: Any, v: Any, layer: Any, batch: Any, plan: Any, **how: Any) -> Any:
            self.attended.append((batch.forward_mode, layer.layer_id, how.get("topk_indices")))
            return forward(q, k, v, layer, batch, plan, **how)

        engine.dispatcher.index_topk = index_topk  # type: ignore[method-assign]
        engine.dispatcher.forward = attend  # type: ignore[method-assign, assignment]


def test_a_layer_that_shares_attends_to_what_the_layer_before_selected() -> None:
    model, ids = tiny("glm_moe_dsa"), text_of("glm_moe_dsa", rows=1, tokens=12)
    with enable(model, page_size=4) as engine:
        watch = Watch(engine)
        in_chunks(model, ids, [11, 1])
        pool = engine.dispatcher.caches
        stored = [pool.layer(i).index is not None for i in range(4)]
        assert stored == [True, True, False, True]
    assert [layer for _, layer, _ in watch.selected] == [0, 1, 3] * 2
    assert [layer for _, layer, _ in watch.attended] == [0, 1, 2, 3] * 2
    for start, modes in ((0, ForwardMode.EXTEND), (1, ForwardMode.DECODE)):
        made = {x: s for m, x, s in watch.selected[3 * start : 3 * start + 3] if m is modes}
        used = {x: s for m, x, s in watch.attended[4 * start : 4 * start + 4] if m is modes}
        assert [used[x].tolist() for x in range(4)] == [made[x].tolist() for x in (0, 1, 1, 3)]
        assert made[1].tolist() != made[0].tolist()


def test_a_short_prompt_attends_to_all_keys_and_stores_its_index_keys(name: str) -> None:
    model, ids = tiny(name), text_of(name, rows=1, tokens=TOPK + 3)
    with enable(model, page_size=4) as engine:
        watch = Watch(engine)
        in_chunks(model, ids, [TOPK, 1, 1, 1])
    counts = [None if s is None else (s >= 0).sum(1).tolist() for _, _, s in watch.attended]
    layers = len(engine.layers)
    assert counts == [None] * layers + [[TOPK]] * (3 * layers)


def test_index_keys_have_the_precision_of_the_model(name: str) -> None:
    """In bfloat16 transformers keeps them so, too; bfloat16 keys in float32 would select others."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with enable(tiny(name).to(dtype), page_size=16) as engine:
            index = engine.dispatcher.caches.layer(0).index
            assert index is not None
            assert (index.dtype, index.shape[1:]) == (dtype, (16, 32))


def test_a_failed_pass_leaves_the_cache_as_it_was(name: str) -> None:
    """What it wrote lies behind every length, index keys too."""
    model, ids = tiny(name), text_of(name, rows=1, tokens=24)
    expected = eager_logits(model, ids)
    with torch.no_grad(), enable(model, page_size=4, num_pages=7) as engine:
        cache = model(ids[:, :16], use_cache=True).past_key_values
        with pytest.raises(OutOfPagesError):
            model(torch.cat([ids, ids], 1), past_key_values=cache)
        norm = model.model.norm.forward
        model.model.norm.forward = lambda x: 1 / 0
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :5], past_key_values=cache)
        model.model.norm.forward = norm
        close(model(ids[:, 16:], past_key_values=cache).logits, expected[:, 16:])
        cache.crop(-12)
        close(model(ids[:, 12:], past_key_values=cache).logits, expected[:, 12:])
        assert engine.num_held == 6


@pytest.mark.long
def test_a_compiled_model_selects_and_attends_in_one_operator_each() -> None:
    types = ["full", "shared"]  # two layers without experts
    how = {"num_hidden_layers": 2, "indexer_types": types, "first_k_dense_replace": 2}
    model, ids = tiny("glm_moe_dsa", **how), text_of("glm_moe_dsa", tokens=16)
    expected, graphs = eager_logits(model, ids), []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    with enable(model, page_size=4):
        model.forward = torch.compile(model.forward, backend=backend)
        close(in_chunks(model, ids, [4, 11, 1]), expected)
    torch.compiler.reset()
    calls = [sum(x.startswith("attn_core.attention") for x in graph) for graph in graphs]
    assert set(calls) <= {0, 3}  # the decoder is one graph: a selection and two attentions
    assert 3 in calls


def test_what_does_not_run_is_refused(name: str) -> None:
    model, inputs = tiny(name), inputs_of(name)
    expected = generate(model, inputs, max_new_tokens=4)
    indexer = model.model.layers[0].self_attn.indexer
    with enable(model, page_size=16):
        indexer.index_topk = 7
        with pytest.raises(UnsupportedError, match=r"layer 0 selects 7 keys, .* enabled for 5"):
            generate(model, inputs)
        indexer.index_topk = TOPK
        with pytest.raises(UnsupportedError, match="Indexer runs without a paged cache"):
            indexer(torch.zeros(1, 1, 64), torch.zeros(1, 1, 32), None, None, None)
        with pytest.raises(UnsupportedError, match="position_ids that restart"):
            model(torch.ones(1, 4).long(), position_ids=torch.tensor([[0, 1, 0, 1]]))
        with pytest.raises(UnsupportedError, match=r"an attention_mask of \(1, 1, 4, 4\)"):
            model(torch.ones(1, 4).long(), attention_mask=torch.ones(1, 1, 4, 4))
    assert torch.equal(generate(model, inputs, max_new_tokens=4), expected)  # given back
    assert "forward" not in vars(indexer)
    with pytest.raises(
        NoBackendError, match=r"head_dim 48/32 in fp8_e4m3 \(supports latents by 128"
    ):
        enable(model, kv_cache_dtype="fp8_e4m3")
    model.model.layers[0].self_attn.indexer = None
    with pytest.raises(UnsupportedError, match=r"layers \[1.* have an indexer; the first layer"):
        enable(model)

    class OtherIndexer(torch.nn.Module):
        pass

    model.model.layers[0].self_attn.indexer = OtherIndexer()
    with pytest.raises(UnsupportedError, match="layer 0 selects keys by a OtherIndexer of test"):
        enable(model)
    assert len(generate(tiny(name), inputs)[0]) == 12 + NEW
