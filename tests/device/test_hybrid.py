"""Pairs of backends over one shared cache on a real GPU: random sessions, and captured decode."""

import hybrid
import pytest
import torch
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import probe_device

if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("no CUDA device", allow_module_level=True)

PASSES = 200
PAIRS = [
    *hybrid.hybrids(probe_device(), load_plugins().installed_libraries(), torch.device("cuda"))
]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_random_session_over_the_shared_cache(pair):
    with torch.no_grad():
        hybrid.run_mixed_passes(pair, passes=PASSES)


@pytest.mark.parametrize("pair", PAIRS)
def test_replayed_passes_equal_eager(pair):
    with torch.no_grad():
        hybrid.run_replays(pair)
