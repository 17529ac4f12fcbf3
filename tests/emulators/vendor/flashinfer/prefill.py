"""flashinfer.prefill 0.6.14: the wrappers of paged and of ragged prefill, planned, then run."""

import contextlib
import math
from typing import Any

import torch

from ._kernels import CAUSAL, CUSTOM, FP8, NON_CAUSAL, Prefill

with contextlib.suppress(ImportError):
    from ._trtllm import (
        trtllm_batch_context_with_kv_cache as trtllm_batch_context_with_kv_cache,
    )
    from ._trtllm import trtllm_fmha_v2_prefill as trtllm_fmha_v2_prefill
with contextlib.suppress(ImportError):
    from ._trtllm_mla import trtllm_ragged_attention_deepseek as trtllm_ragged_attention_deepseek


def _choose(backend, custom, q, kv):
    """determine_attention_backend on sm90."""
    if backend != "auto":
        return backend
    return "fa2" if custom or (kv in FP8 and q not in FP8) else "fa3"


def _dtype(x):
    return getattr(torch, x) if isinstance(x, str) else x


def _check_types(wrapper, q, k):
    for name, x, planned in (
        ("q", q, wrapper._cached_q_data_type),
        ("k", k, wrapper._cached_kv_data_type),
    ):
        if x.dtype != planned:
            raise ValueError(f"The dtype of {name} {x.dtype} does not match {planned} of plan.")


def _check(x, shape, dtype, name):
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"Invalid shape of {name}: expected {shape}, got {x.shape}")
    if x.dtype != dtype:
        raise ValueError(f"Invalid dtype of {name}: expected {dtype}, got {x.dtype}")


def _results(wrapper, q, width, out, lse, return_lse):
    """Return out and lse, new and full of NaN where none is given."""
    shape = (*q.shape[:-1], width)
    if out is None:
        out = q.new_full(shape, torch.nan, dtype=wrapper._cached_o_data_type)
    _check(out, shape, wrapper._cached_o_data_type, "out")
    if return_lse and lse is None:
        lse = q.new_full(q.shape[:2], torch.nan, dtype=torch.float32)
    if lse is not None:
        _check(lse, q.shape[:2], torch.float32, "lse")
    return out, lse


class _Wrapper:
    """What both wrappers share, under the names that the library's own code keeps it."""

    def _create(self, float_workspace_buffer, kv_layout, backend, jit_args):
        if kv_layout not in ("NHD", "HND"):
            raise KeyError(f"Invalid kv_layout {kv_layout}")
        if jit_args is not None or backend not in ("auto", "fa2", "fa3"):
            raise NotImplementedError("this emulation has fa2 and fa3 as they are")
        self._kv_layout, self._backend = kv_layout, backend
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8, device=self.device)
        self._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._max_total_num_rows = None
        self._plan_info = self._cached_module = None

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.empty(
            int_workspace_buffer.shape, dtype=torch.uint8
        )

    def _rows(self, total, batch_size):
        """Check what a CUDA graph has fixed; return the number of rows that the plan is for."""
        if not self._use_cuda_graph:
            return total
        if self._max_total_num_rows is None:
            self._max_total_num_rows = total
        elif total > self._max_total_num_rows:
            raise ValueError(f"The total number of rows {total} exceeds {self._max_total_num_rows}")
        if batch_size != self._fixed_batch_size:
            raise ValueError(f"The batch size should be fixed, {batch_size} is not")
        return self._max_total_num_rows

    def _plan(
        self, qo_indptr, kv_indptr, kv_lens, rows, num_qo_heads, num_kv_heads, page_size, types,
        d_qk, d_vo, causal, window_left, soft_cap, fixed_split_size, disable_split_kv, sm_scale,
        custom,
    ):  # fmt: skip
        q, kv, o = types
        kv, o = q if kv is None else kv, q if o is None else o
        self._cached_q_data_type, self._cached_kv_data_type = _dtype(q), _dtype(kv)
        self._cached_o_data_type = _dtype(o)
        types = (self._cached_q_data_type, self._cached_kv_data_type, self._cached_o_data_type)
        self._backend = _choose(self._backend, custom, *types[:2])
        soft_cap = soft_cap or 0.0
        self._cached_module = Prefill(
            self._backend, *types, kv_indptr.dtype, d_qk, d_vo, window_left >= 0, soft_cap > 0
        )
        args = [
            self._float_workspace_buffer, self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer, qo_indptr, kv_indptr, kv_lens, rows,
            len(qo_indptr) - 1, num_qo_heads, num_kv_heads, page_size, self._use_cuda_graph,
            d_qk, d_vo, causal, window_left,
        ]  # fmt: skip
        if self._backend == "fa2":
            args += [fixed_split_size or -1, disable_split_kv, 0]
        self._plan_info = self._cached_module.plan(*args)
        self._qo_indptr_last = int(qo_indptr[-1])
        self._causal, self._window_left = causal, window_left
        self._logits_soft_cap, self._sm_scale = soft_cap, sm_scale

    def _mask_mode(self):
        if self._custom_mask_buf is not None:
            return CUSTOM
        return CAUSAL if self._causal else NON_CAUSAL

    def _check_planned(self, q):
        assert self._plan_info is not None, "plan info is not initialized"
        if q.size(0) != self._qo_indptr_last:
            raise ValueError(f"q.shape[0] ({q.size(0)}) does not match qo_indptr[-1]")


