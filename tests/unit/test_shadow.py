"""A shadow finds planted faults, writes what reproduces them, and changes nothing else."""

from __future__ import annotations

import dataclasses
import json

import faulty
import pytest
import torch
from attn_core import Shadow
from attn_core.errors import UnknownBackendError, UnsupportedError, UsageError
from attn_core.runtime.batch import ForwardMode
from attn_core.runtime.graphs import GraphRunner
from attn_core.spec.device import Device
from attn_core.trust.files import load, save
from attn_core.trust.judge import Answer, judge
from attn_core.trust.replay import replay
from attn_core.trust.reproducer import some_requests
from faulty import Served, layers, registry

M = ForwardMode
REGISTRY = registry()
PASSES = [
    (M.EXTEND, [5, 30, 1], [5, 77, 130]),
    (M.DECODE, [1, 1, 1], [5, 77, 130]),
    (M.TARGET_VERIFY, [4, 4], [50, 117]),
]


def make(folder, backend="torch_native", **more):
    return Shadow(backend, **{"every": 1, "folder": folder, "registry": REGISTRY, **more})


def found(shadow):
    assert shadow.difference is not None, shadow.problem
    return shadow.difference


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("host", [True, False])
def test_right_backends_do_not_differ(kind, dtype, host, tmp_path):
    shadow = make(tmp_path, "reference")  # takes lengths from the device
    served = Served("torch_native" if host else "lengthy", shadow, kind=kind, dtype=dtype)
    if not host:
        served.dispatcher.routes["decode"].__class__ = faulty.Reference
    for mode, queries, keys in PASSES:
        served.run(mode, queries, keys, return_lse=True, host=host)
    assert (shadow.difference, shadow.problem, shadow.compared) == (None, "", 6)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "more",
    [
        {"store": "fp8_e4m3", "scales": {0: (0.5, 2.0), 1: (0.5, 2.0)}},
        {"store": "fp8_e5m2", "scales": {0: (torch.tensor([0.5]), torch.tensor([2.0]))}},
        {"layout": "NHD", "fused": True},
        {"page_size": 1},
        {"every_layer": layers(sliding_window=20)},
        {"every_layer": layers(logit_cap=5.0, sinks=torch.randn(4))},
    ],
    ids=["fp8", "scales in tensors", "fused write", "slots", "window", "cap and sinks"],
)
def test_a_fault_is_found_in_every_form(more, tmp_path):
    """And the file holds it: replayed, the same backend is wrong again and the other is right."""
    shadow = make(tmp_path)
    pages = {"pages": 400} if more.get("page_size") == 1 else {}
    served = Served("lengthy", shadow, dtype="bf16" if "store" in more else "fp32", **pages, **more)
    served.run(M.DECODE, [1, 1], [100, 77], return_lse=True)
    assert (shadow.difference, shadow.problem) == (None, "")
    served.run(M.EXTEND, [5, 30, 1], [5, 77, 130], return_lse=True)
    said = found(shadow)
    assert (said.number, said.mode, said.layer, said.request) == (1, M.EXTEND, 0, 2)
    assert [name for name, v in said.verdicts.items() if v.wrong] == ["lengthy"]
    again = {x.name: x for x in replay(load(said.file), [], REGISTRY, Device("cpu"))}
    assert again["lengthy"].now.wrong
    assert again["lengthy"].recorded.wrong
    assert again["lengthy"].now.request == 2
    assert not again["torch_native"].wrong
    assert not again["torch_native"].recorded.wrong


@pytest.mark.parametrize(("mode", "queries", "keys"), PASSES)
def test_a_window_by_one_is_found(mode, queries, keys, tmp_path):
    shadow = make(tmp_path)
    Served("windowed", shadow, every_layer=layers(sliding_window=16)).run(mode, queries, keys)
    assert [name for name, v in found(shadow).verdicts.items() if v.wrong] == ["windowed"]


def test_a_shadow_that_is_wrong_itself_is_named(tmp_path):
    shadow = make(tmp_path, "lengthy")
    Served("torch_native", shadow).run(M.DECODE, [1], [130])
    assert [name for name, v in found(shadow).verdicts.items() if v.wrong] == ["lengthy"]
    assert "torch_native is right" in str(shadow.difference)


def test_the_log_sum_exp_is_compared_where_it_is_asked_for(tmp_path):
    shadow = make(tmp_path)
    served = Served("swapped", shadow)
    served.run(M.DECODE, [1, 1], [30, 77])
    assert shadow.difference is None
    served.run(M.DECODE, [1, 1], [30, 77], return_lse=True)
    assert found(shadow).verdicts["swapped"].of == "lse"


