"""flashinfer 0.6.14's trtllm functions: XQA's front, and trtllm-gen of sm100 in float32."""

import importlib
import math
from types import SimpleNamespace

import attn_reference
import torch

from flashinfer._raw_memory import dense

_xqa = importlib.import_module("flashinfer.xqa")  # the package binds the name to the function
_MIB = 1 << 20


class FP4Tensor:
    """Of the signatures alone: no output is FP4 here."""


def get_trtllm_gen_fmha_module():
    return SimpleNamespace()


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: list[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
):
    k_cache, v_cache = kv_cache
    if (k_cache.dtype == torch.uint8) and kv_cache_sf is None:
        raise ValueError("kv_cache_sf must be provided for NVFP4 KV cache.")
    if kv_cache_sf is not None:
        assert all(t.dtype == torch.float8_e4m3fn for t in kv_cache_sf), (
            "kv_cache_sf tensors should be float8 dtype."
        )
    if backend == "auto":
        backend = "trtllm-gen" if _xqa.compute_capability[0] == 10 else "xqa"
    if out is None:
        out = torch.empty_like(query)
    if backend == "xqa":
        if max_q_len is not None or cum_seq_lens_q is not None:
            raise ValueError("xqa backend does not support cum_seq_lens_q")
        if return_lse or lse is not None:
            raise NotImplementedError("xqa backend does not support return_lse/lse output")
        k_blocks, v_blocks = kv_cache_sf or (None, None)
        heads_at = 1 if kv_layout == "HND" else 2
        num_kv_heads, head_dim = k_cache.shape[heads_at], query.shape[-1]
        q, semaphores = query, workspace_buffer.view(torch.uint8)[: 8 * _MIB]
        if q_len_per_req > 1:
            q = q.view(q.shape[0] // q_len_per_req, q_len_per_req, *q.shape[1:])
        kv_scale = bmm2_scale * o_scale
        _xqa.xqa(
            q.unsqueeze(1), k_cache, v_cache, block_tables, seq_lens.unsqueeze(1),
            out.unsqueeze(1), workspace_buffer.view(torch.uint8)[8 * _MIB :], semaphores,
            num_kv_heads, k_cache.shape[3 - heads_at],
            sinks=None if sinks is None else sinks.reshape(num_kv_heads, -1),
            q_scale=bmm1_scale / kv_scale * head_dim**0.5, kv_scale=kv_scale,
            sliding_win_size=window_left + 1 if window_left >= 0 else 0, kv_layout=kv_layout,
            enable_pdl=enable_pdl, rcp_out_scale=1.0 / o_scale, q_seq_len=q_len_per_req,
            mask=mask, k_sf_cache=k_blocks, v_sf_cache=v_blocks,
        )  # fmt: skip
        return out
    if backend != "trtllm-gen":
        raise KeyError(f"Backend {backend} not supported")
    if q_len_per_req is not None:
        batch = query.size(0) // q_len_per_req
        query_lens = [q_len_per_req] * batch
    else:
        assert max_q_len is not None
        batch, query_lens = cum_seq_lens_q.size(0) - 1, dense(cum_seq_lens_q).diff().tolist()
    return _gen(
        query, k_cache, v_cache, workspace_buffer, block_tables, seq_lens,
        max(query_lens), max_seq_len, bmm1_scale, bmm2_scale, batch, query_lens, window_left, out,
        kv_layout, sinks, True, lse, return_lse, 8 * _MIB,
    )  # fmt: skip


def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: list[torch.Tensor] | None = None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
):
    if not causal and window_left >= 0:
        raise NotImplementedError(
            "Sliding-window non-causal attention is not supported for trtllm-gen paged KV cache."
        )
    k_cache, v_cache = kv_cache
    if k_cache.dtype != query.dtype:
        _missing("context", f"{query.dtype} queries over a cache of {k_cache.dtype}")
    ends = dense(cum_seq_lens_kv)
    assert ends.dtype == torch.int32
    assert ends[0] == 0
    assert torch.equal(ends.diff(), dense(seq_lens).int()), "cum_seq_lens_kv is not of seq_lens"
    query_lens = dense(cum_seq_lens_q).diff().tolist()
    assert max(query_lens) <= max_q_len
    if out is None:
        out = torch.empty_like(query)
    return _gen(
        query, k_cache, v_cache, workspace_buffer, block_tables, seq_lens, max_q_len,
        max_kv_len, bmm1_scale, bmm2_scale, batch_size, query_lens, window_left, out, kv_layout,
        sinks, causal, lse, return_lse, 0,
    )  # fmt: skip


