"""Two real backends of a CPU over one cache: passes of different sizes take different ones."""

from __future__ import annotations

import pytest
import torch
from adaptive_passes import BATCHES, DRAFTS, LONGEST, M, first_pair
from attn_core.plugins.registry import Registry
from attn_core.runtime.picks import picks
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import probe_cpu

NAMES = ("intel_amx", "torch_native")  # the first is said to be quick, the second to be steady
ROLES = {M.DECODE: "decode", M.TARGET_VERIFY: "verify", M.EXTEND: "prefill"}


@pytest.fixture(scope="module", params=["this CPU", "plugins with graphs"])
def passes(request):
    registry = plugins() if "graphs" in request.param else None
    made = {"dtype": "bf16", "page_size": 16, "registry": registry, "graphs": registry is not None}
    found = first_pair([NAMES], probe_cpu(), torch.device("cpu"), **made)
    return found or pytest.skip("this CPU has no AMX, or intel_amx is not installed")


def plugins():
    """Two plugins of a backend that replays its plans with other requests."""
    row = Capabilities(
        kind="mha", device="any", dtypes={"bf16"}, kv_dtypes={"bf16"}, priority=1, lse=True,
        max_verify_topk=1, cuda_graph="uniform",
    )  # fmt: skip
    specs = [BackendSpec(name=n, capabilities=[row], create="reference:Reference") for n in NAMES]
    return Registry(backends={("softmax", s.name): s for s in specs})


@pytest.mark.parametrize(("mode", "new"), [(M.DECODE, 1), (M.TARGET_VERIFY, DRAFTS), (M.EXTEND, 5)])
def test_the_backend_changes_with_the_size_and_the_answer_does_not(passes, mode, new):
    quick, steady = NAMES
    assert passes.run(mode, 1, 32, new) == {quick}
    assert passes.run(mode, BATCHES[-1], LONGEST - 1, new) == {steady}
    assert passes.run(mode, 1, 40, new, seed=1) == {quick}
    kinds = [k for k in passes.dispatcher.passes if k.role == ROLES[mode]]
    assert {(k.backend, k.requests, k.longest) for k in kinds} == {
        (quick, 1, 32),
        (steady, BATCHES[-1], LONGEST // 2),
    }
    assert not any(k.captured for k in kinds)


def test_a_captured_size_has_a_graph_for_each_pick(passes):
    quick, steady = NAMES
    if not passes.dispatcher.captured:
        pytest.skip("its rows have no graphs")
    passes.capture()
    for seed, (mode, new) in enumerate([(M.DECODE, 1), (M.TARGET_VERIFY, DRAFTS)]):
        for requests in (1, 3, BATCHES[-1]):  # 3 are padded to 4
            before = dict(passes.dispatcher.passes)
            assert passes.run(mode, requests, 8, new, seed) == {quick}
            assert passes.run(mode, requests, LONGEST - 1, new, seed) == {steady}
            assert passes.run(mode, requests, 9, new, seed + 9) == {quick}
            after = passes.dispatcher.passes
            assert all(k.captured for k, n in after.items() if n != before.get(k, 0))


def test_the_picks_are_said_in_a_table(passes):
    said = picks(passes.selection)
    for name in NAMES:
        assert name in said
    assert "verify" in said
    assert "ATTN_ADAPTIVE=0" in said
