"""Passes are picked by size between two backends of a GPU, eager and in CUDA graphs.

Run: `pytest tests/device/test_adaptive.py`. Costs are made up, so that sizes decide and no clock;
every answer is compared with the float64 oracle.
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from adaptive_passes import BATCHES, DRAFTS, LONGEST, M, first_pair
from attn_core.spec.device import probe_device

PAIRS = (("triton", "fa3"), ("triton", "flashinfer"))
SHORT, LONG = 8, LONGEST - 1  # tokens of each request
MODES = [(M.DECODE, 1), (M.TARGET_VERIFY, DRAFTS)]


@pytest.fixture(scope="module", params=[1, 16], ids=["page 1", "page 16"])
def passes(request):
    device = torch.device("cuda")
    found = first_pair(PAIRS, probe_device(), device, dtype="bf16", page_size=request.param)
    if found is None:
        pytest.skip("fa3 or flashinfer beside triton is not installed, or does not fit")
    return found


def names(passes):
    quick, steady = passes.names
    return {quick}, {steady}


@pytest.mark.parametrize(("mode", "new"), [*MODES, (M.EXTEND, 5)])
@torch.no_grad()
def test_eager_passes(passes, mode, new):
    quick, steady = names(passes)
    assert passes.run(mode, 1, SHORT, new) == quick
    assert passes.run(mode, BATCHES[-1], LONG, new) == steady
    assert passes.run(mode, 1, LONG, new, seed=1) == steady
    assert passes.run(mode, 2, SHORT, new, seed=2) == quick


@torch.no_grad()
def test_captured_passes(passes):
    """Each batch size has a graph for short requests and one for long ones."""
    quick, steady = names(passes)
    if passes.runner is None:
        passes.capture()
    before = dict(passes.dispatcher.passes)
    for seed, (mode, new) in enumerate(MODES):
        for requests in (1, 3, BATCHES[-1]):  # 3 are padded to 4
            assert passes.run(mode, requests, SHORT, new, seed) == quick
            assert passes.run(mode, requests, LONG, new, seed) == steady
            assert passes.run(mode, requests, SHORT + 1, new, seed + 9) == quick
    grown = {k: n for k, n in passes.dispatcher.passes.items() if n != before.get(k, 0)}
    assert all(k.captured for k in grown)
    by_size = {(k.requests, k.longest): k.backend for k in grown if k.role == "decode"}
    assert {*by_size.values()} == quick | steady


@torch.no_grad()
def test_one_graph_for_all_lengths_is_that_of_the_workload(passes):
    """What engines do that capture one graph for each batch size."""
    _, steady = names(passes)
    pickers, picked = passes.dispatcher.pickers, {}
    for requests in BATCHES:
        route = pickers.captured(M.DECODE, (requests.bit_length(), 11, 1))
        picked[requests] = route.backend.config.name
    assert {picked[BATCHES[-1]]} == steady  # its workload has long prompts
