"""The suite kills every planted fault, and lets the backends without a fault pass."""

import pathlib
import unittest
from dataclasses import replace
from enum import Enum
from functools import cache

import mutants
import pytest
import torch
from attn_core.errors import AttnError, BackendRunError, UnsupportedError
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import Device, parse_device
from attn_core.testing.plan import plan
from attn_core.testing.runner import report, run_all, run_check
from attn_core.testing.tolerance import CheckFailed
from linear_backend import linear_spec
from mutants.masks import BehindTheWindowReadAtPageOne
from mutants.scores import ScoresInBfloat16
from reference import spec_of
from sparse_reference import sparse_spec
from wrapped import wrapper_spec

HERE, CPU = Device("cpu"), torch.device("cpu")
# The check that a fault fails first, "Fault: check"; it is asked before the others, for speed.
KILLERS = pathlib.Path(__file__).parent / "killers.txt"


class Verdict(Enum):
    """How a check failed: by what was computed, by an error of the contract, or by any other."""

    NUMBER = "number"
    CONTRACT = "contract"
    CRASH = "crash"

    @classmethod
    def of(cls, failure):
        """Judge by what `run_check` raised its CheckFailed from."""
        cause = failure.__cause__
        if isinstance(cause, CheckFailed):
            return cls.NUMBER
        if isinstance(cause, AttnError) and not isinstance(cause, BackendRunError):
            return cls.CONTRACT
        return cls.CRASH


@cache
def checks(spec):
    """The checks of a right backend, each feature in one place."""
    if spec.name == "triton":
        device, libraries = parse_device("cuda:sm90"), {"triton": "3.4"}
        planned = plan(spec, device, libraries, passes=12, reduced=True)
        # the interpreter bears no threads: all launches share its state
        return [p for p in planned if p.check.feature != "threads"]
    planned = plan(spec, HERE, {}, passes=60, reduced=True)
    if spec.family == "linear":  # shapes are no fault of any of these
        planned = [p for p in planned if not p.check.feature.startswith(("dim-", "heads-"))]
    return planned


def spec_for(mutant, dtypes):
    """The declaration of the right backend that a fault is planted in."""
    if mutant in mutants.KERNELS:
        return load_plugins().get("triton")
    if mutant in mutants.SPARSE:
        return sparse_spec(dtypes=dtypes)
    if mutant in mutants.LINEAR:
        return linear_spec()
    if mutant in mutants.WRAPPERS:
        return wrapper_spec(dtypes=dtypes)
    return spec_of(fused=mutant in mutants.WRITERS, dtypes=dtypes)


def named(planned):
    return f"{planned.kind}-{planned.check.id}"


def killers():
    """Return fault → the check that kills it, as written down."""
    return dict(line.split(": ") for line in KILLERS.read_text().splitlines())


def write_down(mutant, check):
    """Write down which check kills a fault, and forget faults that are no more."""
    names = {m.__name__ for m in mutants.MUTANTS}
    known = {name: was for name, was in killers().items() if name in names}
    lines = sorted((known | {mutant.__name__: named(check)}).items())
    KILLERS.write_text("".join(f"{name}: {by}\n" for name, by in lines))


def killed(mutant, dtypes=("fp32", "bf16"), first=None):
    """Run checks until one sees the fault; return it and what it says, None where none does.

    first: the check that is asked before the others, by kind and id. A crash is no verdict on a
    fault: it would be seen without a suite, so the next check is asked.
    """
    spec = spec_for(mutant, dtypes)
    faulty = replace(spec, create=f"{mutant.__module__}:{mutant.__name__}")
    for one in sorted(checks(spec), key=lambda p: named(p) != first):
        if one.row is not None:
            try:
                run_check(one, faulty, CPU)
            except unittest.SkipTest:  # what only a device has the memory for
                continue
            except CheckFailed as failure:
                if Verdict.of(failure) is not Verdict.CRASH:
                    return one, str(failure)
    return None


def test_there_are_enough_faults():
    assert len(mutants.MUTANTS) - len(mutants.WRAPPERS) >= 30
    assert len(mutants.WRAPPERS) >= 8
    assert len(mutants.LINEAR) >= 25
    assert len(mutants.SPARSE) >= 30
    assert len({m.__name__ for m in mutants.MUTANTS}) == len(mutants.MUTANTS)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.__name__)
def test_a_fault_is_killed(mutant, anew):
    """Where checks change on purpose, --anew writes killers.txt anew, for speed alone."""
    result = killed(mutant, first=None if anew else killers().get(mutant.__name__))
    assert result is not None
    if anew:
        write_down(mutant, result[0])


def test_pages_behind_a_window_are_poison_at_every_page_size():
    """Tokens given back one by one: only this check of the reduced suite has pages of one."""
    first = killers()[BehindTheWindowReadAtPageOne.__name__]
    _, verdict = killed(BehindTheWindowReadAtPageOne, first=first)
    assert verdict.startswith("page-window-prefill-bf16-page1: output:")
    assert "not finite" in verdict


# Scores in bfloat16 are no fault there: the budget is measured by a run that has them.
IN_BFLOAT16 = [
    m for m in mutants.MUTANTS if m not in (ScoresInBfloat16, *mutants.KERNELS, *mutants.LINEAR)
]


@pytest.mark.long
@pytest.mark.parametrize("mutant", IN_BFLOAT16, ids=lambda m: m.__name__)
def test_a_fault_is_killed_in_bfloat16_alone(mutant):
    assert killed(mutant, ("bf16",)) is not None


RIGHT = {
    "reference": spec_of(),
    "fused-and-in-parts": replace(spec_of(fused=True), create="in_parts:InParts"),
    "wrapper": wrapper_spec(),
    "sparse": sparse_spec(),
    "linear": linear_spec(),
}


@pytest.mark.parametrize("spec", RIGHT.values(), ids=RIGHT)
def test_no_fault_passes(spec):
    """In every kind what kills a fault in one, and something for each cell of the matrix."""
    kill = {p.check.feature for p in checks(spec) if named(p) in killers().values()}
    chosen, proved = [], set()
    for one in checks(spec):
        cells = {(one.kind, cell) for cell in one.check.cells}
        if one.check.feature in kill or not cells <= proved:
            chosen.append(one)
            proved |= cells if one.row is not None else set()
    passes(chosen, spec)


@pytest.mark.long
@pytest.mark.parametrize("spec", RIGHT.values(), ids=RIGHT)
def test_no_fault_passes_the_whole_suite(spec):
    passes(checks(spec), spec)


def passes(chosen, spec):
    """Run checks on a right backend: none fails, and no declared cell is left unproved."""
    outcomes = run_all(chosen, spec, CPU)
    assert [o.detail for o in outcomes if o.status == "failed"] == []
    cells = report(outcomes, spec, HERE, {})
    assert [r.problem for result in cells.values() for r in result.values() if r.problem] == []


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (CheckFailed("output: largest error 1.0, allowed 0.1"), Verdict.NUMBER),
        (UnsupportedError("window 3 (supports none)"), Verdict.CONTRACT),
        (BackendRunError("its own error is the cause"), Verdict.CRASH),
        (IndexError("list index out of range"), Verdict.CRASH),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_crash_is_no_verdict(error, verdict):
    def fail(bench):
        raise error

    planned = next(p for p in checks(spec_of()) if p.row is not None)
    with pytest.raises(CheckFailed) as failure:
        run_check(replace(planned, check=replace(planned.check, run=fail)), spec_of(), CPU)
    assert Verdict.of(failure.value) is verdict