def _gen(
    query, k_cache, v_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len,
    bmm1_scale, bmm2_scale, batch, query_lens, window_left, out, kv_layout, sinks, causal, lse,
    return_lse, counters,
):  # fmt: skip
    if kv_layout == "NHD":
        k_cache, v_cache = k_cache.transpose(-3, -2), v_cache.transpose(-3, -2)
    assert query.data_ptr() % 16 == 0, "addresses of 16 bytes"
    for t in (query, k_cache, v_cache):
        if t.stride(-1) != 1:
            raise RuntimeError("head_dim must have stride 1, TMA needs it")
    heads, dim, page = query.shape[1], query.shape[2], k_cache.shape[-2]
    kv_heads, mixed = k_cache.shape[-3], k_cache.dtype != query.dtype
    group = heads // kv_heads
    if heads % kv_heads:
        raise RuntimeError(
            f"num_qo_heads must be a multiple of num_kv_heads, got num_kv_heads: {kv_heads} "
            f"and num_qo_heads: {heads}"
        )
    if dim not in (64, 128, 256) or (page not in (16, 32, 64) and (page < 128 or group == 1)):
        _missing("decode" if counters else "context", f"headDim {dim}, numTokensPerPage {page}")
    if mixed and group > 16 and group % 16:
        raise RuntimeError("The numHeadsQ/numHeadsKv is not supported.")
    if out.shape != query.shape or out.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"Invalid shape or dtype of out: {tuple(out.shape)} {out.dtype}")
    assert block_tables.dim() == 2
    assert block_tables.dtype == torch.int32
    assert {type(bmm1_scale), type(bmm2_scale)} == {float}, "scales are doubles"
    assert sinks is None or sinks.dtype == torch.float32, "attention_sinks must be a float tensor"
    assert not workspace_buffer[:counters].any(), "counters must be 0"
    need = counters
    if return_lse or lse is not None:
        need += 8 * heads * batch * -(-max_q_len // 256) * 256 + _MIB
    if workspace_buffer.numel() < need:
        raise RuntimeError(
            "Buffer overflow when allocating memory for trtllm_gen_softmax_workspace"
        )
    if not counters and (return_lse or lse is not None):
        workspace_buffer.fill_(255)  # no counters, so its softmax statistics come first
    lens = dense(seq_lens).tolist()
    assert max(lens) <= max_kv_len, f"lengths {lens} above max_kv_len {max_kv_len}"
    table = dense(block_tables)
    keys = attn_reference.gather(k_cache.transpose(-3, -2), table, lens)
    values = attn_reference.gather(v_cache.transpose(-3, -2), table, lens, whole=True)
    found, sums = attn_reference.attend(
        query.float(), [k.float() for k in keys], [v.float() for v in values],
        query_lens=query_lens, scale=bmm1_scale, causal=causal,
        left=window_left if window_left >= 0 else None,
        sinks=None if sinks is None else dense(sinks),
    )  # fmt: skip
    dense(out).copy_(found * bmm2_scale)
    if lse is None and not return_lse:
        return out
    lse = torch.empty(sums.shape) if lse is None else lse
    lse.copy_(sums * math.log2(math.e))  # ComputeLSEFromMD: base 2
    return (out, lse) if return_lse else out


def _missing(phase: str, what: str):
    raise RuntimeError(f"Missing TRTLLM-GEN kernel ({phase}): {what}")
