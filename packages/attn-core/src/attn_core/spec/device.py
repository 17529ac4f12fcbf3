"""Devices by name, and this machine as a Device. Torch is inspected but never imported."""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from packaging.version import Version

from attn_core.errors import UsageError
from attn_core.formatting import near


@dataclass(frozen=True)
class Device:
    """The device that attention runs on, such as `cuda:sm90` with runtime "12.8", or `cpu:amx`.

    runtime: the version of CUDA, ROCm or CANN. None means unknown and counts as the newest.
    name: the driver's name for the chip, by which measured profiles are found; None: not known.
    """

    type: str
    arch: str | None = None
    runtime: str | None = None
    name: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.type}:{self.arch}" if self.arch else self.type


RUNTIMES = ("cuda", "rocm", "npu")  # types with a version: of CUDA, of ROCm, of CANN
# Per type its architectures; the first is its newest data-centre part.
ARCHS: dict[str, tuple[str, ...]] = {
    "cuda": ("sm103", "sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm110", "sm120"),
    "rocm": ("gfx950", "gfx90a", "gfx942", "gfx1100"),
    "npu": ("910c", "910b"),
    "xpu": ("pvc", "bmg", "dg2"),
    "cpu": ("amx", "avx512", "avx2", "neon"),
}
# Chips that run what another member of their family runs, by CUDA's rules of compatibility: Jetson
# Orin, Thor under its name before CUDA 13, and the GB10 of a DGX Spark.
FAMILY = {"sm87": "sm86", "sm88": "sm86", "sm101": "sm110", "sm121": "sm120"}


CPUINFO = pathlib.Path("/proc/cpuinfo")  # on Linux, with the instruction sets among its words
# GPUs that profiles are measured on, with the driver's name for them; H100 is the SXM5 board.
GPUS = {"h200": ("sm90", "NVIDIA H200"), "h100": ("sm90", "NVIDIA H100 80GB HBM3")}


def parse_device(
    text: str,
    runtime: str | None = None,
    extra: Iterable[str] = (),
    here: Device | None = None,
) -> Device:
    """Parse "cuda", "cuda:sm90" and so on. A type alone means its newest data-centre architecture.

    "cpu" alone is the CPU of this machine: every machine has one, beside its accelerator too.
    "h200" is the GPU itself: cuda:sm90, ranked by what was measured on it, if anything was.
    A member of a family is reduced to the family's architecture: "cuda:sm121" is cuda:sm120, as
    probe_device reports it too.
    runtime: version of CUDA, ROCm or CANN; CPUs and XPUs have none.
    extra: device types that plugins declare in addition, with any architecture.
    here: this machine, whose own architecture is accepted even if no list has it.
    Raises UsageError, which lists the possible values.
    """
    if not isinstance(text, str):
        raise UsageError(f"device {text!r} (expected a text such as 'cuda:sm90' or 'cpu')")
    if runtime is not None:
        try:
            Version(runtime)
        except ValueError:  # InvalidVersion, or too long a number
            raise UsageError(f"--runtime-version {runtime}: not a version like 12.8") from None
    kind, _, arch = text.strip().lower().partition(":")
    if kind in GPUS and not arch:
        arch, name = GPUS[kind]
        return Device("cuda", arch, runtime, name)
    if kind not in ARCHS:
        if kind in set(extra):
            return Device(kind, arch or None, runtime)
        raise UsageError(f"unknown device type {kind!r}: {near(kind, [*ARCHS, *extra])}")
    if runtime is not None and kind not in RUNTIMES:
        with_runtime = ", ".join(RUNTIMES)
        raise UsageError(
            f"--runtime-version {runtime}: a {kind} device has none (only {with_runtime})"
        )
    if kind == "cpu" and not arch:
        return probe_cpu() if here is None else devices_of(here)[-1]
    if not arch:
        return Device(kind, ARCHS[kind][0], runtime)
    if kind == "cuda":
        arch = FAMILY.get(arch, arch)
    if arch not in ARCHS[kind] and (here is None or str(here) != f"{kind}:{arch}"):
        devices = [f"{kind}:{a}" for a in ARCHS[kind]]
        raise UsageError(f"unknown device {text!r}: {near(f'{kind}:{arch}', devices)}")
    return Device(kind, arch, runtime)


