"""Choose the kernels of prefill on a Hopper, and how they are launched."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attn_core.backends.triton.linear.arguments import Constants, Inputs, Rows, Workspace
from attn_core.backends.triton.linear.hopper.ahead import prepare_gdn_ahead
from attn_core.backends.triton.linear.hopper.fused_gdn import fused_gdn_hopper
from attn_core.backends.triton.linear.hopper.maps import (
    Maps,
    of_gdn,
    of_kda,
    of_tokens,
    side_by_side,
)
from attn_core.backends.triton.linear.hopper.prepare_gdn import prepare_gdn_hopper
from attn_core.backends.triton.linear.hopper.prepare_kda import prepare_kda_hopper
from attn_core.backends.triton.linear.hopper.scan import scan_hopper
from attn_core.backends.triton.linear.hopper.scan_alone import scan_alone
from attn_core.backends.triton.linear.launch import PrefillKernels
from attn_core.ops.triton.launcher import Launcher

Copies = Callable[[Inputs, Rows, Workspace], Maps]


def copied(*rows: Rows) -> bool:
    """Say whether tokens can be copied 16 bytes at a time."""
    return all(
        x.ptr.data_ptr() % 16 == x.token_stride % 16 == x.head_stride % 16 == 0 for x in rows
    )


def takes(common: Constants, inputs: Inputs, out: Rows) -> bool:
    """Say whether `ahead` takes these inputs."""
    return prepare(common, inputs) is not None and _copies(common, inputs, out)


def _copies(common: Constants, inputs: Inputs, out: Rows) -> bool:
    """Say whether TMA copies what `scan_alone` reads, and its outputs.

    With a decay per channel keys and queries are those that were prepared.
    """
    values, keys = (inputs.v, out), () if common.PER_CHANNEL else (inputs.q, inputs.k)
    fits = common.K == 128 and common.V % 64 == 0 and inputs.v.ptr.dtype.itemsize == 2
    return (
        fits
        and copied(*values, *keys)
        and all(side_by_side(x, common.V) for x in values)
        and all(side_by_side(x, common.K) for x in keys)
    )


def prepare(common: Constants, inputs: Inputs) -> Launcher | None:
    """Return what prepares chunks, None for inputs that the kernels do not take.

    Four programs of GDN, of 128 registers a thread, share a multiprocessor, and two of KDA.
    """
    dtype = inputs.k.ptr.dtype
    taken = (torch.bfloat16,) if common.PER_CHANNEL else (torch.bfloat16, torch.float16)
    if common.K != 128 or dtype not in taken or not copied(inputs.q, inputs.k):
        return None
    if common.PER_CHANNEL:
        return Launcher(prepare_kda_hopper, common, num_warps=4)
    return Launcher(prepare_gdn_hopper, common, num_warps=4, maxnreg=128)


def scan(
    common: Constants, inputs: Inputs, out: Rows, *, alone: bool
) -> tuple[Launcher, int, Copies | None] | None:
    """Return what carries the states, the rows of V of a program, and what it copies by.

    None as above. alone: each tile of 64 rows can have a multiprocessor to itself. If not, two of a
    head share one and the copies of its chunks. The bits are the same.
    """
    tokens = (inputs.q, inputs.k, inputs.v)
    fits = common.K == 128 and common.V % 64 == 0 and inputs.v.ptr.dtype.itemsize == 2
    if not (fits and copied(*tokens)):
        return None
    if (alone or common.V % 128) and _copies(common, inputs, out):
        return _scan_alone(common, ahead=False), 64, of_kda if common.PER_CHANNEL else of_gdn
    if common.V % 128:
        return None
    stages = 2 if common.PER_CHANNEL else 3
    return Launcher(scan_hopper, stages, common, num_warps=4), 128, None


def _scan_alone(common: Constants, *, ahead: bool) -> Launcher:
    """Return what carries 64 rows of a state in each program, with a multiprocessor to itself."""
    stages, options = 2 if common.PER_CHANNEL else 3, {"launch_pdl": True} if ahead else {}
    last = (stages, 3, 2, ahead, common)
    return Launcher(scan_alone, *last, num_warps=4, maxnreg=168, **options)


def ahead(common: Constants, constants: Constants) -> PrefillKernels:
    """Return kernels that prepare GDN's chunks and scan them at once.

    common: what prepares is compiled for. constants: what carries the states is.
    Four programs of the first share a multiprocessor.
    """
    return PrefillKernels(
        Launcher(prepare_gdn_ahead, common.V // 64, common, num_warps=4, maxnreg=128),
        _scan_alone(constants, ahead=True),
        rows=64, ahead=True, maps=of_gdn,
    )  # fmt: skip


def fused(constants: Constants, inputs: Inputs, out: Rows) -> PrefillKernels | None:
    """Return one kernel that prepares GDN's chunks and carries the states, None as of `prepare`.

    TMA copies tokens whose heads lie side by side, and writes outputs alike.
    """
    tokens = (inputs.q, inputs.k, inputs.v, out)
    fits = constants.K == constants.V == 128 and inputs.v.ptr.dtype.itemsize == 2
    if not (fits and copied(*tokens) and all(side_by_side(x, 128) for x in tokens)):
        return None
    launcher = Launcher(fused_gdn_hopper, constants, num_warps=4)
    return PrefillKernels(None, launcher, 128, ahead=False, maps=of_tokens)
