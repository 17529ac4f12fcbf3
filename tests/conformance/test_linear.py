"""Linear attention against its suite: torch_native on the CPU, triton in its interpreter."""

import json
from dataclasses import replace

import pytest
import torch
from attn_core.cli.app import build_app
from attn_core.errors import BackendNotImplementedError
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import Device, parse_device
from attn_core.testing import LinearSuite, far
from attn_core.testing.checks import templates
from attn_core.testing.harness import Bench
from attn_core.testing.linear_cases import LinearPoint
from attn_core.testing.linear_catalog import CASES, FAR, adapted
from attn_core.testing.linear_checks import linear_templates
from attn_core.testing.linear_passes import run_linear_case
from attn_core.testing.linear_related import far_slots
from attn_core.testing.plan import plan
from attn_core.testing.runner import problems, report, run_all
from attn_core.testing.tolerance import CheckFailed
from linear_backend import ROW, linear_spec
from typer.testing import CliRunner

CPU, HERE = torch.device("cpu"), Device("cpu", "avx2")


class TestTorchNative(LinearSuite):
    name = "torch_native"
    passes = 60
    reduced = True


@pytest.mark.long  # every case in two dtypes, and many over both dtypes of states
class TestTorchNativeInFull(LinearSuite):
    name = "torch_native"


FP32 = LinearPoint(dtype="fp32", state_dtype="fp32")
CASES_BY_NAME = {case.feature: case for case in CASES}
# What triton's kernels do in different ways, at one shape; each in turn for one kind, the other is
# `long`.
INTERPRETED = (
    "prefill-fresh", "prefill-slots-out", "checkpoints", "decode-fresh", "verify-tree", "mixed",
    "decode-padding", "verify-chain-fresh", "gate-softplus-prefill", "gate-bounded-verify",
    "near-equal-keys-prefill", "decay-mixed", "pages-verify", "strided-prefill",
)  # fmt: skip


