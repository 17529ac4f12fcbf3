"""A row whose probe crashed, hung or raised is not selected here, and the reason says so."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest
import torch
from attn_core.costs import store
from attn_core.costs.environment import environment
from attn_core.costs.shapes import row_key
from attn_core.errors import BackendError, UsageError
from attn_core.integrations.choice import choose
from attn_core.integrations.transformers.select import select_for
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.result import NoBackendError, Overrides
from attn_core.selection.solver import select
from attn_core.spec.device import Device, probe_device
from attn_core.spec.requirements import LayerRequirements, Requirements
from attn_core.tools import probes, probing
from attn_core.tools.doctor import examine
from attn_core.tools.probes import Probes, probed
from attn_core.tools.probing import Target, probe, targets
from hypothesis import given
from hypothesis import strategies as st

ROWS = """
from attn_core import BackendSpec, Capabilities, hookimpl

def row(**fields):
    plain = dict(kind="mha", device="cpu", dtypes={"fp32"}, kv_dtypes={"fp32"}, priority=90)
    return Capabilities(**plain | fields)

@hookimpl
def attn_register_backends():
    names = ("Crashing", "Ending", "Fine", "Hanging", "Raising", "Wrong")
    return [
        BackendSpec(name=n.lower(), capabilities=[row()], create=f"faulty_backends:{n}")
        for n in names
    ] + [BackendSpec(name="absent", capabilities=[row(device="cuda")], create="x:Y"),
         BackendSpec(name="declared", capabilities=[row()])]
"""
BACKENDS = """
import os, signal, subprocess, sys, time
from attn_core.backends.torch_native.backend import TorchNative as Fine

class Crashing(Fine):
    def init_forward_metadata(self, batch):
        print("what a kernel prints", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)

class Ending(Fine):
    def init_forward_metadata(self, batch):
        print("no licence\\x1b for this kernel", file=sys.stderr, flush=True)
        os._exit(7)

