"""What choices lose is measured against another round's best, and nothing of a run is lost."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from attn_core.costs import store
from attn_core.costs.environment import environment
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Pass
from attn_core.measure.timing import FEWEST
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.spec.device import parse_device
from small_cases import CASES

from benchmarks import regret
from benchmarks.ours import device_kind
from benchmarks.regret import TRIES
from benchmarks.regret_shapes import COUNT, PHASES, default_seed, draw, form_of, pass_of
from benchmarks.regret_table import loss, losses, page, summary
from benchmarks.regret_tune import tuning_jobs
from benchmarks.results import FOLDER

CPU = torch.device("cpu")
SMALL = [c for c in CASES if c.page_size == 16 or c.phase in ("mla", "prefill")]
TIMES = {"apple": 30.0, "berry": 10.0, "cherry": 100.0}


def shape(first, second, automatic="a", rule="b", phase="decode"):
    rounds = [{n: [us, us, us, 0.0] for n, us in r.items()} for r in (first, second)]
    choices = {"automatic": {"backend": automatic, "by": "profile"}, "rule": {"backend": rule}}
    return {"name": f"{automatic} {first}", "phase": phase, "rounds": rounds, **choices}


def test_a_round_is_judged_by_the_best_of_the_other():
    """Each round has another best, by luck: against the best of its own round neither loses."""
    lucky = shape({"a": 100, "b": 90}, {"a": 100, "b": 120})
    assert losses(lucky, "automatic") == pytest.approx([100 / 120 - 1, 0.0])
    assert losses(lucky, "rule") == pytest.approx([0.0, 90 / 100 - 1])
    assert loss(lucky, "automatic") == pytest.approx(math.sqrt(100 / 120) - 1)


def test_a_pass_in_no_graph_takes_no_less_than_the_host():
    one = shape({"a": 10, "b": 20}, {"a": 10, "b": 20}, phase="prefill")
    assert loss(one, "rule") == pytest.approx(1.0)
    for r in one["rounds"]:
        r["a"][3] = r["b"][3] = 40.0
    assert loss(one, "rule") == 0
    assert loss(one | {"phase": "decode"}, "rule") == pytest.approx(1.0)
    verify = one | {"phase": "verify"}
    assert loss(verify, "rule") == 0  # a record that does not say: of before they were captured
    assert loss(verify | {"captured": True}, "rule") == pytest.approx(1.0)


def test_a_choice_that_fails_here_misses_the_limits_and_stays_json():
    good = [shape({"a": 10, "b": 30}, {"a": 10, "b": 30}) for _ in range(60)]
    result = summary(good)
    assert result["met"]
    assert result["automatic"]["worst"] == 0
    assert result["rule"]["mean"] == pytest.approx(2.0)
    assert not summary(good[:59])["met"]  # too few
    assert not summary([*good, shape({"a": 10, "b": 9}, {"a": 10, "b": 9})])["met"]  # 11 % at worst
    failing = summary([*good, shape({"a": 10}, {"a": 10}, automatic="gone")])
    assert not failing["met"]
    assert failing["automatic"]["failed"] == 1
    json.dumps(failing, allow_nan=False)
    assert summary([])["automatic"]["mean"] is None


def test_shapes_come_from_the_seed_and_cover_every_phase():
    for device in ("cuda", "cpu"):
        drawn = draw("1.0", device)
        assert [c.name for c in drawn] == [c.name for c in draw("1.0", device)]
        assert len({c.name for c in drawn}) == COUNT >= 60
        assert {c.phase for c in drawn} == set(PHASES)
        assert {c.kind for c in drawn} == {"mha", "mla"}
        assert sum(c.sigma is not None for c in drawn) > COUNT / 4
        for case in drawn:
            size = pass_of(case)
            assert size.longest <= size.kv_tokens
            assert size.queries <= size.kv_tokens
            lengths = zip(case.seq_lens, case.query_lens, strict=True)
            assert all(0 < n <= s for s, n in lengths)
    assert {c.name for c in drawn}.isdisjoint(c.name for c in draw("1.1", "cpu"))
    assert default_seed().startswith("attn-core ")


class Labelled:
    def __init__(self, name, call):
        self.name, self.call = name, call

    def __call__(self):
        return self.call()


class FakeClock:
    def __init__(self):
        self.calls = 0

    def sample(self, call):
        self.calls += 1
        return TIMES[call.name], 0.0


@pytest.fixture
def registry(monkeypatch):
    """Three backends that are torch_native; by name, apple is the first of equal priorities."""
    real, make = load_plugins(), regret.our_backend
    good, origin = real.get("torch_native"), real.origins["softmax", "torch_native"]
    keys = {("softmax", n): replace(good, name=n, aliases=()) for n in TIMES}
    fruit = Registry(backends=keys, origins=dict.fromkeys(keys, origin))

    def labelled(name, *args):
        one = make(name, *args)
        return replace(one, prepare=lambda inputs: Labelled(name, one.prepare(inputs)))

    monkeypatch.setattr(regret, "load_plugins", lambda: fruit)
    monkeypatch.setattr(regret, "our_backend", labelled)
    monkeypatch.setattr(regret.store, "tuned_profile", lambda *_: None)
    return fruit


def run(out, *words, cases=SMALL):
    clock = FakeClock()
    arguments = ["--device", "cpu", "--out", str(out), *words]
    code = regret.main(arguments, cases=cases, clock=clock)
    return code, json.loads(out.read_text()), clock


def test_without_a_profile_the_choice_is_the_rule(registry, tmp_path, capsys):
    code, record, _ = run(tmp_path / "r.json")
    assert code == 1
    assert [s["name"] for s in record["shapes"]] == [c.name for c in SMALL]
    for one in record["shapes"]:
        assert one["automatic"]["backend"] == one["rule"]["backend"] == "apple"
        assert one["automatic"]["by"] == "priority"
        assert one["slower"] == {"cherry": 100.0}  # it is in no round
        assert set(one["rounds"][0]) == {"apple", "berry"}
        assert loss(one, "automatic") == pytest.approx(2.0)
    assert record["summary"]["rule"]["mean"] == pytest.approx(2.0)
    assert "**not met**" in capsys.readouterr().out


def test_a_profile_chooses_and_a_run_goes_on(registry, tmp_path, capsys):
    """What was judged is not judged again; another profile needs another file."""
    case = SMALL[0]
    size, env = pass_of(case), environment(registry, device_kind(CPU))
    costs = {
        Key(name, "", form_of(case), size): Cost(us, us, us, 0.0) for name, us in TIMES.items()
    }
    file, out = tmp_path / "p.json", tmp_path / "r.json"
    store.write(file, Profile(environment=env, costs=costs, date="2026-01-01"))
    words = ("--profile", str(file))
    _, record, _ = run(out, *words, cases=SMALL[:1])
    (one,) = record["shapes"]
    assert one["automatic"] == {
        "backend": "berry", "by": "profile", "expected_us": 10.0, "this_form": True
    }  # fmt: skip
    assert (loss(one, "automatic"), loss(one, "rule")) == (0, pytest.approx(2.0))
    _, again, clock = run(out, *words, cases=SMALL[:1])
    assert (again["shapes"], clock.calls) == (record["shapes"], 0)
    with pytest.raises(SystemExit, match="another run"):
        run(out, cases=SMALL[:1])
    text = page("r.json", record)
    assert "| decode | 1 | 1 | 0.0 % | 0.0 % | 200.0 % | 200.0 % |" in text
    assert "in all 1 shapes; the rule" in text
    two = record | {"shapes": [one, one | {"automatic": {"backend": "berry", "by": "priority"}}]}
    assert "in 1 shapes, by priority in the others; the rule" in page("r.json", two)
    store.write(file, Profile(environment=env | {"torch": "0"}, costs=costs, date="2026-01-01"))
    with pytest.raises(SystemExit, match="another environment"):
        run(tmp_path / "other.json", *words)


def test_an_interrupted_run_keeps_what_it_judged(registry, tmp_path, monkeypatch):
    real, left = regret.judged, iter(range(2))

    def stops(*args):
        next(left)
        return real(*args)

    out = tmp_path / "r.json"
    monkeypatch.setattr(regret, "judged", stops)
    with pytest.raises(StopIteration):
        run(out)
    assert len(json.loads(out.read_text())["shapes"]) == 2
    monkeypatch.setattr(regret, "judged", real)
    _, record, _ = run(out)
    assert [s["name"] for s in record["shapes"]] == [c.name for c in SMALL]
    _, none, _ = run(out, "--seconds", "0")
    assert none["shapes"] == record["shapes"]


def test_what_is_wrong_is_never_the_best(registry, tmp_path, monkeypatch, capsys):
    wrong = regret.our_backend

    def spoiled(name, *args):
        one = wrong(name, *args)
        if name != "berry":
            return one
        return replace(one, prepare=lambda inputs: Labelled(name, lambda: inputs.q * 2))

    monkeypatch.setattr(regret, "our_backend", spoiled)
    _, record, _ = run(tmp_path / "r.json", cases=SMALL[:1])
    (one,) = record["shapes"]
    assert one["bad"]["berry"].startswith("wrong: error")
    assert loss(one, "automatic") == 0
    assert "berry fails in 1" in capsys.readouterr().out


def test_tuning_first_measures_other_points_than_those_that_are_judged(registry, tmp_path):
    """The choice is then by what was tuned; a resumed run keeps the profile it began with."""
    out, cases = tmp_path / "r.json", SMALL[:1]
    _, record, _ = run(out, "--tune", "0.5", cases=cases)
    file = tmp_path / "r.profile.json"
    tuned = store.read_profile(file)
    assert record["profile"]["points"] == len(tuned.costs) > 0
    own = {(form_of(case), pass_of(case)) for case in cases}
    assert own.isdisjoint((key.form, key.size) for key in tuned.costs)
    before = file.read_text()
    run(out, "--tune", "0.5", cases=cases)
    assert file.read_text() == before


def test_parts_share_one_profile_and_one_record(registry, tmp_path, capsys):
    """Each tunes and judges its own part; together they are what one process does."""
    out, file = tmp_path / "r.json", tmp_path / "r.profile.json"
    clock = FakeClock()

    def part(*words):
        arguments = ["--device", "cpu", "--out", str(out), *words]
        return regret.main(arguments, cases=SMALL, clock=clock)

    assert part("--compile") == 0
    assert "compiled" in capsys.readouterr().out
    assert not file.exists()
    with pytest.raises(SystemExit, match="tune all parts first"):  # a draw is spent once
        part("--part", "1/2")
    tuned = []
    for one in ("1/2", "2/2"):
        assert part("--tune", "0.3", "--part", one) == 0
        tuned.append(set(store.read_profile(file).costs))
    assert tuned[0] < tuned[1]
    assert not out.exists()  # nothing is judged before all have tuned
    part("--part", "2/2")
    half = json.loads(out.read_text())
    assert [s["name"] for s in half["shapes"]] == [c.name for c in SMALL[1::2]]
    part("--part", "1/2")
    record = json.loads(out.read_text())
    assert [s["name"] for s in record["shapes"]] == [c.name for c in SMALL]
    assert record["summary"] == summary(record["shapes"])
    assert record["profile"]["points"] == len(tuned[1])
    assert "over 2 GPUs of one host" in page(out.name, record)
    with pytest.raises(SystemExit, match="another run"):
        run(out)
    with pytest.raises(SystemExit):
        part("--part", "3/2")


class Hiccups(FakeClock):
    """A clock for which berry's first call, and then all of its first round, take ten times."""

    def __init__(self):
        super().__init__()
        self.berry = 0

    def sample(self, call):
        us, host = super().sample(call)
        self.berry += call.name == "berry"
        bad = self.berry == 1 or TRIES < self.berry <= TRIES + FEWEST
        return us * (10 if bad and call.name == "berry" else 1), host


