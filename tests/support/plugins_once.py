"""Load the plugins that are installed once a process, not for 0.05 s at thousands of calls."""

import functools
import pathlib
import sys

from attn_core.plugins import registry

try:
    from attn_intel.cpu.build import compiled_library
except ModuleNotFoundError:  # a GPU's machine may have no other package than its vendor's

    def compiled_library():
        return None


ROOT = str(pathlib.Path(__file__).parents[2])


def install():
    """Put what remembers in the place of load_plugins, for whoever imports it from now on."""
    if not hasattr(registry.load_plugins, "__wrapped__"):
        registry.load_plugins = _remembered(registry.load_plugins)


def _remembered(original):
    """Load anew where a test installs plugins in a folder of its own, or hands them over.

    Tests share a Registry: it is frozen.
    """
    known, loaded = {*sys.path}, {}

    @functools.wraps(original)
    def load_plugins(entry_points=None):
        own = [p for p in sys.path if p not in known and not p.startswith(ROOT)]
        if entry_points is not None or own:
            return original(entry_points)
        here = (*sys.path, compiled_library())  # this library is among the Registry's own
        if here not in loaded:
            loaded[here] = original()
        return loaded[here]

    return load_plugins
