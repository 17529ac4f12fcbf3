"""wave's kernels compile for CDNA 3 and 4 by the calls that our backend makes, with no GPU here."""

import importlib
from importlib.util import find_spec

import pytest
import torch
from attn_rocm.wave import kernels

GQA = kernels.LayerShape(32, 8, 128, 128, torch.bfloat16, 128**-0.5, 0.0)
CAPPED = kernels.LayerShape(8, 4, 64, 64, torch.float16, 0.125, 30.0)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Let kernels be compiled to files, and not be loaded; returns a function that reads all."""
    missing = [name for name in ("wave_lang", "iree", "iree.compiler") if not find_spec(name)]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: `nox -s compiled` installs all")
    monkeypatch.setenv("WAVE_CACHE_ON", "0")
    module = importlib.import_module("wave_lang.kernel.wave.compile")
    real = module.WaveCompileOptions

    def options(**kwargs):
        file = tmp_path / f"{len([*tmp_path.iterdir()])}.vmfb"
        return real(**kwargs | {"wave_runtime": False, "create_vmfb_file": str(file)})

    monkeypatch.setattr(module, "WaveCompileOptions", options)
    for cached in (kernels.decode_kernels, kernels.extend_kernel):
        cached.cache_clear()
    return lambda: [file.read_bytes() for file in sorted(tmp_path.iterdir())]


@pytest.mark.long
@pytest.mark.parametrize("shape", [GQA, CAPPED], ids=["gqa", "soft cap"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_kernels_of_a_layer_compile(compiled, monkeypatch, arch, shape):
    monkeypatch.setenv("WAVE_DEFAULT_ARCH", arch)
    kernels.decode_kernels(shape)
    kernels.extend_kernel(shape, kernels.SHORT)
    built = compiled()
    assert len(built) == 3
    assert all(arch.encode() in blob for blob in built)
