"""Run the kernels of prefill: a plan of the chunks once a pass, two launches a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from attn_core.backends.triton.linear.arguments import Chunks, Workspace
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
    tensors, wide = like((*inputs, rows, stored)), v.dtype == torch.float32
    if plan.num_chunks:
        key = ("prepare", *tensors)
        launcher = layer.launchers.get(key)
        if launcher is None:
            prepared = prepare_launch(
                layer.arch, common.K, per_channel=common.PER_CHANNEL, wide=wide
            )
            constants = common._replace(PRECISION=layer.precision(v.dtype))
            kernel = prepare_kda if common.PER_CHANNEL else prepare_gdn
            last = prepared.rows if common.PER_CHANNEL else layer.arch in FROM_SHARED
            launcher = layer.launchers[key] = Launcher(
                kernel,
                *(last, constants),
                num_warps=prepared.warps,
                num_stages=prepared.stages,
            )
        programs = plan.num_chunks * common.HV
        launcher.launch((programs, 1, 1), (inputs, weights, layer.numbers, plan.chunks, plan.work))
    spots = slots if checkpoints is None else checkpoints
    tiles = slots.shape[0] * common.HV
    alone = tiles * -(-common.V // 64) <= plan.processors
    chosen = scan_launch(layer.arch, common.V, common.K, wide=wide, alone=alone)
    key = (
        *("scan", fresh is None, checkpoints is None, chosen.stages, *tensors),
        *map(alike, (*places, spots)),
    )
    launcher = layer.launchers.get(key)
    if launcher is None:
        constants = common._replace(
            FRESH=fresh is not None,
            CHECKPOINTS=checkpoints is not None,
            PRECISION=layer.precision(v.dtype),
        )
        launcher = layer.launchers[key] = Launcher(
            scan_chunks,
            *(chosen.rows, chosen.stages, constants),
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )
    launcher.launch(
        (layer.programs(slots, chosen), 1, 1),
        (inputs, rows, stored, places, spots, plan.chunks, plan.work),
    )
    return out
