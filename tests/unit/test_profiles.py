"""Measured profiles that plugins ship: found by the device's name, validated, and ranked by."""

from __future__ import annotations

import json
from dataclasses import replace

import attn_core
import pytest
import torch
from attn_core.cli import inputs
from attn_core.cli.options import InputFlags
from attn_core.costs import store
from attn_core.costs.environment import environment
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form, row_key
from attn_core.costs.workload import Workload
from attn_core.errors import UsageError
from attn_core.integrations.sglang.selection import choose
from attn_core.integrations.transformers.select import select_for
from attn_core.plugins.registry import load_plugins
from attn_core.selection.ranking import shipped_profile
from attn_core.selection.result import Overrides, explain
from attn_core.selection.solver import select
from attn_core.spec.device import Device, parse_device, probe_device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from attn_core.tools.tuning import tuning

H200 = parse_device("h200")
MHA = Requirements(layers=(LayerRequirements(num_q_heads=32, num_kv_heads=8, head_dim=128),))
LIBRARIES = dict.fromkeys(("flash-attn-3", "flashinfer-python", "triton"))
CHAIN = Speculation(topk=1, num_draft_tokens=4, mode="prefill")
TREE = Speculation(topk=4, num_draft_tokens=8, mode="decode")


@pytest.fixture(scope="module")
def registry():
    return load_plugins()


def chosen(registry, needs, device=H200, **options):
    found = select(needs, device, registry, LIBRARIES, simulated=True, **options)
    return found, (found.backend("prefill"), found.backend("decode"))


