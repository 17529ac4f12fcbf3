"""The comparison of engines of two GPUs with engines of one."""

import argparse
import json
import math
import time
import types

import pytest

from benchmarks.engines import parallel, replays, soak_model
from benchmarks.engines.configurations import OURS
from benchmarks.engines.parallel import KINDS, ONE, PEER, difference, judge
from benchmarks.engines.replays import replay


def logprobs(*values, tokens=None):
    tokens = tokens or range(len(values))
    return {"alone": [[[token, x] for token, x in zip(tokens, values, strict=True)]]}


def test_logprobs_are_compared_up_to_where_the_tokens_part():
    one = logprobs(-1.0, -2.0, -3.0, -4.0)
    result = difference(one, logprobs(-1.5, -2.0, -3.25, -40.0, tokens=[0, 1, 7, 3]))
    assert result == {"mean": 0.25, "worst": 0.5, "compared": 3, "not_finite": 0}


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_numbers_that_are_not_finite_never_pass(value):
    one = logprobs(-1.0, -2.0, -3.0)
    result = difference(one, logprobs(-1.0, value, -3.0))
    assert result["not_finite"]
    late = difference(one, logprobs(-1.0, -2.0, value, tokens=[5, 1, 2]))
    assert late["not_finite"]  # behind the token where they part
    peer = {"mean": 1.0, "worst": 9.0, "not_finite": 0}
    assert any("not finite" in text for text in judge("tp", result, peer, "x"))


def test_ours_may_differ_as_much_as_the_peer():
    peer = {"mean": 0.02, "worst": 0.2, "not_finite": 0}
    assert judge("tp", {"mean": 0.03, "worst": 0.4, "not_finite": 0}, peer, "x") == []
    [text] = judge("tp", {"mean": 0.031, "worst": 0.4, "not_finite": 0}, peer, "x")
    assert text == "tp: x: mean 0.03100 (limit 0.03000)"
    exact = {"mean": 0.0, "worst": 0.0, "not_finite": 0}  # a pipeline
    assert judge("pp", {"mean": 0.002, "worst": 0.09, "not_finite": 0}, exact, "x") == []
    assert len(judge("pp", {"mean": 0.1, "worst": 1.0, "not_finite": 0}, exact, "x")) == 2


def test_an_engine_that_failed_is_named():
    result = {(kind, b): logprobs(-1.0) for kind in (ONE, "tp") for b in (OURS, PEER)}
    [row] = parallel.rows(result, ["tp"])
    assert row["wrong"] == []
    assert row["ours"]["compared"] == 1
    [row] = parallel.rows(result | {("tp", OURS): "RuntimeError: no"}, ["tp"])
    assert row["wrong"] == [f"tp {OURS}: RuntimeError: no"]


def test_keys_split_over_ranks_are_compared_with_one_gpu_and_triton():
    assert parallel.engines("dcp") == [
        (parallel.ONE_HEAD, OURS),
        (parallel.ONE_HEAD, "triton"),
        ("dcp", OURS),
        ("dcp", "triton"),
    ]


def test_each_kind_is_recorded_once_its_engines_are_done(tmp_path, monkeypatch):
    """A time limit leaves what was compared before, and names what it stopped."""
    seen, path = [], tmp_path / "found.json"

    def run_one(kind, backend, model, number, end, args):
        config = json.loads((model / "config.json").read_text())
        assert (config["num_key_value_heads"] == 1) is (kind in ("one-kv-head", "dcp"))
        seen.append((kind, backend, path.exists()))
        return "not started, no seconds left" if kind == "dcp" else logprobs(-1.0)

    monkeypatch.setattr(parallel, "run_one", run_one)
    monkeypatch.setattr(soak_model, "write_model", lambda folder, config, seed: (
        folder / "config.json").write_text(json.dumps(config)))  # fmt: skip
    args = argparse.Namespace(
        kinds=["tp", "dcp"], out=path, device="cpu", seconds=9.0, together=1, logs=tmp_path
    )
    assert parallel.compare(args) == 1
    assert len(seen) == 8  # engines of one GPU that kinds share run once
    dcp, tp = json.loads(path.read_text())["rows"]
    assert (tp["kind"], tp["wrong"], tp["peer_backend"]) == ("tp", [], "fa3")
    assert dcp["peer_backend"] == "triton"
    assert "dcp attn_core: not started, no seconds left" in dcp["wrong"]
    args.kinds = ["pp"]
    assert parallel.compare(args) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["dcp", "pp", "tp"]
    assert [row["command"].split()[-1] for row in rows] == ["dcp", "pp", "tp"]  # each its own
    assert rows[0] == dcp
    assert all(row["date"] and row["versions"] for row in rows)


def test_no_engine_starts_without_seconds_left(tmp_path):
    args = argparse.Namespace(device="cpu", logs=tmp_path)
    said = parallel.run_one("tp", OURS, tmp_path / "one", 0, time.monotonic() - 1, args)
    assert said == "not started, no seconds left"