class Hanging(Fine):
    def init_forward_metadata(self, batch):
        child = subprocess.Popen(["sleep", "600"])
        with open(os.environ["HANGING"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(600)

class Raising(Fine):
    def init_forward_metadata(self, batch):
        raise RuntimeError("no kernel image is available")

class Wrong(Fine):
    def forward(self, q, *args, **kwargs):
        return super().forward(q * 1.02, *args, **kwargs)
"""
CPU = probe_device()
MHA = LayerRequirements(num_q_heads=4, num_kv_heads=2, head_dim=32)
NEEDS = Requirements(layers=(MHA,), dtype="fp32")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """Install a plugin with faulty backends, for this process and those that it starts."""
    folder = tmp_path_factory.mktemp("faulty")
    info = folder / "attn_faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: attn-faulty\nVersion: 1.0\nRequires-Dist: attn-core==0.1.*\n"
    )
    (info / "entry_points.txt").write_text("[attn_core]\nfaulty = faulty_rows\n")
    (folder / "faulty_rows.py").write_text(ROWS)
    (folder / "faulty_backends.py").write_text(BACKENDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("HANGING", str(folder / "hanging"))
        yield folder


@pytest.fixture(scope="module")
def registry(plugin):
    loaded = load_plugins()
    origins = {k: o for k, o in loaded.origins.items() if o.distribution == "attn-faulty"}
    assert len(origins) == 8
    return Registry({k: loaded.backends[k] for k in origins}, origins)


@pytest.fixture(scope="module")
def found(registry):
    """What became of the faulty backends: one run, because processes take seconds to start."""
    return {p.target.spec.name: p for p in probe(targets(registry, CPU), CPU, 10.0)}


def test_what_can_run_here_is_probed(found):
    assert sorted(found) == ["crashing", "ending", "fine", "hanging", "raising", "wrong"]
    assert not any(p.unknown for p in found.values())


def test_a_crash_a_hang_and_an_exception_are_reasons(found):
    failed = {name: p.failed for name, p in found.items()}
    assert failed["fine"] == ""
    assert failed["crashing"] == "its process was killed by SIGSEGV"
    assert failed["ending"] == (
        r"its process ended with exit code 7: no licence\x1b for this kernel"
    )
    assert failed["hanging"] == "no answer within 10 s"
    assert failed["raising"].endswith("declared, but RuntimeError: no kernel image is available")
    assert "error" in failed["wrong"]


def test_what_hangs_is_ended_with_what_it_started(found, plugin):
    assert found["hanging"].failed
    for number in map(int, (plugin / "hanging").read_text().split()):
        for _ in range(100):  # a killed process is gone once somebody has waited for it
            try:
                with open(f"/proc/{number}/stat") as file:
                    state = file.read().rpartition(")")[2].split()[0]
            except OSError:
                break
            if state == "Z":
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"process {number} of the probe goes on")


@pytest.fixture
def cached(registry, found, tmp_path, monkeypatch):
    """Keep the verdicts in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert probes.read(registry, CPU) is None
    assert probed(registry, CPU) is registry
    verdicts = {p.target.name: p.failed for p in found.values()}
    probes.write(verdicts, registry, CPU)
    return probed(registry, CPU)


def test_the_selection_avoids_what_failed(cached, registry):
    chosen = select(NEEDS, CPU, cached, {})
    assert (chosen.backend("prefill"), chosen.backend("decode")) == ("fine", "fine")
    assert select(NEEDS, CPU, registry, {}).backend("decode") == "crashing"  # without a verdict
    [why] = {str(r) for v in chosen.verdicts if v.spec.name == "crashing" for r in v.reasons}
    assert why.startswith("its probe failed on ")
    assert "its process was killed by SIGSEGV" in why
    assert "`attn check crashing` says more" in why
    with pytest.raises(NoBackendError, match="SIGSEGV"):
        select(NEEDS, CPU, cached, {}, Overrides(decode_attention_backend="crashing"))


def test_a_verdict_is_of_this_machine_and_of_these_versions(cached, registry, monkeypatch):
    elsewhere = select(NEEDS, CPU, cached, {}, simulated=True)
    assert elsewhere.backend("decode") == "crashing"
    newer = {k: replace(o, version="1.1") for k, o in registry.origins.items()}
    assert probed(replace(registry, origins=newer), CPU).failed == {}
    row = registry.get("crashing").capabilities[0]
    spec = replace(registry.get("crashing"), capabilities=[replace(row, head_dims={32})])
    changed = {**cached.backends, ("softmax", "crashing"): spec}
    other = select(NEEDS, CPU, replace(cached, backends=changed), {})
    assert other.backend("decode") == "crashing", "another row was not probed"


def test_doctor_names_what_failed(cached, registry):
    findings = {f.subject: f for f in examine(registry)}
    assert findings["probes"].found == "1 rows"
    digest = row_key(registry.get("hanging").capabilities[0])
    hangs = findings[f"hanging, row {digest}"]
    assert (hangs.level, hangs.fix) == ("problem", "attn check hanging")
    assert "no answer within 10 s" in hangs.verdict


def test_integrations_avoid_what_failed(cached, registry):
    config = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1
    }  # fmt: skip
    asked = {"dtype": torch.float32, "device": torch.device("cpu"), "registry": registry}
    assert select_for(config, **asked).backend("decode") == "fine"
    loaded = load_plugins()  # another environment than that of the faulty plugin alone
    probes.write(probes.read(registry, CPU).failed, loaded, CPU)
    chosen, _ = choose(NEEDS, torch.device("cpu"))
    assert chosen.backend("decode") == "fine"


def test_a_process_that_cannot_start_is_no_verdict(registry, monkeypatch):
    monkeypatch.setattr(probing.sys, "executable", "/bin/false")
    with pytest.raises(BackendError, match="cannot start: its process ended with exit code 1"):
        list(probe(targets(registry, CPU)[:1], CPU))


def test_the_command(plugin, here, registry, found, tmp_path, monkeypatch):
    def quick(todo, device, seconds):
        assert (device, seconds) == (CPU, 9.0)
        return [probing.Probed(t, found[t.spec.name].failed) for t in todo if t.spec.name in found]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("attn_core.cli.doctor.run_probes", quick)
    done = here("doctor", "--probe", "--seconds", "9", "--json")
    assert done.returncode == 1
    failed = {
        f["subject"].partition(",")[0] for f in json.loads(done.stdout) if f["found"] == "failed"
    }
    assert failed == {"crashing", "ending", "hanging", "raising", "wrong"}
    chosen = json.loads(here("select", "--dtype", "fp32", "--json").stdout)
    assert chosen["decode"] == "fine"
    explained = here("why-not", "raising", "--dtype", "fp32")
    assert "no kernel image is available" in " ".join(explained.stdout.split())  # lines wrap
    assert here("doctor", "--probe", "--device", "cuda:sm90").returncode == 2
    assert here("doctor", "--probe", "--seconds", "nan").returncode == 2


JUNK = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.none(), max_size=2)


@given(st.sampled_from(("schema", "date", "rows", "family", "backend", "row", "failed", "")), JUNK)
def test_a_spoilt_cache_is_a_usage_error(registry, tmp_path_factory, key, junk):
    data = Probes(verdicts={("softmax", "fine", "0"): "x"}, date="2026").to_json()
    if key in data:
        data[key] = junk
    elif key:
        data["rows"][0][key] = junk
    else:
        data = junk
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        path = store.own_path(environment(registry, CPU), probes.FOLDER)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(data))
        try:
            again = probes.read(registry, CPU)
        except UsageError as error:
            said = str(error)
            assert str(path) in said
            assert "attn doctor --probe" in said
            assert [f.level for f in examine(registry) if f.subject == "probes"] == ["problem"]
        else:
            assert Probes.from_json(again.to_json()) == again


def test_other_devices_have_nothing_to_probe(registry):
    assert targets(registry, Device("acme")) == []
    assert {t.spec.name for t in targets(registry, Device("cuda", "sm90"))} == {"absent"}
    assert Target(registry.get("fine"), 0).name[:2] == ("softmax", "fine")
