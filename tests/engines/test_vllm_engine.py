"""vLLM itself on a CPU, its scheduler, prefix cache and drafts, beside vLLM's own attention."""

import importlib
import json
import pathlib
import subprocess
import sys

import pytest
import vllm_on_cpu

from benchmarks.engines import parallel, soak_model, vllm_engine

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2,
         "prompt_lookup_min": 1}  # fmt: skip
CASES = {
    "chunks and drafts": ("llama", {"speculative_config": NGRAM, "max_num_batched_tokens": 48}),
    "windows and a cap": ("gemma2", {}),
    "two ranks": ("llama", {"tensor_parallel_size": 2}),
    "two stages": ("llama", {"pipeline_parallel_size": 2}),
}


def serve(folder, model, arguments, plugin=None):
    environment = vllm_on_cpu.environment(plugin)
    script = str(SUPPORT / "vllm_answers.py")
    command = [sys.executable, script, str(folder), model, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    lines = [x for x in done.stdout.splitlines() if x.startswith("ANSWERS ")]
    assert lines, done.stderr[-3000:] + done.stdout[-3000:]
    return json.loads(lines[0].removeprefix("ANSWERS ")), done.stdout


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_vllm(case, tmp_path):
    model, arguments = CASES[case]
    expected, printed = serve(tmp_path / "model", model, arguments)
    assert "attn_core serves" not in printed
    plugin = vllm_on_cpu.install(tmp_path / "plugin")
    found, printed = serve(tmp_path / "model", model, arguments, plugin)
    assert "attn_core serves" in printed
    assert found["answers"] == expected["answers"]
    assert len({tuple(tokens) for tokens, _cached in found["answers"]}) >= 5
    assert any(cached for _tokens, cached in found["answers"])  # vLLM's prefix cache was hit
    wanted = {"extend", "decode", *(["target_verify"] if "speculative_config" in arguments else [])}
    if not {"tensor_parallel_size", "pipeline_parallel_size"} & {*arguments}:  # in this process
        assert wanted <= {mode for mode, passes in found["modes"].items() if passes}


@pytest.mark.long
def test_steps_are_timed_with_each_backend_and_not_twice(tmp_path):
    """benchmarks.engines.run times vLLM: here a tiny model, whose figures say nothing of speed."""
    plugin = vllm_on_cpu.install(tmp_path / "plugin")
    command = [
        sys.executable, "-m", "benchmarks.engines.run", "vllm-cpu", "--rounds", "1",
        "--limit", "600", "--results", str(tmp_path), "--logs", str(tmp_path / "logs"),
        "--backends",
    ]  # fmt: skip
    printed = []
    for backend, of in (("CPU_ATTN", None), ("attn_core", plugin), ("attn_core", plugin)):
        done = subprocess.run(
            [*command, backend], env=vllm_on_cpu.environment(of), cwd=SUPPORT.parents[1],
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        printed.append(done.stdout)
        assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "vllm.cpu.cpu.json").read_text())["rows"]
    assert not [row["error"] for row in rows if "error" in row]
    assert {(r["backend"], r["case"]) for r in rows if r["ms"] > 0} == {
        (backend, case)
        for backend in ("CPU_ATTN", "attn_core")
        for case in ("decode 2x64", "prefill 2x64")
    }
    for row in rows:
        assert ("chosen" in row) == (row["backend"] == "attn_core")
    assert "recorded" in printed[2]
    assert "| decode 2x64 |" in printed[2]


@pytest.mark.long
def test_logprobs_of_two_ranks_are_those_of_vllm_on_one(tmp_path):
    """What benchmarks.engines.parallel runs on GPUs, for each engine."""
    (model := tmp_path / "model").mkdir()
    soak_model.write_model(model, soak_model.CONFIG, seed=1)
    plugin = vllm_on_cpu.install(tmp_path / "plugin")
    found = []
    for kind, backend, of in (("one-vllm", "CPU_ATTN", None), ("vllm-tp", "attn_core", plugin)):
        out = tmp_path / f"{kind}.json"
        command = [
            sys.executable, "-m", "benchmarks.engines.parallel", "--one", kind, backend,
            "--model", str(model), "--device", "cpu", "--out", str(out),
        ]  # fmt: skip
        environment = vllm_on_cpu.environment(of)
        done = subprocess.run(
            command, env=environment, cwd=SUPPORT.parents[1], capture_output=True, text=True,
            timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("attn_core serves" in done.stdout + done.stderr) == (of is not None)
        found.append(json.loads(out.read_text()))
    apart = parallel.difference(*found)
    assert apart["compared"] > 1000
    assert apart["worst"] < 1e-3
    assert not apart["not_finite"]


def test_kernels_of_other_models_are_left_out_of_a_start(monkeypatch):
    """benchmarks.engines empties a list inside vLLM, which has to be there and to be read."""
    hook = vllm_engine.RouterKernels()
    plain = importlib.import_module(hook.module)
    assert getattr(plain, hook.shapes)
    assert hook.shapes in plain._warmup_ll_bf16_router_gemm.__code__.co_names
    monkeypatch.delitem(sys.modules, hook.module)
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    assert getattr(importlib.import_module(hook.module), hook.shapes) == ()
    assert hook not in sys.meta_path


def test_vllm_warms_up_as_what_is_timed(monkeypatch):
    from vllm import SamplingParams
    from vllm.v1.worker.gpu import warmup

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    whole = SamplingParams.for_sampler_warmup
    assert whole().top_k > 0
    assert "for_sampler_warmup" in warmup.warmup_kernels.__wrapped__.__code__.co_names
    try:
        vllm_engine.start_fast(SamplingParams)
        found = SamplingParams.for_sampler_warmup()
        assert (found.temperature, found.top_p, found.logprobs) == (0, 1.0, None)
        assert found.top_k <= 0
    finally:
        SamplingParams.for_sampler_warmup = staticmethod(whole)