def _plain(**given):
    """Refuse what this emulation does not have, where it is asked for."""
    asked = [name for name, value in given.items() if value not in (None, "NONE", False, 0)]
    if asked:
        raise NotImplementedError(f"not emulated: {', '.join(asked)}")


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._create(float_workspace_buffer, kv_layout, backend, jit_args)
        self._use_cuda_graph, self._fixed_batch_size = use_cuda_graph, 0
        if use_cuda_graph:
            buffers = {
                "qo_indptr_buf": qo_indptr_buf,
                "paged_kv_indptr_buf": paged_kv_indptr_buf,
                "paged_kv_indices_buf": paged_kv_indices_buf,
                "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
            }
            for name, buffer in buffers.items():
                if not torch.is_tensor(buffer):
                    raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode")
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            if len(paged_kv_indptr_buf) != self._fixed_batch_size + 1:
                raise ValueError("The length of paged_kv_indptr_buf should be batch_size + 1.")
            if len(paged_kv_last_page_len_buf) != self._fixed_batch_size:
                raise ValueError("The length of paged_kv_last_page_len_buf should be batch_size.")
        self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr_buf, paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        _plain(
            pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction,
            rope_scale=rope_scale, rope_theta=rope_theta, prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr,
            seq_lens=seq_lens, seq_lens_q=seq_lens_q, block_tables=block_tables,
            max_sequence_kv=max_sequence_kv, custom_mask=custom_mask,
            token_pos_in_items_len=token_pos_in_items_len,
        )  # fmt: skip
        pages = paged_kv_indptr.diff()
        lengths = (pages - 1).clamp(min=0) * page_size + paged_kv_last_page_len
        rows = self._rows(int(qo_indptr[-1]), len(qo_indptr) - 1)
        # elements, not bytes: the library's own offsets into a mask that is given packed
        mask_indptr = torch.nn.functional.pad((qo_indptr.diff() * lengths).cumsum(0), (1, 0)).int()
        if self._use_cuda_graph:
            if len(paged_kv_indices) > len(self._paged_kv_indices_buf):
                raise ValueError(
                    "The length of paged_kv_indices exceeds the allocated buffer size."
                )
            self._qo_indptr_buf.copy_(qo_indptr)
            self._paged_kv_indptr_buf.copy_(paged_kv_indptr)
            self._paged_kv_last_page_len_buf.copy_(paged_kv_last_page_len)
            self._paged_kv_indices_buf[: len(paged_kv_indices)].copy_(paged_kv_indices)
            if packed_custom_mask is not None:
                for name in ("_custom_mask_buf", "_mask_indptr_buf"):
                    if not torch.is_tensor(getattr(self, name)):
                        raise ValueError(f"{name[1:]} must be initialized with a torch.Tensor")
                self._custom_mask_buf[: len(packed_custom_mask)].copy_(packed_custom_mask)
                self._mask_indptr_buf.copy_(mask_indptr)
        else:
            self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr, paged_kv_indptr
            self._paged_kv_indices_buf = paged_kv_indices
            self._paged_kv_last_page_len_buf = paged_kv_last_page_len
            self._custom_mask_buf = packed_custom_mask
            self._mask_indptr_buf = None if packed_custom_mask is None else mask_indptr
        self._plan(
            qo_indptr, paged_kv_indptr, lengths, rows, num_qo_heads, num_kv_heads, page_size,
            (q_data_type, kv_data_type, o_data_type), head_dim_qk, head_dim_vo or head_dim_qk,
            causal, window_left, logits_soft_cap, fixed_split_size, disable_split_kv, sm_scale,
            self._custom_mask_buf is not None,
        )  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        # fa2 and fa3 do not read `sinks`: they are dropped without a word
        _plain(kv_cache_sf=kv_cache_sf)
        k, v = paged_kv_cache if isinstance(paged_kv_cache, tuple) else paged_kv_cache.unbind(1)
        _check_types(self, q, k)
        self._check_planned(q)
        assert window_left in (None, self._window_left)
        if self._kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        sm_scale = 1 / math.sqrt(q.size(-1)) if self._sm_scale is None else self._sm_scale
        sm_scale *= (q_scale or 1.0) * (1.0 if k_scale is None else k_scale)
        out, lse = _results(self, q, v.shape[-1], out, lse, return_lse)
        mode = self._mask_mode()
        self._cached_module.paged_run(
            self, q, k, v, out, lse, mode, sm_scale, self._logits_soft_cap
        )
        if v_scale is not None and v_scale != 1.0:
            out *= v_scale
        return (out, lse) if return_lse else out


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._create(float_workspace_buffer, kv_layout, backend, jit_args)
        _plain(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        self._use_cuda_graph, self._fixed_batch_size = use_cuda_graph, 0
        if use_cuda_graph:
            if not torch.is_tensor(qo_indptr_buf) or not torch.is_tensor(kv_indptr_buf):
                raise ValueError("indptr buffers should be torch.Tensors in cuda graph mode")
            self._fixed_batch_size = len(qo_indptr_buf) - 1
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr_buf, kv_indptr_buf
        self._custom_mask_buf = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
    ) -> None:
        _plain(
            pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction,
            rope_scale=rope_scale, rope_theta=rope_theta, prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr,
            seq_lens=seq_lens, seq_lens_q=seq_lens_q, custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask, v_indptr=v_indptr, o_indptr=o_indptr,
            token_pos_in_items_len=token_pos_in_items_len,
        )  # fmt: skip
        if len(kv_indptr) != len(qo_indptr):
            raise ValueError("The kv_indptr length should be equal to mask_indptr length.")
        rows = self._rows(int(qo_indptr[-1]), len(qo_indptr) - 1)
        if self._use_cuda_graph:
            self._qo_indptr_buf.copy_(qo_indptr)
            self._kv_indptr_buf.copy_(kv_indptr)
        else:
            self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._plan(
            qo_indptr, kv_indptr, kv_indptr.diff(), rows, num_qo_heads, num_kv_heads, 1,
            (q_data_type, kv_data_type, o_data_type), head_dim_qk, head_dim_vo or head_dim_qk,
            causal, window_left, logits_soft_cap, fixed_split_size, disable_split_kv, sm_scale,
            False,
        )  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        # the scales are read for FP4 and by backends that are not emulated; here they are dropped
        _plain(kv_cache_sf=kv_cache_sf)
        _check_types(self, q, k)
        self._check_planned(q)
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        sm_scale = 1 / math.sqrt(q.size(-1)) if self._sm_scale is None else self._sm_scale
        out, lse = _results(self, q, v.shape[-1], out, lse, return_lse)
        mode = self._mask_mode()
        self._cached_module.ragged_run(
            self, q, k, v, out, lse, mode, sm_scale, self._logits_soft_cap
        )
        return (out, lse) if return_lse else out
