"""Put what SGLang imports on a CPU before its first import; nox has a session for each engine."""

import importlib.util
import os
import pathlib
import sys

import pytest

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
STUBS = str(SUPPORT / "sglang_cpu")
ROOT = str(SUPPORT.parents[1])  # of benchmarks

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_vllm*.py"]
if importlib.util.find_spec("sglang"):
    sys.path.insert(0, STUBS)  # one of them is a vllm
else:
    collect_ignore_glob.append("test_sglang*.py")


@pytest.fixture(scope="session")
def engine_environment():
    """The environment of a process that runs SGLang."""
    path = filter(None, [STUBS, str(SUPPORT), ROOT, os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "1"}
