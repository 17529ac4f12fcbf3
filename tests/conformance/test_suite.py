"""The suite itself: what is asked, what is skipped and why, what `attn check` says and writes."""

import json
import pathlib
from dataclasses import replace

import attn_core
import pytest
import torch
from attn_core.cli.app import build_app
from attn_core.errors import BackendNotImplementedError, UnsupportedError
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import Device
from attn_core.testing import far, fuzz_session
from attn_core.testing.case_catalog import CHAIN, FOREST, PAGED, RELATED, renamed
from attn_core.testing.cases import Case
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.oracle import attend_one, tree_mask
from attn_core.testing.passes import attend, compare, create, prepared, run_case
from attn_core.testing.plan import plan
from attn_core.testing.runner import problems, report, run_all
from attn_core.testing.strides import restrided
from attn_core.testing.tolerance import CheckFailed, within_budget
from attn_core.tools.matrix import build_matrix, table
from reference import ROW, spec_of
from typer.testing import CliRunner

HERE = Device("cpu", "avx2")
SKIPS = pathlib.Path(__file__).parent / "skips.txt"
BUILT = ("torch_native", "flex_attention")


def skips():
    """Every feature of the suite that a built-in backend does not declare, with its reason."""
    registry, lines = load_plugins(), set()
    for spec in (s for s in registry.backends.values() if s.name in BUILT):
        for p in plan(spec, HERE, {}):
            if p.row is None:
                lines.add(f"{spec.name}, {p.kind}, {p.check.feature}: {p.reason}")
    return sorted(lines)


def test_support_does_not_shrink_unseen(anew):
    """When rows change on purpose, --anew writes the list anew."""
    if anew:
        SKIPS.write_text("\n".join(skips()) + "\n")
    assert skips() == SKIPS.read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("torch_native", k) for k in ("mha", "mla", "gdn", "kda")), ("flex_attention", "mha")],
)
def test_every_declared_cell_was_proved_on_a_device(name, kind):
    cells = build_matrix(load_plugins(), [kind])[kind][name]
    for cell, level in cells["evidence"].items():
        declared = cell == "page_sizes" or cells[cell]
        assert level == ("device-tested" if declared else "declared"), cell
    header, lines = table({kind: {name: cells}}, kind)
    assert lines[0][header.index("evidence")] == "device-tested"


def test_a_backend_without_an_implementation_is_not_checked():
    rows = [replace(row, create=None) for row in spec_of().capabilities]
    spec = replace(spec_of(), create=None, capabilities=rows)
    with pytest.raises(BackendNotImplementedError, match="not implemented"):
        plan(spec, HERE, {})


def test_a_backend_for_other_devices_is_not_checked():
    rows = [replace(row, device="cuda", archs={"sm90"}) for row in spec_of().capabilities]
    spec = replace(spec_of(), capabilities=rows)
    with pytest.raises(UnsupportedError, match=r"reference \(mha\) cannot run here: .*cuda:sm90"):
        plan(spec, HERE, {})


def test_a_row_is_asked_with_its_own_shapes_and_pages():
    changes = {"head_dims": {128}, "q_heads": {32}, "group_sizes": {8}, "page_sizes": {32}}
    row = replace(ROW, head_dim_pairs=frozenset(), dtypes={"bf16"}, **changes)
    spec = replace(spec_of(), capabilities=[row])
    planned = plan(spec, HERE, {}, kinds=("mha",))
    requested = [p for p in planned if p.row is not None]
    layers = {layer for p in requested for layer in p.check.needs.layers}
    assert {(x.num_q_heads, x.num_kv_heads, x.head_dim) for x in layers} == {(32, 4, 128)}
    assert {p.check.needs.page_size for p in requested} - {None} == {32, 64}
    skipped = {p.check.feature for p in planned if p.row is None}
    chunks = {"dual-chunk-borders-in-blocks", "dual-chunk-borders-in-blocks-decode"}  # of 48 tokens
    others = ("vision", "dual-chunk-sparse", "shared-prefix")
    skipped = {x for x in skipped if not any(name in x for name in others)}
    assert skipped == {"kv-fp32", "kv-fp16"} | chunks


