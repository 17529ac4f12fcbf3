"""SGLang's own ModelRunner and draft worker on a CPU, with the plugin as SGLang loads it."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from amx_kernels import compiled

SUPPORT = pathlib.Path(__file__).parents[1] / "support"


def run(script, *arguments, environment):
    """Run a script in a process of its own."""
    command = [sys.executable, str(SUPPORT / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def logits(model, backend, page_size, folder, environment):
    """Run a model and return its logits, [7, 4, vocabulary], and what was printed."""
    out = folder / f"{backend}-{page_size}.pt"
    done = run("engine_logits.py", model, backend, page_size, out, environment=environment)
    return torch.load(out), done.stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory, engine_environment):
    folder = tmp_path_factory.mktemp("expected")
    return logits("llama", "torch_native", 1, folder, engine_environment)[0]


@pytest.mark.parametrize(
    ("page_size", "inside"), [(1, "torch_native"), (16, "torch_native"), (16, "intel_amx")]
)
def test_logits_are_those_of_sglang(page_size, inside, tmp_path, engine_environment, expected):
    """`inside` is named: by default it is intel_amx where its kernels are compiled."""
    if inside == "intel_amx":
        compiled()  # here, else the test is skipped
    environment = engine_environment | {"ATTN_ATTENTION_BACKEND": inside}
    found, printed = logits("llama", "attn_core", page_size, tmp_path, environment)
    assert expected.abs().max() > 5  # attention shows
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert found.argmax(-1).equal(expected.argmax(-1))
    assert f"{{'prefill': '{inside}', 'decode': '{inside}'" in printed


@pytest.mark.parametrize("model", ["gpt_oss", "deepseek"])
def test_windows_sinks_and_latents_are_a_dense_softmax(model, tmp_path, engine_environment):
    expected, _printed = logits(model, "dense", 1, tmp_path, engine_environment)
    found, _printed = logits(model, "attn_core", 16, tmp_path, engine_environment)
    assert expected.abs().max() > 5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_sparse_models_attend_to_what_their_indexers_select(tmp_path, engine_environment):
    """Beside a float64 selection over FP8 index keys and a dense softmax over what it chose.

    A latent on an edge of two bfloat16 numbers may fall the other way; another key is off by 1.
    """
    expected, _printed = logits("deepseek_v32", "dense", 64, tmp_path, engine_environment)
    found, printed = logits("deepseek_v32", "attn_core", 64, tmp_path, engine_environment)
    assert expected.abs().max() > 5
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
    assert "{'prefill': 'torch_native', 'decode': 'torch_native'" in printed


@pytest.mark.parametrize(
    ("model", "beside"), [("qwen3_next", "torch_native"), ("kimi_linear", "dense")]
)
def test_hybrid_models_are_sglangs_own_backend_over_a_recurrence(
    model, beside, tmp_path, engine_environment
):
    expected, _printed = logits(model, beside, 1, tmp_path, engine_environment)
    found, printed = logits(model, "attn_core", 1, tmp_path, engine_environment)
    assert expected.abs().max() > 5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert "'linear_prefill': 'torch_native', 'linear_decode': 'torch_native'" in printed


def answers(backend, topk, folder, environment):
    """Serve requests; return their answers and how many of their tokens were cached."""
    out = folder / f"{backend}-{topk}.json"
    environment = environment | {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
    run("engine_answers.py", backend, topk, out, environment=environment)
    return json.loads(out.read_text())


def test_a_server_with_a_prefix_cache_of_states_answers_as_sglangs_own(
    tmp_path, engine_environment
):
    expected = answers("torch_native", 0, tmp_path, engine_environment)
    found = answers("attn_core", 0, tmp_path, engine_environment)
    assert found == expected
    assert max(found["cached"][1]) >= 128  # two chunks: the state at their end was kept
    drafted = answers("attn_core", 4, tmp_path, engine_environment)
    assert drafted["answers"] == expected["answers"]


@pytest.mark.parametrize("topk", [1, 4])
def test_the_draft_worker_of_eagle_runs_on_attn_core(topk, engine_environment):
    done = run("engine_drafts.py", topk, environment=engine_environment)
    *names, count, difference = done.stdout.split()[-4:]
    steps = "DraftTreeBackend" if topk > 1 else "DraftDecodeBackend"
    assert names == [steps, "AttnCoreBackend"]
    assert int(count) == 3 * 3 * topk  # steps, requests, branches
    assert float(difference) < 1e-4
