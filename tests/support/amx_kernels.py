"""intel_amx's kernels for tests: compiled here, where nothing is, else the test is skipped."""

import contextlib
import pathlib

import pytest
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing.plan import plan
from attn_intel.cpu import build, library

TILES, VECTORS = (
    ("-include", str(pathlib.Path(__file__).parent / f"emulated_{what}.h"))
    for what in ("tiles", "avx512")
)
LIBRARIES = {build.KERNELS: None}


def compiled():
    """Return the library of this source; without one and without a compiler skip the test."""
    path = build.compiled_library()
    if path is None:
        if (reason := build.unsupported()) is not None:
            pytest.skip(f"intel_amx is not compiled: {reason}")
        folder = build.cache()
        if folder is None:
            pytest.skip("there is no home folder to compile into")
        path = build.build(folder)
    return path


def level_of_this_cpu():
    """Return the level by its name, "avx512_bf16"."""
    compiled()
    return library.LEVELS[library.load().level]


@contextlib.contextmanager
def at_level(monkeypatch, name, path=None):
    """Run what is inside at a level that this CPU has, else skip; path: another library."""
    kernels = library.Kernels(str(path or compiled()))
    level = library.LEVELS.index(name)
    if path is None and level > kernels.level:
        pytest.skip(f"this CPU has {library.LEVELS[kernels.level]}, not {name}")
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "level", level)
        patch.setattr("attn_intel.cpu.backend.load", lambda: kernels)
        yield kernels


def build_edited(monkeypatch, folder, *, source=None, levels=None):
    """Compile with other sources or levels into `folder`."""
    if (reason := build.unsupported()) is not None:
        pytest.skip(f"intel_amx cannot be compiled: {reason}")
    with monkeypatch.context() as patch:
        if source is not None:
            patch.setattr(build, "SOURCE", source)
        if levels is not None:
            patch.setattr(build, "LEVELS", build.LEVELS | levels)
            patch.setattr(build, "FLAGS", ("-O1", *build.FLAGS[1:]))  # compiled sooner
        return build.build(folder)


def emulated_tiles(monkeypatch, folder, source=None):
    """Compile the AMX level over tiles in plain C, and AVX-512 too where the CPU lacks it."""
    below = ("avx512", "avx512_bf16")
    if library.Kernels(str(compiled())).level >= library.LEVELS.index(below[-1]):
        levels = {"amx_bf16": (*build.LEVELS[below[-1]], *TILES)}
    else:
        vectors = (*build.AVX2, "-Wno-psabi", *VECTORS)
        levels = dict.fromkeys(below, vectors) | {"amx_bf16": (*vectors, *TILES)}
    return build_edited(monkeypatch, folder, source=source, levels=levels)


def spec():
    return load_plugins().get("intel_amx")


def checks(*names, kind="mha"):
    """List the check with each of `names`, else the first whose name begins with it."""
    result = plan(spec(), parse_device("cpu:avx512"), LIBRARIES, kinds=(kind,), passes=10)
    return [
        min(
            (p for p in result if p.row and p.check.id.startswith(n)), key=lambda p: p.check.id != n
        )
        for n in names
    ]
