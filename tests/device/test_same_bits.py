"""A pass has the same bits each time: what is read too early or too late differs by chance.

Run: `pytest tests/device/test_same_bits.py`.
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from attn_core.plugins.registry import load_plugins

from benchmarks.cases import Case, build
from benchmarks.ours import our_backend
from benchmarks.runner import tolerance

TIMES = 200
LATENT = {"kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
TREES = {"phase": "verify", "queries": 8, "tree": True, "batch": 64, "length": 2560}
CASES = (
    Case(phase="mla-extend", batch=6, length=1028, queries=322, q_heads=64, page_size=16, **LATENT),
    Case(phase="mla-extend", batch=2, length=2048, queries=512, q_heads=16, **LATENT),
    Case(phase="mla", batch=64, length=4096, ragged=True, q_heads=16, **LATENT),
    Case(phase="mla", batch=64, length=2560, q_heads=16, shared=((64, 2048),), **LATENT),
    Case(phase="mla", batch=64, length=2048, ragged=True, q_heads=128, page_size=1, **LATENT),
    Case(phase="mla-verify", batch=32, length=2048, queries=4, q_heads=16, **LATENT),
    Case(phase="decode", batch=64, length=4096, ragged=True),
    Case(phase="decode", batch=64, length=2560, shared=((64, 2048),)),
    Case(**TREES, shared=((64, 2048),)),
    Case(**TREES, shared=((64, 2048),), q_heads=28, kv_heads=4, page_size=16),
    Case(phase="prefill", batch=4, length=2048, queries=None, ragged=True),
    Case(phase="prefill", batch=4, length=2048, queries=None, ragged=True, page_size=16),
    Case(phase="prefill", batch=4, length=2048, queries=None, head_dim=256, v_head_dim=256),
    Case(phase="extend", batch=8, length=4096, queries=300, page_size=1),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_pass_has_the_same_bits_each_time(case):
    device = torch.device("cuda")
    inputs = build(case, device)
    ours = our_backend("triton", load_plugins(), device, shared_prefix=bool(case.shared))
    call = ours.prepare(inputs)
    first = call().clone()
    assert inputs.error(first) <= tolerance(case)
    others = sum(not torch.equal(call(), first) for _ in range(TIMES))
    assert others == 0, f"{others} of {TIMES} passes have other bits"