def test_a_hiccup_is_timed_again_and_names_nobody_slow(registry, tmp_path, capsys):
    out = tmp_path / "r.json"
    regret.main(["--device", "cpu", "--out", str(out)], cases=SMALL[:1], clock=Hiccups())
    (one,) = json.loads(out.read_text())["shapes"]
    assert one["slower"] == {"cherry": 100.0}
    assert one["rounds_timed"] == 3
    assert [r["berry"][0] for r in one["rounds"]] == [10.0, 10.0]
    assert "of up to 3, as 1 shapes' first two disagreed" in " ".join(
        capsys.readouterr().out.split()
    )


def test_rounds_that_never_agree_end():
    """Each backend counts, by what selection weighs: a prefill's host too."""
    one = [{"a": [10.0, 9.0, 11.0, 5.0]}, {"a": [10.4, 9.0, 11.0, 20.0]}]
    assert regret.agreeing(one, {"phase": "decode"})
    assert not regret.agreeing(one, {"phase": "prefill"})
    assert not regret.agreeing(one[:1], {"phase": "decode"})


def test_what_was_timed_once_alone_loses_what_it_took():
    one = shape({"a": 10, "b": 20}, {"a": 10, "b": 20}, automatic="c")
    assert loss(one | {"slower": {"c": 60.0}}, "automatic") == pytest.approx(5.0)
    assert math.isinf(loss(one, "automatic"))


