"""Passes that vLLM may make and that no case names: drawn, against a dense softmax."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from vllm_on_cpu import register_on_cpu
from vllm_passes import BLOCK, CONTEXT, ROWS, Pass, attention, builder, engine, error

DRAFTS = 3
EDGES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1)


@pytest.fixture(autouse=True)
def _registered():
    register_on_cpu()


@dataclass
class OddPass(Pass):
    """A pass whose tables name vLLM's null block where a window has left a block behind.

    window: of the layer, 0 without. unpadded: idle requests add no rows of padding.
    """

    window: int = 0
    unpadded: bool = False

    def common(self):
        found = super().common()
        if self.window:
            tables = self.tables.clone()
            for row, cached in enumerate(self.cached):
                tables[row, : max(0, cached - self.window + 1) // BLOCK] = 0
            found = replace(found, block_table_tensor=tables)
        if self.unpadded:
            tokens = sum(self.new)
            positions = found.positions[:tokens]
            found = replace(found, num_actual_tokens=tokens, positions=positions)
        return found


def drawn(seed):
    """Return a pass, the drafts of its requests, and what the layer has: window, sinks, cap."""
    draw = random.Random(seed)
    drafts = draw.choice((0, 0, DRAFTS))
    kinds = draw.choice(((1,), (1, 0), (0,), (drafts + 1,), (drafts + 1, 1, 0)))
    new = [draw.choice(kinds) or draw.choice((1, 2, 3, 15, 16, 17, draw.randint(1, 60)))
           for _ in range(draw.randint(1, ROWS - 2))]  # fmt: skip
    cached = [
        draw.choice((*EDGES, draw.randint(0, 90), CONTEXT - n if draw.random() < 0.2 else 0))
        for n in new
    ]
    rows = sorted(zip(new, cached, strict=True), key=lambda row: row[0] > drafts + 1)
    used, kept = 0, []  # vLLM runs no more than its blocks hold
    for n, c in rows:
        used += -(-(n + c) // BLOCK)
        if used < 47:
            kept.append((n, c))
    new, cached = zip(*kept, strict=True)
    window = draw.choice((None, None, 1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 40))
    more = {"window": window} if window else {}
    if draw.random() < 0.3:
        more["cap"] = 5.0
    if draw.random() < 0.3:
        more["sinks"] = torch.randn(4)
    uniform = len(set(new)) == 1 and new[0] in (1, drafts + 1)
    idle = draw.choice((0, 0, 1, 2)) if uniform else 0
    made = OddPass(
        new, cached, window=window or 0, idle=idle, unpadded=draw.random() < 0.5,
        padding=0 if idle else draw.choice((0, 0, 1, 7)),
    )  # fmt: skip
    return made, drafts, more


@pytest.mark.parametrize("seed", range(16))
def test_a_drawn_pass_is_a_dense_softmax(seed):
    torch.manual_seed(seed)
    made, drafts, more = drawn(seed)
    config = engine(drafts)
    names = {"window": "per_layer_sliding_window", "cap": "logits_soft_cap", "sinks": "sinks"}
    module = attention(config, **{names[name]: value for name, value in more.items()})
    assert error(config, builder(config, module), made, module, **more) < 1e-5


def test_requests_without_tokens_do_not_make_drafts_of_one_a_decode_pass_of_all():
    """Four drafts of one request and three requests without tokens: as many of both."""
    torch.manual_seed(0)
    config = engine(DRAFTS)
    module = attention(config)
    made = OddPass((DRAFTS + 1,), (17,), idle=DRAFTS, unpadded=True)
    assert error(config, builder(config, module), made, module) < 1e-5
