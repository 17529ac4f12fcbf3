"""Choose the kernels of prefill on a Hopper, and how they are launched."""

from __future__ import annotations

import torch

from attn_core.backends.triton.linear.arguments import Constants, Inputs, Rows
from attn_core.backends.triton.linear.hopper.prepare_gdn import prepare_gdn_hopper
from attn_core.backends.triton.linear.hopper.prepare_kda import prepare_kda_hopper
from attn_core.backends.triton.linear.hopper.scan import scan_hopper
from attn_core.ops.triton.launcher import Launcher


def copied(*rows: Rows) -> bool:
    """Say whether tokens can be copied 16 bytes at a time."""
    return all(
        x.ptr.data_ptr() % 16 == x.token_stride % 16 == x.head_stride % 16 == 0 for x in rows
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


def scan(common: Constants, inputs: Inputs, *, alone: bool) -> tuple[Launcher, int] | None:
    """Return what carries the states, and the rows of V of a program; None as above.

    alone: each tile of 64 rows can have a multiprocessor to itself. If not, two of a head share one
    and the copies of its chunks. The bits are the same.
    """
    tokens = (inputs.q, inputs.k, inputs.v)
    fits = common.K == 128 and common.V % 64 == 0 and inputs.v.ptr.dtype.itemsize == 2
    if not (fits and copied(*tokens)):
        return None
    groups = 1 if alone or common.V % 128 else 2
    stages = 3 if groups == 2 and not common.PER_CHANNEL else 2
    return Launcher(scan_hopper, groups, stages, common, num_warps=4), 64 * groups
