"""What measured times depend on: this machine's chip, driver, torch and libraries."""

from __future__ import annotations

import os
import pathlib
import platform
import re

import attn_core
from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.registry import Registry
from attn_core.spec.device import Device, probe_device, torch_build

_DRIVERS = ("/sys/module/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/xe/version")


def chip(device: Device) -> str:
    """Return the name of the chip: the driver's, else the CPU's with its instruction set."""
    if device.name:
        return device.name
    return f"{_cpu()} ({device.arch})" if device.type == "cpu" else str(device)


def environment(registry: Registry, device: Device | None = None) -> dict[str, str]:
    """Return what times on this machine depend on, name → version or text. Imports no torch."""
    here = device or probe_device()
    versions = {name: v for name, v in registry.installed_libraries().items() if v}
    entries: dict[str, str | None] = {
        "device": chip(here),
        "driver": _driver() if here.type != "cpu" else None,
        "runtime": here.runtime,
        "threads": str(_threads()) if here.type == "cpu" else None,
        "torch": torch_build().get("version"),
        "attn-core": attn_core.__version__,
        **{o.distribution: o.version for o in registry.origins.values()},
        **versions,
    }
    return {name: value for name, value in sorted(entries.items()) if value}


def assumed_environment(registry: Registry, device: Device, libraries: Libraries) -> dict[str, str]:
    """Return the environment of a simulated machine: its libraries are those that are assumed."""
    entries = {
        "device": device.name or str(device),
        "runtime": device.runtime,
        **{name: version or "assumed" for name, version in libraries.items()},
        "attn-core": attn_core.__version__,
        **{o.distribution: o.version for o in registry.origins.values()},
    }
    return {name: value for name, value in sorted(entries.items()) if value}


def _driver() -> str | None:
    for path in map(pathlib.Path, _DRIVERS):
        try:
            return path.read_text().strip() or None
        except OSError:
            continue
    return None


def _threads() -> int:
    """Return how many threads torch takes: what OMP_NUM_THREADS says, else this process's CPUs."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named):
        return int(named)
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _cpu() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return match[1].strip() if match else platform.processor() or platform.machine()