def test_outputs_and_cache_are_those_without_a_shadow(tmp_path):
    plain, watched = Served("lengthy"), Served("lengthy", make(tmp_path))
    for mode, queries, keys in PASSES:
        pairs = zip(plain.run(mode, queries, keys), watched.run(mode, queries, keys), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    for layer in plain.layers:
        a, b = plain.pool.layer(layer.layer_id), watched.pool.layer(layer.layer_id)
        assert torch.equal(a.k, b.k)
        assert torch.equal(a.v, b.v)


def test_a_sample_of_each_mode_is_taken_until_the_first_difference(tmp_path):
    shadow = make(tmp_path, every=3)
    served = Served("lengthy", shadow)
    for _ in range(4):
        served.run(M.DECODE, [1], [20])
        served.run(M.EXTEND, [2], [20])
    assert (shadow.passes, shadow.compared) == (8, 2 * 2 * 2)
    reports = []
    shadow = make(tmp_path, report=reports.append)
    served = Served("lengthy", shadow)
    for _ in range(3):
        served.run(M.DECODE, [1], [120])
    assert len(reports) == 1
    assert shadow.compared == 1  # the second layer is no longer looked at
    shadow.difference = None
    served.run(M.DECODE, [1], [120])
    assert [r.number for r in reports] == [0, 3]


def test_captured_passes_are_left_alone(tmp_path):
    shadow = make(tmp_path)
    served = Served("lengthy", shadow)
    runner = GraphRunner(served.dispatcher, batch_sizes=[2], max_seq_len=160, max_query_len=4)

    def step(batch, metadata, q, k, v):
        return served.dispatcher.forward(q, k, v, served.layers[0], batch, metadata)

    q, k, v = (torch.randn(2, h, 32) for h in (4, 2, 2))
    runner.capture(M.DECODE, step, inputs=(q, k, v))
    runner.replay(served.batch(M.DECODE, [1, 1], [9, 130]), q, k, v)
    assert (shadow.passes, shadow.compared) == (0, 0)


def test_padding_is_not_compared(tmp_path):
    """Page 0 holds anything, and backends make of it what they like."""
    served = Served("torch_native", make(tmp_path, "reference"))
    cache = served.pool.layer(0)
    cache.k[0], cache.v[0] = torch.nan, torch.nan
    batch = served.batch(M.DECODE, [1, 1], [20, 1])
    batch.views["full"].page_table[1] = 0
    batch.views["full"].out_cache_loc[1] = 0
    metadata = served.dispatcher.init_forward_metadata(batch)
    q, k, v = (torch.randn(2, h, 32) for h in (4, 2, 2))
    k[1], v[1] = torch.nan, 1e30
    served.dispatcher.forward(q, k, v, served.layers[0], batch, metadata)
    assert served.dispatcher.shadow.difference is None
    assert served.dispatcher.shadow.compared == 1


def test_a_file_stays_below_its_bound(tmp_path):
    shadow = make(tmp_path, max_bytes=100_000)  # the last request takes 84 kB
    served = Served("lengthy", shadow)
    served.run(M.DECODE, [1, 1, 1], [90, 95, 130])
    r = load(found(shadow).file)
    assert (r.seq_lens, r.about["request_of_the_pass"]) == ((130,), 2)
    assert found(shadow).file.stat().st_size < 90_000
    shadow = make(tmp_path, max_bytes=1000)
    Served("lengthy", shadow).run(M.DECODE, [1], [130])
    assert found(shadow).file is None
    assert "max_bytes is 1000" in str(shadow.difference)


def test_what_fails_in_the_shadow_does_not_fail_the_pass(tmp_path, caplog):
    shadow = make(tmp_path, "crashing")
    served = Served("torch_native", shadow)
    assert torch.isfinite(served.run(M.DECODE, [1], [130])[0]).all()
    assert shadow.problem == "crashing: ValueError: no plan"
    assert "compares nothing any more" in caplog.text
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    shadow = make(nowhere)
    Served("lengthy", shadow).run(M.DECODE, [1], [130])
    assert "no file: " in str(found(shadow))


def test_what_cannot_be_compared_is_refused_at_once(tmp_path):
    with pytest.raises(UnknownBackendError, match="unknown backend 'nobody'"):
        make(tmp_path, "nobody")
    with pytest.raises(UsageError, match="every 0"):
        make(tmp_path, every=0)
    with pytest.raises(UsageError, match="no other backend runs passes"):
        Served("torch_native", make(tmp_path))
    with pytest.raises(UnsupportedError, match="triton cannot run this: device cpu"):
        Served("torch_native", make(tmp_path, "triton"))
    shadow = make(tmp_path)
    Served("lengthy", shadow)
    with pytest.raises(UsageError, match="has a dispatcher already"):
        Served("lengthy", shadow)


def test_a_reproducer_is_what_was_saved(tmp_path):
    shadow = make(tmp_path)
    served = Served("lengthy", shadow, every_layer=layers(sliding_window=40, sinks=torch.randn(4)))
    served.run(M.TARGET_VERIFY, [4, 4], [50, 117], return_lse=True)
    r = load(found(shadow).file)
    save(r, tmp_path / "again")
    again = load(tmp_path / "again")
    for f in dataclasses.fields(r):
        if f.name in ("mode", "query_lens", "seq_lens", "setting", "about", "lse"):
            assert getattr(r, f.name) == getattr(again, f.name), f.name
    assert torch.equal(r.cache.k, again.cache.k)
    assert torch.equal(r.layer.sinks, again.layer.sinks)
    assert torch.equal(r.spec.tree_mask, again.spec.tree_mask)
    assert json.dumps(r.about)


def test_fewer_requests_are_judged_as_they_were(tmp_path):
    shadow = make(tmp_path)
    Served("lengthy", shadow).run(M.EXTEND, [5, 30, 3], [5, 77, 130])
    r = load(found(shadow).file)
    alone = some_requests(r, [2, 1])
    answers = {name: Answer(*parts) for name, parts in alone.recorded.items()}
    verdicts = judge(alone, answers)
    assert verdicts["lengthy"].wrong
    assert verdicts["lengthy"].request == 0
    assert not verdicts["torch_native"].wrong
    assert len(alone.cache.k) == 1 + 5 + 9  # page 0, and those that hold 77 and 130 tokens