def torch_build() -> dict[str, str]:
    """Read the installed torch's version, cuda and hip from its version file, not by import."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = (pathlib.Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return {}
    constants = re.findall(r"^(__version__|cuda|hip|xpu)\b[^=]*= *['\"]([^'\"]+)['\"]", text, re.M)
    return {("version" if name == "__version__" else name): value for name, value in constants}


def probe_device() -> Device:
    """Return the device of this machine: an accelerator that torch can use, else the CPU."""
    build = torch_build()
    if "cuda" in build and (gpu := _cuda_gpu()):
        return Device("cuda", gpu[0], build["cuda"], gpu[1])
    if "hip" in build and (arch := _rocm_arch()):
        return Device("rocm", arch, ".".join(build["hip"].split(".")[:2]))
    if importlib.util.find_spec("torch_npu") and any(pathlib.Path("/dev").glob("davinci[0-9]*")):
        return Device("npu", _npu_arch(), None)
    if "xpu" in build and (arch := _xpu_arch()):
        return Device("xpu", arch, None)
    return probe_cpu()


def probe_cpu() -> Device:
    """Return the CPU of this machine, whatever accelerator is beside it."""
    return Device("cpu", _cpu_arch())


def devices_of(here: Device) -> tuple[Device, ...]:
    """Return what this machine has: the device that was probed, and its CPU beside it."""
    return (here,) if here.type == "cpu" else (here, probe_cpu())


def _cuda_gpu() -> tuple[str, str | None] | None:
    """Ask the driver for the architecture and the name of the first GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if cuda.cuInit(0) != 0:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    failed = cuda.cuDeviceGet(ctypes.byref(device), 0)
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    failed = failed or cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    failed = failed or cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    if failed:
        return None
    arch, name = f"sm{major.value * 10 + minor.value}", ctypes.create_string_buffer(256)
    device_name = getattr(cuda, "cuDeviceGetName", None)
    unnamed = device_name is None or device_name(name, len(name), device)
    return FAMILY.get(arch, arch), None if unnamed else name.value.decode(errors="replace")


def _rocm_arch() -> str | None:
    """Read the first GPU's gfx name from the kernel's topology."""
    for path in sorted(pathlib.Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        match = re.search(r"^gfx_target_version (\d+)$", path.read_text(), re.M)
        if match and (number := int(match[1])):
            return f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"
    return None


def _npu_arch() -> str | None:
    text = "".join(p.read_text() for p in pathlib.Path("/proc/driver").glob("**/*version*"))
    match = re.search(r"910[bc]", text.lower())
    return match[0] if match else None


def _xpu_arch() -> str | None:
    """Tell Intel GPUs apart by PCI device id (8086:0bd5 is a Data Center GPU Max)."""
    for path in sorted(pathlib.Path("/sys/class/drm").glob("card*/device/vendor")):
        if path.read_text().strip() != "0x8086":
            continue
        number = int((path.parent / "device").read_text(), 16)
        for arch, low, high in (("pvc", 0x0BD0, 0x0BDF), ("dg2", 0x5690, 0x56CF)):
            if low <= number <= high:
                return arch
        if 0xE200 <= number <= 0xE2FF:
            return "bmg"
    return None


def _cpu_arch() -> str | None:
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "neon"
    try:
        flags = set(CPUINFO.read_text().split())
    except OSError:
        return None
    for arch, flag in (("amx", "amx_tile"), ("avx512", "avx512f"), ("avx2", "avx2")):
        if flag in flags:
            return arch
    return None
