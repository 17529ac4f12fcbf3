"""The tests start where attn-intel is not installed, as on a GPU's machine."""

import pathlib
import subprocess
import sys

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
SCRIPT = """
import sys

sys.modules["attn_intel"] = None  # as if it were not there
sys.path.insert(0, sys.argv[1])
import plugins_once
from attn_core.plugins import registry

plugins_once.install()
assert registry.load_plugins() is registry.load_plugins()
print(*(name for _, name in registry.load_plugins().backends))
"""


def test_plugins_are_kept_without_the_cpu_kernels():
    command = [sys.executable, "-c", SCRIPT, str(SUPPORT)]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "torch_native" in names
    assert "intel_amx" not in names
