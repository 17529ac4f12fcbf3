"""A step of a draft model's tree attends with the sinks of its call; needs no SGLang."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer

HEADS, DIM, TOPK = 2, 16, 2
BASE = "sglang.srt.layers.attention.base_attn_backend"
OWN = "attn_core.integrations.sglang"


@pytest.fixture
def draft_trees(monkeypatch):
    """The module, imported over an empty base class of SGLang and forgotten afterwards."""
    base = ModuleType(BASE)
    base.AttentionBackend = type("AttentionBackend", (), {})
    monkeypatch.setitem(sys.modules, BASE, base)
    importers = [f"{OWN}.{name}" for name in ("backend", "drafts", "draft_trees")]
    before = {name: sys.modules.pop(name, None) for name in importers}
    yield importlib.import_module(importers[-1])
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def test_a_step_takes_the_sinks_of_the_call(draft_trees):
    """SGLang's models hand their parameter on, where the layer holds a detached view of it."""
    sinks = torch.nn.Parameter(torch.randn(HEADS))
    layer = AttentionLayer(
        layer_id=0, num_q_heads=HEADS, num_kv_heads=1, head_dim=DIM, v_head_dim=DIM, scale=0.25,
        sinks=sinks.detach(),
    )  # fmt: skip
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        cu_seqlens_q=torch.tensor([0, TOPK], dtype=torch.int32),
        positions=torch.full((TOPK,), 7),
        max_q_len=TOPK,
        spec=SpecInfo(topk=TOPK, num_draft_tokens=TOPK, tree_mask=torch.eye(TOPK).bool()[None]),
    )
    called = []

    def forward(q, k, v, own, *args, **kwargs):
        called.append(own)
        return q + own.sinks[:, None]

    own = SimpleNamespace(
        _pass=(batch, None), layers={0: layer}, dispatcher=SimpleNamespace(forward=forward)
    )
    module = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, v_head_dim=DIM, qk_head_dim=DIM)
    step = draft_trees.TreeStep(own, TOPK)
    q = torch.randn(TOPK, HEADS * DIM)
    for values in (sinks.detach(), torch.ones(HEADS)):  # the same memory, then other numbers
        out = step.forward_decode(q, None, None, module, None, sinks=values)
        torch.testing.assert_close(out, q + values.repeat_interleave(DIM))
        assert called[-1].sinks.data_ptr() == values.data_ptr()
        assert own.layers[0] is called[-1]
