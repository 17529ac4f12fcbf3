"""Pairs of backends over one shared cache on real devices: random sessions, and captured decode.

Every machine has the pairs of its CPU, `-k cpu`.
"""

import hybrid
import pytest
import torch
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import Device, probe_device
from attn_core.testing.runner import torch_device

HERE = probe_device()
PASSES = {"cpu": 20}  # elsewhere 200


def pairs():
    """Yield the pairs of this machine's devices, their type in front of the id.

    On a CPU they compile for longer than the default tests may take.
    """
    libraries = load_plugins().installed_libraries()
    for device in {d.type: d for d in (Device("cpu"), HERE)}.values():
        for param in hybrid.hybrids(device, libraries, torch_device(device)):
            marks = [*param.marks, *([pytest.mark.long] if device.type == "cpu" else [])]
            yield pytest.param(*param.values, id=f"{device.type}-{param.id}", marks=marks)


PAIRS = [*pairs()]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_random_session_over_the_shared_cache(pair):
    with torch.no_grad():
        hybrid.run_mixed_passes(pair, passes=PASSES.get(pair.torch_device.type, 200))


@pytest.mark.parametrize("pair", PAIRS)
def test_replayed_passes_equal_eager(pair):
    with torch.no_grad():
        hybrid.run_replays(pair)
