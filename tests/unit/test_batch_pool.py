"""The memory of transformers' continuous batching, which some releases fill with nothing."""

from types import SimpleNamespace

import pytest
import torch
from attn_core.cache.layer_cache import LayerCache
from attn_core.integrations.transformers import batch_passes
from attn_core.integrations.transformers.batch_pool import BatchPool


def test_a_pool_is_made_finite_and_keeps_what_is():
    memory = torch.full((3, 4, 2, 8), float("nan"))
    memory[1], memory[2] = 5.0, float("inf")
    pool = object.__new__(BatchPool)
    pool._caches = {0: LayerCache(k=memory, v=memory.clone())}
    pool.make_finite()
    assert memory.isfinite().all()
    assert pool.layer(0).v.isfinite().all()
    assert (memory[1] == 5.0).all()


@pytest.mark.parametrize(("role", "other", "finite"), [
    (True, False, True), (False, True, True), (False, False, False),
])  # fmt: skip
def test_it_is_where_a_backend_that_may_run_requires_it(monkeypatch, role, other, finite):
    """A backend that is picked later reads the same memory as the first one."""
    made = []
    layers = {0: SimpleNamespace(group=0, chunk=None)}
    pool = SimpleNamespace(make_finite=lambda: made.append(True), layers=layers, all_layers=())
    monkeypatch.setattr(batch_passes, "BatchPool", lambda *args: pool)
    dispatcher = SimpleNamespace(from_selection=lambda *args, **more: None)
    monkeypatch.setattr(batch_passes, "HybridDispatcher", dispatcher)
    choices = [
        SimpleNamespace(row=SimpleNamespace(requires_finite_padding=x)) for x in (role, other)
    ]
    selection = SimpleNamespace(
        roles={"decode": choices[0]}, alternatives={"decode": (choices[1],)}
    )
    batch_passes.Batches(selection, None, (), None, 16)
    assert bool(made) is finite
