"""A pool of more numbers than 32 bits count, where the device has the memory for it."""

from __future__ import annotations

import dataclasses
import unittest

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.testing.answers import Answer
from attn_core.testing.cases import Case
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Inputs, Point
from attn_core.testing.passes import attend, compare, create, prepared
from attn_core.testing.pools import poison, raw
from attn_core.testing.tolerance import Measure

BEYOND = 1 << 32  # an offset of 32 bits, with or without a sign, wraps to a page of poison


def far_pages(bench: Bench, case: Case, point: Point) -> Measure:
    """Pages that begin beyond 2^32 numbers are read, and written by a row with fused_kv_write.

    Raises unittest.SkipTest, which pytest takes for a skip, where there is no such memory.
    """
    inputs, reference = prepared(bench, case, point)
    pools = [t for t, _ in inputs.cache.parts()]
    first = BEYOND // min(t[0].numel() for t in pools) + 1
    needed = sum((first + len(t)) * t[0].nbytes for t in pools)
    refuse_memory(bench.torch_device, needed)
    try:
        return _attended(bench, case, point, with_far_pages(inputs, point, first), reference)
    except torch.OutOfMemoryError as error:
        message = str(error)
    finally:  # other processes run checks on the same device
        if bench.torch_device.type != "cpu":
            torch.get_device_module(bench.torch_device).empty_cache()
    raise unittest.SkipTest(f"a pool of {needed >> 20} MiB: {message}")


def _attended(bench: Bench, case: Case, point: Point, inputs: Inputs, reference: Answer) -> Measure:
    actual = attend(create(bench, case, inputs, point), inputs, cache=inputs.cache)
    return compare(
        actual, reference, inputs.real_tokens, TORCH_DTYPES[point.dtype], "output from far pages"
    )


def refuse_memory(device: torch.device, needed: int) -> None:
    """Raise unittest.SkipTest where a device lacks `needed` bytes, or is only a CPU."""
    if device.type == "cpu":
        raise unittest.SkipTest(f"a pool of {needed >> 20} MiB: asked on an accelerator alone")
    module = torch.get_device_module(device)
    free = module.mem_get_info(device)[0] if hasattr(module, "mem_get_info") else needed
    if free < needed + needed // 4:  # what other processes may yet ask for
        raise unittest.SkipTest(f"a pool of {needed >> 20} MiB: {free >> 20} MiB are free")


def with_far_pages(inputs: Inputs, point: Point, first: int) -> Inputs:
    """Return the pass with page 1 and on at page 1 + `first` and on; the first pages are poison."""

    def far(t: Tensor) -> Tensor:
        new = t.new_empty(first + len(t), *t.shape[1:])
        packed = inputs.cache.latent_dim > 0  # there every byte is part of a NaN
        poison_value = torch.tensor(0xFF) if packed else raw(poison(point.dtype, (1,), large=False))
        raw(new)[: 2 * len(t)] = poison_value.to(t.device)
        raw(new)[first:] = raw(t)
        return new

    cache, view = inputs.cache, inputs.batch.views["full"]
    slots, size = view.out_cache_loc, point.page_size
    assert slots is not None  # make_inputs gives slots
    view = dataclasses.replace(
        view,
        page_table=torch.where(view.page_table > 0, view.page_table + first, 0),
        out_cache_loc=torch.where(slots >= size, slots + first * size, slots),
    )
    indexer = inputs.indexer
    if indexer is not None:
        old = indexer.topk_indices
        indexer = dataclasses.replace(
            indexer, topk_indices=torch.where(old >= size, old + first * size, old)
        )
    far_cache = LayerCache(
        k=far(cache.k),
        v=None if cache.v is None else far(cache.v),
        latent_dim=cache.latent_dim,
        layout=cache.layout,
    )
    batch = dataclasses.replace(inputs.batch, views={"full": view})
    return dataclasses.replace(
        inputs, cache=far_cache, after=far_cache, batch=batch, indexer=indexer
    )
