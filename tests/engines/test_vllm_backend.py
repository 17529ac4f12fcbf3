"""The adapter with vLLM's own layers, builders and passes on a CPU, against a dense softmax."""

import pytest
import torch
from vllm_passes import Pass, attention, builder, engine, error, register_on_cpu

DRAFTS = 3


@pytest.fixture(autouse=True)
def _registered():
    register_on_cpu()


PASSES = {
    "prefill": (lambda: Pass((21, 5, 1), (0, 0, 0)), 0),
    "chunk": (lambda: Pass((6, 19, 1), (17, 0, 33)), 0),
    "decode": (lambda: Pass((1, 1, 1), (16, 40, 0)), 0),
    "mixed": (lambda: Pass((1, 1, 18, 3), (30, 15, 16, 0)), 0),
    "padded": (lambda: Pass((6, 19), (17, 0), padding=7), 0),
    "chain": (lambda: Pass((4, 4, 4), (16, 40, 1)), DRAFTS),
    "chain and prefill": (lambda: Pass((4, 4, 20), (16, 33, 2)), DRAFTS),
    "short chains": (lambda: Pass((2, 2, 3), (16, 33, 2)), DRAFTS),
    "decode with drafts": (lambda: Pass((1, 1), (16, 33)), DRAFTS),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_a_dense_softmax(name):
    torch.manual_seed(0)
    make, drafts = PASSES[name]
    config = engine(drafts)
    module = attention(config)
    assert error(config, builder(config, module), make(), module) < 1e-5
