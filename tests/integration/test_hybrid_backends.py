"""Prefill and decode of one model on different backends give the tokens of eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from attn_core.integrations.transformers import enable  # noqa: E402
from attn_core.selection.result import Overrides  # noqa: E402

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
NEW = 40
PAIRS = [("torch_native", "flex_attention"), ("flex_attention", "torch_native")]


def tiny(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **TINY, **changes)
    model = transformers.AutoModelForCausalLM
    return model.from_config(config, attn_implementation="eager").eval()


def generate(model: Any) -> torch.Tensor:
    """Continue three prompts of 19, 12 and 3 tokens, padded on the left."""
    torch.manual_seed(1)
    mask = torch.ones(3, 19, dtype=torch.int64)
    mask[1, :7] = 0
    mask[2, :16] = 0
    ids = torch.randint(2, 110, (3, 19)) * mask
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=["flex-decodes", "flex-prefills"])
@pytest.mark.parametrize(("name", "window"), [("llama", None), ("mistral", 8)], ids=str)
def test_tokens_of_a_mixed_pair_equal_eager(
    name: str, window: int | None, prefill: str, decode: str
) -> None:
    model = tiny(name, **({"sliding_window": window} if window else {}))
    expected = generate(model)
    assert len(set(expected[0].tolist())) > 10  # a model that says one word proves nothing
    pair = Overrides(prefill_attention_backend=prefill, decode_attention_backend=decode)
    for page_size in (16, 1):  # flex_attention reads the first in place and gathers the second
        with enable(model, page_size=page_size, overrides=pair) as engine:
            routes = engine.dispatcher.routes
            assert (routes["prefill"].config.name, routes["decode"].config.name) == (
                prefill,
                decode,
            )
            flex = routes["prefill" if prefill == "flex_attention" else "decode"]
            before = flex.compilations
            assert torch.equal(generate(model), expected), page_size
            assert flex.compilations == before
