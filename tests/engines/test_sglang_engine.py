"""SGLang's own ModelRunner on a CPU: the same logits by attn_core as by another backend."""

import pathlib
import subprocess
import sys

import pytest
import torch

SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "engine_logits.py"


def logits(model, backend, page_size, folder, environment):
    """Run a model in a process of its own and return logits, [7, 4, vocabulary], and output."""
    out = folder / f"{backend}-{page_size}.pt"
    command = [sys.executable, str(SCRIPT), model, backend, str(page_size), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out), done.stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory, engine_environment):
    folder = tmp_path_factory.mktemp("expected")
    return logits("llama", "torch_native", 1, folder, engine_environment)[0]


@pytest.mark.parametrize("page_size", [1, 16])
def test_logits_are_those_of_sglang(page_size, tmp_path, engine_environment, expected):
    found, printed = logits("llama", "attn_core", page_size, tmp_path, engine_environment)
    assert expected.abs().max() > 5  # attention shows
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert found.argmax(-1).equal(expected.argmax(-1))
    assert "{'prefill': 'torch_native', 'decode': 'torch_native'" in printed


@pytest.mark.parametrize("model", ["gpt_oss", "deepseek"])
def test_windows_sinks_and_latents_are_a_dense_softmax(model, tmp_path, engine_environment):
    expected, _printed = logits(model, "dense", 1, tmp_path, engine_environment)
    found, _printed = logits(model, "attn_core", 16, tmp_path, engine_environment)
    assert expected.abs().max() > 5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
