"""ACL graphs, emulated: what a row declares is captured and replayed, all else is refused by name.

The suite replays a pass by calling it again with the metadata of its capture. Here the operations
of the capture are replayed, with the numbers that they were called with.
"""

import pytest
import torch
from attn_ascend import gdn, indexer, sparse
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from npu_graphs import put_in

NPU = {"torch-npu": "2.13.0", "attn-ascend": "0.1.0"}
ASCEND, TRITON = ("ascend", "softmax"), ("triton", "linear")


@pytest.fixture(autouse=True)
def graphs(vendor, monkeypatch):
    """Capture in emulated ACL graphs."""
    return put_in(monkeypatch)


def found(who, wanted):
    """Return a backend's spec and the checks of graphs whose name begins so."""
    spec = load_plugins().get(*who)
    planned = plan(spec, parse_device("npu:910b"), NPU, passes=6)
    asked = [p for p in planned if p.row and p.check.id.startswith(wanted)]
    assert asked, [p.check.id for p in planned if p.row and "graph" in p.check.id]
    return spec, asked


def run(who, wanted):
    spec, asked = found(who, wanted)
    for planned in asked:
        run_check(planned, spec, torch.device("cpu"), arch="910b")


@pytest.mark.parametrize("who", [ASCEND, TRITON], ids=lambda x: x[0])
def test_what_is_captured_is_right_for_other_requests(who, graphs):
    run(who, "graph-")
    assert graphs.captures


def _host_lengths(monkeypatch):
    """Read the lengths of the captured requests on the host."""
    real = indexer.by_torch

    def by_torch(q_index, weights, cache, view, request, last, topk):
        return real(q_index, weights, cache, view, request, torch.tensor(last.tolist()), topk)

    monkeypatch.setattr(indexer, "by_torch", by_torch)


def _slots_of_the_capture(monkeypatch):
    monkeypatch.setattr(gdn.Rows, "refill", lambda self, batch: None)


def _pages_of_the_capture(monkeypatch):
    real, first = sparse._gathered, {}

    def gathered(cache, view, slots, dim):
        kept = first.setdefault((slots.shape, view.page_table.shape), slots.clone())
        return real(cache, view, kept, dim)

    monkeypatch.setattr(sparse, "_gathered", gathered)


@pytest.mark.parametrize(
    ("who", "mistake"),
    [(ASCEND, _host_lengths), (ASCEND, _pages_of_the_capture), (TRITON, _slots_of_the_capture)],
    ids=["lengths on the host", "pages of the capture", "slots of the capture"],
)
def test_what_is_left_of_the_captured_requests_is_seen(who, mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises((CheckFailed, RuntimeError)):
        run(who, "graph-decode")
