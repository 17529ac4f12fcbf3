"""flashinfer.mla 0.6.14: absorbed latent attention over pages, and trtllm-gen's of sm100."""

import math
from dataclasses import dataclass

import attn_reference
import torch

from ._kernels import require as _require
from ._trtllm_mla import check as _check
from ._trtllm_mla import (
    trtllm_batch_decode_with_kv_cache_mla as trtllm_batch_decode_with_kv_cache_mla,
)

# Of the emulated GPU; tests set it.
compute_capability = (9, 0)

PROCESSORS = 132
_MIB = 1 << 20
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class _Schedule:
    """What a plan copies into the int workspace."""

    queries: list
    first_page: list
    lengths: list
    heads: int
    causal: bool
    tile: int


class _Module:
    """What get_batch_mla_module builds for one family of kernels."""

    def __init__(self, backend, q, kv, o, index, head_dim_ckv, head_dim_kpe, use_profiler):
        if backend == "fa3" and compute_capability[0] != 9:
            raise RuntimeError("Ninja build failed: fa3 is for sm90a")
        if q not in (torch.float16, torch.bfloat16) or (kv != q and kv != torch.float8_e4m3fn):
            raise RuntimeError(f"Ninja build failed: {q} queries, {kv} keys")
        if (head_dim_ckv, head_dim_kpe) != (512, 64) or index != torch.int32 or use_profiler:
            raise RuntimeError(f"Ninja build failed: {head_dim_ckv}, {head_dim_kpe}, {index}")
        self.kv = kv

    def plan(
        self, float_workspace, int_workspace, page_locked, qo_indptr, kv_indptr, kv_len,
        num_heads, head_dim_o, causal,
    ):  # fmt: skip
        for t in (qo_indptr, kv_indptr, kv_len):
            _require(t.device.type == "cpu" and t.dtype == torch.int32, "int32 on the host")
            _require(t.is_contiguous(), "plan reads addresses")
        batch = kv_len.shape[0]
        _require(batch > 0, "a division by the batch size")
        _require(qo_indptr.shape[0] == kv_indptr.shape[0] == batch + 1, "B + 1 entries")
        _require(head_dim_o == 512, "the partial output is of 512")
        _require(page_locked.shape == int_workspace.shape, "two int workspaces of one size")
        queries = qo_indptr.diff().tolist()
        if min(queries) < 0:
            raise RuntimeError("qo_indptr should be non-negative")
        tile = 128 if sum(queries) * num_heads // batch > 64 else 64
        works = sum(-(-n * num_heads // tile) for n in queries) + PROCESSORS
        _require(works <= 16384, f"{works} pieces of work in a buffer for 16384")
        if float_workspace.numel() < 2 * PROCESSORS * 64 * (2 * head_dim_o + 4):
            raise RuntimeError("Buffer overflow when allocating memory for mla_partial_o")
        # the kernels read what the plan of the workspace says, whichever wrapper planned it
        int_workspace.schedule = _Schedule(
            queries, kv_indptr.tolist(), kv_len.tolist(), num_heads, causal, tile
        )
        return [tile // 64, PROCESSORS]

    def run(
        self, int_workspace, plan_info, q_nope, q_pe, ckv, kpe, kv_indices, out, lse, mask_mode,
        num_heads, page_size, sm_scale, base_e, ckv_scale, kpe_scale,
    ):  # fmt: skip
        plan = int_workspace.schedule
        _require(num_heads == plan.heads, "not the planned heads")
        _require(bool(mask_mode) == plan.causal, "not the planned mask")
        _require(kv_indices.dtype == torch.int32, "kv_indices is int32")
        rows = {t: t.stride()[: t.dim() - 1] for t in (q_nope, q_pe, ckv, kpe, out)}
        for t, strides in rows.items():
            _require(t.stride(-1) == 1, "the last dim is contiguous")
            _require(all(s * t.element_size() % 16 == 0 for s in strides), "rows of 16 bytes")
            _require(t.data_ptr() % 16 == 0, "addresses of 16 bytes")
        latents = torch.cat(
            [self._read(ckv, ckv_scale, q_nope), self._read(kpe, kpe_scale, q_pe)], -1
        )
        keys = []
        for first, n in zip(plan.first_page, plan.lengths, strict=False):
            pages = kv_indices[first : first + -(-n // page_size)]
            _require(pages.shape[0] == -(-n // page_size), "indices end before the last page")
            keys.append(latents[pages.long()].reshape(-1, 1, 576)[:n])
        got, total = attn_reference.attend(
            torch.cat([q_nope, q_pe], -1),
            keys,
            [x[..., :512] for x in keys],
            query_lens=plan.queries,
            scale=sm_scale,
            causal=plan.causal,
        )
        if plan.causal:
            self._lose(plan, torch.cat([q_nope, q_pe], -1), keys, sm_scale, got, total)
        out.copy_(got.to(out.dtype))
        if lse is not None:
            lse.copy_(total if base_e else total * LOG2E)

    def _lose(self, plan, q, keys, scale, got, total):
        """Lose the keys that the kernels lose: they round down where a tile's keys end."""
        at = 0
        for n, mine in zip(plan.queries, keys, strict=False):
            for end in range(plan.tile, n * plan.heads, plan.tile):
                last, rows = divmod(end, plan.heads)
                seen = len(mine) - n + last
                if rows and seen % 64 == 0:
                    heads = slice(max(0, rows - plan.tile), rows)
                    few, token = [mine[:seen]], slice(at + last, at + last + 1)
                    got[token, heads], total[token, heads] = attn_reference.attend(
                        q[token, heads], few, [x[..., :512] for x in few],
                        query_lens=[1], scale=scale, causal=False,
                    )  # fmt: skip
            at += n

    def _read(self, pages, scale, q):
        """Give pages [P, page, D] the type of the queries; FP8 is scaled in it too."""
        pages = pages.reshape(*pages.shape[:2], pages.shape[-1])
        if self.kv == q.dtype:
            return pages
        return pages.to(q.dtype) * torch.tensor(scale).to(q.dtype)


def get_batch_mla_module(backend, *args):
    return _Module(backend, *args)


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        if backend == "cutlass":
            raise NotImplementedError("no emulation of this one")
        self._int_workspace_buffer = torch.empty(8 * _MIB, dtype=torch.uint8, device=self.device)
        self._pin_memory_int_workspace_buffer = torch.empty(8 * _MIB, dtype=torch.uint8)
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf = qo_indptr
        self._kv_indptr_buf = kv_indptr
        self._kv_indices_buf = kv_indices
        self._kv_len_arr_buf = kv_len_arr
        hopper = compute_capability == (9, 0)
        self._backend = ("fa3" if hopper else "fa2") if backend == "auto" else backend

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        if kv_data_type not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(f"MLA kv_data_type {kv_data_type} is not supported.")
        if kv_data_type == torch.float8_e4m3fn:
            if self._backend != "fa3" or compute_capability[0] != 9:
                raise ValueError(
                    "FP8 kv_data_type for MLA is only supported with the fa3 backend on SM90, "
                    f"got backend={self._backend!r}."
                )
            if q_data_type != torch.bfloat16:
                raise ValueError(
                    "FP8 kv_data_type for MLA currently only supports "
                    f"q_data_type=torch.bfloat16, got {q_data_type}."
                )
        self._cached_module = get_batch_mla_module(
            self._backend, q_data_type, kv_data_type, q_data_type, qo_indptr.dtype,
            head_dim_ckv, head_dim_kpe, use_profiler,
        )  # fmt: skip
        host = [t.to("cpu") for t in (qo_indptr, kv_indptr, kv_len_arr)]
        if self._use_cuda_graph:
            self._qo_indptr_buf.copy_(qo_indptr, non_blocking=True)
            self._kv_indptr_buf.copy_(kv_indptr, non_blocking=True)
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices, non_blocking=True)
            self._kv_len_arr_buf.copy_(kv_len_arr, non_blocking=True)
        else:
            self._qo_indptr_buf = qo_indptr.to(self.device, non_blocking=True)
            self._kv_indptr_buf = kv_indptr.to(self.device, non_blocking=True)
            self._kv_indices_buf = kv_indices.to(self.device, non_blocking=True)
            self._kv_len_arr_buf = kv_len_arr.to(self.device, non_blocking=True)
        self._causal, self._page_size, self._sm_scale = causal, page_size, sm_scale
        self._q_data_type, self._kv_data_type = q_data_type, kv_data_type
        self._plan_info = self._cached_module.plan(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            *host,
            num_heads,
            head_dim_ckv,
            causal,
        )

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if o_scale is not None:
            raise ValueError("o_scale is only supported with the cutlass backend for now.")
        for name, t, planned in (
            ("q_nope", q_nope, self._q_data_type),
            ("q_pe", q_pe, self._q_data_type),
            ("ckv_cache", ckv_cache, self._kv_data_type),
            ("kpe_cache", kpe_cache, self._kv_data_type),
        ):
            if t.dtype != planned:
                raise ValueError(f"{name}.dtype={t.dtype} does not match the planned {planned}.")
        fp8, scales = self._kv_data_type == torch.float8_e4m3fn, (ckv_scale, kpe_scale)
        if fp8 and None in scales:
            raise ValueError("ckv_scale and kpe_scale are required when kv_data_type is FP8.")
        if fp8 and not all(math.isfinite(s) and s > 0 for s in scales):
            raise ValueError(f"ckv_scale must be a finite positive value, got {scales}")
        if not fp8 and scales != (None, None):
            raise ValueError("ckv_scale / kpe_scale are only valid when kv_data_type is FP8.")
        if out is None:
            out = torch.empty_like(q_nope).fill_(torch.nan)
        else:
            _check(out, q_nope.shape, q_nope.dtype, "out")
        if return_lse and lse is None:
            lse = torch.full(q_nope.shape[:2], torch.nan)
        elif return_lse:
            _check(lse, q_nope.shape[:2], torch.float32, "lse")
        self._cached_module.run(
            self._int_workspace_buffer, self._plan_info, q_nope, q_pe, ckv_cache, kpe_cache,
            self._kv_indices_buf, out, lse, int(self._causal), q_nope.shape[1], self._page_size,
            self._sm_scale, return_lse_base_on_e, *(scales if fp8 else (1.0, 1.0)),
        )  # fmt: skip
        return (out, lse) if return_lse else out
