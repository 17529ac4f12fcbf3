"""Run the kernels of prefill: a plan of the chunks once a pass, one or two launches a layer."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from attn_core.backends.triton.linear.arguments import Chunks, Constants, Inputs, Rows, Workspace
from attn_core.backends.triton.linear.launch import LinearArguments, PrefillKernels
from attn_core.backends.triton.linear.normalize import normalized, normalizes_first
from attn_core.backends.triton.linear.operands import (
    at_slots_of,
    inputs_of,
    placed,
    placed_slots,
    rows_of,
    slots_of,
    states_of,
)
from attn_core.backends.triton.linear.prepare import prepare_gdn
from attn_core.backends.triton.linear.prepare_kda import prepare_kda
from attn_core.backends.triton.linear.scan import scan_chunks
from attn_core.backends.triton.linear.tuning import (
    FROM_SHARED,
    fuses,
    prepare_launch,
    prepares_ahead,
    scan_launch,
)
from attn_core.backends.triton.tuning import is_hopper
from attn_core.backends.triton.variants import has_gluon
from attn_core.ops.triton.launcher import Arguments, Launcher, MapOf, alike

CHUNK = 64
_HOPPER = "attn_core.backends.triton.linear.hopper.launch"


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """The chunks of a pass, and a workspace that its layers share, one after another.

    scans: tiles of 64 rows of the states. ahead: chunks are prepared while others are scanned.
    fused: one kernel does both, for inputs that it takes.
    """

    chunks: Chunks
    work: Workspace
    num_chunks: int
    batch: int
    scans: int
    processors: int
    ahead: bool
    fused: bool

    @cached_property
    def shared(self) -> Arguments:
        """What all layers are given: the chunks and the workspace."""
        return Arguments(self.chunks, self.work)

    @cached_property
    def prepared(self) -> tuple[MapOf, ...]:
        """Where TMA finds T and P, k_in, q_in and k_out, as rows."""
        T, wide = self.work.T, (self.work.k_in, self.work.q_in, self.work.k_out)
        count, width = T.shape[0] * T.shape[1], wide[0].shape[-1]
        squares = MapOf(T.data_ptr(), (count * 2 * CHUNK, CHUNK), (CHUNK, 1))
        return squares, *(MapOf(x.data_ptr(), (count * CHUNK, width), (width, 1)) for x in wide)

    @property
    def alone(self) -> bool:
        """Say whether each tile of a state can have a multiprocessor to itself."""
        return self.scans <= self.processors


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
    common, total, processors = layer.common, len(start), 1
    pinned = device.type == "cuda"
    if pinned:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    scans = len(query_lens) * common.HV * -(-common.V // 64)
    longest = max(counts, default=0)
    ahead = not common.PER_CHANNEL and prepares_ahead(layer.arch, scans, longest, processors)
    fused = not common.PER_CHANNEL and fuses(layer.arch, total * common.HV, longest, processors)
    turn = []
    if ahead:
        places = [j for n in counts for j in range(n)]
        turn = sorted(range(total), key=places.__getitem__)
    parts = (start, [min(CHUNK, x) for x in left], begins, first, order, turn)
    padded = [[*part, *[0] * (-len(part) % 4)] for part in parts]  # each is aligned to 16 bytes
    numbers = [x for part in padded for x in part]
    host = torch.tensor(numbers, dtype=torch.int32, device="cpu", pin_memory=pinned)
    table = host.to(device, non_blocking=True)
    pieces = torch.split(table, [len(part) for part in padded])
    heads = (total, common.HV)

    def empty(*dims: int, store: torch.dtype = dtype) -> Tensor:
        return torch.empty(*heads, *dims, dtype=store, device=device)

    T = empty(2, CHUNK, CHUNK)
    wide = (common.K,) if common.PER_CHANNEL else ()
    decay = empty(*wide, store=torch.float32)
    spread = [empty(CHUNK, common.K) if common.PER_CHANNEL else T for _ in range(3)]
    factors = decay if common.PER_CHANNEL else empty(3, CHUNK, store=torch.float32)
    waits = (table, table)
    if ahead:
        programs = total * common.HV * -(-common.V // 64)
        zeros = torch.zeros(1 + programs, dtype=torch.int32, device=device)
        waits = (zeros[1:], zeros)
    work = Workspace._make((T, factors, decay, *spread, *waits))
    sizes = (total, len(query_lens), scans, processors)
    return PrefillPlan(Chunks(*pieces), work, *sizes, ahead, fused)


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
    common = layer.common
    if normalizes_first(common, k.dtype):
        q, k = normalized(layer, q), normalized(layer, k)
        common = common._replace(NORM=False)
    at_tokens, like_tokens = zip(*map(placed, (q, k, v, g, beta, out)), strict=True)
    at_state, like_state = placed_slots(state)
    at_places, like_places = at_slots_of(slots, slots_out, fresh)
    at_spots, like_spots = at_places[0], None
    if checkpoints is not None:
        at_spots, like_spots = checkpoints.data_ptr(), alike(checkpoints)
    key = (
        *("prefill", fresh is None, plan.num_chunks > 0, plan.alone, plan.ahead, plan.fused),
        *(like_tokens, like_state, like_places, like_spots),
    )
    kernels = layer.prefills.get(key)
    if kernels is None:
        constants = common._replace(FRESH=fresh is not None, CHECKPOINTS=checkpoints is not None)
        inputs, rows = inputs_of(q, k, v, g, beta), rows_of(out)
        kernels = layer.prefills[key] = _kernels(layer, common, constants, inputs, rows, plan)
    at_inputs, at_out = at_tokens[:5], at_tokens[5]
    prepares = (at_inputs, layer.at_weights_or(at_inputs[0][0]), layer.numbers)
    carries = (at_out, at_state, at_places, at_spots)
    at_chunks, at_work = plan.shared.addresses

    def preparing() -> tuple[Any, ...]:
        return inputs_of(q, k, v, g, beta), layer.weights_or(q), layer.numbers

    def carrying() -> tuple[Any, ...]:
        places = slots_of(slots, slots_out, fresh)
        return rows_of(out), states_of(state), places, slots if checkpoints is None else checkpoints

    prepare, maps = kernels.prepare, kernels.maps
    if prepare is not None:
        sizes = (plan.num_chunks, plan.scans, plan.processors) if kernels.ahead else ()
        programs = 4 * plan.processors if kernels.ahead else plan.num_chunks * common.HV
        if programs:
            prepare.launch(
                (programs, 1, 1),
                (*prepares, at_chunks, at_work, *sizes),
                lambda: (*preparing(), *plan.shared.values, *sizes),
            )
    grid = (plan.batch * common.HV * common.V // kernels.rows, 1, 1)
    if maps is None:
        kernels.scan.launch(
            grid,
            (at_inputs, *carries, at_chunks, at_work),
            lambda: (inputs_of(q, k, v, g, beta), *carrying(), *plan.shared.values),
        )
        return out
    (at_q, q_row, _), (at_k, k_row, _), (at_v, v_row, _) = at_inputs[:3]
    tokens, wide = v.shape[0], common.HV * common.V
    keys, values = (tokens, common.HV // common.GROUP * common.K), (tokens, wide)
    at_maps: tuple[MapOf, ...] = (
        MapOf(at_k, keys, (k_row, 1)), MapOf(at_q, keys, (q_row, 1)),
        MapOf(at_v, values, (v_row, 1)), MapOf(at_out[0], values, (at_out[1], 1)),
    )  # fmt: skip
    if prepare is not None:
        T, k_in, q_in, k_out = plan.prepared
        own = (k_in, q_in, *at_maps[2:], T, k_out)
        at_maps = own if common.PER_CHANNEL else (*at_maps, T, T)

    def copying() -> tuple[Any, ...]:
        return maps(inputs_of(q, k, v, g, beta), rows_of(out), plan.work)

    if prepare is None:
        kernels.scan.launch(
            grid,
            (*at_maps, *prepares, *carries, at_chunks),
            lambda: (*copying(), *preparing(), *carrying(), plan.chunks),
        )
    else:
        kernels.scan.launch(
            grid,
            (*at_maps, *carries, at_chunks, at_work),
            lambda: (*copying(), *carrying(), *plan.shared.values),
        )
    return out


def _kernels(
    layer: LinearArguments, common: Constants, constants: Constants, inputs: Inputs, out: Rows,
    plan: PrefillPlan,
) -> PrefillKernels:  # fmt: skip
    """Return what prepares the chunks and what carries the states through them."""
    own = _kernels_of(layer.arch) if plan.num_chunks else None  # no chunks are nothing to copy
    if own is not None and plan.fused and (whole := own.fused(constants, inputs, out)):
        only: PrefillKernels = whole
        return only
    if own is not None and plan.ahead and own.takes(common, inputs, out):
        chosen: PrefillKernels = own.ahead(common, constants)
        return chosen
    prepare = None if own is None else own.prepare(common, inputs)
    scan = None if own is None else own.scan(constants, inputs, out, alone=plan.alone)
    if scan is None and not constants.PER_CHANNEL:
        prepare = None  # it leaves P, where Triton's scan takes P · T
    scan, rows, maps = scan or _scan(layer, constants, inputs, alone=plan.alone)
    return PrefillKernels(
        prepare or _prepare(layer, common, inputs), scan, rows, ahead=False, maps=maps
    )


def _prepare(layer: LinearArguments, common: Constants, inputs: Inputs) -> Launcher:
    """Return what prepares the chunks."""
    dtype, per_channel = inputs.k.ptr.dtype, common.PER_CHANNEL
    wide = dtype == torch.float32
    chosen = prepare_launch(layer.arch, common.K, per_channel=per_channel, wide=wide)
    constants = common._replace(PRECISION=layer.precision(dtype))
    kernel = prepare_kda if per_channel else prepare_gdn
    last = chosen.rows if per_channel else layer.arch in FROM_SHARED
    return Launcher(kernel, last, constants, num_warps=chosen.warps, num_stages=chosen.stages)


def _scan(
    layer: LinearArguments, common: Constants, inputs: Inputs, *, alone: bool
) -> tuple[Launcher, int, None]:
    """Return what carries the states through the chunks, and the rows of V of a program."""
    dtype = inputs.v.ptr.dtype
    wide = dtype == torch.float32
    chosen = scan_launch(layer.arch, common.V, common.K, wide=wide, alone=alone)
    constants = common._replace(PRECISION=layer.precision(dtype))
    last = (chosen.rows, chosen.stages, constants)
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    return Launcher(scan_chunks, *last, **options), chosen.rows, None


@cache
def _kernels_of(arch: str) -> ModuleType | None:
    """Return the launches of an architecture's own kernels; None in Triton's interpreter."""
    if not is_hopper(arch) or knobs.runtime.interpret or not has_gluon():
        return None
    return importlib.import_module(_HOPPER)
