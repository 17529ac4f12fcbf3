"""The real torch-npu, loaded on a CPU over stubs of CANN: its schemas, and our calls of it."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from npu_schemas import SCHEMAS
from stub_libraries import build
from wheels import MISSING, TESTS, folders, pinned

pytestmark = pytest.mark.skipif(not folders(), reason=MISSING)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what a process with the real torch-npu prints."""
    theirs, ours = pinned()["torch-npu"].split(".")[:2], torch.__version__.split(".")[:2]
    if theirs != ours:
        pytest.skip(f"torch-npu {'.'.join(theirs)} needs its own torch, this is {'.'.join(ours)}")
    if torch.version.cuda is not None:
        pytest.skip("torch-npu aborts beside a torch for CUDA, whose options it registers again")
    lacking = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    if lacking:
        pytest.skip(f"no {', '.join(lacking)}, to build the stubs of CANN's libraries")
    [wheel] = [f for f in folders() if (f / "torch_npu").is_dir()]
    stubs = tmp_path_factory.mktemp("stubs")
    build(wheel, stubs)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join([str(stubs), str(wheel / "torch_npu" / "lib")]),
        "PYTHONPATH": os.pathsep.join([str(wheel), str(TESTS / "support"), *sys.path]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
    }
    script = pathlib.Path(TESTS) / "support" / "real_npu.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", [name for _, name in SCHEMAS])
def test_a_recorded_schema_is_what_the_wheel_registers(said: list[str], name: str) -> None:
    [registered] = [line for line in said if f"::{name}(" in line]
    [space] = [s for s, n in SCHEMAS if n == name]
    recorded = torch._C.parse_schema(f"{space}::{SCHEMAS[space, name]}")
    assert torch._C.parse_schema(registered) == recorded


def test_our_calls_pass_the_real_operators(said: list[str]) -> None:
    passed = [line for line in said if line.startswith("passed ")]
    assert len(passed) == 14