def test_an_h200_takes_what_was_fastest_there(registry):
    """Hopper's documented order is one name; the chip's record has one for each task."""
    found, names = chosen(registry, MHA)
    assert names == ("fa3", "triton")
    assert "measured" in found.roles["decode"].reason
    assert "NVIDIA H200" in explain(found)
    assert chosen(registry, MHA, Device("cuda", "sm90"))[1] == ("fa3", "fa3")
    assert chosen(registry, MHA, profile=Profile())[1] == ("fa3", "fa3")


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (replace(MHA, kv_cache_dtype="fp8_e4m3"), ("fa3", "triton")),
        (replace(MHA, speculation=TREE), ("fa3", "triton")),
        (replace(MHA, speculation=replace(TREE, mode="prefill")), ("triton", "triton")),
        # prompts are 8 % slower, and verifying a chain of one request or of few far faster
        (replace(MHA, speculation=CHAIN), ("triton", "triton")),
        # what was not measured keeps the documented order
        (replace(MHA, kv_cache_dtype="fp8_e5m2", deterministic=True), None),
        (replace(MHA, deterministic=True), None),
        (Requirements(layers=(LayerRequirements(kind="mla"),)), None),
    ],
)
def test_the_task_of_a_phase_decides(registry, needs, expected):
    _, names = chosen(registry, needs)
    assert names == (expected or chosen(registry, needs, Device("cuda", "sm90"))[1])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_trees_are_verified_by_what_was_fastest_on_an_h100_also_on_a_rank(registry, ranks):
    """A rank's heads were not measured; the nearest say the same, and not what priorities say."""
    heads = replace(MHA.layers[0], num_q_heads=32 // ranks, num_kv_heads=8 // ranks)
    needs = replace(MHA, layers=(heads,), speculation=TREE, page_size=1)
    found, _ = chosen(registry, needs, parse_device("h100"))
    assert {found.roles[role].backend for role in ("decode", "verify", "draft")} == {"triton"}
    costs = {v.spec.name: v.expected for v in found.verdicts if v.phase is Phase.DECODE}
    assert costs["triton"].us < 0.8 * costs["fa3"].us
    assert costs["triton"].measured == (ranks == 1)
    assert chosen(registry, needs, parse_device("h100"), profile=Profile())[1] == ("fa3", "fa3")


def test_a_name_and_a_preference_rank_before_what_was_measured(registry):
    assert chosen(registry, MHA, overrides=Overrides(prefer=("fa3",)))[1] == ("fa3", "fa3")
    named = Overrides(decode_attention_backend="flashinfer")
    assert chosen(registry, MHA, overrides=named)[1] == ("fa3", "flashinfer")


def test_shipped_profiles_are_what_the_records_say():
    from benchmarks import profile

    made = dict(profile.shipped())
    assert made.keys() == {*profile.PROFILES.glob("*.json")}
    for path, text in made.items():
        assert path.read_text() == text
        assert store.read_profile(path).costs


def test_what_was_tuned_ships_without_what_users_do_not_share():
    from benchmarks import profile

    env = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130"}
    own = tuned(env | {"driver": "580", "runtime": "13.0"}, fa3=12.34567, triton=1.0)
    (right, *_), other = own.costs, Form(q_heads=2, kv_heads=2, head_dim=64, v_head_dim=64)
    once = right._replace(size=replace(right.size, requests=99))
    own = replace(own, bad={once: "no memory", right._replace(form=other): "wrong"})
    made = profile.profile([], own)
    assert made.environment == env
    assert {c.us for c in made.costs.values()} == {12.35, 1.0}
    assert list(made.bad.values()) == ["wrong"]
    assert made.date == own.date
    assert Profile.from_json(json.loads(profile.text_of(made))).costs == made.costs


def test_a_draws_costs_replace_those_of_its_forms_and_few_of_a_series_ship():
    """What a draw lacks, FP8 here, stays as it was; costs of two environments are never one."""
    from benchmarks import profile

    env = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130"}
    own, draw = tuned(env, fa3=5.0, triton=1.0), tuned(env, fa3=2.0, triton=3.0)
    (key, *_), cost = own.costs, Cost(7.0, 7.0, 7.0, 0.0)
    fp8 = key._replace(form=replace(key.form, store="fp8_e4m3"))
    own = replace(own, costs=own.costs | {fp8: cost}, bad={key._replace(row="x"): "old"})
    many = {
        key._replace(size=replace(key.size, requests=n, kv_tokens=n << 20)): cost
        for n in range(1, 2 * profile.SHIPPED)
    }
    made = profile.replaced(own, replace(draw, costs=draw.costs | many))
    assert made.costs[fp8] == cost
    assert not made.bad
    passes = {k.size for k in made.costs if k.form == key.form and k.size.phase == key.size.phase}
    assert len(passes) == profile.SHIPPED
    assert {c.us for k, c in made.costs.items() if k.size in passes} <= {2.0, 3.0, 7.0}
    with pytest.raises(SystemExit, match="torch was"):
        profile.replaced(tuned(env | {"torch": "2.12.0"}, fa3=5.0), draw)


def test_what_is_shipped_is_of_rows_as_they_are_today(registry):
    """A row that changed since it was measured has no times: measure again, or drop its points."""
    rows = {(s.name, row_key(r)) for s in registry.backends.values() for r in s.capabilities}
    from benchmarks import profile

    for path in profile.PROFILES.glob("*.json"):
        shipped = store.read_profile(path)
        assert {(k.backend, k.row) for k in shipped.costs if k.row} <= rows
        # a release with another version leaves them all out: measure again first
        assert shipped.environment["attn-core"] == attn_core.__version__


def test_a_shipped_profile_of_another_library_is_left_out(registry):
    """Its times are of FlashInfer 0.6.14; another version has other kernels."""
    libraries = LIBRARIES | {"flashinfer-python": "0.6.15"}
    found = select(MHA, H200, registry, libraries, simulated=True)
    assert (found.backend("prefill"), found.backend("decode")) == ("fa3", "fa3")
    assert "priority" in found.roles["decode"].reason
    assert "flashinfer-python was 0.6.14 and is 0.6.15" in explain(found)


@pytest.mark.parametrize("changed", ["torch", "attn-core", "attn-nvidia"])
def test_a_shipped_profile_of_another_torch_or_release_is_left_out(registry, monkeypatch, changed):
    """A build for another CUDA is another torch; kernels of another release have other times."""
    env = {"device": H200.name, "torch": "2.11.0+cu130"}
    env |= {"attn-core": attn_core.__version__, "attn-nvidia": attn_core.__version__}
    here, now = LIBRARIES | {"torch": env["torch"]}, None

    def shipped(*args):
        yield tuned(env | ({changed: now} if now else {}), fa3=1.0)

    monkeypatch.setattr(store, "shipped", shipped)
    assert shipped_profile(H200, registry, here)[0].costs
    now = "2.11.0+cu128" if changed == "torch" else "0.0.9"
    found, why = shipped_profile(H200, registry, here)
    assert not found.costs
    said = f"{changed} was {now} and is {env[changed]}"
    assert said in why
    assert said in tuning(registry, H200, here, here=False).verdict


@pytest.mark.parametrize("stale_last", [False, True])
def test_each_shipped_profile_answers_for_its_own_versions(registry, monkeypatch, stale_last):
    """Two plugins ship times of one device: those of another torch are not used with the others."""
    stale = tuned({"device": H200.name, "torch": "2.10.0"}, fa3=1.0)
    good = tuned({"device": H200.name, "torch": "2.11.0"}, triton=2.0)
    shipped = [good, stale] if stale_last else [stale, good]
    monkeypatch.setattr(store, "shipped", lambda *args: shipped)
    found, why = shipped_profile(H200, registry, LIBRARIES | {"torch": "2.11.0"})
    assert found.costs == good.costs
    assert "torch was 2.10.0 and is 2.11.0" in why


def test_a_shipped_profile_of_libraries_that_are_not_here_is_used(registry):
    """What is not here runs nothing; the times of the others are what they were."""
    assert shipped_profile(H200, registry, {"triton": "3.6.0"})[0].costs
    assert not shipped_profile(H200, registry, {"torch": "2.10.0"})[0].costs


BROKEN = [
    ("[]", "expected a JSON object"),
    ("{", "it is no JSON"),
    ('{"schema": 2}', "expected schema 1, found 2"),
    ('{"schema": 1, "environment": 3}', "expected an environment, found 3"),
    ('{"schema": 1, "environment": {"torch": 2}}', "expected environment torch: a short text"),
    ('{"schema": 1, "environment": {}, "series": 1}', "expected series: a list"),
]


@pytest.mark.parametrize(("text", "fault"), BROKEN)
def test_a_broken_profile_is_skipped_and_named(tmp_path, monkeypatch, text, fault):
    folder = tmp_path / "attn_broken" / "profiles"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "x.json").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    store._files.cache_clear()
    assert not list(store.shipped(["attn_broken", "attn_no_such:thing", "?"], "x"))
    (said,) = store.faults(["attn_broken"])
    assert fault in said
    assert "x.json" in said


