"""Put what SGLang imports on a CPU before its first import; `nox -s sglang` has SGLang."""

import importlib.util
import os
import pathlib
import sys

import pytest

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
STUBS = str(SUPPORT / "sglang_cpu")

if importlib.util.find_spec("sglang"):
    sys.path.insert(0, STUBS)
else:
    collect_ignore_glob = ["test_sglang*.py"]


@pytest.fixture(scope="session")
def engine_environment():
    """The environment of a process that runs SGLang."""
    path = os.pathsep.join([STUBS, str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
