"""ACL graphs, emulated: what a row declares is captured and replayed, all else is refused.

The suite replays a pass by calling it again with the metadata of its capture. Here the operations
of the capture are replayed, with the numbers that they were called with.
"""

import dataclasses

import pytest
import torch
from attn_ascend import calls, gdn, indexer, sparse, tasks
from attn_core import ForwardMode, GraphRunner, HybridDispatcher, KVPool, UnsupportedError
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing import case_catalog
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.plan import plan
from attn_core.testing.replay import replayed
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from mla_passes import Pass
from npu_graphs import put_in

NPU = {"torch-npu": "2.13.0", "attn-ascend": "0.1.0"}
ASCEND, TRITON = ("ascend", "softmax"), ("triton", "linear")


@pytest.fixture(autouse=True)
def graphs(vendor, monkeypatch):
    """Capture in emulated ACL graphs."""
    return put_in(monkeypatch)


def run(kind, wanted="graph-"):
    """Run the checks of graphs of a kind whose name begins so; return their names."""
    spec = load_plugins().get(*(TRITON if kind == "gdn" else ASCEND))
    planned = plan(spec, parse_device("npu:910b"), NPU, kinds=(kind,), passes=6)
    requested = [p for p in planned if p.row and p.check.id.startswith(wanted)]
    assert requested
    for one in requested:
        run_check(one, spec, torch.device("cpu"), arch="910b")
    return " ".join(one.check.id for one in requested)


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("mha", ("graph-decode", "graph-decode-window", "graph-chain")),
        ("dsa", ("graph-decode", "graph-chain")),
        ("gdn", ("graph-decode",)),
    ],
)
def test_what_is_captured_is_right_for_other_requests(kind, cases, graphs):
    names = run(kind)
    assert [x for x in cases if x not in names] == []
    assert graphs.captures
    assert (graphs.updates > graphs.captures) == (kind == "mha")


def test_sinks_are_captured(graphs):
    """With them the operator returns the log-sum-exp, too."""
    spec = load_plugins().get("ascend")
    row = next(r for r in spec.capabilities if r.create == "attn_ascend.paged:AscendPaged")
    bench = Bench(spec=spec, row=row, torch_device=torch.device("cpu"), arch="910b")
    case = dataclasses.replace(case_catalog.GRAPHS["mha"]["decode"], sinks=True)
    replayed(bench, case, Point(dtype="bf16", page_size=128))
    assert graphs.updates


def test_the_latent_decode_of_atb_is_not_captured():
    """It reads its lengths on the host, and torch-npu has no update of its tasks."""
    that = Pass("ascend", "mla-decode", arch="910b", page_size=128, heads=(16, 1))
    pool = KVPool([], num_pages=1, page_size=128, kv_cache_dtype="bf16", device="cpu")
    served = HybridDispatcher(dict.fromkeys(("prefill", "decode"), that.backend()), pool)
    runner = GraphRunner(served, batch_sizes=[2], max_seq_len=256)
    with pytest.raises(UnsupportedError, match="on ascend, which is not captured in CUDA graphs"):
        runner.capture(ForwardMode.DECODE, lambda *a: None)


def _host_lengths(monkeypatch):
    """Read the lengths of the captured requests on the host."""
    real = indexer.by_torch

    def by_torch(q_index, weights, cache, view, request, last, topk):
        return real(q_index, weights, cache, view, request, torch.tensor(last.tolist()), topk)

    monkeypatch.setattr(indexer, "by_torch", by_torch)


def _slots_of_the_capture(monkeypatch):
    monkeypatch.setattr(gdn.Rows, "refill", lambda self, batch: None)


def _selection_of_the_capture(monkeypatch):
    real, first = sparse._gathered, {}

    def gathered(cache, view, slots, dim):
        kept = first.setdefault((slots.shape, view.page_table.shape), slots.clone())
        return real(cache, view, kept, dim)

    monkeypatch.setattr(sparse, "_gathered", gathered)


def _lengths_of_the_capture(monkeypatch):
    """Record the event of each task, but leave its lengths as they were."""

    def update(attend, captured, lengths):
        for task in captured:
            task.event.record(None)

    monkeypatch.setattr(tasks, "update", update)


def _refill(*names):
    """Leave a field of the captured calls as it was."""

    def mistake(monkeypatch):
        real = calls.Call.refill

        def refill(self, other):
            kept = {name: getattr(self, name) for name in names}
            kept = {n: list(x) if isinstance(x, list) else x.clone() for n, x in kept.items()}
            real(self, other)
            for name, old in kept.items():
                own = getattr(self, name)
                own[:] = old

        monkeypatch.setattr(calls.Call, "refill", refill)

    return mistake


def _not_waiting(monkeypatch):
    monkeypatch.setattr(torch.npu.Stream, "synchronize", lambda self: None)


def _no_event(monkeypatch):
    monkeypatch.setattr(torch.npu.ExternalEvent, "record", lambda self, stream: None)


def _no_task(monkeypatch):
    """Capture the plain operator, whose lengths stay those of the capture."""
    monkeypatch.setattr(tasks, "capturing", lambda: False)


MISTAKES = {
    "lengths on the host": ("dsa", _host_lengths, "graph-decode"),
    "selection of the capture": ("dsa", _selection_of_the_capture, "graph-decode"),
    "slots of the capture": ("gdn", _slots_of_the_capture, "graph-decode"),
    "lengths of the capture": ("mha", _lengths_of_the_capture, "graph-decode-bf16"),
    "lengths that are not refilled": ("mha", _refill("key_lens"), "graph-decode-bf16"),
    "pages of the capture": ("mha", _refill("table"), "graph-decode-window-bf16"),
    "a mask of the capture": ("mha", _refill("mask"), "graph-decode-window-bf16"),
    "no wait for the replay before": ("mha", _not_waiting, "graph-decode-bf16"),
    "an event that nobody records": ("mha", _no_event, "graph-decode-bf16"),
    "no task": ("mha", _no_task, "graph-decode-bf16"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_left_of_the_captured_requests_is_seen(name, monkeypatch):
    kind, mistake, wanted = MISTAKES[name]
    mistake(monkeypatch)
    with pytest.raises((CheckFailed, RuntimeError, AssertionError)):
        run(kind, wanted)
