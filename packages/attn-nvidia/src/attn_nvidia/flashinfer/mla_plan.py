"""What FlashInfer's MLA plans are made of: lengths on the host, page lists, a pool of wrappers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from attn_core import DECODE_MODES, ForwardBatch, UnsupportedError
from torch import Tensor

from attn_nvidia.flashinfer.csr import query_lengths
from attn_nvidia.flashinfer.kernels import Lengths
from attn_nvidia.flashinfer.wrappers import PinnedCopy

T = TypeVar("T")

# A plan has room for 16384 pieces of work and does not check it (MLAPlan in attention/scheduler.cuh
# of flashinfer 0.6.14): one per tile of queries, and at most one more per multiprocessor.
_MOST_TILES = 16384 - 256
_MOST_HEADS = 128  # of a query, in causal passes
_MOST_KEPT = 16  # plans of ragged calls in a pass: one per chunk of a prefix


def host_lengths(
    batch: ForwardBatch, keys: Lengths, page_table: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return qo_indptr, kv_indptr [B + 1] and kv_len [B], int32 on the host, of a pass.

    keys int32 [B]. kv_indptr is where the pages of each request begin in page_list(page_table): the
    library takes no length from it (MLAPlan in attention/scheduler.cuh of flashinfer 0.6.14).
    Requests without queries are left out: they would make the tiles of 128 heads too small.
    """
    rows = np.arange(len(keys) + 1, dtype=np.int32)
    qo_indptr, kv_indptr = rows, rows * np.int32(page_table.stride(0))
    if batch.forward_mode not in DECODE_MODES:  # which have one query each
        qo_indptr = np.zeros(len(rows), dtype=np.int32)
        queries = query_lengths(batch)
        queries.cumsum(out=qo_indptr[1:])
        asks = queries > 0
        if asks.any() and not asks.all():
            asks = np.append(asks, True)  # the end of the last one
            qo_indptr, kv_indptr, keys = qo_indptr[asks], kv_indptr[asks], keys[asks[:-1]]
    return torch.from_numpy(qo_indptr), torch.from_numpy(kv_indptr), torch.from_numpy(keys)


def kernel_heads(batch: ForwardBatch, heads: int) -> int:
    """Return how many heads the kernels get for `heads` query heads of a pass.

    In a causal pass that is a power of two. The rows of a request, its queries' heads, are cut into
    tiles of 128, or of 64 where requests have 64 rows on average or fewer. Where a tile ends within
    a query, its rows of that query lack the query's own key if the keys before fill blocks of 64:
    mla.cuh and mla_hopper.cuh of flashinfer 0.6.14 round down what their plan rounds up. Raises
    UnsupportedError for more heads than a tile has rows.
    """
    if batch.forward_mode in DECODE_MODES:
        return heads
    if heads > _MOST_HEADS:
        raise UnsupportedError(
            f"flashinfer: {heads} query heads of latent attention in a {batch.forward_mode.value} "
            f"pass (it has at most {_MOST_HEADS} there); choose triton"
        )
    return 1 << (heads - 1).bit_length()


def refuse_too_many(tokens: int, requests: int, heads: int) -> None:
    """Raise UnsupportedError for a pass that needs more work items than a plan has room for."""
    rows = tokens * heads
    tile = 128 if rows > 64 * requests else 64
    if rows // tile + requests <= _MOST_TILES:
        return
    max_queries = (_MOST_TILES - requests) * tile // heads
    raise UnsupportedError(
        f"flashinfer: {tokens} query tokens of {heads} heads in one absorbed pass (a "
        f"plan has room for about {max_queries}); prefill in smaller chunks"
    )


class Wrapper:
    """A wrapper of the library, and when its pinned buffer may be written to again."""

    __slots__ = ("_copy", "library")

    def __init__(self, library: Any, device: torch.device) -> None:
        self.library, self._copy = library, PinnedCopy(device)

    def plan(self, call: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Call a plan of this wrapper, which fills its pinned buffer and enqueues the copy of it.

        With lengths from the host nothing in the library waits for the copy before: where the
        device lags a pass behind, a plan would overwrite what has not been copied yet.
        """
        self._copy.wait()
        call(self.library, *args, **kwargs)
        self._copy.begun()


class Plan:
    """A planned wrapper. While it lives no other pass plans that wrapper; then it goes back."""

    __slots__ = ("_home", "_wrapper", "library")

    def __init__(self, wrapper: Wrapper, home: list[Wrapper]) -> None:
        self.library = wrapper.library
        self._wrapper, self._home = wrapper, home

    def __del__(self) -> None:
        self._home.append(self._wrapper)


class Wrappers:
    """A pool of wrappers: they own pinned memory, so making one takes milliseconds."""

    def __init__(self, make: Callable[[Tensor], Any], plan: Callable[..., object]) -> None:
        self._make, self._plan = make, plan
        self._free: dict[int, list[Wrapper]] = {}

    def plan(self, scratch: Tensor, *args: object, **kwargs: object) -> Plan:
        """Plan a free wrapper, or a new one, over `scratch`; the arguments are the library's."""
        free = self._free.setdefault(scratch.data_ptr(), [])
        wrapper = free.pop() if free else Wrapper(self._make(scratch), scratch.device)
        wrapper.plan(self._plan, *args, **kwargs)
        return Plan(wrapper, free)


def plan_ragged(library: Any, *args: object, **kwargs: object) -> None:
    """Plan a wrapper by its own plan()."""
    library.plan(*args, **kwargs)


def plan_absorbed(library: Any, *arguments: object) -> None:
    """Plan an MLA wrapper; again without what has not changed: kernels, buffers, dtypes.

    The fields and the call that plan() of flashinfer 0.6.14 ends with; another version, which has
    no such names, plans by the front door each time.
    """
    qo_indptr, kv_indptr, pages, kv_len, heads, latent, _, _, causal, scale, *_ = arguments
    module = getattr(library, "_cached_module", None)
    if module is None:
        library.plan(*arguments)
        return
    library._kv_indices_buf, library._causal, library._sm_scale = pages, causal, scale
    library._plan_info = module.plan(
        library._float_workspace_buffer,
        library._int_workspace_buffer,
        library._pin_memory_int_workspace_buffer,
        *(qo_indptr, kv_indptr, kv_len, heads, latent, causal),
    )


class PerPassCache(Generic[T]):
    """Values that depend on the cumulative lengths of ragged calls, made once in a pass.

    A pass hands the same tensors to all its layers and does not write to them meanwhile.
    """

    def __init__(self) -> None:
        self._values: list[tuple[Sequence[Tensor], Sequence[int], Hashable, T]] = []

    def clear(self) -> None:
        """Forget all values: a pass begins."""
        self._values.clear()

    def get(self, inputs: Sequence[Tensor], parameters: Hashable, make: Callable[[], T]) -> T:
        """Return the value made of these tensors, and of `parameters`, in this pass."""
        versions = [0 if t.is_inference() else t._version for t in inputs]
        for tensors, old_versions, cached_parameters, value in self._values:
            same = all(a is b for a, b in zip(tensors, inputs, strict=True))
            if same and old_versions == versions and cached_parameters == parameters:
                return value
        if len(self._values) == _MOST_KEPT:  # a caller that never begins a pass
            del self._values[0]
        value = make()
        self._values.append((inputs, versions, parameters, value))
        return value
