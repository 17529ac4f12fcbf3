"""FlashInfer's wrappers, created once and planned again for every pass."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from attn_core import BackendError
from torch import Tensor

from attn_nvidia.common.jit_log import building
from attn_nvidia.flashinfer.csr import Csr, HostCsr
from attn_nvidia.flashinfer.kernels import Kernel


class Shape(NamedTuple):
    """What a wrapper is built and planned for; passes that agree share wrappers."""

    kernel: Kernel
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    causal: bool
    window_left: int
    logit_cap: float
    masked: bool
    fixed_split: int | None  # pages
    split: bool
    q_dtype: torch.dtype
    kv_dtype: torch.dtype

    def __str__(self) -> str:
        window = "" if self.window_left < 0 else ", window"
        cap = ", soft cap" if self.logit_cap else ""
        dtypes = " and ".join(str(x).removeprefix("torch.") for x in {self.q_dtype, self.kv_dtype})
        return f"flashinfer {self.kernel}, {dtypes}, head dim {self.head_dim}{window}{cap}"


class Static(NamedTuple):
    """The buffers that a captured plan reads: lengths, page ids, of trees the masks, schedule."""

    csr: Csr
    indices: Tensor
    mask: tuple[Tensor, Tensor] | None
    schedule: Tensor


class PinnedCopy:
    """A copy from pinned memory to a device, which must be over before the memory is reused.

    A plan is such a copy, so that a host far ahead of its device must not plan anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self._event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]  # torch has no annotation here

    def wait(self) -> None:
        """Wait for the copy that was begun last; most often it is over."""
        if self._event is not None:
            self._event.synchronize()

    def begun(self) -> None:
        """Note that a copy was begun on the current stream."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))


class PlannedWrapper:
    """One wrapper and the plan in it.

    static: the buffers that a captured graph reads, None where there is none. A plan lies in the
    wrapper's own workspaces, so that a wrapper serves one pass at a time (WrapperPool).
    """

    def __init__(
        self,
        library: Any,
        shape: Shape,
        workspace: Tensor,
        static: Static | None = None,
    ) -> None:
        self.shape, self._static = shape, static
        self._wrapper = _create(library, shape, workspace, static)
        self.run = self._wrapper.run
        self._dtypes = tuple(
            torch.empty(0, dtype=x, device="cpu") for x in (shape.q_dtype, shape.kv_dtype)
        )
        self._info: list[int] | None = None
        self._copy = PinnedCopy(workspace.device)

    def plan(
        self,
        host: HostCsr,
        device: Csr,
        indices: Tensor,
        tokens: int,
        mask: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Plan a pass. Raises BackendError where a captured graph does not fit the new plan.

        host, device: the same lists twice. mask: bits and where each request's begin. Where the
        wrapper is captured, device, indices and mask are its static buffers, filled.
        """
        self._copy.wait()
        if self._info is None:
            with building(str(self.shape)):
                self._build(host, indices, mask)
            self._copy.begun()
            self._copy.wait()
        info = self._schedule(host, device, indices, tokens, mask)
        self._copy.begun()
        if self._static is not None and self._info not in (None, info):
            raise BackendError(
                f"{self.shape}: a captured graph was planned as {self._info} and is now {info}; "
                "capture it again"
            )
        self._info = info

    def _build(self, host: HostCsr, indices: Tensor, mask: tuple[Tensor, Tensor] | None) -> None:
        """Plan by the library's own method, which builds and loads the kernels.

        It wants lists of nothing but the requests' pages, and fills static buffers with them.
        """
        w, s = self._wrapper, self.shape
        types = {"q_data_type": s.q_dtype, "kv_data_type": s.kv_dtype, "sm_scale": 1.0}
        masks = {"window_left": s.window_left, "logits_soft_cap": s.logit_cap}
        heads = (s.num_q_heads, s.num_kv_heads, s.head_dim, s.page_size)
        last = host.keys - (host.pages.diff() - 1).clamp_(min=0) * s.page_size
        pages = (host.pages, indices[:0] if self._static else indices, last)
        if s.kernel == "decode":
            w.plan(*pages, *heads, **masks, **types)
            return
        w.plan(
            host.csr.qo_indptr,
            *pages,
            *heads,
            head_dim_vo=s.v_head_dim,
            causal=s.causal,
            packed_custom_mask=None if mask is None or self._static else mask[0],
            fixed_split_size=s.fixed_split,
            disable_split_kv=not s.split,
            max_token_per_sequence=0,  # of other backends: it spares a loop over the requests
            **masks,
            **types,
        )

    def _schedule(
        self,
        host: HostCsr,
        device: Csr,
        indices: Tensor,
        tokens: int,
        mask: tuple[Tensor, Tensor] | None,
    ) -> list[int]:
        """Do what plan() does, without what has not changed: buffers and the scheduler.

        The same fields and arguments as fast_decode_plan in decode.py, and as plan() in prefill.py,
        of flashinfer 0.6.14. fa3 takes from its plan where pages begin, and lengths from `keys`.
        """
        w, s = self._wrapper, self.shape
        if self._static is None:
            w._paged_kv_indptr_buf, w._paged_kv_indices_buf = device.indptr, indices
            w._paged_kv_last_page_len_buf = device.last_page_len
            w._qo_indptr_buf = device.qo_indptr
            if mask is not None:  # given to plan(), masks that are packed count elements for bytes
                w._custom_mask_buf, w._mask_indptr_buf = mask
        graph, batch = self._static is not None, host.keys.shape[0]
        buffers = (
            w._float_workspace_buffer,
            w._int_workspace_buffer,
            w._pin_memory_int_workspace_buffer,
        )
        if s.kernel == "decode":
            info = w._cached_module.plan(
                *buffers, host.pages, batch, s.num_q_heads, s.num_kv_heads, s.page_size, graph,
                s.window_left, s.logit_cap, s.head_dim, s.v_head_dim,
                *self._dtypes,
            )  # fmt: skip
        else:
            # colocated blocks, of attention that shares a launch with decode: none
            fa2 = (s.fixed_split or -1, not s.split, 0) if s.kernel == "fa2" else ()
            info = w._cached_module.plan(
                *buffers, host.csr.qo_indptr, host.csr.indptr if s.kernel == "fa3" else host.pages,
                host.keys,
                w._max_total_num_rows or tokens, batch,
                s.num_q_heads, s.num_kv_heads, s.page_size, graph, s.head_dim, s.v_head_dim,
                s.causal, s.window_left, *fa2,
            )  # fmt: skip
            w._qo_indptr_last = tokens
        w._plan_info = info
        return list(info)


