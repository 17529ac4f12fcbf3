"""A pass of linear attention beside itself: made again, captured and replayed, and far away."""

from __future__ import annotations

import unittest
from dataclasses import replace

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.state_pool import StateCache, StatePool
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.graphs import captured, without_host_lengths
from attn_core.runtime.linear_routes import LinearRoutes
from attn_core.testing import far
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import to_device
from attn_core.testing.linear_cases import LinearCase, LinearPass, LinearPoint
from attn_core.testing.linear_inputs import make_batch
from attn_core.testing.linear_passes import LinearEngine
from attn_core.testing.linear_states import PoolMemory
from attn_core.testing.tolerance import Measure, require, worst


def twice(bench: Bench, case: LinearCase, point: LinearPoint) -> Measure:
    """A row that declares `deterministic` gives the same bits again, in a new backend too."""
    [pass_] = case.passes
    first, second = (LinearEngine(bench, case, point) for _ in range(2))
    measures = [first.step(pass_), second.step(pass_)]
    same = all(map(torch.equal, first.outputs, second.outputs))
    require(same, "not deterministic: the same pass gave other bits")
    second.memory.require_kept(first.memory, "not deterministic, the same pass again", states=())
    return worst(measures)


def replayed(bench: Bench, case: LinearCase, point: LinearPoint) -> Measure:
    """Capture a pass with padding alone, then replay it with requests, in other orders and slots.

    On a CUDA device the call is captured in a graph; elsewhere it is made again, with the plan and
    the tensors of the capture, which shows the same mistakes.
    """
    [pass_] = case.passes
    n = len(pass_.slots)
    trees = None if pass_.trees is None else pass_.trees[::-1]
    passes = [pass_, replace(pass_, slots=pass_.slots[::-1], fresh=(1, 4), trees=trees)]
    passes.append(replace(pass_, slots=(*pass_.slots[2:], -1, -1)))
    if bench.row.separate_write_slots:
        passes.append(replace(pass_, slots_out=(4, *pass_.slots[1:])))
    engine = LinearEngine(bench, replace(case, passes=tuple(passes)), point)
    separate = (-1,) * n if bench.row.separate_write_slots else None
    padding = replace(pass_, slots=(-1,) * n, slots_out=separate, fresh=(0,))
    static = make_batch(padding, engine.device)
    if not bench.row.needs_host_lengths:
        static = without_host_lengths(static)
    inputs = [to_device(tuple(x), engine.device) for x in engine.draw(padding)]
    outs = [x[2].new_full(x[2].shape, torch.nan) for x in inputs]
    parts = engine.routes.capture(static)

    def run() -> Tensor:
        for layer, (q, k, v, g, beta), out in zip(engine.on_device, inputs, outs, strict=True):
            engine.routes.forward(q, k, v, g, beta, layer, static, parts, out)
        return outs[0]

    replay, _ = captured(run, engine.device)
    measures = []
    for changed in passes:
        tensors, old_memory = engine.draw(changed), engine.memory.copy()
        out_too = changed if separate is None else replace(changed, slots_out=changed.writes)
        batch = make_batch(out_too, engine.device)
        _refill(static, batch)
        for static_input, source in zip(inputs, tensors, strict=True):
            for x, y in zip(static_input, source, strict=True):
                x.copy_(y)
        for out in outs:
            out.fill_(torch.nan)
        engine.routes.replay(static, parts)
        replay()
        plan = engine.routes.plan(batch)
        measures.append(engine.check(changed, tensors, outs, old_memory, batch, plan))
    return worst(measures)


def _refill(static: ForwardBatch, batch: ForwardBatch) -> None:
    """Copy the slots and the trees of a pass into the tensors that a graph reads."""
    if static.spec is not None and static.spec.tree_mask is not None:
        assert batch.spec is not None
        assert batch.spec.tree_mask is not None
        static.spec.tree_mask.copy_(batch.spec.tree_mask)
    for name in ("state_slots", "state_slots_out", "state_fresh"):
        target, source = getattr(static, name), getattr(batch, name)
        if target is not None:
            target.copy_(torch.zeros_like(target) if source is None else source)


def far_slots(bench: Bench, case: LinearCase, point: LinearPoint) -> Measure:
    """Slots that begin beyond 2^32 numbers are read and written.

    Raises unittest.SkipTest, which pytest takes for a skip, where there is no such memory.
    """
    [pass_] = case.passes
    case = replace(case, num_layers=1)
    (_, hv), (k, v) = case.heads, case.dims
    size, dtype = hv * k * v, TORCH_DTYPES[point.state_dtype]
    first = far.BEYOND // size + 1  # an offset of 32 bits wraps to a slot of poison
    slots = first + case.num_slots
    needed = slots * size * dtype.itemsize
    far.refuse_memory(bench.torch_device, needed)
    try:
        return _far_away(LinearEngine(bench, case, point), pass_, first)
    except torch.OutOfMemoryError as error:
        message = str(error)
    finally:  # other processes run checks on the same device
        if bench.torch_device.type != "cpu":
            torch.get_device_module(bench.torch_device).empty_cache()
    raise unittest.SkipTest(f"a pool of {needed >> 20} MiB: {message}")


def _far_away(engine: LinearEngine, pass_: LinearPass, first: int) -> Measure:
    """Run a pass over the last slots of a large pool, `first` and on; the first ones are poison."""
    pool_state = engine.memory.pool.states.state
    storage = pool_state.new_empty(1, first + pool_state.shape[1], *pool_state.shape[2:])
    storage[:, : 2 * pool_state.shape[1]] = torch.nan
    storage[:, first:] = pool_state
    last, ids = storage[:, first:], engine.memory.pool.layer_ids
    engine.memory = PoolMemory(StatePool.of(ids, StateCache(state=last)), {"state": last})
    engine.routes = LinearRoutes(engine.routes.routes, StatePool.of(ids, StateCache(state=storage)))
    batch = make_batch(replace(pass_, slots=tuple(s + first for s in pass_.slots)), engine.device)
    tensors, old_memory = engine.draw(pass_), engine.memory.copy()
    parts = engine.routes.plan(batch)
    outs = [engine.attend(0, tensors[0], batch, parts)]
    return engine.check(pass_, tensors, outs, old_memory, batch, parts)