def test_a_gpu_can_be_named_and_is_no_architecture():
    assert (H200.type, H200.arch, H200.name) == ("cuda", "sm90", "NVIDIA H200")
    assert parse_device("h200", "13.0") == Device("cuda", "sm90", "13.0")
    assert parse_device("h100").name == "NVIDIA H100 80GB HBM3"
    with pytest.raises(UsageError, match="unknown device type 'h201'"):
        parse_device("h201")


def test_the_probe_asks_the_driver_for_a_name(monkeypatch):
    class Driver:
        def cuInit(self, flags):  # noqa: N802 - the driver's own names
            return 0

        def cuDeviceGet(self, device, ordinal):  # noqa: N802
            return 0

        def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
            value._obj.value = {75: 9, 76: 0}[attribute]
            return 0

        def cuDeviceGetName(self, name, size, device):  # noqa: N802
            name.value = b"NVIDIA H200"
            return 0

    monkeypatch.setattr("attn_core.spec.device.torch_build", lambda: {"cuda": "13.0"})
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver())
    assert probe_device().name == "NVIDIA H200"


@pytest.mark.parametrize(
    ("here", "named", "name", "simulated"),
    [
        ("NVIDIA H200", None, "NVIDIA H200", False),
        ("NVIDIA H200", "h200", "NVIDIA H200", False),
        ("NVIDIA H200", "cuda:sm90", None, False),
        ("NVIDIA H100", None, "NVIDIA H100", False),
        ("NVIDIA H100", "h200", "NVIDIA H200", True),
    ],
)
def test_a_machine_takes_the_profile_of_the_gpu_that_is_meant(
    monkeypatch, registry, here, named, name, simulated
):
    device = Device("cuda", "sm90", "13.0", here)
    monkeypatch.setattr(inputs, "probe_device", lambda: device)
    found = inputs.selection_inputs(InputFlags(device=named), registry)
    assert (found.device.name, found.simulated) == (name, simulated)
    assert found.device.runtime == (None if simulated else "13.0")


