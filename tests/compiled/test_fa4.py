"""Each kernel that fa4's rows use compiles for Hopper and for Blackwell, with no GPU here."""

import json
import pathlib
import subprocess
import sys
from importlib.util import find_spec

import build_fa4
import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "build_fa4.py"
COMPILERS = ("nvidia-cutlass-dsl", "quack-kernels")


def build(arch, *words):
    missing = [name for name in ("flash_attn", "cutlass", "quack") if not find_spec(name)]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: `nox -s compiled` installs all")
    done = subprocess.run([sys.executable, SCRIPT, arch, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [line | {"faults": [line["error"]] if "error" in line else []} for line in lines]


@pytest.mark.long
@pytest.mark.parametrize("arch", build_fa4.CHIPS)
def test_every_kernel_compiles(arch, evidence):
    lines = build(arch)
    evidence(build_fa4.chip(arch), lines, COMPILERS)
    assert len(lines) == len(build_fa4.SITES)
    assert [line for line in lines if line["faults"]] == []