def test_the_row_that_declares_a_condition_answers_for_it():
    chains = replace(ROW, max_verify_topk=1)
    trees = replace(ROW, max_page_size=1)
    spec = replace(spec_of(), capabilities=[chains, trees])
    planned = plan(spec, HERE, {}, kinds=("mha",))
    by_id = {p.check.id: p for p in planned}
    assert by_id["verify-tree-bf16-page1"].row is trees
    assert by_id["verify-chain-bf16-page16"].row is chains
    refused = by_id["verify-tree-bf16-page16"]
    assert refused.row is None
    assert refused.reason == "speculative topk 2 (supports topk up to 1)"


def test_what_is_not_declared_is_not_run():
    plain = replace(ROW, sinks=False, kv_dtypes={"fp32", "bf16"})
    spec = replace(spec_of(), capabilities=[plain])
    skipped = {p.check.feature: p.reason for p in plan(spec, HERE, {}) if p.row is None}
    assert skipped["sinks"] == "sinks (not supported)"
    assert skipped["fp4"] == "kv_cache_dtype fp4_e2m1 (supports bf16, fp32)"


def test_a_declared_cell_that_no_check_proves_is_a_problem():
    spec = spec_of()
    planned = plan(spec, HERE, {}, kinds=("mha",), reduced=True)
    some = [p for p in planned if "sinks" not in p.check.cells][:3]
    cells = report(run_all(some, spec, torch.device("cpu")), spec, HERE, {})
    assert any(p.startswith("mha, sinks: declared, but no check") for p in problems(cells))


@pytest.mark.parametrize("requires_finite_padding", [False, True])
def test_tails_are_poison_or_large_as_the_row_asks(requires_finite_padding):
    """A kernel that reads whole pages is wrong, unless its row asks for finite tails."""
    row = replace(ROW, requires_finite_padding=requires_finite_padding)
    spec = replace(spec_of(), create="mutants.cache:TailReadAndMasked")
    bench = Bench(spec=spec, row=row, torch_device=torch.device("cpu"))
    case, point = PAGED[0], Point(dtype="fp32", page_size=16)
    if requires_finite_padding:
        run_case(bench, case, point)
    else:
        with pytest.raises(CheckFailed, match="not finite"):
            run_case(bench, case, point)


@pytest.mark.parametrize(("share", "passes"), [(0.9, True), (1.1, False)])
def test_the_budget_has_an_edge(share, passes):
    truth = torch.linspace(-1, 1, 11, dtype=torch.float64)
    near = truth + 1e-2
    allowed = 2 * 1e-2 + 2 * torch.finfo(torch.float32).eps
    actual = truth.clone()
    actual[3] += share * allowed
    if passes:
        assert within_budget("x", actual, truth, near, torch.float32).ratio == pytest.approx(share)
    else:
        with pytest.raises(CheckFailed, match="x: largest error"):
            within_budget("x", actual, truth, near, torch.float32)


def test_a_small_error_everywhere_is_over_budget():
    """The largest entry may be off by as much; all of them may not."""
    truth = torch.ones(100, dtype=torch.float64)
    near = truth.clone()
    near[0] += 1e-2
    with pytest.raises(CheckFailed, match="root mean square"):
        within_budget("x", truth + 1e-2, truth, near, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "share"), [(0.05, 0.99), (4.0, 0.95)])
