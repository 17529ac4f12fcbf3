"""Let each test import the emulated vendor libraries, and nothing outside it."""

import importlib
import pathlib
import sys

import numpy as np
import pytest
import torch
from attn_core.runtime import workspace

VENDOR = pathlib.Path(__file__).parent / "vendor"
EMULATED = {p.stem for p in VENDOR.iterdir()}


class UntouchedZeros:
    """torch, whose zeros are of memory that costs nothing until it is touched."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, nbytes, *, dtype, device):
        assert (dtype, device) == (torch.uint8, torch.device("cpu"))
        return torch.from_numpy(np.zeros(nbytes, np.uint8))


@pytest.fixture(autouse=True)
def _own_scratch(monkeypatch):
    """Give each test scratch of its own: a larger one of another test would hide one too small."""
    monkeypatch.setattr(workspace, "_HELD", {})
    monkeypatch.setattr(workspace, "torch", UntouchedZeros())


@pytest.fixture(autouse=True)
def vendor(monkeypatch):
    """Put vendor/ first on sys.path; afterwards its modules are gone and real ones are back."""
    with monkeypatch.context() as patch:  # no file is new, and no folder has to be read anew
        patch.setattr(importlib, "invalidate_caches", lambda: None)
        monkeypatch.syspath_prepend(str(VENDOR))
    real = _taken_out()
    yield VENDOR
    _taken_out()
    sys.modules.update(real)


def _taken_out():
    if not EMULATED & sys.modules.keys():
        return {}
    names = [m for m in sys.modules if m.partition(".")[0] in EMULATED]
    return {name: sys.modules.pop(name) for name in names}