def _create(library: Any, shape: Shape, workspace: Tensor, static: Static | None) -> Any:
    wrapper = _wrap(library, shape, workspace, static)
    if static is not None:  # there may be one per batch size: each has what it needs, not 8 MiB
        wrapper.reset_workspace_buffer(workspace, static.schedule)
    return wrapper


def _wrap(library: Any, shape: Shape, workspace: Tensor, static: Static | None) -> Any:
    graph = static is not None
    if static is None:
        buffers: tuple[Tensor | None, ...] = (None,) * 4
        masks: tuple[Tensor | None, ...] = (None, None)
    else:
        buffers = (
            static.csr.qo_indptr, static.csr.indptr, static.indices, static.csr.last_page_len
        )  # fmt: skip
        masks = static.mask or (None, None)
    # HND pools come as transposed views: the kernels take any strides
    if shape.kernel == "decode":
        return library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=graph,
            paged_kv_indptr_buffer=buffers[1],
            paged_kv_indices_buffer=buffers[2],
            paged_kv_last_page_len_buffer=buffers[3],
        )
    return library.BatchPrefillWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=graph,
        qo_indptr_buf=buffers[0],
        paged_kv_indptr_buf=buffers[1],
        paged_kv_indices_buf=buffers[2],
        paged_kv_last_page_len_buf=buffers[3],
        custom_mask_buf=masks[0],
        mask_indptr_buf=masks[1],
        backend=shape.kernel,
    )


class WrapperPool:
    """Wrappers that no living pass uses: a pass leases them for as long as its plan lives.

    So a plan is a value: passes may be planned ahead, and run in any order.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._wrappers: dict[tuple[Shape, int], list[list[Any]]] = {}

    def lease(self, shape: Shape, workspace: Tensor, owner: object) -> PlannedWrapper:
        """Return a wrapper that is `owner`'s until it is gone; workspace: of the current stream."""
        entries = self._wrappers.setdefault((shape, workspace.data_ptr()), [])
        for entry in entries:
            planned, lease = entry
            if lease() is None:
                entry[1] = weakref.ref(owner)
                return planned  # type: ignore[no-any-return]  # the first of each entry
        wrapper = PlannedWrapper(self._library, shape, workspace)
        entries.append([wrapper, weakref.ref(owner)])
        return wrapper
