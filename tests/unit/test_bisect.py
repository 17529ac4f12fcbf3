"""A failing call is reduced to the least that the fault needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_core import Shadow
from attn_core.errors import UsageError
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import ForwardMode
from attn_core.spec.device import Device
from attn_core.trust.bisect import smallest
from attn_core.trust.files import load, save
from attn_core.trust.replay import replay
from faulty import LONG, Served, layers, registry

M, CPU, REGISTRY = ForwardMode, Device("cpu"), registry()


def failing(name, folder, mode, queries, keys, **more):
    shadow = Shadow("torch_native", every=1, folder=folder, registry=REGISTRY)
    Served(name, shadow, **more).run(mode, queries, keys, return_lse=True)
    return load(shadow.difference.file)


def checked(r, name, path):
    """Save and read the smallest call: its backend is still wrong, and the other right."""
    save(r, path)
    result = {x.name: x for x in replay(load(path), [], REGISTRY, CPU)}
    assert result[name].now.wrong
    assert not result["torch_native"].now.wrong
    return load(path)


@pytest.mark.parametrize(
    ("mode", "queries", "keys", "more"),
    [
        (M.EXTEND, [5, 30, 3, 8], [5, 77, 130, 8], {}),
        (M.DECODE, [1, 1, 1], [99, 160, 130], {"dtype": "bf16", "store": "fp8_e4m3"}),
        pytest.param(M.TARGET_VERIFY, [4, 4], [50, 117], {}, marks=pytest.mark.long),
        (M.EXTEND, [3, 2], [110, 20], {"kind": "mla"}),
    ],
    ids=["extend", "decode over fp8", "tree", "mla"],
)
def test_a_fault_of_long_requests(mode, queries, keys, more, tmp_path):
    """101 tokens of one request, one query and one head: one token less, and it is right."""
    result = smallest(
        failing("lengthy", tmp_path, mode, queries, keys, **more), None, REGISTRY, CPU
    )
    r = checked(result.smallest, "lengthy", tmp_path / "smallest")
    assert r.seq_lens == (LONG + 1,)
    assert r.query_lens == (1,) if mode is not M.TARGET_VERIFY else r.query_lens
    assert (r.layer.num_q_heads, r.layer.num_kv_heads) == (1, 1)
    assert r.setting.kv_cache_dtype == r.setting.dtype
    assert r.spec is None
    assert result.tried < 300


def test_a_fault_of_a_window(tmp_path):
    """The window stays, what is beside it goes; the shortest one needs a token behind it."""
    every = layers(sliding_window=16, logit_cap=20.0, sinks=torch.randn(4))
    r = failing("windowed", tmp_path, M.EXTEND, [5, 30], [40, 77], every_layer=every)
    result = smallest(r, "windowed", REGISTRY, CPU)
    r = checked(result.smallest, "windowed", tmp_path / "smallest")
    assert (r.layer.sliding_window, r.layer.logit_cap, r.layer.sinks) == (1, None, None)
    assert (r.query_lens, r.seq_lens) == ((1,), (2,))


def test_layers_beside_go(tmp_path):
    every = (*layers(count=1), *layers(count=3, sliding_window=9)[1:])
    r = failing("lengthy", tmp_path, M.DECODE, [1], [120], every_layer=every)
    assert len(r.others) == 1
    assert smallest(r, None, REGISTRY, CPU).smallest.others == ()


def test_what_is_right_is_not_bisected(tmp_path):
    r = failing("lengthy", tmp_path, M.DECODE, [1], [120])
    with pytest.raises(UsageError, match="the backend is right here"):
        smallest(r, "torch_native", REGISTRY, CPU)
    known = registry()
    right = replace(known.backends["softmax", "reference"], name="lengthy")
    backends = {**known.backends, ("softmax", "lengthy"): right}
    with pytest.raises(UsageError, match="none of lengthy, torch_native is wrong here"):
        smallest(r, None, type(known)(backends=backends), CPU)
    here = load_plugins()  # without the one that was wrong
    with pytest.raises(
        UsageError, match="none of torch_native is wrong here; lengthy was not run: unknown backend"
    ):
        smallest(r, None, here, CPU)
