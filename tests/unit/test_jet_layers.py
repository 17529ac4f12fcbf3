"""The linear layers of Jet-Nemotron: from its config to the recurrence, V wider than K."""

import dataclasses
from pathlib import Path

import pytest
import torch
from attn_core import (
    HybridDispatcher,
    KVPool,
    LinearLayer,
    Overrides,
    Speculation,
    StatePool,
    load_plugins,
    parse_device,
    select,
)
from attn_core.model_config import read_config, requirements_from_config
from linear_passes import M, close, expected, gate, inputs, make_batch, speculation
from linear_serving import forward
from recording import LAYERS

CONFIG = Path(__file__).parent.parent / "data" / "configs" / "jet-nemotron-2b.json"
EXACT = 5e-5  # of a run in float32, whose gates are summed over a chunk


@pytest.fixture
def served():
    """Return a dispatcher as the config asks for it, and a layer as the model makes it."""
    torch.manual_seed(0)
    needs = requirements_from_config(
        read_config(CONFIG), dtype="float32", speculation=Speculation(num_draft_tokens=3)
    )
    registry = load_plugins()
    overrides = Overrides(attention_backend="torch_native")
    needs = dataclasses.replace(needs, page_size=4)  # of make_batch
    selection = select(needs, parse_device("cpu:avx2"), registry, {}, overrides)
    [jet] = needs.linear_layers
    layer = LinearLayer(
        layer_id=0, num_k_heads=12, num_v_heads=12, head_k_dim=96, head_v_dim=256, qk_norm=1e-6
    )
    layer = dataclasses.replace(layer, gate=gate(layer))
    assert jet == layer.requirements
    states = StatePool([layer], num_slots=4, num_drafts=3)
    pages = KVPool(LAYERS, num_pages=5, page_size=selection.page_size, kv_cache_dtype="fp32")
    dispatcher = HybridDispatcher.from_selection(
        selection, registry, LAYERS, pages, linear_layers=[layer], states=states
    )
    return dispatcher, layer, states


def test_a_prompt_a_token_and_drafts_are_the_recurrence(served):
    dispatcher, layer, states = served
    lens, slots = [70, 3], (2, 1)
    fresh = torch.tensor([True, True])
    tensors = inputs(layer, 73)
    out, _ = forward(
        dispatcher, make_batch(M.EXTEND, lens, slots, state_fresh=fresh), tensors, layer
    )
    wanted = expected(tensors, lens, layer, [None, None])
    close(out, torch.cat([o for o, _ in wanted]), EXACT)
    last = [s[-1] for _, s in wanted]

    tensors = inputs(layer, 2)
    out, _ = forward(dispatcher, make_batch(M.DECODE, [1, 1], slots), tensors, layer)
    wanted = expected(tensors, [1, 1], layer, last)
    close(out, torch.cat([o for o, _ in wanted]), EXACT)
    last = [s[-1] for _, s in wanted]

    tensors = inputs(layer, 6)
    batch = make_batch(M.TARGET_VERIFY, [3, 3], slots, spec=speculation(3))
    out, metadata = forward(dispatcher, batch, tensors, layer)
    wanted = expected(tensors, [3, 3], layer, last)
    close(out, torch.cat([o for o, _ in wanted]), EXACT)
    dispatcher.commit(batch, metadata, torch.tensor([1, -1]))
    close(states.states.state[0, 2], wanted[0][1][1], EXACT)
    close(states.states.state[0, 1], last[1], EXACT)