def interpreted():
    for i, name in enumerate(INTERPRETED):
        for kind in ("gdn", "kda"):
            marks = [] if kind == ("gdn", "kda")[i % 2] else [pytest.mark.long]
            yield pytest.param(kind, name, id=f"{kind}-{name}", marks=marks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/device has the suite on a GPU")
@pytest.mark.parametrize(("kind", "name"), [*interpreted()])
def test_triton_in_the_interpreter(kind, name):
    pytest.importorskip("triton")
    spec = load_plugins().get("triton", "linear")
    row = next(r for r in spec.capabilities if r.kind == kind and "sm90" in r.archs)
    case = CASES_BY_NAME[name]
    layers = case.num_layers if name == "verify-chain-fresh" else 1
    case = replace(case, kind=kind, heads=(1, 2), dims=(16, 32), num_layers=layers)
    bench = Bench(spec=spec, row=row, torch_device=CPU, arch="sm90")
    run_linear_case(bench, adapted(case, row), FP32)


def bench_of(**row):
    spec = linear_spec()
    return Bench(spec=spec, row=replace(spec.capabilities[0], **row), torch_device=CPU)


def planned(**row):
    """Return the checks of the reference with a changed row, and its spec."""
    spec = replace(linear_spec(), capabilities=[replace(ROW, **row)])
    return plan(spec, HERE, {}, passes=20, reduced=True), spec


def test_a_row_is_asked_with_its_own_shapes_and_states():
    checks, _ = planned(head_dim_pairs=frozenset(), head_dims={128}, kv_dtypes={"bf16"})
    declared = [p for p in checks if p.row is not None]
    layers = {layer for p in declared for layer in p.check.needs.layers}
    assert {(x.head_dim, x.v_head_dim) for x in layers} == {(128, 128)}
    assert {p.check.id.rpartition("-")[2] for p in declared} == {"bf16"}


@pytest.mark.parametrize(
    ("changes", "reason", "unasked"),
    [
        ({"checkpoints": False}, "checkpoints (not supported)", "checkpoint-then-prefill"),
        ({"separate_write_slots": False}, "separate_write_slots (not supported)",
         "decode-slots-out"),
        ({"cuda_graph": "decode"}, "cuda_graph uniform (supports decode)", "graph-verify-chain"),
        ({"deterministic": False}, "deterministic (not supported)", "twice-prefill"),
        ({"max_verify_topk": 0}, "speculative topk 1 (supports no speculation)", "verify-chain"),
        ({"max_verify_topk": 1}, "speculative topk 2 (supports topk up to 1)", "verify-tree"),
    ],
)  # fmt: skip
def test_what_is_not_declared_is_named_and_not_run(changes, reason, unasked):
    checks, _ = planned(**changes)
    skipped = {p.check.feature: p.reason for p in checks if p.row is None}
    assert reason in skipped[unasked]
    assert "decode" not in skipped


def test_a_backend_that_is_only_declared_is_not_checked():
    spec = load_plugins().get("cutedsl", "linear")
    with pytest.raises(BackendNotImplementedError, match="not implemented"):
        plan(replace(spec, capabilities=[replace(r, create=None) for r in spec.capabilities],
                     create=None), parse_device("cuda:sm90"), {})  # fmt: skip


def test_a_declared_cell_that_no_check_proves_is_a_problem():
    checks, spec = planned()
    some = [p for p in checks if p.check.feature in ("decode", "decode-fresh")]
    cells = report(run_all(some, spec, CPU), spec, HERE, {})
    assert not cells["gdn"]["decode"].problem
    assert [p.partition(":")[0] for p in problems(cells)] == ["gdn, prefill", "gdn, target_verify"]


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("name", FAR)
def test_slots_beyond_what_an_offset_counts_are_found(name, wraps, monkeypatch):
    """With offsets of 16 bits instead of 32, so that it fits anywhere."""
    monkeypatch.setattr(far, "BEYOND", 1 << 16)
    monkeypatch.setattr(far, "refuse_memory", lambda device, needed: None)
    case = replace(CASES_BY_NAME["decode"], passes=(FAR[name],))
    bench = bench_of()
    if not wraps:
        far_slots(bench, case, FP32)
        return
    spec = replace(bench.spec, create="linear_backend:OffsetsOf16Bits")
    with pytest.raises(CheckFailed, match="not finite"):
        far_slots(replace(bench, spec=spec), case, FP32)


def test_what_no_memory_is_there_for_is_skipped_with_its_reason():
    checks, spec = planned()
    some = [p for p in checks if p.check.feature.startswith("far-slots")]
    assert all(p.check.alone for p in some)
    details = {o.detail for o in run_all(some, spec, CPU)}
    assert details == {"a pool of 16384 MiB: asked on an accelerator alone"}


def few_templates(kind, rows, **options):
    """Ask two things of linear rows, and one of others."""
    make, few = (linear_templates, ("decode", "verify-tree")) if kind in ("gdn", "kda") else (
        templates, ("softcap",)
    )  # fmt: skip
    for template in make(kind, rows, **options):
        if template(rows[0]).feature in few:
            yield template


@pytest.fixture
def few_checks(monkeypatch):
    for name in ("templates", "linear_templates"):
        monkeypatch.setattr(f"attn_core.testing.plan.{name}", few_templates)


def invoke(*arguments):
    done = CliRunner().invoke(build_app("check"), ["check", *arguments, "--json", "--quick"])
    return json.loads(done.stdout), done.stderr


def test_attn_check_runs_the_softmax_and_the_linear_backend_of_a_name(few_checks, tmp_path):
    data, _ = invoke("torch_native", "--device", "cpu", "--evidence", str(tmp_path))
    assert data["kinds"].keys() == {"mha", "gdn", "kda"}
    assert data["kinds"]["kda"]["target_verify"]["cases"] == 1
    assert any("gdn, prefill: declared, but no check" in f for f in data["failures"])
    [path] = tmp_path.glob("torch_native-gdn-*.json")
    cells = json.loads(path.read_text())["cells"]
    assert {cell: proof["level"] for cell, proof in cells.items()} == {
        "decode": "device-tested",
        "target_verify": "device-tested",
    }


def test_attn_check_says_which_family_cannot_run_here(few_checks):
    data, told = invoke("triton", "--device", "cpu")
    assert data["kinds"].keys() == {"gdn", "kda"}  # torch runs them on a CPU
    assert "not checked: triton (mha) cannot run here" in told
    data, told = invoke("triton", "--device", "cpu", "--kind", "gdn")
    assert (data["kinds"].keys(), told) == ({"gdn"}, "")


def test_a_refusal_of_a_declared_case_is_a_failure():
    case = CASES_BY_NAME["verify-chain"]
    checks, spec = planned()
    spec = replace(spec, create="linear_backend:Decoder")
    some = [p for p in checks if p.check.feature == case.feature]
    [outcome] = run_all(some, spec, CPU)
    assert outcome.status == "failed"
    assert "declared, but refused: linear-reference does not verify drafts" in outcome.detail
