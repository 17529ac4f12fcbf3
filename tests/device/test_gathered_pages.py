"""FP8 pages of a prompt on a GPU: Triton's kernels bring the tokens that torch's operators bring.

Run: `pytest tests/device/test_gathered_pages.py`.
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from attn_core.runtime import sparse
from triton_passes import launches

from benchmarks.sparse_cases import SparseCase, build


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_tokens_that_torch_brings(dtype, monkeypatch):
    x = build(SparseCase(phase="prefill", batch=3, new=40, length=4096), torch.device("cuda"))
    cache = x.caches["fp8_e4m3"]
    chosen = x.chosen.clone()
    chosen[5, 1000:] = -1
    brought = []
    for triton in (False, True):
        sparse._gatherer.cache_clear()
        if not triton:
            monkeypatch.setattr(sparse, "has_triton", lambda device: False)
        else:
            monkeypatch.undo()
        with launches() as names:
            latents, slots = sparse.gather_pages(x.layer, cache, x.batch, chosen, dtype)
        brought.append((latents.flatten(0, 1)[slots.clamp(min=0).long()], slots < 0))
    (want, none), (actual, none_too) = brought
    assert {"decode_pages", "place_slots"} <= {*names}
    assert torch.equal(none, none_too)
    assert torch.equal(actual[~none], want[~none])
