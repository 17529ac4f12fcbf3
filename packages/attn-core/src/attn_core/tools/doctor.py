"""Check what is installed and whether it fits together, and suggest the command that fixes it."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from dataclasses import replace

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import attn_core
from attn_core.costs import store
from attn_core.plugins.dependencies import Libraries, Pin, alternatives, shortfall, used
from attn_core.plugins.evidence import faults
from attn_core.plugins.registry import Registry
from attn_core.spec.device import Device, devices_of, probe_device, torch_build
from attn_core.tools import probes
from attn_core.tools.clashes import clashes
from attn_core.tools.finding import Finding, Level
from attn_core.tools.tuning import tuning

BUILDS = {"cuda": "cuda", "rocm": "hip", "xpu": "xpu"}  # device type → what torch is built for

VECTORS = {  # architecture of a CPU → what its kernels may use
    "amx": "with AMX",
    "avx512": "with AVX-512, without AMX",
    "avx2": "with AVX2, without AVX-512 and AMX",
    "neon": "with NEON",
    "": "with instructions that are not known",
}


def examine(registry: Registry, device: Device | None = None) -> list[Finding]:
    """Check Python, torch, driver, packages, plugins and the kernel libraries of this device."""
    detected = device or probe_device()
    build = torch_build()
    libraries = registry.installed_libraries()
    return [
        Finding("python", platform.python_version(), "ok", "3.11 or newer"),
        *_torch(build),
        *_driver(build),
        _device(detected, device is not None, build),
        *(_cpu(cpu) for cpu in devices_of(detected)[1:] if device is None),
        *(_npu(detected, libraries) if device is None else ()),
        *_packages(registry),
        *_kernel_libraries(registry, detected, libraries, build.get("version")),
        _tuning(registry, detected, libraries, here=device is None),
        *(probes.findings(registry, detected) if device is None else ()),
        *clashes(registry.pins, detected),
    ]


def _torch(build: dict[str, str]) -> Iterator[Finding]:
    version = build.get("version")
    if version is None:
        yield Finding("torch", "not installed", "problem", "needed", "pip install 'torch>=2.8'")
    elif Version(version) < Version("2.8"):
        text = "too old, 2.8 or newer is needed"
        yield Finding("torch", version, "problem", text, "pip install --upgrade 'torch>=2.8'")
    else:
        kinds = [f"{k} {build[k]}" for k in ("cuda", "hip", "xpu") if k in build]
        yield Finding("torch", version, "ok", f"built for {kinds[0] if kinds else 'CPU'}")


def _driver(build: dict[str, str]) -> Iterator[Finding]:
    version = _cuda_driver()
    if version is None:
        if "cuda" in build:
            text = "torch is built for CUDA, but no driver answers: attention runs on the CPU"
            yield Finding("cuda driver", "none", "note", text)
        else:
            yield Finding(
                "cuda driver", "none", "ok", "no NVIDIA driver: nothing runs on CUDA here"
            )
        return
    if "cuda" not in build:
        text = "a GPU driver is here, but torch is not built for CUDA"
        yield Finding("cuda driver", version, "problem", text, "pip install --upgrade torch")
    elif Version(version).major < Version(build["cuda"]).major:
        text = f"older than torch's CUDA {build['cuda']}: update the driver"
        yield Finding("cuda driver", version, "problem", text)
    else:
        yield Finding("cuda driver", version, "ok", f"runs CUDA up to {version}")


def _device(device: Device, assumed: bool, build: dict[str, str]) -> Finding:
    runtime = f", runtime {device.runtime}" if device.runtime else ""
    if not assumed:
        vectors = f", {VECTORS[device.arch or '']}" if device.type == "cpu" else ""
        return Finding("device", str(device), "ok", f"found{runtime}{vectors}")
    if device.type in BUILDS and BUILDS[device.type] not in build:
        text = f"assumed{runtime}; this torch is not built for {device.type} and cannot use it"
        return Finding("device", str(device), "note", text)
    return Finding("device", str(device), "ok", f"assumed{runtime}")


def _cpu(cpu: Device) -> Finding:
    text = f"beside the device, {VECTORS[cpu.arch or '']}: --device cpu takes it"
    return Finding("cpu", str(cpu), "ok", text)


def _npu(device: Device, libraries: Libraries) -> Iterator[Finding]:
    """Name a torch-npu on a machine without an NPU, where torch cannot load it and fails."""
    version = libraries.get("torch-npu")
    if version and device.type != "npu":
        yield Finding(
            "torch-npu",
            version,
            "problem",
            "no NPU answers: without its driver and CANN `import torch` fails; "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 leaves it out",
            "pip uninstall -y torch-npu",
        )


def _cuda_driver() -> str | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _packages(registry: Registry) -> Iterator[Finding]:
    core = attn_core.__version__
    yield Finding("attn-core", core, "ok", "the contract")
    origins = {o.distribution: o.version for o in registry.origins.values()}
    for name, version in sorted(origins.items()):
        if name == "attn-core":
            continue
        lockstep = not name.startswith("attn-") or version == core or name.count("-") != 1
        yield Finding(name, version, "ok" if lockstep else "note", "backends registered")
    for slow in registry.slow:
        yield Finding(f"{slow.name} ({slow.origin})", "slow", "note", str(slow))
    for broken in registry.broken:
        subject = f"{broken.name} ({broken.origin})"
        yield Finding(subject, "broken", "problem", broken.error)
    modules = [origin.module for origin in registry.origins.values()]
    for fault in faults(modules):
        yield Finding("evidence", "unreadable", "problem", fault)
    for fault in store.faults(modules):
        yield Finding("profile", "unreadable", "problem", fault)


def _kernel_libraries(
    registry: Registry, device: Device, libraries: dict[str, str | None], torch: str | None
) -> Iterator[Finding]:
    """Judge what the backends of this device require, each advice once; install nothing in vain.

    A backend that is declared and not implemented asks for no library: none helps it.
    """
    required: dict[str, list[str]] = {}  # group → the implemented backends that require it
    declared: list[str] = []
    for spec in registry.backends.values():
        for row in spec.capabilities:
            if row.device not in ("any", device.type) or (
                row.archs and device.arch not in row.archs
            ):
                continue
            name = f"{spec.name} (linear)" if spec.family == "linear" else spec.name
            if row.requires and not spec.creator(row) and name not in declared:
                declared.append(name)
            for group in row.requires:
                users = required.setdefault(group, [])
                if spec.creator(row) and spec.name not in users:
                    users.append(spec.name)
    merged: dict[tuple[str, ...], tuple[Finding, list[str], list[str]]] = {}
    for group, users in sorted(required.items()):
        for key, finding in _group(group, registry.pins, libraries, torch):
            if not users and finding.level == "note":
                continue
            _, groups, names = merged.setdefault(key, (finding, [], []))
            groups.append(group)
            names.extend(name for name in users if name not in names)
    for key, (finding, groups, names) in merged.items():
        purpose = f"for {', '.join(sorted(names))}" if names else "for no implemented backend"
        verdict = f"{purpose}; {finding.verdict}" if finding.verdict else purpose
        finding = replace(finding, verdict=verdict)
        yield finding if len(groups) == 1 else _together(finding, groups, *key[:2])
    if declared:
        text = "declared, not implemented in 0.1: their libraries are not asked for"
        yield Finding("no library helps", ", ".join(sorted(declared)), "ok", text)


def _together(finding: Finding, groups: list[str], kind: str, name: str) -> Finding:
    """Let one finding stand for several groups that one installation closes."""
    if kind == "installed":
        return finding
    requirements = [n for g in groups for n in alternatives(g) if n.name == name]
    limits = SpecifierSet(",".join(sorted({str(s) for n in requirements for s in n.specifier})))
    fix = finding.fix if kind == "pinned" else f"pip install '{name}{limits}'"
    return replace(finding, subject=f"{name}{limits}", found=f"{name} not installed", fix=fix)


def _group(
    group: str, pins: tuple[Pin, ...], libraries: dict[str, str | None], torch: str | None
) -> Iterator[tuple[tuple[str, ...], Finding]]:
    """Judge one any-of group: what of it is installed, else how to install it.

    Findings with one key say the same: ("pinned" | "free" | "installed", distribution, …).
    """
    names = alternatives(group)
    group_pins = [p for p in pins if any(p.accepts(n) for n in names)]
    fitting = {p.distribution: p for p in group_pins if p.loads(torch)}
    tied = {p.distribution for p in pins} - set(fitting)  # pinned, but to no torch like this one
    missing = shortfall(group, libraries)
    key: tuple[str, ...]
    if missing is not None:
        pin = next((p for p in fitting.values() if p.pip), None)
        free = [n for n in names if n.name not in tied | set(fitting)]
        new = not any(canonicalize_name(n.name) in libraries for n in names)
        if pin is not None:
            key = ("pinned", pin.distribution, pin.pip) if new else (group,)
            yield key, Finding(group, missing, "note", pin.why, pin.pip)
        elif free:
            key = ("free", free[0].name) if new else (group,)
            text, fix = "", f"pip install '{free[0]}'"
            if free[0].name == "torch":  # every other backend here has the one that is installed
                text, fix = "another torch: install it in an environment of its own", ""
            yield key, Finding(group, missing, "note", text, fix)
        else:
            texts = [f"{p.distribution}: {p.why}" for p in fitting.values()]
            other_torch: dict[str, list[str]] = {}
            for p in group_pins:
                if not p.loads(torch):
                    other_torch.setdefault(p.distribution, []).append(p.torch)
            if other_torch:
                available = ", ".join(
                    f"{d} for torch{' or '.join(t)}" for d, t in other_torch.items()
                )
                texts.insert(0, f"none for torch {torch}: {available}")
            yield (group,), Finding(group, missing, "note", "; ".join(texts))
        return
    for name in names:
        version = libraries.get(canonicalize_name(name.name))
        if version is None:
            continue
        order = _turn(name, group, libraries)
        pin = fitting.get(name.name)
        fits = pin is None or SpecifierSet(pin.version).contains(version, prereleases=True)
        level: Level = "problem"
        if name.name in tied:
            text, fix = f"no version of it is known to work with torch {torch}", ""
        elif pin is not None and not fits:
            text, fix = f"not the version for torch {torch}: {pin.why}", pin.pip
        else:
            level, text, fix = "ok", "", ""
        verdict = "; ".join(t for t in (order, text) if t)
        key = ("installed", name.name, verdict)
        yield key, Finding(name.name, version, level, verdict, fix)


def _tuning(registry: Registry, device: Device, libraries: Libraries, *, here: bool) -> Finding:
    state = tuning(registry, device, libraries, here=here)
    return Finding(
        "measured", state.found, "ok" if state.good else "note", state.verdict, state.fix
    )


def _turn(name: Requirement, group: str, libraries: Libraries) -> str:
    """Say whether this one of a group that is met is used, and before or instead of which."""
    names, first = alternatives(group), used(group, libraries)
    if len(names) == 1 or first is None:
        return ""
    if name.name != first.name:
        return f"not used, {first.name} goes before it"
    earlier = [n.name for n in names[: names.index(first)]]
    later = [n.name for n in names[names.index(first) + 1 :]]
    reason = f", for lack of {' and '.join(earlier)}" if earlier else ""
    return f"used{reason}" + (f", before {' and '.join(later)}" if later else "")
