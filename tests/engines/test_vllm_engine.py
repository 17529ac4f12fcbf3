"""vLLM itself on a CPU, its scheduler, prefix cache and drafts, beside vLLM's own attention."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import vllm_on_cpu

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2,
         "prompt_lookup_min": 1}  # fmt: skip
CASES = {
    "chunks and drafts": ("llama", {"speculative_config": NGRAM, "max_num_batched_tokens": 48}),
    "windows and a cap": ("gemma2", {}),
    "two ranks": ("llama", {"tensor_parallel_size": 2}),
}


def serve(folder, model, arguments, plugin=None):
    path = os.pathsep.join(filter(None, [plugin, str(SUPPORT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
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
    if "tensor_parallel_size" not in arguments:  # whose ranks are other processes
        assert wanted <= {mode for mode, passes in found["modes"].items() if passes}
