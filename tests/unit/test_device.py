"""Devices by name, and this machine's, without torch."""

from __future__ import annotations

import pytest
from attn_core.errors import UsageError
from attn_core.spec.device import ARCHS, Device, parse_device, probe_cpu, probe_device, torch_build


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda", "cuda:sm103"),
        ("rocm", "rocm:gfx950"),
        ("npu", "npu:910c"),
        ("xpu", "xpu:pvc"),
        *((f"{t}:{a}", f"{t}:{a}") for t, archs in ARCHS.items() for a in archs),
        ("CUDA:SM90", "cuda:sm90"),
        ("cuda:sm87", "cuda:sm86"),
        ("cuda:sm121", "cuda:sm120"),
    ],
)
def test_names(text, expected):
    assert str(parse_device(text)) == expected


@pytest.mark.parametrize(("major", "minor"), [(8, 7), (8, 9), (9, 0), (10, 1), (12, 1)])
def test_a_chip_that_the_probe_finds_can_be_named(monkeypatch, major, minor):
    """The probe and --device take a chip for the same architecture."""

    class Driver:
        def cuInit(self, flags):  # noqa: N802 - the driver's own names
            return 0

        def cuDeviceGet(self, device, ordinal):  # noqa: N802
            return 0

        def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
            value._obj.value = {75: major, 76: minor}[attribute]
            return 0

    monkeypatch.setattr("attn_core.spec.device.torch_build", lambda: {"cuda": "13.0"})
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver())
    here = probe_device()
    assert here.arch in ARCHS["cuda"]
    assert parse_device(f"cuda:sm{major}{minor}", "13.0") == here


def test_this_machines_own_architecture_can_be_named_where_no_list_has_it():
    here = Device("rocm", "gfx1201", "7.0")
    assert parse_device("rocm:gfx1201", here=here) == Device("rocm", "gfx1201")
    with pytest.raises(UsageError, match="unknown device 'rocm:gfx1200'"):
        parse_device("rocm:gfx1200", here=here)


def test_every_documented_architecture_is_known():
    assert set(ARCHS["cuda"]) == {f"sm{n}" for n in (75, 80, 86, 89, 90, 100, 103, 110, 120)}
    assert set(ARCHS["rocm"]) == {"gfx90a", "gfx942", "gfx950", "gfx1100"}
    assert set(ARCHS["npu"]) == {"910b", "910c"}
    assert set(ARCHS["xpu"]) == {"pvc", "bmg", "dg2"}
    assert set(ARCHS["cpu"]) == {"amx", "avx512", "avx2", "neon"}


@pytest.mark.parametrize("name", ["cpu", "cpu:amx", "xpu", "xpu:bmg"])
def test_a_device_without_a_runtime_takes_no_version(name):
    with pytest.raises(UsageError, match=r"12.8: a .pu device has none \(only cuda, rocm, npu\)"):
        parse_device(name, "12.8")
    assert parse_device("npu", "8.3").runtime == "8.3"
    assert parse_device("acme", "1", extra=["acme"]).runtime == "1"


def test_a_plugins_own_device_type_is_taken_as_it_is():
    assert parse_device("acme:x7", extra=["acme"]) == Device("acme", "x7")
    with pytest.raises(UsageError, match="unknown device type 'acme'"):
        parse_device("acme:x7")


def test_runtime_versions():
    assert parse_device("cuda:sm90", "12.3").runtime == "12.3"
    with pytest.raises(UsageError, match="not a version"):
        parse_device("cuda:sm90", "twelve")


def test_cpu_alone_is_this_machines():
    assert parse_device("cpu") == probe_cpu()
    assert parse_device("cpu", here=Device("cpu", "avx2")) == Device("cpu", "avx2")
    assert parse_device("cpu", here=Device("cuda", "sm90")) == probe_cpu()


def test_this_machine_agrees_with_torch():
    import torch

    here = probe_device()
    assert torch_build()["version"] == torch.__version__
    if torch.cuda.is_available() and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability(0)
        assert (here.type, here.arch) == ("cuda", f"sm{major}{minor}")
        assert here.runtime == torch.version.cuda
    elif not torch.cuda.is_available():
        assert here.type in ("cpu", "npu", "xpu")
    if here.type == "cpu" and here.arch != "neon":
        level = torch.backends.cpu.get_cpu_capability()
        assert (here.arch in ("amx", "avx512")) == level.startswith("AVX512")
