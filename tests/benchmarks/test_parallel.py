"""The comparison of engines of two GPUs with engines of one."""

import math

import pytest

from benchmarks.engines import parallel
from benchmarks.engines.configurations import OURS
from benchmarks.engines.parallel import KINDS, ONE, PEER, arguments, difference, judge, replay


def logprobs(*values, tokens=None):
    tokens = tokens or range(len(values))
    return {"alone": [[[token, x] for token, x in zip(tokens, values, strict=True)]]}


def test_logprobs_are_compared_up_to_where_the_tokens_part():
    one = logprobs(-1.0, -2.0, -3.0, -4.0)
    found = difference(one, logprobs(-1.5, -2.0, -3.25, -40.0, tokens=[0, 1, 7, 3]))
    assert found == {"mean": 0.25, "worst": 0.5, "compared": 3, "not_finite": 0}


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_numbers_that_are_not_finite_never_pass(value):
    one = logprobs(-1.0, -2.0, -3.0)
    found = difference(one, logprobs(-1.0, value, -3.0))
    assert found["not_finite"]
    late = difference(one, logprobs(-1.0, -2.0, value, tokens=[5, 1, 2]))
    assert late["not_finite"]  # behind the token where they part
    peer = {"mean": 1.0, "worst": 9.0, "not_finite": 0}
    assert any("not finite" in text for text in judge("tp", found, peer, "x"))


def test_ours_may_differ_as_much_as_the_peer():
    peer = {"mean": 0.02, "worst": 0.2, "not_finite": 0}
    assert judge("tp", {"mean": 0.03, "worst": 0.4, "not_finite": 0}, peer, "x") == []
    [text] = judge("tp", {"mean": 0.031, "worst": 0.4, "not_finite": 0}, peer, "x")
    assert text == "tp: x: mean 0.03100 (limit 0.03000)"
    exact = {"mean": 0.0, "worst": 0.0, "not_finite": 0}  # a pipeline
    assert judge("pp", {"mean": 0.002, "worst": 0.09, "not_finite": 0}, exact, "x") == []
    assert len(judge("pp", {"mean": 0.1, "worst": 1.0, "not_finite": 0}, exact, "x")) == 2


def test_an_engine_that_failed_is_named():
    found = {(kind, b): logprobs(-1.0) for kind in (ONE, "tp") for b in (OURS, PEER)}
    [row] = parallel.rows(found, ["tp"])
    assert row["wrong"] == []
    assert row["ours"]["compared"] == 1
    [row] = parallel.rows(found | {("tp", OURS): "RuntimeError: no"}, ["tp"])
    assert row["wrong"] == [f"tp {OURS}: RuntimeError: no"]


def test_prompts_are_replayed_together_alone_and_behind_a_prefix():
    asked = []

    def generate(input_ids, sampling_params, return_logprob, logprob_start_len):
        asked.append((input_ids, logprob_start_len))
        assert len(sampling_params) == len(return_logprob) == len(input_ids)
        meta = {"input_token_logprobs": [(None, 3), (-1.0, 4)], "output_token_logprobs": [(-2, 5)]}
        return [{"meta_info": meta} for _ in input_ids]

    found = replay(generate, (1, 7), 100)
    assert found["together"] == [[[4, -1.0], [5, -2]]] * 2
    (prompts, starts), (alone, _), (longer, cached) = asked
    assert [len(x) for x in prompts] == [1, 7]
    assert starts == [0, 0]
    assert len(alone) == 1
    assert [x[: len(p)] for x, p in zip(longer, prompts, strict=True)] == prompts
    assert cached == [1, 7]
    again = []
    replay(lambda **named: again.append(named["input_ids"]) or generate(**named), (1, 7), 100)
    assert again[0] == prompts


@pytest.mark.parametrize("kind", KINDS)
def test_engines_side_by_side_have_ports_of_their_own(kind):
    first, second = (arguments(kind, OURS, "model", "cuda", number) for number in (0, 1))
    assert abs(first["port"] - second["port"]) > 300
    assert first.get("disable_custom_all_reduce", False) == (kind != ONE)
    assert (first["base_gpu_id"] == second["base_gpu_id"]) == (kind != ONE)
