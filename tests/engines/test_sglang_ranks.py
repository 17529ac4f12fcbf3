"""What the benchmarks of several GPUs ask SGLang for, and what the adapter refuses there."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest
from attn_core import UnsupportedError
from attn_core.integrations.sglang import selection
from engine_passes import attention, mha_pool, runner
from sglang.srt.server_args import ServerArgs

from benchmarks.engines import parallel, replays, sglang_engine
from benchmarks.engines.configurations import CONFIGURATIONS, OURS
from benchmarks.engines.soak_model import CONFIG, write_model

NAMES = {field.name for field in dataclasses.fields(ServerArgs)}


@pytest.mark.parametrize("kind", [k for k in parallel.KINDS if "vllm" not in k])
def test_sglang_knows_every_argument_of_an_engine(kind):
    found = replays.sglang_arguments(parallel.KINDS[kind], OURS, "model", "cuda", 0)
    assert set(found) <= NAMES


@pytest.mark.parametrize("name", [n for n, c in CONFIGURATIONS.items() if c.engine == "sglang"])
def test_sglang_knows_every_argument_of_a_configuration(name, tmp_path):
    for number in (None, 0):  # alone, and beside others
        (folder := tmp_path / str(number)).mkdir()
        found = sglang_engine.arguments(CONFIGURATIONS[name], OURS, folder, number)
        assert set(found) <= NAMES


def test_ranks_of_several_gpus_use_no_multicast(tmp_path):
    """A field that SGLang renames would leave the fused all-reduce on."""
    found = sglang_engine.arguments(CONFIGURATIONS["tp2"], OURS, tmp_path)
    assert found["enforce_disable_flashinfer_allreduce_fusion"]
    assert found["disable_custom_all_reduce"]
    assert not any(found.get(name) for name in ("enable_symm_mem", "enable_nccl_nvls"))


def test_a_server_of_one_rank_asks_no_other():
    assert selection.ranks() is None


def test_prompts_split_over_ranks_are_refused_by_their_flag():
    from attn_core.integrations.sglang.backend import AttnCoreBackend

    run = runner([attention()], mha_pool(), 1, attn_cp_size=2)
    with pytest.raises(UnsupportedError, match="--attn-cp-size 2"):
        AttnCoreBackend(run)


def test_a_pool_with_other_heads_than_the_layers_is_refused():
    """Data-parallel attention with a model whose class splits its heads over all ranks."""
    from attn_core.integrations.sglang.backend import AttnCoreBackend

    with pytest.raises(UnsupportedError, match="has 2 KV heads on this rank, and SGLang's pool 4"):
        AttnCoreBackend(runner([attention()], mha_pool(heads=4), 1))


@pytest.mark.long
def test_two_ranks_answer_as_one(tmp_path, engine_environment):
    """Whole servers, split by heads, layers and requests: prompts and greedy tokens."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 32}
    script, found = pathlib.Path(__file__).parents[1] / "support/engine_ranks.py", {}
    for kind in (parallel.ONE, "tp", "pp", parallel.ONE_QWEN3, "dp"):
        one = parallel.one_gpu(kind)
        out, model = tmp_path / f"{kind}.json", tmp_path / one
        if kind == one:
            model.mkdir()
            config = {**CONFIG, **shape, **parallel.MODELS[one], "torch_dtype": "float32"}
            write_model(model, config, seed=1)
        command = [sys.executable, str(script), kind, OURS, str(model), str(out)]
        done = subprocess.run(
            command, env=engine_environment, capture_output=True, text=True, timeout=900
        )
        assert out.exists(), done.stderr[-3000:]
        found[kind] = json.loads(out.read_text())
    for kind in ("tp", "pp", "dp"):
        apart = parallel.difference(found[parallel.one_gpu(kind)], found[kind])
        assert apart["worst"] < 1e-3
        assert not apart["not_finite"]
        assert apart["compared"] > 1000