def test_kinds_of_more_gpus_than_there_are_start_no_engine(monkeypatch, capsys):
    monkeypatch.setattr(parallel, "devices", lambda: ("Some GPU", 80.0, 2))
    monkeypatch.setattr(parallel, "run_one", None)
    args = argparse.Namespace(kinds=["tp", "dcp4"], device="cuda")
    assert parallel.compare(args) == 2
    assert "dcp4 needs 4 GPUs, here are 2" in capsys.readouterr().err


def test_prompts_are_replayed_together_alone_and_behind_a_prefix():
    requested = []

    def generate(input_ids, sampling_params, return_logprob, logprob_start_len):
        requested.append((input_ids, logprob_start_len))
        assert len(sampling_params) == len(return_logprob) == len(input_ids)
        meta = {"input_token_logprobs": [(None, 3), (-1.0, 4)], "output_token_logprobs": [(-2, 5)]}
        return [{"meta_info": meta} for _ in input_ids]

    result = replay(generate, (1, 7), 100)
    assert result["together"] == [[[4, -1.0], [5, -2]]] * 2
    (prompts, starts), (alone, _), (longer, cached) = requested
    assert [len(x) for x in prompts] == [1, 7]
    assert starts == [0, 0]
    assert len(alone) == 1
    assert [x[: len(p)] for x, p in zip(longer, prompts, strict=True)] == prompts
    assert cached == [1, 7]
    again = []
    replay(lambda **named: again.append(named["input_ids"]) or generate(**named), (1, 7), 100)
    assert again[0] == prompts


def test_vllm_is_asked_for_the_same_prompts():
    """Behind a prefix without their logprobs, for which vLLM reads no prefix cache."""
    requested = []

    def known(*pairs):
        return [{token: types.SimpleNamespace(logprob=x)} if x else None for token, x in pairs]

    def generate(ids, sampling, use_tqdm):
        requested.append(([each["prompt_token_ids"] for each in ids], sampling["prompt_logprobs"]))
        answer = types.SimpleNamespace(token_ids=[5], logprobs=known((5, -2.0)))
        prompt = known((3, None), (4, -1.0)) if sampling["prompt_logprobs"] == 0 else None
        made = {"prompt_token_ids": [3, 4], "prompt_logprobs": prompt, "outputs": [answer]}
        return [types.SimpleNamespace(**made) for _ in ids]

    result = replays.replay_vllm(generate, dict, (1, 7), 100)
    assert result["together"] == [[[4, -1.0], [5, -2.0]]] * 2
    assert result["again"] == [[[5, -2.0]]] * 2
    assert [prompt for _, prompt in requested] == [0, 0, None]
    assert [ids for ids, _ in requested] == [ids for _, ids in replays.prompts((1, 7), 100)]


def test_vllm_is_compared_with_its_flash_attention():
    assert parallel.engines("vllm-tp") == [
        ("one-vllm", OURS), ("one-vllm", "FLASH_ATTN"), ("vllm-tp", OURS), ("vllm-tp", "FLASH_ATTN")
    ]  # fmt: skip
    alone, split = (
        replays.vllm_arguments(KINDS[kind], OURS, "model", "cuda")
        for kind in ("one-vllm", "vllm-tp")
    )
    assert {alone["attention_backend"], split["attention_backend"]} == {"CUSTOM"}
    assert split["tensor_parallel_size"] == 2
    assert split["disable_custom_all_reduce"]
    assert not split["compilation_config"]["pass_config"]["fuse_allreduce_rms"]
    assert "pass_config" not in alone["compilation_config"]


def test_backends_that_differ_on_one_gpu_are_wrong():
    near, far = logprobs(-1.0), logprobs(-2.0)
    result = {(kind, OURS): far for kind in ("one-vllm", "vllm-tp")}
    result |= {(kind, "FLASH_ATTN"): near for kind in ("one-vllm", "vllm-tp")}
    [row] = parallel.rows(result, ["vllm-tp"])
    assert any("attn_core and FLASH_ATTN on one GPU: mean 1.0" in text for text in row["wrong"])


@pytest.mark.parametrize("kind", [k for k in KINDS if "vllm" not in k])
def test_engines_side_by_side_have_ports_of_their_own(kind):
    first, second = (
        replays.sglang_arguments(KINDS[kind], OURS, "model", "cuda", number) for number in (0, 1)
    )
    taken = [
        {x["port"], *range(x["port"] + 233, x["port"] + 240), x["nccl_port"]}
        for x in (first, second)
    ]
    assert not taken[0] & taken[1]
    assert max(taken[1]) < 32768  # from there on Linux hands ports out itself
    assert first.get("disable_custom_all_reduce", False) == bool(KINDS[kind])
    assert (first["base_gpu_id"] == second["base_gpu_id"]) == bool(KINDS[kind])
