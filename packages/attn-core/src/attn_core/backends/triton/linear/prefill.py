"""Run the kernels of prefill: a plan of the chunks once a pass, two launches a layer."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor
from triton import knobs

from attn_core.backends.triton.linear.arguments import Chunks, Constants, Inputs, Workspace
from attn_core.backends.triton.linear.launch import LinearArguments
from attn_core.backends.triton.linear.operands import (
    inputs_of,
    like,
    rows_of,
    slots_of,
    states_of,
)
from attn_core.backends.triton.linear.prepare import prepare_gdn
from attn_core.backends.triton.linear.prepare_kda import prepare_kda
from attn_core.backends.triton.linear.scan import scan_chunks
from attn_core.backends.triton.linear.tuning import FROM_SHARED, prepare_launch, scan_launch
from attn_core.backends.triton.variants import has_gluon
from attn_core.ops.triton.launcher import Launcher, alike

CHUNK = 64


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """The chunks of a pass, and a workspace that its layers share, one after another."""

    chunks: Chunks
    work: Workspace
    num_chunks: int
    batch: int
    processors: int


def plan_prefill(
    layer: LinearArguments, query_lens: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> PrefillPlan:
    """Cut the new tokens of each request into chunks of 64. Copies one tensor, and never syncs.

    layer: any of the layers that use the plan, which are alike. dtype: of q, k and v.
    The workspace has 16 KiB a chunk and value head, or 64 KiB with a decay per channel.
    """
    counts = [-(-n // CHUNK) for n in query_lens]
    begins = [0, *accumulate(query_lens)]
    start = [x for begin, n in zip(begins, query_lens, strict=False)
             for x in range(begin, begin + n, CHUNK)]  # fmt: skip
    left = [n - x for n in query_lens for x in range(0, n, CHUNK)]
    first = [0, *accumulate(counts)][:-1]
    order = sorted(range(len(query_lens)), key=lambda b: -query_lens[b])
    parts = (start, [min(CHUNK, x) for x in left], begins, first, order)
    padded = [[*part, *[0] * (-len(part) % 4)] for part in parts]  # each is aligned to 16 bytes
    numbers = [x for part in padded for x in part]
    pinned = device.type == "cuda"
    host = torch.tensor(numbers, dtype=torch.int32, device="cpu", pin_memory=pinned)
    table = host.to(device, non_blocking=True)
    pieces = torch.split(table, [len(part) for part in padded])
    common, total = layer.common, len(start)
    heads = (total, common.HV)

    def empty(*dims: int, store: torch.dtype = dtype) -> Tensor:
        return torch.empty(*heads, *dims, dtype=store, device=device)

    T = empty(2, CHUNK, CHUNK)
    wide = (common.K,) if common.PER_CHANNEL else ()
    decay = empty(*wide, store=torch.float32)
    spread = [empty(CHUNK, common.K) if common.PER_CHANNEL else T for _ in range(3)]
    factors = decay if common.PER_CHANNEL else empty(3, CHUNK, store=torch.float32)
    work = Workspace(T, factors, decay, *spread)
    processors = 1
    if pinned:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return PrefillPlan(Chunks(*pieces), work, total, len(query_lens), processors)


def prefill(
    layer: LinearArguments,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    plan: PrefillPlan,
    *,
    slots_out: Tensor | None = None,
    fresh: Tensor | None = None,
    checkpoints: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run the new tokens of each request and store its last state.

    q, k [T, Hk, K]; v [T, Hv, V]; g [T, Hv] or [T, Hv, K]; beta [T, Hv].
    state, slots, slots_out, fresh: as of `decode`. A request without tokens keeps its state.
    plan: of plan_prefill, for the query lengths of this batch.
    checkpoints: int32 [chunks], a slot for the state after each chunk of 64 tokens, requests one
    after another; -1 is none.
    Returns out [T, Hv, V] in the dtype of v.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    if not plan.batch:
        return out
    common, places = layer.common, slots_of(slots, slots_out, fresh)
    inputs, weights = inputs_of(q, k, v, g, beta), layer.weights_or(q)
    rows, stored = rows_of(out), states_of(state)
    tensors = like((*inputs, rows, stored))
    if plan.num_chunks:
        key = ("prepare", *tensors)
        launcher = layer.launchers.get(key)
        if launcher is None:
            launcher = layer.launchers[key] = _prepare(layer, inputs)
        programs = plan.num_chunks * common.HV
        launcher.launch((programs, 1, 1), (inputs, weights, layer.numbers, plan.chunks, plan.work))
    spots = slots if checkpoints is None else checkpoints
    alone = slots.shape[0] * common.HV * -(-common.V // 64) <= plan.processors
    key = (
        *("scan", fresh is None, checkpoints is None, alone, *tensors),
        *map(alike, (*places, spots)),
    )
    scan = layer.scans.get(key)
    if scan is None:
        constants = common._replace(FRESH=fresh is not None, CHECKPOINTS=checkpoints is not None)
        scan = layer.scans[key] = _scan(layer, constants, inputs, alone=alone)
    launcher, height = scan
    launcher.launch(
        (slots.shape[0] * common.HV * common.V // height, 1, 1),
        (inputs, rows, stored, places, spots, plan.chunks, plan.work),
    )
    return out


def _prepare(layer: LinearArguments, inputs: Inputs) -> Launcher:
    """Return what prepares the chunks."""
    common, dtype, own = layer.common, inputs.k.ptr.dtype, _kernels_of(layer.arch)
    launcher: Launcher | None = None if own is None else own.prepare(common, inputs)
    if launcher is not None:
        return launcher
    wide, per_channel = dtype == torch.float32, common.PER_CHANNEL
    chosen = prepare_launch(layer.arch, common.K, per_channel=per_channel, wide=wide)
    constants = common._replace(PRECISION=layer.precision(dtype))
    kernel = prepare_kda if per_channel else prepare_gdn
    last = chosen.rows if per_channel else layer.arch in FROM_SHARED
    return Launcher(kernel, last, constants, num_warps=chosen.warps, num_stages=chosen.stages)


def _scan(
    layer: LinearArguments, common: Constants, inputs: Inputs, *, alone: bool
) -> tuple[Launcher, int]:
    """Return what carries the states through the chunks, and the rows of V of a program."""
    dtype, own = inputs.v.ptr.dtype, _kernels_of(layer.arch)
    found: tuple[Launcher, int] | None = None
    if own is not None:
        found = own.scan(common, inputs, alone=alone)
    if found is not None:
        return found
    wide = dtype == torch.float32
    chosen = scan_launch(layer.arch, common.V, common.K, wide=wide, alone=alone)
    constants = common._replace(PRECISION=layer.precision(dtype))
    last = (chosen.rows, chosen.stages, constants)
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    return Launcher(scan_chunks, *last, **options), chosen.rows


@cache
def _kernels_of(arch: str) -> ModuleType | None:
    """Return the launches of an architecture's own kernels; None in Triton's interpreter."""
    if arch != "sm90" or knobs.runtime.interpret or not has_gluon():
        return None
    return importlib.import_module("attn_core.backends.triton.linear.hopper.launch")
