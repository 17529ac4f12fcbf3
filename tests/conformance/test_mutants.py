"""The suite kills every planted fault, and lets the backend without a fault pass."""

from dataclasses import replace

import mutants
import pytest
import torch
from attn_core.capabilities import Device
from attn_core.testing.budget import CheckFailed
from attn_core.testing.plan import plan
from attn_core.testing.runner import report, run_all, run_check
from reference import spec_of

HERE, CPU = Device("cpu"), torch.device("cpu")


def spec_for(mutant):
    spec = spec_of(fused=mutant in mutants.WRITERS)
    return replace(spec, create=f"mutants:{mutant.__name__}")


def killer(spec):
    """Run checks until one fails and return its verdict, None where all pass."""
    for planned in plan(spec, HERE, {}, passes=60):
        if planned.row is not None:
            try:
                run_check(planned, spec, CPU)
            except CheckFailed as verdict:
                return str(verdict)
    return None


def test_there_are_enough_faults():
    assert len(mutants.MUTANTS) >= 30
    assert len({m.__name__ for m in mutants.MUTANTS}) == len(mutants.MUTANTS)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.__name__)
def test_a_fault_is_killed(mutant):
    assert killer(spec_for(mutant)) is not None


@pytest.mark.parametrize("fused", [False, True])
def test_no_fault_passes(fused):
    spec = spec_of(fused=fused)
    outcomes = run_all(plan(spec, HERE, {}, passes=60), spec, CPU)
    assert [o.detail for o in outcomes if o.status == "failed"] == []
    cells = report(outcomes, spec, HERE, {})
    assert {c for found in cells.values() for c, r in found.items() if r.problem} == set()
