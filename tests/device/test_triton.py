"""triton on a real GPU: the whole suite, replayed CUDA graphs and batch invariance included."""

from dataclasses import replace

import pytest
import torch
from attn_core.testing import BackendSuite, LinearSuite
from triton_passes import Requests, make_layer

if not torch.cuda.is_available():
    pytest.skip("no CUDA or ROCm device", allow_module_level=True)


class TestTriton(BackendSuite):
    name = "triton"


class TestTritonLinear(LinearSuite):
    name = "triton"


class TestTritonCut(BackendSuite):
    """The same with short requests cut too, as in serving only long ones are: states are joined."""

    name = "triton"

    @pytest.fixture(autouse=True)
    def cut(self, monkeypatch):
        monkeypatch.setattr("attn_core.backends.triton.scheduler.unsplit_keys_on", lambda device: 0)


@pytest.mark.parametrize("queries", [1, 100], ids=["decode", "extend"])
@pytest.mark.parametrize(
    ("store", "page", "layout"),
    [("bf16", 16, "NHD"), ("bf16", 64, "HND"), ("bf16", 1, "NHD"), ("fp8_e5m2", 16, "NHD")],
)
def test_a_pool_beyond_32_bit_offsets(store, page, layout, queries):
    """A request whose pages lie by turns at both ends of a pool of more than 2^31 numbers."""
    heads, dim = 8, 128
    near = Requests(make_layer(heads, 2, dim), [300], page=page, store=store, layout=layout)
    pages = (1 << 31) // (page * heads * dim) + near.cache.num_pages
    if torch.cuda.mem_get_info()[0] < 3 * near.cache.k.element_size() << 31:
        pytest.skip("too little memory for the pool")
    own = torch.arange(near.cache.num_pages)
    moved = torch.where(own % 2 > 0, pages - own, own)

    def spread(store):
        far = torch.empty(pages, *store.shape[1:], dtype=store.dtype, device=store.device)
        for a, b in zip(own.tolist(), moved.tolist(), strict=True):
            far[b].copy_(store[a])
        return far

    q, batch = near.draw(queries), near.batch([queries])
    want = near.attend(batch, q)
    near.check(want, q, [queries])
    assert near.cache.v is not None
    near.cache = replace(near.cache, k=spread(near.cache.k), v=spread(near.cache.v))
    near.table = moved.to(near.table)[near.table.long()]
    actual = near.attend(near.batch([queries]), q)
    for a, b in zip(actual, want, strict=True):
        assert torch.equal(a, b)
