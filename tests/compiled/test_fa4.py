"""Each kernel that fa4's rows use compiles for Hopper and for Blackwell, with no GPU here."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "fa4.py"
# The compiler pins torch and others: a Python of its own may have it.
PYTHON = os.environ.get("ATTN_FA4_PYTHON", sys.executable)
FIND = "import attn_core, importlib.metadata as m; m.version('flash-attn-4'); import cutlass, quack"


def build(arch, *words):
    found = subprocess.run([PYTHON, "-c", FIND], capture_output=True, text=True)
    if found.returncode:
        why = found.stderr.strip().splitlines()[-1]
        pytest.skip(f"{PYTHON} cannot compile FA4 ({why}); set ATTN_FA4_PYTHON to one that can")
    done = subprocess.run([PYTHON, SCRIPT, arch, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_every_kernel_compiles(arch):
    lines = build(arch)
    assert len(lines) > 18
    assert [line for line in lines if "error" in line] == []