def test_tuning_knows_layers_pages_and_drafts_and_none_of_the_sizes():
    drawn, here = draw("1.0", "cuda"), parse_device("cuda:sm90")
    libraries = json.loads((FOLDER / "regret.nvidia-h200.json").read_text())["environment"]
    todo = tuning_jobs(drawn, load_plugins(), here, libraries, ["fa3", "triton", "flashmla"])
    passes, cases = [(j.form, j.size) for j in todo], {(form_of(c), pass_of(c)) for c in drawn}
    assert cases.isdisjoint(passes)

    def kinds(some):
        return {(form, x.phase, x.drafts, x.tree) for form, x in some}

    assert kinds(passes) == kinds(cases)
    assert kinds(passes[: len(kinds(cases))]) == kinds(cases)  # in turns


def test_one_pass_is_the_whole_workload():
    size = Pass.even("decode", 3, 100)
    one = regret.OnePass(size=size)
    assert one.passes(regret.Phase.DECODE, None) == ((size, 1.0),)
    assert one.passes(regret.Phase.PREFILL, None) == ()


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["regret.nvidia-h200", "regret.nvidia-h200.second"])
def test_a_choice_is_made_again_over_recorded_times(tmp_path, capsys, name, every):
    """A record of the H200 has this version's choices: what changes them makes them anew."""
    record, profile = [FOLDER / f"{name}{x}.json" for x in ("", ".profile")]
    path = tmp_path / record.name
    before = json.loads(record.read_text())
    assert before["summary"] == json.loads(json.dumps(summary(before["shapes"])))
    shapes = before["shapes"][::every]
    changed = [one | {"automatic": one["rule"]} for one in shapes]
    path.write_text(json.dumps(before | {"shapes": changed}))
    (tmp_path / profile.name).write_text(profile.read_text())
    regret.main(["--again", "--device", "cuda:sm90", "--out", str(path)])
    after = json.loads(path.read_text())
    assert after["shapes"] == shapes
    assert after["summary"] == json.loads(json.dumps(summary(shapes)))
    assert "over the times of that run" in capsys.readouterr().out
