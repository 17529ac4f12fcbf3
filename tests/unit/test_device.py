"""Devices by name, and this machine's, without torch."""

from __future__ import annotations

import pytest
from attn_core.capabilities import Device
from attn_core.device import ARCHS, parse_device, probe_device, torch_build
from attn_core.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda", "cuda:sm103"),
        ("rocm", "rocm:gfx950"),
        ("npu", "npu:910c"),
        ("xpu", "xpu:pvc"),
        ("cpu", "cpu:amx"),
        *((f"{t}:{a}", f"{t}:{a}") for t, archs in ARCHS.items() for a in archs),
        ("CUDA:SM90", "cuda:sm90"),
    ],
)
def test_names(text, expected):
    assert str(parse_device(text)) == expected


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