def test_the_lse_of_rounded_probabilities_is_within_the_budget(dtype, size, share):
    """Small scores round to almost nothing; probabilities that are added up round as ever."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 4, 16, generator=draw).to(dtype) for n in (1, 33, 33))
    near, right = (
        attend_one(q[0].to(t), k.to(t), v.to(t), scale=size / 4)[1] for t in (dtype, torch.float64)
    )
    logits = torch.einsum("hd,nhd->hn", q[0].double(), k.double()) * size / 4
    top = logits.amax(-1, keepdim=True) + 0.1  # a maximum that only some blocks met
    for scale in (1.0, share):
        p = ((logits - top).exp() * scale).to(dtype).double()
        actual = p.sum(-1).log() + top[:, 0]
        if scale == 1.0:
            within_budget("LSE", actual, right, near, torch.float32)
        else:
            with pytest.raises(CheckFailed, match="LSE: "):
                within_budget("LSE", actual, right, near, torch.float32)


def test_cases_say_what_they_prove():
    case = Case(feature="x", query_lens=(1,), seq_lens=(9,), window=3, kv_dtype="fp8_e4m3")
    assert case.cells == {"page_sizes", "sliding_window", "fp8_kv"}
    assert len({c.feature for c in PAGED}) == len(PAGED)


CPU = torch.device("cpu")


def bench_of(create, row=ROW):
    return Bench(spec=replace(spec_of(), create=create), row=row, torch_device=CPU)


def test_a_renamed_tree_is_the_same_tree():
    assert renamed(CHAIN, 1) != CHAIN
    want, actual = (tree_mask(t) for t in (FOREST, renamed(FOREST, 3)))
    assert not torch.equal(actual, actual.tril()), "a child before its parent"
    assert sorted(want.sum(1).tolist()) == sorted(actual.sum(1).tolist())
    assert sorted(want.sum(0).tolist()) == sorted(actual.sum(0).tolist())


@pytest.mark.parametrize("how", ["fused", "apart", "heads-first", "values-apart"])
def test_strides_change_no_number(how):
    x = [torch.randn(5, heads, dim) for heads, dim in ((4, 8), (2, 8), (2, 6))]
    new = restrided(how, x)
    assert all(torch.equal(a, b) and b.stride(-1) == 1 for a, b in zip(x, new, strict=True))
    moved = [not b.is_contiguous() for b in new]
    assert moved == ([False, False, True] if how == "values-apart" else [True] * 3)
    if how == "fused":  # as split() leaves them
        q, k, v = torch.randn(5, 60).split([32, 16, 12], 1)
        views = [q.view(5, 4, 8), k.view(5, 2, 8), v.view(5, 2, 6)]
        assert [b.stride() for b in new] == [y.stride() for y in views]


@pytest.mark.parametrize(("create", "wraps"), [("reference:Reference", False), ("far", True)])
@pytest.mark.parametrize("fused", [False, True])
def test_pages_beyond_what_an_offset_counts_are_found(create, wraps, fused, monkeypatch):
    """With offsets of 16 bits instead of 32, so that it fits anywhere."""
    monkeypatch.setattr(far, "BEYOND", 1 << 16)
    monkeypatch.setattr(far, "refuse_memory", lambda device, needed: None)
    create = "mutants.cache:OffsetsOf16Bits" if wraps else create
    bench = bench_of(create, replace(ROW, fused_kv_write=fused))
    case, point = RELATED["mha"]["decode"], Point(dtype="bf16", page_size=16)
    if wraps:
        with pytest.raises(CheckFailed, match="not finite"):
            far.far_pages(bench, case, point)
    else:
        far.far_pages(bench, case, point)


def test_a_fused_backend_leaves_what_the_engine_has_written():
    case, point = RELATED["mha"]["decode"], Point(dtype="bf16", page_size=16)
    bench = bench_of("reference:Reference", replace(ROW, fused_kv_write=True))
    inputs, right = prepared(bench, case, point)
    view = replace(inputs.batch.views["full"], out_cache_loc=None)
    batch = replace(inputs.batch, views={"full": view})
    written = replace(inputs, cache=inputs.after, k=inputs.k * 0, v=inputs.v * 0)
    actual = attend(create(bench, case, inputs, point), written, batch=batch)
    compare(actual, right, inputs.real_tokens, torch.bfloat16, "output")


def test_what_no_memory_is_there_for_is_skipped_with_its_reason():
    spec = spec_of()
    planned = plan(spec, HERE, {}, kinds=("mha",), reduced=True)
    some = [p for p in planned if p.check.feature.startswith("far-pages")]
    outcomes = run_all(some, spec, CPU)
    assert {o.status for o in outcomes} == {"skipped"}
    assert outcomes[0].detail == "a pool of 16384 MiB: asked on an accelerator alone"


def test_a_fault_in_one_of_two_threads_ends_both(monkeypatch):
    def broken(self, number):
        if number:
            raise CheckFailed("one is wrong")
        step(self, number)

    step = fuzz_session._Session.step
    monkeypatch.setattr(fuzz_session._Session, "step", broken)
    case, point = RELATED["mha"]["decode"], Point(dtype="bf16", page_size=16)
    with pytest.raises(CheckFailed, match="one is wrong"):
        fuzz_session.run_two_sessions(
            bench_of("reference:Reference"), case, point, "auto", passes=5
        )


def invoke(*arguments):
    return CliRunner().invoke(build_app("check"), ["check", *arguments])


def test_attn_check_names_the_fault_and_exits_1(monkeypatch, tmp_path):
    spec = replace(
        spec_of(max_verify_topk=0, cuda_graph="never"),
        capabilities=[replace(ROW, max_verify_topk=0, cuda_graph="never", dtypes={"fp32"})],
        create="mutants.lse:SinksIgnored",
    )
    registry = load_plugins()
    key = ("softmax", "reference")
    registry = replace(registry, backends={**registry.backends, key: spec})
    for module in ("cli.check", "testing.parallel"):
        monkeypatch.setattr(f"attn_core.{module}.load_plugins", lambda: registry)
    monkeypatch.setattr("attn_core.testing.plan.templates", few_templates)
    done = invoke("reference", "--json", "--device", "cpu", "--evidence", str(tmp_path))
    assert done.exit_code == 1, done.output
    data = json.loads(done.stdout)
    assert data["kinds"]["mha"]["sinks"]["failed"] > 0
    assert any("sinks-fp32-page16: output: largest error" in f for f in data["failures"])
    [path] = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert written["backend"] == "reference"
    assert written["versions"]["attn-core"] == attn_core.__version__
    assert "page_sizes" not in written["cells"]  # the failed case is evidence for it too
    assert written["cells"]["logit_cap"]["level"] == "device-tested"
    text = invoke("reference", "--device", "cpu")
    assert (text.exit_code, text.stderr) == (1, "")  # a bar is for terminals
    assert "failed: sinks-fp32-page16" in text.stdout


def test_attn_check_without_a_name_checks_all_that_this_device_serves(monkeypatch, tmp_path):
    right = replace(ROW, max_verify_topk=0, cuda_graph="never", dtypes={"fp32"})
    spec = replace(spec_of(), capabilities=[right], create="reference:Reference")
    others = {
        "wrong": replace(spec, name="wrong", create="mutants.lse:SinksIgnored"),
        "right": replace(spec, name="right"),
        "lacking": replace(
            spec, name="lacking", capabilities=[replace(right, requires=("absent>=2",))]
        ),
        "elsewhere": replace(spec, name="elsewhere", capabilities=[replace(right, device="rocm")]),
        "declared": replace(spec, name="declared", create=None),
    }
    registry = load_plugins()
    registry = replace(registry, backends={("softmax", n): s for n, s in others.items()})
    for module in ("cli.check", "testing.parallel"):
        monkeypatch.setattr(f"attn_core.{module}.load_plugins", lambda: registry)
    monkeypatch.setattr("attn_core.testing.plan.templates", few_templates)
    # few checks prove few cells
    monkeypatch.setattr("attn_core.testing.runner.problems", lambda cells: [])
    done = invoke("--json", "--device", "cpu", "--evidence", str(tmp_path))
    assert done.exit_code == 1, done.output
    assert done.stderr.count("not checked") == 1
    assert "not checked: lacking (mha) cannot run here: absent not installed" in done.stderr
    data = json.loads(done.stdout)
    assert [d["backend"] for d in data] == ["right", "wrong"]
    assert [bool(d["failures"]) for d in data] == [False, True]
    assert {json.loads(p.read_text())["backend"] for p in tmp_path.iterdir()} == {"right", "wrong"}
    text = invoke("--device", "cpu").stdout
    assert "mha of right on cpu" in text
    assert "mha of wrong on cpu" in text
    assert text.count("failed: sinks-fp32-page16") == 1
    registry.backends.pop(("softmax", "wrong"))
    assert invoke("--device", "cpu").exit_code == 0


def few_templates(kind, rows, **kwargs):
    from attn_core.testing.checks import templates

    wanted = ("sinks-fp32-page16", "softcap-fp32-page16", "prefill-edges-fp32-page16")
    for template in templates(kind, rows, **kwargs):
        if template(rows[0]).id in wanted:
            yield template


def test_attn_check_needs_a_device_of_this_machine():
    done = invoke("torch_native", "--device", "npu:910b")
    assert done.exit_code != 0
    assert "this machine has" in str(done.exception)