def test_the_integrations_take_what_was_tuned_here(monkeypatch):
    """flex_attention is the last by priority; a profile that measured it alone puts it first."""
    form = Form(q_heads=4, kv_heads=2, head_dim=32, v_head_dim=32, dtype="fp32", store="fp32",
                page_size=1)  # fmt: skip
    costs = {
        Key("flex_attention", "", form, size): Cost(1.0, 1.0, 1.0, 0.0)
        for phase in (Phase.PREFILL, Phase.DECODE)
        for size, _ in Workload().passes(phase, None)
    }
    monkeypatch.setattr(store, "tuned_profile", lambda *args: Profile(costs=costs))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    }  # fmt: skip
    found = select_for(config, dtype=torch.float32, device=torch.device("cpu"))
    assert found.backend("prefill") == found.backend("decode") == "flex_attention"
    found, _ = choose(replace(MHA, layers=(replace(MHA.layers[0], num_q_heads=4, num_kv_heads=2,
                              head_dim=32),), dtype="fp32"), torch.device("cpu"))  # fmt: skip
    assert found.backend("decode") == "flex_attention"


def tuned(env, **us):
    """Return a profile of one environment: backend → µs of every pass of the default workload."""
    form = Form(q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128, page_size=1)
    costs = {
        Key(name, "", form, size): Cost(value, value, value, 0.0)
        for name, value in us.items()
        for phase in (Phase.PREFILL, Phase.DECODE)
        for size, _ in Workload().passes(phase, None)
    }
    return Profile(environment=env, costs=costs, date="2026-11-20T10:00:00+00:00")


def test_the_doctor_says_what_is_measured_and_what_it_brings(tmp_path, monkeypatch, registry):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here, libraries = Device("cpu", "avx2"), {}
    env = environment(registry, here)

    def found():
        return tuning(registry, here, libraries, here=True)

    nothing = found()
    assert (nothing.found, nothing.good, nothing.fix) == ("nothing", False, "attn tune")
    assert "decode: torch_native, flex_attention" in nothing.verdict
    old = env | {"torch": "1.0"}
    store.write(store.own_path(old), tuned(old, flex_attention=1.0))
    assert found().found == "stale"
    assert f"torch was 1.0 and is {env['torch']}" in found().verdict
    store.write(store.own_path(env), tuned(env, flex_attention=1.0, torch_native=4.0))
    measured = found()
    assert measured.good
    assert measured.found == f"{2 * (3 + 5)} points"
    assert "days old" in measured.verdict
    assert "prefill takes 75 % less with flex_attention than with torch_native" in measured.verdict
    store.own_path(env).write_text("{")
    assert found().found == "unreadable"


def test_the_doctor_knows_what_is_shipped(registry):
    shipped = tuning(registry, H200, LIBRARIES, here=False)
    assert shipped.good
    assert "shipped for NVIDIA H200" in shipped.verdict
    assert "decode takes" in shipped.verdict
    stale = tuning(registry, H200, LIBRARIES | {"triton": "9"}, here=False)
    assert (stale.found, stale.good) == ("stale", False)
    assert "triton was 3.6.0 and is 9" in stale.verdict
