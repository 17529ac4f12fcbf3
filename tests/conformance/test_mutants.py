"""The suite kills every planted fault, and lets the backend without a fault pass."""

import pathlib
import unittest
from dataclasses import replace
from functools import cache

import mutants
import pytest
import torch
from attn_core.spec.device import Device
from attn_core.testing.plan import plan
from attn_core.testing.runner import report, run_all, run_check
from attn_core.testing.tolerance import CheckFailed
from reference import spec_of
from wrapped import wrapper_spec

HERE, CPU = Device("cpu"), torch.device("cpu")
# The check that a fault fails first, "Fault: check"; it is asked before the others, for speed.
KILLERS = pathlib.Path(__file__).parent / "killers.txt"


@cache
def checks(spec):
    """The checks of a right backend, each feature in one place."""
    return plan(spec, HERE, {}, passes=60, reduced=True)


def named(planned):
    return f"{planned.kind}-{planned.check.id}"


@cache
def killers():
    return dict(line.split(": ") for line in KILLERS.read_text().splitlines())


def killed(mutant, dtypes=("fp32", "bf16"), first=None):
    """Run checks until one fails; return it and its verdict, None where all pass.

    first: the check that is asked before the others, by kind and id.
    """
    if mutant in mutants.WRAPPERS:
        spec = wrapper_spec(dtypes=dtypes)
    else:
        spec = spec_of(fused=mutant in mutants.WRITERS, dtypes=dtypes)
    faulty = replace(spec, create=f"mutants:{mutant.__name__}")
    for one in sorted(checks(spec), key=lambda p: named(p) != first):
        if one.row is not None:
            try:
                run_check(one, faulty, CPU)
            except unittest.SkipTest:  # what only a device has the memory for
                continue
            except CheckFailed as verdict:
                return one, str(verdict)
    return None


def test_there_are_enough_faults():
    assert len(mutants.MUTANTS) - len(mutants.WRAPPERS) >= 30
    assert len(mutants.WRAPPERS) >= 8
    assert len({m.__name__ for m in mutants.MUTANTS}) == len(mutants.MUTANTS)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.__name__)
def test_a_fault_is_killed(mutant):
    """Where checks change on purpose: python tests/conformance/test_mutants.py, for speed alone."""
    found = killed(mutant, first=killers().get(mutant.__name__))
    assert found is not None
    if mutant in mutants.WRAPPERS:  # it is seen by what it returns, not because the library raised
        assert "declared, but" not in found[1]


def test_pages_behind_a_window_are_poison_at_every_page_size():
    """Tokens given back one by one are nowhere else in a suite with each feature in one place."""
    _, verdict = killed(mutants.BehindTheWindowReadAtPageOne)
    assert verdict.startswith("page-window-prefill-bf16-page1: output:")
    assert "not finite" in verdict


# Scores in bfloat16 are no fault there: the budget is measured by a run that has them.
IN_BFLOAT16 = [m for m in mutants.MUTANTS if m is not mutants.ScoresInBfloat16]


@pytest.mark.long
@pytest.mark.parametrize("mutant", IN_BFLOAT16, ids=lambda m: m.__name__)
def test_a_fault_is_killed_in_bfloat16_alone(mutant):
    assert killed(mutant, ("bf16",)) is not None


RIGHT = {
    "reference": spec_of(),
    "reference-fused": spec_of(fused=True),
    "wrapper": wrapper_spec(),
}


@pytest.mark.parametrize("spec", RIGHT.values(), ids=RIGHT)
def test_no_fault_passes(spec):
    outcomes = run_all(checks(spec), spec, CPU)
    assert [o.detail for o in outcomes if o.status == "failed"] == []
    cells = report(outcomes, spec, HERE, {})
    assert [r.problem for found in cells.values() for r in found.values() if r.problem] == []


if __name__ == "__main__":
    lines = [f"{m.__name__}: {named(killed(m)[0])}\n" for m in mutants.MUTANTS]
    KILLERS.write_text("".join(sorted(lines)))
