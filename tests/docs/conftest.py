"""The part of the conformance suite that is quick enough for every run of the tests."""

from __future__ import annotations

import pytest
import torch
from attn_core import Device
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check

SLOW = ("prefill-long", "prefill-edges", "prefill-prefix")  # the float64 oracle takes its time


def _run(spec):
    checks = plan(spec, Device("cpu", "avx2"), {}, passes=10, reduced=True)
    requested = [p for p in checks if p.row is not None and not p.check.id.startswith(SLOW)]
    for one in requested:
        run_check(one, spec, torch.device("cpu"))
    return [p.check.id for p in requested]


@pytest.fixture
def run_quick_checks():
    """Return a function that runs each declared feature of a backend once, on the CPU."""
    return _run
