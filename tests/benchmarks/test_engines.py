"""Records of engine runs: merged by case, resumed, and turned into a table and a plot."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from attn_core.costs.workload import Workload

from benchmarks.engines import (
    choice_table,
    processes,
    record,
    run,
    sglang_engine,
    table,
    vllm_engine,
)
from benchmarks.engines.configurations import (
    ALONE,
    CONFIGURATIONS,
    FIXED,
    NEW_TOKENS,
    OURS,
    Case,
    named,
)
from benchmarks.engines.costs import by_costs, variables
from benchmarks.engines.steps import FEW_TOKENS, environment, measure, prompts

VERSIONS = {"sglang": "0.5.16", "torch": "2.11.0"}
DECODE = Case(kind="decode", batch=2, length=8, must=0.98, aim=1.03)
PREFILL = Case(kind="prefill", batch=2, length=8, must=0.98, aim=1.03)


def row(backend, case, ms=None, number=1, **more):
    timed = {} if ms is None else {"ms": ms, "spread_ms": [ms - 1, ms + 1]}
    return {
        "backend": backend,
        "case": case,
        "round": number,
        "versions": VERSIONS,
        **timed,
        **more,
    }


@pytest.fixture
def eagle(tmp_path):
    """A made-up record: ours is faster in one case, flashinfer failed in one, one has no time."""
    path = tmp_path / "sglang.some-gpu.eagle.json"
    rows = [
        row(OURS, "decode 16x4096", 10.0),
        row(OURS, "decode 16x4096", 12.0, 2),
        row("fa3", "decode 16x4096", 13.2),
        row("flashinfer", "decode 16x4096", 20.0),
        row(OURS, "decode 64x2048", 24.0),
        row("fa3", "decode 64x2048", 12.0),
        row("flashinfer", "decode 64x2048", error="OutOfMemoryError: `cuda`"),
    ]
    for each in rows:
        record.merge(path, each, configuration="eagle", device="Some GPU")
    return path


def test_rows_are_merged_by_backend_case_and_round(tmp_path):
    path = tmp_path / "r.json"
    for each in (row("fa3", "a", 3.0), row("fa3", "a", 5.0, 2), row("fa3", "b", error="E")):
        record.merge(path, each, device="Some GPU")
    record.merge(path, row("fa3", "b", 7.0))
    record.merge(path, row("fa3", "a", 4.0), configuration="bf16")
    result = json.loads(path.read_text())
    assert (result["device"], result["configuration"]) == ("Some GPU", "bf16")
    assert [(r["case"], r["round"], r["ms"]) for r in result["rows"]] == [
        ("a", 1, 4.0),
        ("a", 2, 5.0),
        ("b", 1, 7.0),
    ]
    assert record.medians(result, "a") == {"fa3": 4.5}
    a, b = (dataclasses.replace(DECODE, length=n) for n in (1, 2))
    for case in (a, b):
        record.merge(path, row("fa3", case.name, 1.0))
    record.drop(path, "fa3", 1, [a])  # a run of one case times no other again
    assert [(r["case"], r["round"]) for r in record.load(path)["rows"]] == [
        ("a", 1), ("a", 2), ("b", 1), (b.name, 1),
    ]  # fmt: skip
    record.drop(tmp_path / "none.json", "fa3", 1, [a])
    assert not (tmp_path / "none.json").exists()


def test_rows_of_another_run_are_joined_by_a_command(tmp_path, capsys):
    into, other, foreign = (tmp_path / f"{name}.json" for name in ("into", "other", "foreign"))
    head = {"configuration": "eagle", "device": "Some GPU"}
    record.merge(into, row("fa3", "a", 3.0), **head)
    record.merge(into, row(OURS, "a", 3.0), **head)
    killed = row("flashinfer", "a", error="killed after 240 s: it compiled")
    for each in (row("fa3", "a", 2.0), row("fa3", "b", 5.0), killed):
        record.merge(other, each, **head)
    record.main([str(into), str(other)])
    assert "2 rows" in capsys.readouterr().out
    assert record.medians(record.load(into), "a") == {"fa3": 2.0, OURS: 3.0}
    assert record.medians(record.load(into), "b") == {"fa3": 5.0}
    assert len(record.load(into)["rows"]) == 3
    record.merge(foreign, row("fa3", "a", 1.0), **head | {"device": "Another GPU"})
    with pytest.raises(ValueError, match="Another GPU"):
        record.join(into, foreign)
    record.main([str(tmp_path / "new.json"), str(other)])
    assert record.load(tmp_path / "new.json")["configuration"] == "eagle"


def test_runs_on_several_gpus_write_to_one_record(tmp_path):
    path = tmp_path / "r.json"

    def rows(backend):
        for number in range(30):
            record.merge(path, row(backend, "a", 1.0, number))

    threads = [threading.Thread(target=rows, args=(name,)) for name in ("fa3", OURS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(record.load(path)["rows"]) == 60


def test_a_recorded_case_is_skipped_with_the_same_versions_only():
    cases = (DECODE, PREFILL)
    known = {"rows": [row(OURS, DECODE.name, 3.0), row(OURS, PREFILL.name, number=2, error="E")]}
    assert record.missing(known, cases, OURS, 1, VERSIONS) == [PREFILL]
    assert record.missing(known, cases, OURS, 2, VERSIONS) == [DECODE]
    assert record.missing(known, cases, "fa3", 1, VERSIONS) == [*cases]
    assert record.missing(known, cases, OURS, 1, VERSIONS | {"torch": "3"}) == [*cases]
    assert record.missing({}, cases, OURS, 1, VERSIONS) == [*cases]


def test_the_best_built_in_is_the_one_to_beat(eagle):
    known = record.load(eagle)
    times = record.medians(known, "decode 16x4096")
    assert times == {OURS: 11.0, "fa3": 13.2, "flashinfer": 20.0}
    assert record.best_peer(times) == "fa3"
    assert record.speedup(times) == pytest.approx(1.2)
    assert record.speedup({OURS: 1.0}) is record.speedup({"fa3": 1.0}) is None
    assert record.best_peer({"attn_core:triton": 1.0, "fa3": 2.0}) == "fa3"
    assert run.best_of_most(eagle, "eagle") == "fa3"
    assert record.is_timed(known, "flashinfer")
    assert not record.is_timed(known, "triton")
    assert not record.is_timed({"rows": [row("fa3", "a", error="E")]}, "fa3")
    assert run.best_of_most(eagle.with_name("none.json"), "eagle") is None


def test_rounds_alternate_and_triton_runs_once():
    order = [*run.processes([OURS, "fa3", "flashinfer", "triton"], 3, lambda: "fa3")]
    assert order == [
        (OURS, 1), ("fa3", 1), ("flashinfer", 1), ("fa3", 2), (OURS, 2), (OURS, 3), ("fa3", 3),
        ("triton", 1),
    ]  # fmt: skip
    assert [*run.processes([OURS, "fa3"], 1, lambda: None)] == [(OURS, 1), ("fa3", 1)]
    assert [*run.processes([OURS], 2, lambda: "fa3")] == [(OURS, 1), (OURS, 2)]


def test_triton_has_all_rounds_where_no_other_built_in_backend_serves():
    order = [*run.processes([OURS, "triton"], 2, lambda: "triton")]
    assert order == [(OURS, 1), ("triton", 1), ("triton", 2), (OURS, 2)]
    assert {*CONFIGURATIONS["dcp2"].peers} == {"triton"}


@pytest.mark.parametrize(
    ("name", "gpus", "refused"),
    [("tp4", 2, True), ("vllm-tp2", 1, True), ("bf16", 0, False), ("tp2", 2, False)],
)
def test_a_configuration_of_more_gpus_than_there_are_is_refused(
    name, gpus, refused, monkeypatch, tmp_path, capsys
):
    """Else each of its processes would fail, and the failures would be recorded."""
    started = []
    monkeypatch.setattr(run, "devices", lambda: ("Some GPU", 80.0, gpus))
    monkeypatch.setattr(run.together, "run", lambda *args: started.append(args))
    monkeypatch.setattr(sys, "argv", ["run", name, "--together", "--results", str(tmp_path)])
    if refused:
        with pytest.raises(SystemExit):
            run.main()
        assert f"{name} needs {CONFIGURATIONS[name].gpus} GPUs, here are {gpus}" in (
            capsys.readouterr().err
        )
    else:
        assert run.main() == 0
    assert bool(started) is not refused


def test_the_machine_says_what_it_has():
    name, gigabytes, gpus = run.devices()
    assert name
    assert (gigabytes == float("inf")) == (gpus == 0)


def test_a_step_is_the_difference_of_two_runs():
    calls = []

    def generate(ids, tokens):
        calls.append(tokens)
        assert [len(prompt) for prompt in ids] == [8, 8]
        return 5.0 + 0.003 * tokens, tokens

    result = measure(DECODE, generate, lambda: calls.append("flush"), 3)
    assert (result["ms"], result["spread_ms"], result["tokens_per_s"]) == (3.0, [3.0, 3.0], 667)
    assert calls[:3] == ["flush", FEW_TOKENS, FEW_TOKENS]


def test_what_is_compiled_for_the_first_steps_is_not_timed():
    seconds = iter([1.0, 1.0, 1.0, 9.0, 2.0, *[1.0, 2.0] * 3])
    result = measure(DECODE, lambda ids, tokens: (next(seconds), tokens), lambda: None, 3)
    assert result["spread_ms"] == [pytest.approx(1e3 / (NEW_TOKENS - FEW_TOKENS), abs=1e-3)] * 2


def test_a_longer_run_that_takes_less_time_is_no_measurement():
    """The prefix cache lost the prompts, so that the shorter run computed them again."""
    seconds = iter([1.0, 1.0, 1.0, *[1.0, 2.0], 5.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    with pytest.raises(RuntimeError, match=r"decode 2x8: .*prefix cache lost the prompts"):
        measure(DECODE, lambda ids, tokens: (next(seconds), tokens), lambda: None, 3)


def test_prompts_of_log_normal_lengths():
    case = Case(kind="decode", batch=64, length=1000, sigma=1.0, must=1.0, aim=1.0)
    assert case.name == "decode 64x1000 sigma 1"
    assert case.lengths == sorted(case.lengths)
    assert (case.lengths[0], case.lengths[31], case.lengths[32]) == (89, 981, 1020)
    assert case.lengths[-1] == 11218
    lengths = [len(prompt) for prompt in prompts(case)]
    assert sorted(lengths) == case.lengths != lengths
    assert dataclasses.replace(case, batch=1).lengths == [1000]


def test_a_prefill_flushes_the_prefix_cache_first():
    calls, seconds = [], iter([9.0, 0.2, 0.4, 0.1])

    def generate(ids, tokens):
        calls.append(tokens)
        return next(seconds), tokens

    result = measure(PREFILL, generate, lambda: calls.append("flush"), 3)
    assert (result["ms"], result["spread_ms"], result["tokens_per_s"]) == (
        200.0,
        [100.0, 400.0],
        80,
    )
    assert calls == ["flush", 1] + ["flush", 1] * 3


@pytest.mark.parametrize("name", [n for n, c in CONFIGURATIONS.items() if c.engine == "sglang"])
def test_a_configuration_captures_its_batches_and_writes_its_models(name, tmp_path):
    configuration = CONFIGURATIONS[name]
    result = sglang_engine.arguments(configuration, "fa3", tmp_path)
    assert result["attention_backend"] == "fa3"
    shares = result.get("dp_size", 1) * result.get("pp_size", 1)
    each = {max(case.batch // shares, 1) for case in configuration.cases}
    assert set(result["cuda_graph_bs_decode"]) == each
    assert result.get("disable_custom_all_reduce", False) == (configuration.gpus > 1)
    written = json.loads((tmp_path / "model/config.json").read_text())
    assert written["num_hidden_layers"] == configuration.model["num_hidden_layers"]
    drafted = configuration.draft_model is not None
    assert ("speculative_draft_model_path" in result) == drafted
    assert configuration.is_speculative == (drafted or name == "ngram")
    (tmp_path / "named").mkdir()
    ours = sglang_engine.arguments(configuration, "attn_core:triton", tmp_path / "named")
    assert ours["attention_backend"] == OURS
    plain = {"ATTN_SHARED_PREFIX": "1"} if configuration.shared_prefix else {}
    named_inside = {"ATTN_DECODE_ATTENTION_BACKEND": "triton", **plain}
    assert environment(configuration, "attn_core:triton") == named_inside
    assert environment(configuration, OURS) == plain
    assert environment(configuration, "fa3") == environment(configuration, OURS + ALONE) == {}
    assert environment(configuration, OURS + FIXED) == {"ATTN_ADAPTIVE": "0", **plain}
    for case in configuration.cases:
        assert max(case.lengths) < result["context_length"]
        assert case.must < case.aim


@pytest.mark.parametrize("name", [n for n, c in CONFIGURATIONS.items() if c.engine == "vllm"])
def test_a_configuration_of_vllm_names_attn_core_by_its_flag(name, tmp_path):
    configuration = CONFIGURATIONS[name]
    result = vllm_engine.arguments(configuration, "attn_core:triton", tmp_path)
    batches = {case.batch for case in configuration.cases}
    assert result["attention_backend"] == "CUSTOM"
    assert set(result["compilation_config"]["cudagraph_capture_sizes"]) == batches
    assert result["max_num_seqs"] == max(batches)
    assert json.loads((tmp_path / "model/config.json").read_text())["model_type"] == "llama"
    (tmp_path / "peer").mkdir()
    peer = vllm_engine.arguments(configuration, "FLASH_ATTN", tmp_path / "peer")
    assert {key for key in result if result[key] != peer[key]} == {"attention_backend", "model"}
    for case in configuration.cases:
        assert case.length + NEW_TOKENS <= result["max_model_len"]


def test_a_module_that_is_imported_later_has_no_shapes_to_compile(tmp_path, monkeypatch):
    hook = vllm_engine.RouterKernels()
    hook.module = "warms_up"
    (tmp_path / "warms_up.py").write_text(f"{hook.shapes} = ((6144, 264),)\nOTHER = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    assert hook.find_spec("another", None) is None
    assert hook in sys.meta_path
    result = importlib.import_module("warms_up")
    monkeypatch.delitem(sys.modules, "warms_up")
    assert getattr(result, hook.shapes) == ()
    assert result.OTHER == 1
    assert hook not in sys.meta_path


def test_vllm_compiles_no_sampler_that_greedy_requests_do_not_run():
    assert vllm_engine.QUIET["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


@pytest.mark.parametrize("name", ["shared-prefix", "vllm-shared-prefix"])
def test_prompts_of_members_begin_alike_and_no_others(name):
    """Ours without sharing is timed beside the engine's backends, and is none of them."""
    configuration = CONFIGURATIONS[name]
    assert OURS + ALONE in configuration.peers
    assert record.best_peer({OURS + ALONE: 1.0, OURS: 2.0, "fa3": 3.0}) == "fa3"
    names = ["decode 64x8704 shared 64x8192", "decode 64x8192 shared 8x8192", "decode 64x8704"]
    assert [case.name for case in configuration.cases] == names
    for case in configuration.cases:
        members, common = case.shared
        result = prompts(case)
        assert result == prompts(case)
        assert {len(prompt) for prompt in result} == {case.length}
        begins = [tuple(prompt[: common or 64]) for prompt in result]
        assert len(set(begins)) == case.batch // members
        assert all(
            begins[i] == begins[j]
            for i in range(0, case.batch, members)
            for j in range(i, i + members)
        )
        full = {tuple(prompt) for prompt in result}
        assert len(full) == (case.batch // members if common == case.length else case.batch)


@pytest.mark.parametrize("backend", [OURS, OURS + ALONE, OURS + FIXED])
def test_both_of_ours_name_attn_core_by_the_flag(backend, tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "vllm").mkdir()
    shared = CONFIGURATIONS["shared-prefix"], CONFIGURATIONS["vllm-shared-prefix"]
    sglang = sglang_engine.arguments(shared[0], backend, tmp_path / "sglang")
    assert sglang["attention_backend"] == OURS
    vllm = vllm_engine.arguments(shared[1], backend, tmp_path / "vllm")
    assert vllm["attention_backend"] == "CUSTOM"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_tuned_profile_and_the_requests_of_the_cases_reach_attn_core(name, tmp_path):
    configuration, file = CONFIGURATIONS[name], tmp_path / "tuned.json"
    result = variables(file, "cases", configuration)
    assert result["ATTN_PROFILE"] == str(file)
    workload = Workload.parse(result["ATTN_WORKLOAD"])
    assert workload.requests.keys() == {case.batch for case in configuration.cases}
    longest = max(workload.prompts)
    assert longest == pytest.approx(configuration.longest, rel=0.1)
    assert by_costs(file, "cases") == {"profile": "tuned.json", "workload": "cases"}
    assert variables(None, "", configuration) == by_costs(None, "") == {}


def test_cases_are_picked_by_their_names():
    assert named("bf16", ()) == [*CONFIGURATIONS["bf16"].cases]
    assert [c.batch for c in named("bf16", ["decode 16x4096", "decode 9x9"])] == [16]


def test_a_record_names_its_engine_once():
    assert record.file_name("Some GPU", "eagle") == "sglang.some-gpu.eagle.json"
    assert record.file_name("Some GPU", "vllm-bf16") == "vllm.some-gpu.bf16.json"


def test_the_last_error_is_the_cause_and_not_what_follows_from_it():
    said = """[2026-11-22 10:00:00] Scheduler hit an exception: Traceback (most recent call last):
  File "x.py", line 3, in f
    raise UnsupportedError("no trees")
attn_core.errors.UnsupportedError: draft trees with pages of 16; use pages of 1

[2026-11-22 10:00:01] Received sigquit from a child process. It usually means the child failed.
RuntimeError: Rank 0 scheduler died during initialization (exit code: -3).
"""
    assert (
        processes.last_error(said)
        == "UnsupportedError: draft trees with pages of 16; use pages of 1"
    )
    assert processes.last_error("AssertionError\nbye\n") == "AssertionError"
    assert processes.last_error("EOFError\n") == "EOFError"
    assert processes.last_error("Killed\n\n") == "Killed"
    assert processes.last_error("") == "it printed nothing"


WAITING = """
import json, os, subprocess, sys, time
said = json.loads(sys.stdin.readline())
os.dup2(os.open(said["log"], os.O_WRONLY | os.O_APPEND), 1)
if said["arguments"] == ["hang"]:
    subprocess.run([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(611)"])
sys.exit(int(said["arguments"][0]))
"""


def test_a_process_that_hangs_is_killed_with_its_children(tmp_path):
    spare = processes.Spare([sys.executable, "-c", WAITING])
    log = tmp_path / "logs" / "log"
    assert spare.run(["hang"], log, limit_s=3.0) is None
    assert "up" in log.read_text()
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "time.sleep(611)')" not in left
    assert spare.run(["3"], log, limit_s=60.0) == 3
    spare.stop()
    assert spare._process.poll() is not None


def test_a_process_waits_for_its_arguments_after_its_imports(tmp_path, monkeypatch):
    engine = tmp_path / "sglang/srt/entrypoints/engine.py"
    engine.parent.mkdir(parents=True)
    engine.write_text("")
    log = tmp_path / "log"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    spare = processes.Spare([sys.executable, "-m", "benchmarks.engines.steps", "--later", "sglang"])
    assert spare.run(["nothing", "fa3", "--out", "x"], log, limit_s=60.0) == 2
    spare.stop()
    assert "invalid choice: 'nothing'" in log.read_text()


def test_the_table_shows_times_the_speed_up_and_what_failed(eagle):
    [known] = table.load_all(eagle.parent)
    page = table.page([known])
    assert "Some GPU, SGLang 0.5.16" in page
    assert "| case | attn_core | fa3 | flashinfer | triton | speed-up | must | aim |" in page
    assert (
        "| decode 16x4096 | 11.00 (9.00 … 13.00) | 13.20 (12.20 … 14.20) | "
        "20.00 (19.00 … 21.00) | - | **1.20** | 1.05 | 1.15 |"
    ) in page
    assert "| 12.00 (11.00 … 13.00) | failed | - | **0.50** | 1.11 | 1.25 |" in page
    assert "| decode 1x4096 | - | - | - | - | - | 1.10 | 1.20 |" in page
    assert "- flashinfer: `OutOfMemoryError: 'cuda'` (decode 64x2048)" in page


def test_the_plot_has_a_bar_for_each_case_with_a_speed_up(eagle):
    known = table.load_all(eagle.parent)
    drawing = ET.fromstring(table.plot(known))
    words = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert words[:4] == ["eagle decode 16x4096", "1.20", "eagle decode 64x2048", "0.50"]
    bars = [*drawing.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(bars) == 2
    faster, slower = (float(bar.get("x")) for bar in bars)
    assert slower < faster
    assert table.PLOT in table.readme(known)


def test_a_case_that_a_peer_has_not_run_names_the_one_it_was_held_against(eagle):
    record.merge(eagle, row(OURS, "decode 1x4096", 7.0), configuration="eagle", device="Some GPU")
    record.merge(eagle, row("fa3", "decode 1x4096", 7.7), configuration="eagle", device="Some GPU")
    known = table.load_all(eagle.parent)
    assert "| - | - | 1.10 of fa3 | 1.10 | 1.20 |" in table.page(known)
    assert "decode 1x4096" not in table.plot(known)


def test_tables_of_two_devices_name_them_and_the_plot_is_of_the_first(eagle):
    fast = row(OURS, "decode 64x4096", 1.0), row("fa3", "decode 64x4096", 9.0)
    other = {"configuration": "fp8", "device": "Another GPU", "rows": [*fast]}
    [known] = table.load_all(eagle.parent)
    records = [other, known, {**known, "configuration": "ngram"}]
    page = table.page(records)
    assert "on Some GPU and Another GPU, SGLang" in page
    assert "drafts, topk 4, on Some GPU\n" in page
    assert "cache, on Another GPU\n" in page
    assert page.index("on Another GPU\n") > page.index("on Some GPU\n")
    assert "fp8" not in table.plot(records)
    assert "eagle" in table.plot(records)
    assert "Another" not in table.readme(records)


def test_nothing_is_said_without_a_record(tmp_path):
    assert table.load_all(tmp_path) == []
    assert table.page([]) == table.plot([]) == table.readme([]) == ""
    record.save(tmp_path / "sglang.gpu.fp8.json", {"configuration": "fp8", "rows": []})
    assert table.load_all(tmp_path) == []
    failed = {
        "configuration": "fp8",
        "device": "G",
        "rows": [row(OURS, "decode 64x4096", error="E")],
    }
    assert table.plot([failed]) == table.readme([failed]) == ""
    assert "failed" in table.page([failed])


def test_measured_choice_is_summed_up_over_its_cases_and_what_is_below_is_named() -> None:
    """A case that only one side ran is in no sum."""
    case, other = (f"decode {n}x1000 sigma 1" for n in (1, 16))

    def row(backend: str, of: str, ms: float, number: int = 1) -> dict[str, Any]:
        chosen = {"prefill": "fa3", "decode": "triton"} if backend == "attn_core" else None
        extra = {"chosen": chosen} if chosen else {}
        return {"backend": backend, "case": of, "round": number, "ms": ms, **extra}

    rows = [row("attn_core", case, 10.0), row("attn_core", case, 12.0, 2), row("fa3", case, 10.0)]
    rows += [row("flashinfer", case, 20.0), row("attn_core", other, 30.0)]
    known = {"configuration": "lognormal", "device": "A GPU", "rows": rows}
    said = choice_table.sections([known, {"configuration": "bf16", "device": "B", "rows": rows}])
    taken = "fa3 (prefill); triton (decode)"
    assert f"| lognormal, {case} | 2 | {taken} | 11.00 | fa3 | 10.00 | 0.909 | 0.98 |" in said
    assert f"| lognormal, {other} | 1 | {taken} | 30.00 | - | - | - | 0.98 |" in said
    assert "| sum of 1 of 3 |  |  | 11.00 |  | 10.00 | **0.909** | 1 |" in said
    assert f"Below its must: lognormal, {case} (0.9091)." in said
    assert "on A GPU" in said
    assert "on B" not in said
    assert choice_table.sections([]) == ""
