"""A shadow of triton on a GPU: nothing to find in a right backend, a planted fault is found.

Run: `pytest tests/device/test_shadow.py`.
"""

import json
import os
import pathlib
import sys
import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from attn_core import GraphRunner, Shadow, cli
from attn_core.backends.triton.backend import Triton
from attn_core.runtime.batch import ForwardMode
from faulty import LONG, Served, layers

M = ForwardMode
PASSES = [
    (M.EXTEND, [5, 300, 1], [5, 577, 1030]),
    (M.DECODE, [1, 1, 1], [5, 577, 1030]),
    (M.TARGET_VERIFY, [4, 4], [50, 1017]),
]
SHAPES = {
    "plain": {},
    "window": {"sliding_window": 33},
    "cap and sinks": {"logit_cap": 20.0, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
}


def served(shadow=None, kind="mha", shape="plain", **more):
    changes = dict(SHAPES[shape])
    if "sinks" in changes:
        changes["sinks"] = changes["sinks"].cuda()
    dims = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 128, "v_head_dim": 128}
    if kind == "mla":
        dims = {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
    every = layers(**dims, scale=dims["head_dim"] ** -0.5, **changes)
    return Served(
        "triton", shadow, kind=kind, every_layer=every, dtype="bf16", page_size=64, device="cuda",
        **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shape", "store"),
    [
        *(("mha", shape, None) for shape in SHAPES),
        ("mha", "plain", "fp8_e4m3"),
        ("mla", "plain", None),
    ],
)
def test_right_backends_do_not_differ(kind, shape, store, tmp_path):
    shadow = Shadow("torch_native", every=1, folder=tmp_path)
    x = served(shadow, kind, shape, store=store)
    passes = PASSES[:2] if kind == "mla" else PASSES  # its row at this page verifies chains alone
    for mode, queries, keys in passes:
        x.run(mode, queries, keys, return_lse=True)
    calls = 2 * len(passes)
    assert (shadow.difference, shadow.problem, shadow.compared) == (None, "", calls)


class Off(Triton):
    """Answers 5 % too much for requests of more than 100 tokens."""

    def forward(self, q, k, v, layer, cache, batch, metadata, **kwargs):
        actual = super().forward(q, k, v, layer, cache, batch, metadata, **kwargs)
        out = actual[0] if isinstance(actual, tuple) else actual
        long = batch.views[layer.view].seq_lens > LONG
        of = torch.repeat_interleave(long, batch.cu_seqlens_q.diff())
        out.mul_(torch.where(of, 1.05, 1.0)[:, None, None].to(out.dtype))
        return actual


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_fault_is_found_and_replayed(kind, tmp_path, monkeypatch, capsys):
    shadow = Shadow("torch_native", every=1, folder=tmp_path)
    x = served(shadow, kind)
    backend = x.dispatcher.routes["decode"]
    backend.__class__ = Off
    x.run(M.DECODE, [1, 1], [50, 100])
    assert shadow.difference is None
    x.run(M.DECODE, [1, 1, 1], [50, 100, 500])
    result = shadow.difference
    assert (result.number, result.layer, result.request) == (1, 0, 2)
    assert {n: v.wrong for n, v in result.verdicts.items()} == {
        "triton": True,
        "torch_native": False,
    }
    monkeypatch.setattr(sys, "argv", ["attn", "replay", str(result.file), "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code  # the installed triton is right
    said = json.loads(capsys.readouterr().out)["backends"]
    assert not said["triton"]["now"]["wrong"]
    assert said["triton"]["recorded"]["wrong"]


def test_a_capture_is_left_alone(tmp_path):
    shadow = Shadow("torch_native", every=1, folder=tmp_path)
    x = served(shadow)
    runner = GraphRunner(x.dispatcher, batch_sizes=[2], max_seq_len=640, max_query_len=4)

    def step(batch, metadata, q, k, v):
        return x.dispatcher.forward(q, k, v, x.layers[0], batch, metadata)

    q, k, v = (torch.randn(2, h, 128, device="cuda").bfloat16() for h in (4, 2, 2))
    runner.capture(M.DECODE, step, inputs=(q, k, v))
    runner.replay(x.batch(M.DECODE, [1, 1], [9, 600]), q, k, v)
    assert (shadow.passes, shadow.compared) == (0, 0)


def test_what_it_costs():
    """Print microseconds of a decode pass of two layers: without, not sampled, sampled."""
    times = {}
    shadows = {"off": None, "not sampled": 10**9, "sampled": 1}
    for name, every in shadows.items():
        shadow = None if every is None else Shadow("torch_native", every=every)
        x = served(shadow, pages=600)
        batch = x.batch(M.DECODE, [1] * 16, [1000] * 16)
        q, k, v = (torch.randn(16, h, 128, device="cuda").bfloat16() for h in (4, 2, 2))

        def step(x=x, batch=batch, q=q, k=k, v=v):
            metadata = x.dispatcher.init_forward_metadata(batch)
            for layer in x.layers:
                x.dispatcher.forward(q, k, v, layer, batch, metadata)

        every_time = []
        for _ in range(60):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            every_time.append((time.perf_counter() - start) * 1e6)
        times[name] = sorted(every_time[20:])[20]
        assert shadow is None or (shadow.difference, shadow.problem) == (None, "")
    print(times)
    if "OUT" in os.environ:
        pathlib.Path(os.environ["OUT"], "cost.json").write_text(json.dumps(times))
