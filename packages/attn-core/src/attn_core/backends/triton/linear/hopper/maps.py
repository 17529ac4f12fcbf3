"""What TMA copies of a pass of GDN or KDA, as matrices of which 64 rows are copied at a time.

These descriptors are of a first launch; `prefill` says where the same matrices lie of a later one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_core.backends.triton.hopper.stores import SWIZZLED
from attn_core.backends.triton.linear.arguments import Inputs, Rows, Workspace

CHUNK = 64
Maps = tuple[TensorDescriptor, ...]


def side_by_side(rows: Rows, dim: int) -> bool:
    """Say whether the heads of tokens lie side by side, so that TMA reads them as rows."""
    return bool(rows.head_stride == dim and rows.token_stride >= rows.ptr.shape[1] * dim)


def of_tokens(inputs: Inputs, out: Rows, work: Workspace) -> Maps:
    """Return those of one kernel: k, q and v, a head at a time, and 64 columns of out."""
    parts = ((inputs.k, 128), (inputs.q, 128), (inputs.v, 128), (out, 64))
    return tuple(_tokens(x, columns) for x, columns in parts)


def of_gdn(inputs: Inputs, out: Rows, work: Workspace) -> Maps:
    """Return those of `scan_alone`: k, q, 64 columns of v and of out, and T twice."""
    T = _rows(work.T, CHUNK)
    parts = ((inputs.k, 128), (inputs.q, 128), (inputs.v, 64), (out, 64))
    return *(_tokens(x, columns) for x, columns in parts), T, T


def of_kda(inputs: Inputs, out: Rows, work: Workspace) -> Maps:
    """Return the same with a decay per channel: of k_in, q_in, v, out, T and k_out."""
    k, q, last = (_rows(x, 128) for x in (work.k_in, work.q_in, work.k_out))
    return k, q, _tokens(inputs.v, 64), _tokens(out, 64), _rows(work.T, CHUNK), last


def _tokens(rows: Rows, columns: int) -> TensorDescriptor:
    """View tokens [T, H, D] whose heads lie side by side as [T, H · D]."""
    count, heads, dim = rows.ptr.shape
    return _map(rows.ptr, (count, heads * dim), rows.token_stride, columns)


def _rows(x: Tensor, width: int) -> TensorDescriptor:
    """View a contiguous tensor as rows."""
    return _map(x, (x.numel() // width, width), width, width)


def _map(x: Tensor, shape: Sequence[int], stride: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, [*shape], [stride, 1], [CHUNK, columns], SWIZZLED)
