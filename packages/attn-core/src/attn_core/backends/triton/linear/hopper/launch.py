"""Choose the kernels of prefill on a Hopper, and how they are launched."""

from __future__ import annotations

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_core.backends.triton.hopper.stores import SWIZZLED
from attn_core.backends.triton.linear.arguments import Constants, Inputs, Rows
from attn_core.backends.triton.linear.hopper.ahead import prepare_gdn_ahead
from attn_core.backends.triton.linear.hopper.fused_gdn import fused_gdn_hopper
from attn_core.backends.triton.linear.hopper.prepare_gdn import prepare_gdn_hopper
from attn_core.backends.triton.linear.hopper.prepare_kda import prepare_kda_hopper
from attn_core.backends.triton.linear.hopper.scan import scan_hopper
from attn_core.backends.triton.linear.hopper.scan_alone import scan_alone
from attn_core.backends.triton.linear.launch import PrefillKernels
from attn_core.ops.triton.launcher import Launcher


def copied(*rows: Rows) -> bool:
    """Say whether tokens can be copied 16 bytes at a time."""
    return all(
        x.ptr.data_ptr() % 16 == x.token_stride % 16 == x.head_stride % 16 == 0 for x in rows
    )


def takes(common: Constants, inputs: Inputs) -> bool:
    """Say whether `ahead` takes these inputs."""
    return prepare(common, inputs) is not None and scan(common, inputs, alone=True) is not None


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
    if alone or common.V % 128:
        return _scan_alone(common, ahead=False), 64
    stages = 2 if common.PER_CHANNEL else 3
    return Launcher(scan_hopper, stages, common, num_warps=4), 128


def _scan_alone(common: Constants, *, ahead: bool) -> Launcher:
    """Return what carries 64 rows of a state in each program, with a multiprocessor to itself."""
    stages, options = 2 if common.PER_CHANNEL else 3, {"launch_pdl": True} if ahead else {}
    last = (stages, 3, 1, ahead, common)
    return Launcher(scan_alone, *last, num_warps=4, maxnreg=168, **options)


def ahead(common: Constants, constants: Constants) -> PrefillKernels:
    """Return kernels that prepare GDN's chunks and scan them at once.

    common: what prepares is compiled for. constants: what carries the states is.
    Four programs of the first share a multiprocessor.
    """
    return PrefillKernels(
        Launcher(prepare_gdn_ahead, common.V // 64, common, num_warps=4, maxnreg=128),
        _scan_alone(constants, ahead=True),
        rows=64, ahead=True,
    )  # fmt: skip


def fused(constants: Constants, inputs: Inputs, out: Rows) -> PrefillKernels | None:
    """Return one kernel that prepares GDN's chunks and carries the states, None as of `prepare`.

    TMA copies tokens whose heads lie side by side, and writes outputs alike.
    """
    tokens = (inputs.q, inputs.k, inputs.v, out)
    fits = constants.K == constants.V == 128 and inputs.v.ptr.dtype.itemsize == 2
    if not (fits and copied(*tokens)):
        return None
    if any(x.head_stride != 128 or x.token_stride < x.ptr.shape[1] * 128 for x in tokens):
        return None
    launcher = Launcher(fused_gdn_hopper, constants, num_warps=4)
    return PrefillKernels(None, launcher, 128, ahead=False, descriptors=descriptors)


def descriptors(inputs: Inputs, out: Rows) -> tuple[TensorDescriptor, ...]:
    """Return how TMA reads tokens [T, H, D] whose heads lie side by side: as rows [T, H · D].

    64 at a time, of k, q and v. Each of the two groups that carry writes 64 columns of out.
    """
    copied = ((inputs.k, 128), (inputs.q, 128), (inputs.v, 128), (out, 64))
    return tuple(
        TensorDescriptor(
            x.ptr, [x.ptr.shape[0], x.ptr.shape[1] * 128], [x.token_stride, 1], [64, columns],
            SWIZZLED,
        )
        for x, columns in copied
    )  # fmt: skip
