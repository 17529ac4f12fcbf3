"""torch_native on a GPU: a length that is new costs no more than one that was seen."""

from __future__ import annotations

import time

import pytest
import torch
from attn_core.backends.torch_native.kernels import attend
from attn_core.backends.torch_native.plan import Tile

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
LIMIT_S = 0.01  # cuDNN's plan of a new length takes six times as much


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "queries"), [(8, 4), (32, 128)])
def test_new_lengths_compile_nothing(heads, queries, masked):
    q = torch.randn(1, heads, queries, 128, device="cuda", dtype=torch.bfloat16)

    def seconds(keys):
        k = torch.randn(1, 8, keys, 128, device="cuda", dtype=torch.bfloat16)
        mask = torch.zeros(1, 1, queries, keys, device="cuda") if masked else None
        tile = Tile(blocks=slice(None), start=0, length=keys, mask=mask)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        attend(q, k, k, tile, v_dim=128, scale=0.1, logit_cap=None, need_lse=False)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    seconds(200)
    taken = sorted(seconds(keys) for keys in range(301, 331))
    assert taken[len(taken) // 2] < LIMIT_S, taken
