"""A machine with a GPU and a CPU with AMX: its CPU is a device of it, by every way to name it."""

from __future__ import annotations

import json

import pytest
import torch
from attn_core import Requirements, UsageError, load_plugins, parse_device, probe_device
from attn_core.cli import check, measurement
from attn_core.cli.app import build_app
from attn_core.cli.check import local_device
from attn_core.cli.inputs import must_be_here, selection_inputs
from attn_core.cli.options import InputFlags
from attn_core.integrations import choice
from attn_core.integrations.transformers import select as integration
from attn_core.spec import device
from attn_core.spec.device import Device, probe_cpu
from attn_core.tools import doctor
from typer.testing import CliRunner

AMX = Device("cpu", "amx")
FLAGS = "fpu sse4_2 avx avx2 fma f16c avx512f avx512bw avx512_bf16 amx_bf16 amx_tile amx_int8"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Simulate the files and the driver of a Xeon with an H200."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: a Xeon\nflags\t\t: {FLAGS}\n")
    monkeypatch.setattr(device, "CPUINFO", cpuinfo)
    monkeypatch.setattr(device.platform, "machine", lambda: "x86_64")
    build = {"version": "2.11.0+cu130", "cuda": "13.0"}
    monkeypatch.setattr(device, "torch_build", lambda: build)
    monkeypatch.setattr(device, "_cuda_gpu", lambda: ("sm90", "NVIDIA H200"))


def test_both_are_found():
    assert str(probe_device()) == "cuda:sm90"
    assert probe_cpu() == parse_device("cpu") == AMX


@pytest.mark.parametrize("named", ["cpu", "cpu:amx"])
def test_attn_check_runs_on_the_cpu(named):
    assert local_device(named) == AMX


@pytest.mark.parametrize("named", [None, "cuda", "cuda:sm90"])
def test_attn_check_runs_on_the_gpu(named):
    assert str(local_device(named)) == "cuda:sm90"


def test_attn_check_refuses_what_neither_is():
    for named in ("cpu:avx2", "cuda:sm100", "xpu"):
        with pytest.raises(UsageError, match=r"this machine has cuda:sm90 and cpu:amx"):
            local_device(named)


def test_attn_check_plans_what_the_rows_of_this_cpu_declare(monkeypatch, tmp_path):
    """The command found no row for a CPU without architecture."""
    requested = []
    monkeypatch.setattr(check, "_run", lambda options, jobs: requested.append(options) or [])
    monkeypatch.setattr(
        "attn_core.plugins.registry.Registry.installed_libraries",
        lambda self: {"attn-intel-kernels": "0.1.0"},
    )
    words = ["check", "intel_amx", "--device", "cpu", "--quick", "--evidence", str(tmp_path)]
    CliRunner().invoke(build_app(), words)
    assert [options.device for options in requested] == [AMX]


@pytest.mark.parametrize("named", ["cpu", "cpu:amx"])
def test_selection_takes_the_cpu_and_what_is_installed(named):
    registry = load_plugins()
    result = selection_inputs(InputFlags(device=named), registry)
    assert (result.device, result.simulated) == (AMX, False)
    assert result.libraries == registry.installed_libraries()
    must_be_here(result, probe_device(), "a warm-up")


def test_attn_select_says_which_cpu():
    done = CliRunner().invoke(build_app(), ["select", "--device", "cpu", "--json"])
    assert json.loads(done.stdout)["device"] == "cpu:amx"


def test_another_cpu_is_simulated_and_measured_nowhere():
    result = selection_inputs(InputFlags(device="cpu:avx512"), load_plugins())
    assert result.simulated
    with pytest.raises(UsageError, match=r"this machine has cuda:sm90 and cpu:amx"):
        must_be_here(result, probe_device(), "a measurement")


def test_attn_tune_and_bench_measure_on_the_cpu():
    result = measurement.inputs_of(InputFlags(device="cpu"), None, load_plugins())
    assert (result.device, result.simulated) == (AMX, False)


def test_a_model_on_the_cpu_gets_its_rows(monkeypatch):
    """Of transformers, of SGLang and of vLLM."""
    assert integration._device(torch.device("cpu")) == AMX
    seen = []
    kept = choice.select

    def selecting(needs, here, *rest, **more):
        seen.append(here)
        return kept(needs, here, *rest, **more)

    monkeypatch.setattr(choice, "select", selecting)
    choice.choose(Requirements(), torch.device("cpu"))
    assert seen == [AMX]


def test_attn_doctor_names_the_cpu_beside_the_gpu():
    result = {f.subject: f for f in doctor.examine(load_plugins())}
    assert result["device"].found == "cuda:sm90"
    assert result["cpu"].found == "cpu:amx"
    assert "with AMX" in result["cpu"].verdict
    assert "cpu" not in {f.subject for f in doctor.examine(load_plugins(), AMX)}


@pytest.mark.parametrize(
    ("arch", "text"),
    [
        ("amx", "found, with AMX"),
        ("avx512", "found, with AVX-512, without AMX"),
        ("avx2", "without AVX-512 and AMX"),
        ("neon", "with NEON"),
        (None, "not known"),
    ],
)
def test_attn_doctor_says_what_a_cpu_has(monkeypatch, arch, text):
    monkeypatch.setattr(doctor, "probe_device", lambda: Device("cpu", arch))
    result = {f.subject: f for f in doctor.examine(load_plugins())}
    assert text in result["device"].verdict
    assert "cpu" not in result
