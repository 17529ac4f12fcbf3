"""flashinfer.decode 0.6.14: the wrapper of paged decode, on CUDA cores or on tensor cores."""

import contextlib
import math
from typing import Any

import torch

from ._kernels import FP8, NON_CAUSAL, Decode, Prefill
from .prefill import _check, _check_types, _dtype, _plain

with contextlib.suppress(ImportError):
    from ._trtllm import get_trtllm_gen_fmha_module as get_trtllm_gen_fmha_module
    from ._trtllm import trtllm_batch_decode_with_kv_cache as trtllm_batch_decode_with_kv_cache
with contextlib.suppress(ImportError):
    from ._trtllm import xqa_batch_decode_with_kv_cache as xqa_batch_decode_with_kv_cache


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise KeyError(f"Invalid kv_layout {kv_layout}")
        if jit_args is not None or backend not in ("auto", "fa2"):
            raise NotImplementedError("this emulation has fa2 as it is")
        self._kv_layout, self._float_workspace_buffer = kv_layout, float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8, device=self.device)
        self._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._use_cuda_graph, self._fixed_batch_size = use_cuda_graph, 0
        if use_cuda_graph:
            buffers = {
                "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
                "paged_kv_indices_buffer": paged_kv_indices_buffer,
                "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
            }
            for name, buffer in buffers.items():
                if not torch.is_tensor(buffer):
                    raise ValueError(f"{name} should be a torch.Tensor in cudagraph mode")
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            if len(paged_kv_indptr_buffer) != self._fixed_batch_size + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._use_tensor_cores, self._backend = use_tensor_cores, backend

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.empty(
            int_workspace_buffer.shape, dtype=torch.uint8
        )

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        _plain(
            pos_encoding_mode=pos_encoding_mode, data_type=data_type, rope_scale=rope_scale,
            rope_theta=rope_theta, block_tables=block_tables, seq_lens=seq_lens,
        )  # fmt: skip
        batch_size = len(last_page_len)
        if self._use_cuda_graph:
            if batch_size != self._fixed_batch_size:
                raise ValueError("The batch size should be fixed in cudagraph mode")
            if len(indices) > len(self._paged_kv_indices_buf):
                raise ValueError("The size of indices should fit the allocated buffer")
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
            self._paged_kv_last_page_len_buf = last_page_len
        if fixed_split_size is not None and not self._use_tensor_cores:
            raise ValueError("fixed_split_size is only supported by tensor core decode for now.")
        q = _dtype(q_data_type)
        kv, o = _dtype(kv_data_type) or q, _dtype(o_data_type) or q
        self._cached_q_data_type, self._cached_kv_data_type, self._cached_o_data_type = q, kv, o
        soft_cap = logits_soft_cap or 0.0
        shape = (num_qo_heads, num_kv_heads, page_size, self._use_cuda_graph)
        buffers = (
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
        )
        modes = (indptr.dtype, head_dim, head_dim, window_left >= 0, soft_cap > 0)
        if self._use_tensor_cores:
            if self._backend == "auto":  # fa3 wants FP8 queries with FP8 keys
                self._backend = "fa3" if {q, kv} <= set(FP8) else "fa2"
            self._cached_module = Prefill(self._backend, q, kv, o, *modes)
            queries = torch.arange(batch_size + 1, dtype=torch.int32)
            self._qo_indptr_buf = queries
            lengths = (indptr.diff() - 1).clamp(min=0) * page_size + last_page_len
            split = -1 if fixed_split_size is None else fixed_split_size
            self._plan_info = self._cached_module.plan(
                *buffers, queries, indptr, lengths, batch_size, batch_size, *shape,
                head_dim, head_dim, False, window_left, split, disable_split_kv, 0,
            )  # fmt: skip
        else:
            self._cached_module = Decode(q, kv, o, *modes)
            empty = torch.empty(0, dtype=q), torch.empty(0, dtype=kv)
            self._plan_info = self._cached_module.plan(
                *buffers, indptr, batch_size, *shape, window_left, soft_cap, head_dim, head_dim,
                *empty,
            )  # fmt: skip
        self._window_left, self._logits_soft_cap = window_left, soft_cap
        self._sm_scale = sm_scale

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        # neither kernel reads `sinks`: they are dropped without a word
        _plain(kv_cache_sf=kv_cache_sf)
        k, v = paged_kv_cache if isinstance(paged_kv_cache, tuple) else paged_kv_cache.unbind(1)
        _check_types(self, q, k)
        assert window_left in (None, self._window_left)
        if self._kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        sm_scale = 1 / math.sqrt(q.size(-1)) if self._sm_scale is None else self._sm_scale
        sm_scale *= (q_scale or 1.0) * (1.0 if k_scale is None else k_scale)
        if out is None:
            out = q.new_full(q.shape, torch.nan, dtype=self._cached_o_data_type)
        _check(out, q.shape, self._cached_o_data_type, "out")
        if return_lse and lse is None:
            lse = q.new_full(q.shape[:2], torch.nan, dtype=torch.float32)
        if lse is not None:
            _check(lse, q.shape[:2], torch.float32, "lse")
        soft_cap = self._logits_soft_cap
        if self._use_tensor_cores:
            self._custom_mask_buf = None
            self._cached_module.paged_run(self, q, k, v, out, lse, NON_CAUSAL, sm_scale, soft_cap)
        else:
            self._cached_module.run(self, q, k, v, out, lse, sm_scale, soft_cap)
        if v_scale is not None and v_scale != 1.0:
            out *= v_scale
        return (out, lse) if return_lse else out
