"""The doctor names what is wrong and the line that mends it for the torch that is installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attn_core.plugins.dependencies import Pin
from attn_core.plugins.registry import BrokenPlugin, Origin, Registry, load_plugins
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.tools import clashes, doctor

HOPPER = Device("cuda", "sm90", "13.0")
PINS = (
    Pin(distribution="kern", torch="==2.11.*", version="==0.4.5", why="built for torch 2.11"),
    Pin(distribution="kern", torch="==2.13.*", version="==0.4.8", why="built for torch 2.13"),
    Pin(distribution="source", torch=">=2.8", version="", why="built from source", indexed=False),
    Pin(distribution="meta", torch=">=2.11", version="==1.0", options="--no-deps", why="metadata"),
)


def registry(*groups: str) -> Registry:
    row = Capabilities(
        kind="mha",
        device="cuda",
        archs={"sm90"},
        requires=groups,
        dtypes={"bf16"},
        kv_dtypes={"bf16"},
        priority=1,
    )
    spec = BackendSpec(name="x", capabilities=[row], create="a:b")
    origin = Origin("attn-x", "0.1.0", "attn_x")
    broken = BrokenPlugin("acme", Origin("attn-acme", "2", "attn_acme"), "ImportError: no acme")
    key = ("softmax", "x")
    return Registry({key: spec}, {key: origin}, (broken,), PINS)


def examine(monkeypatch, torch: str, libraries: dict, *groups: str, device=HOPPER):
    monkeypatch.setattr(doctor, "torch_build", lambda: {"version": torch, "cuda": "13.0"})
    monkeypatch.setattr(doctor, "_cuda_driver", lambda: "13.0")
    monkeypatch.setattr(Registry, "installed_libraries", lambda self: libraries)
    return {f.subject: f for f in doctor.examine(registry(*groups), device)}


@pytest.mark.parametrize(
    ("torch", "libraries", "group", "level", "text", "fix"),
    [
        ("2.11.0+cu130", {}, "kern>=0.4", "note", "built for torch 2.11", "'kern==0.4.5'"),
        ("2.13.0", {}, "kern>=0.4", "note", "built for torch 2.13", "'kern==0.4.8'"),
        ("2.12.0", {}, "kern>=0.4", "note", "none for torch 2.12.0", ""),
        ("2.12.0", {}, "kern>=0.4 or meta", "note", "metadata", "--no-deps 'meta==1.0'"),
        ("2.12.0", {}, "kern or free>=3", "note", "for x", "'free>=3'"),
        ("2.13.0", {}, "source", "note", "for x; source: built from source", ""),
        ("2.13.0", {}, "kern>=0.4 or source", "note", "built for torch 2.13", "'kern==0.4.8'"),
        ("2.13.0", {}, "source or free", "note", "for x", "'free'"),
        (  # no command for another torch: what else is here was built for this one
            "2.13.0",
            {},
            "torch==2.8.*",
            "note",
            "for x; another torch: install it in an environment of its own",
            "",
        ),
        (
            "2.12.0",
            {},
            "kern or source",
            "note",
            "==2.11.* or ==2.13.*; source: built from source",
            "",
        ),
        (
            "2.13.0",
            {},
            "kern>=0.4,<=0.4.5",
            "note",
            "for x; none for torch 2.13.0: kern for torch==2.11.*$",
            "",
        ),
        ("2.13.0", {"source": "9"}, "source", "ok", "for x", ""),
        ("2.13.0", {"kern": "0.4.5"}, "kern", "problem", "not the version", "'kern==0.4.8'"),
        ("2.12.0", {"kern": "0.4.5"}, "kern", "problem", "no version of it is known", ""),
        ("2.13.0", {"kern": "0.4.8"}, "kern", "ok", "for x", ""),
    ],
)
def test_libraries(monkeypatch, torch, libraries, group, level, text, fix):
    result = examine(monkeypatch, torch, libraries, group)
    finding = result[group if not libraries else next(iter(libraries))]
    assert finding.level == level
    assert text in finding.verdict + "$"
    assert finding.fix.endswith(fix)
    assert bool(finding.fix) == bool(fix)


@pytest.mark.parametrize(
    ("libraries", "verdicts"),
    [
        (
            {"a": "1", "b": "1"},
            {"a": "for x; used, before b and c", "b": "for x; not used, a goes"},
        ),
        ({"b": "1"}, {"b": "for x; used, for lack of a, before c"}),
        ({"c": "9"}, {"c": "for x; used, for lack of a and b$"}),
        ({"a": "0.9", "c": "1"}, {"a": "for x; not used, c goes before it", "c": "for x; used"}),
        ({"a": "0.9"}, {"a>=1 or b or c": "for x$"}),
    ],
)
def test_of_several_libraries_the_one_that_is_used(monkeypatch, libraries, verdicts):
    """A row names them in the order in which a backend takes them."""
    result = examine(monkeypatch, "2.13.0", libraries, "a>=1 or b or c")
    for name, text in verdicts.items():
        assert (result[name].verdict + "$").startswith(text), result[name].verdict


def doctor_of(monkeypatch, libraries, torch="2.13.0", **backends):
    """Examine backends, each given as (implemented, groups that its row requires)."""
    specs, origins = {}, {}
    for name, (implemented, groups) in backends.items():
        (spec,) = registry(*groups).backends.values()
        specs["softmax", name] = replace(spec, name=name, create="a:b" if implemented else None)
        origins["softmax", name] = Origin("attn-x", "0.1.0", "attn_x")
    monkeypatch.setattr(doctor, "torch_build", lambda: {"version": torch, "cuda": "13.0"})
    monkeypatch.setattr(Registry, "installed_libraries", lambda self: libraries)
    return doctor.examine(Registry(specs, origins, (), PINS), HOPPER)


def test_one_installation_is_advised_once(monkeypatch):
    result = doctor_of(
        monkeypatch,
        {},
        a=(True, ["free>=1", "kern>=0.4"]),
        b=(True, ["free>=1,<2", "source or kern>=0.4"]),
        c=(True, ["kern"]),
    )
    fixes = [f.fix for f in result if f.fix]
    assert sorted(fixes) == ["pip install 'free<2,>=1'", "pip install 'kern==0.4.8'"]
    verdicts = [f.verdict for f in result if f.fix]
    assert sorted(verdicts) == ["for a, b", "for a, b, c; built for torch 2.13"]


def test_what_is_installed_is_named_once(monkeypatch):
    result = doctor_of(monkeypatch, {"free": "1.5"}, a=(True, ["free>=1"]), b=(True, ["free<2"]))
    assert [f.verdict for f in result if f.subject == "free"] == ["for a, b"]


def test_no_library_is_advised_for_a_backend_that_is_not_implemented(monkeypatch):
    result = doctor_of(
        monkeypatch, {"kern": "0.4.5"}, a=(False, ["free>=1", "kern"]), b=(True, ["other"])
    )
    assert [f.fix for f in result if f.subject in ("free>=1", "other")] == ["pip install 'other'"]
    (said,) = [f for f in result if f.found == "a"]
    assert "not implemented" in said.verdict
    (wrong,) = [
        f for f in result if f.subject == "kern"
    ]  # what is installed is looked at all the same
    assert wrong.level == "problem"


def test_libraries_of_other_hardware_are_not_mentioned(monkeypatch):
    result = examine(monkeypatch, "2.13.0", {}, "kern", device=Device("cpu", "amx"))
    assert "kern" not in result


@pytest.mark.parametrize(
    ("libraries", "here", "problem"),
    [
        ({"torch-npu": "2.13.0"}, Device("cpu", "avx2"), True),
        ({"torch-npu": "2.13.0"}, Device("npu", "910b"), False),
        ({}, Device("cpu", "avx2"), False),
    ],
)
def test_a_torch_npu_without_an_npu_is_a_problem(monkeypatch, libraries, here, problem):
    """It breaks `import torch`, which doctor does not import."""
    monkeypatch.setattr(doctor, "probe_device", lambda: here)
    result = examine(monkeypatch, "2.13.0", libraries, device=None)
    assert ("torch-npu" in result) == problem
    if problem:
        assert result["torch-npu"].level == "problem"
        assert "`import torch` fails" in result["torch-npu"].verdict
        assert result["torch-npu"].fix == "pip uninstall -y torch-npu"


def test_broken_plugins_are_problems(monkeypatch):
    result = examine(monkeypatch, "2.13.0", {})
    finding = result["acme (attn-acme 2)"]
    assert (finding.level, finding.verdict) == ("problem", "ImportError: no acme")


@pytest.mark.parametrize(
    ("build", "driver", "level", "text"),
    [
        ({"version": "2.13.0+cpu"}, "13.0", "problem", "not built for CUDA"),
        ({"version": "2.13.0", "cuda": "13.0"}, "12.8", "problem", "update the driver"),
        ({"version": "2.13.0", "cuda": "12.8"}, "13.0", "ok", "runs CUDA up to 13.0"),
        ({"version": "2.13.0", "cuda": "13.0"}, None, "note", "attention runs on the CPU"),
        ({"version": "2.13.0+cpu"}, None, "ok", "no NVIDIA driver"),
    ],
)
def test_driver(monkeypatch, build, driver, level, text):
    monkeypatch.setattr(doctor, "_cuda_driver", lambda: driver)
    (finding,) = doctor._driver(build)
    assert finding.level == level
    assert text in finding.verdict


@pytest.mark.parametrize(
    ("asked", "level", "verdict"),
    [
        (HOPPER, "ok", "assumed, runtime 13.0"),
        (Device("rocm", "gfx942"), "note", "assumed; this torch is not built for rocm and cannot"),
        (Device("cpu", "amx"), "ok", "assumed"),
        (None, "ok", "found"),
    ],
)
def test_a_device_that_was_named_is_assumed(monkeypatch, asked, level, verdict):
    monkeypatch.setattr(doctor, "probe_device", lambda: Device("cpu", "neon"))
    finding = examine(monkeypatch, "2.13.0", {}, device=asked)["device"]
    assert finding.level == level
    assert finding.verdict.startswith(verdict)
    assert ("assumed" in finding.verdict) == (asked is not None)


@pytest.mark.parametrize(
    ("build", "text"), [({}, "needed"), ({"version": "2.6.0"}, "2.8 or newer")]
)
def test_torch_missing_or_old(build, text):
    (finding,) = doctor._torch(build)
    assert finding.level == "problem"
    assert text in finding.verdict
    assert "pip install" in finding.fix


@pytest.mark.parametrize(
    ("owners", "problem"),
    [([], False), (["Amd_AITER"], False), (["aiter"], True), (["amd-aiter", "aiter"], True)],
)
def test_another_project_with_a_librarys_module_is_a_problem(monkeypatch, owners, problem):
    """The index has a package aiter, which is not AMD's."""
    pin = Pin(distribution="amd-aiter", torch=">=2.8", version=">=0.1", why="-", module="aiter")
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"aiter": owners})
    result = [*clashes.clashes((pin,), HOPPER)]
    assert [(f.subject, f.level) for f in result] == [("aiter", "problem")] * problem
    if problem:
        assert "unrelated project: amd-aiter cannot be imported" in result[0].verdict
        assert result[0].fix.startswith("pip uninstall -y aiter && pip install 'amd-aiter>=0.1'")


@pytest.mark.parametrize(
    ("device", "kept", "gone"),
    [
        (Device("npu", "910b"), "triton-ascend==3.2.0", "triton"),
        (Device("cuda", "sm90"), "triton==3.6.0", "triton-ascend"),
    ],
)
def test_two_libraries_with_the_same_files_are_a_problem(device, kept, gone, monkeypatch):
    """triton-ascend owns the module name `triton`: pip lets the two overwrite each other."""
    both = {"triton": "3.6.0", "triton-ascend": "3.2.0"}
    here = dict[str, str]()
    monkeypatch.setattr(
        clashes, "installed", lambda names: {n: here[n] for n in names if n in here}
    )
    monkeypatch.setattr(clashes, "strangers", lambda pin: [])
    pins = load_plugins().pins
    for one in both:
        here |= {one: both[one]}
        result = [*clashes.clashes(pins, device)]
        assert len(result) == len(here) - 1
    assert (result[0].subject, result[0].level) == ("triton-ascend", "problem")
    assert "the files of triton" in result[0].verdict
    assert result[0].fix.startswith(f"pip uninstall -y {gone} && pip install '{kept}'")
