"""The soak's own parts: its requests, what it notes, and what it calls wrong."""

import pytest

from benchmarks.engines import soak
from benchmarks.engines.soak_model import CONFIG, shapes, write_model
from benchmarks.engines.soak_requests import VOCABULARY, Request, Served, Workload, note


def answered(reason, ids, **meta):
    return {"output_ids": ids, "meta_info": {"finish_reason": {"type": reason}, **meta}}


def passing():
    return {
        "unexpected": [],
        "flushed": [True] * 3,
        "counts": {"length": 5, "stop": 5, "abort": 5, "cached_tokens": 9},
        "memory_mib": [{"gpu": 1.0, "host": 1.0}] + [{"gpu": 900.0, "host": 900.0}] * 2,
        "regret": {
            "ours": {"mean": 0.001, "worst": 0.1, "first_choice": 0.99},
            "reference": {"mean": 0.001, "worst": 0.1, "first_choice": 0.99},
        },
    }


def test_requests_come_from_the_seed_and_share_prefixes():
    drawn = [Workload(3, 1000).draw() for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != Workload(4, 1000).draw()
    workload = Workload(3, 1000)
    requests = [workload.draw() for _ in range(400)]
    shared = [r for r in requests if any(r.ids[:1] == p[:1] for p in workload.prefixes)]
    assert 150 < len(shared) < 300
    assert 10 < sum(r.abort_after_s is not None for r in requests) < 100
    assert 60 < sum(bool(r.stop_token_ids) for r in requests) < 200
    longest = max(len(r.ids) + r.max_new_tokens for r in requests)
    assert 1500 < longest < soak.CONTEXT


@pytest.mark.parametrize(
    ("request_", "out", "unexpected"),
    [
        ({}, answered("length", [5] * 4), False),
        ({}, answered("length", [5] * 3), True),  # too short
        ({}, answered("stop", [5, 2]), True),  # nothing should stop it
        ({"stop_token_ids": (7,)}, answered("stop", [5, 7]), False),
        ({"stop_token_ids": (7,)}, answered("stop", [5, 2]), False),
        ({"stop_token_ids": (7,)}, answered("stop", [5, 6]), True),
        ({"abort_after_s": 0.1}, answered("abort", []), False),
        ({}, answered("abort", [5]), True),  # nobody aborted it
    ],
)
def test_an_answer_must_end_as_its_request_asked(request_, out, unexpected):
    served = Served()
    note(Request(ids=[1, 2], max_new_tokens=4, **request_), out, served)
    assert bool(served.unexpected) == unexpected
    assert len(served.answers) == (not unexpected and bool(out["output_ids"]))
    assert served.counts["prompt_tokens"] == 2


class Scorer:
    """An engine that would choose token 9 everywhere, by 0.5, and names the last token 0."""

    def name(self, token):
        return token if token != VOCABULARY - 1 else 0

    def generate(self, *, input_ids, **_):
        logprobs = [
            (None if i == 0 else -1.0 - 0.5 * (t != 9), self.name(t), None)
            for i, t in enumerate(input_ids)
        ]
        top = [None] + [[(-1.0, 9, None)]] * (len(input_ids) - 1)
        return {"meta_info": {"input_token_logprobs": logprobs, "input_top_logprobs": top}}


def test_regret_is_what_a_token_lacks_to_the_first_choice():
    assert soak.regret(Scorer(), [([1, 2], [9, 8]), ([9], [7])]) == [0.0, 0.5, 0.5]
    assert soak.summary([0.0, 0.5, 0.5]) == {
        "mean": 0.333333,
        "worst": 0.5,
        "first_choice": 0.3333,
    }
    assert soak.summary([]) != soak.summary([])  # NaN: no answer is no proof


def test_regret_takes_the_name_0_for_the_last_token_alone():
    assert soak.regret(Scorer(), [([1], [9, VOCABULARY - 1, 0])]) == [0.0, 0.5, 0.5]
    mixed = Scorer()
    mixed.name = lambda token: token + 1
    for token in (7, VOCABULARY - 2, VOCABULARY - 1):
        with pytest.raises(AssertionError, match="logprobs of"):
            soak.regret(mixed, [([1], [token])])


def test_a_soak_passes_or_says_what_is_wrong():
    assert soak.judge(passing()) == []
    assert soak.judge(passing() | {"unexpected": ["early"]}) == ["early"]
    assert "still holds" in soak.judge(passing() | {"flushed": [True, False]})[0]
    grown = [{"gpu": 1.0}, {"gpu": 2.0, "host": 5.0}, {"gpu": 99.0, "host": 5.0}]
    assert soak.judge(passing() | {"memory_mib": grown}) == ["gpu memory grew by 97 MiB (limit 64)"]
    counts = passing()["counts"] | {"cached_tokens": 0}
    assert soak.judge(passing() | {"counts": counts}) == ["no cached_tokens: run longer"]


@pytest.mark.parametrize("ours", [{"mean": 0.02, "worst": 0.1}, {"mean": 0.001, "worst": 0.4}])
def test_worse_tokens_than_the_reference_s_own_are_wrong(ours):
    result = passing()
    result["regret"]["ours"] = ours
    assert len(soak.judge(result)) == 1
    result["regret"]["reference"] = {"mean": 0.01, "worst": 0.2}  # as unsure itself
    assert soak.judge(result) == []
    result["regret"]["ours"] = soak.summary([float("nan")])
    assert len(soak.judge(result)) == 2


def test_weights_depend_on_the_seed_alone(tmp_path):
    torch = pytest.importorskip("torch")
    load = pytest.importorskip("safetensors.torch").load_file
    small = CONFIG | {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 64,
    }
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = tmp_path / name
        folder.mkdir()
        write_model(folder, small, seed)
    first, again, other = (load(tmp_path / name / "model.safetensors") for name in "abc")
    assert {name: tuple(w.shape) for name, w in first.items()} == shapes(small)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
