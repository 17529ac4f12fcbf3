"""flash_attn.cute.interface of flash-attn-4 4.0.0b18: the forward function and its refusals."""

# ruff: noqa: UP006, UP035, UP045  # annotations and defaults are the wheel's

import math
import os
from typing import Callable, Optional, Tuple

import torch
from attn_reference import attend_overflowing, gather, split

HALF = (torch.float16, torch.bfloat16)
compiled = []  # the variants that the real function would have compiled


def _get_device_arch():
    return int(os.environ.get("FLASH_ATTENTION_ARCH", "90"))


def _validate_head_dims(
    head_dim: int, head_dim_v: int, compute_capability: int, alignment: int
) -> None:
    aligned = head_dim % alignment == 0 and head_dim_v % alignment == 0
    if compute_capability == 9:
        fits = 8 <= head_dim <= 256 and 8 <= head_dim_v <= 256
        message = "is not supported on SM90. head_dim and head_dim_v must be between 8 and 256"
    else:
        fits = (8 <= head_dim <= 128 and 8 <= head_dim_v <= 128) or (
            (head_dim, head_dim_v) in ((192, 128), (256, 256), (64, 512), (512, 512))
        )
        message = "is not supported on SM100/SM110. head_dim and head_dim_v must be between 8 and"
    assert fits, f"(head_dim, head_dim_v)=({head_dim}, {head_dim_v}) {message}"
    assert aligned, f"({head_dim}, {head_dim_v}) must be divisible by {alignment}"


def _tile_n_sm90(head_dim, head_dim_v, is_causal, is_local):
    if head_dim <= 64:
        return 128
    if head_dim <= 96:
        return 128 if is_causal or is_local else 144
    if head_dim <= 128:
        return 128
    if head_dim <= 192:
        return 96 if is_local else (128 if head_dim_v <= 128 else 112)
    return 64 if is_local else 80


def maybe_contiguous(x):
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def _flash_attn_fwd(
    q: Optional[torch.Tensor],
    k: Optional[torch.Tensor],
    v: torch.Tensor,
    qv: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    seqused_q: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    min_seqlen_k: Optional[int] = None,
    page_table: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    softcap: Optional[float] = None,
    window_size_left: Optional[int] = None,
    window_size_right: Optional[int] = None,
    learnable_sink: Optional[torch.Tensor] = None,
    tile_mn: Optional[Tuple[int, int]] = None,
    mma_pv_is_rs: Optional[bool] = None,
    intra_wg_overlap: Optional[bool] = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    _arch: Optional[int] = None,
    score_mod: Optional[Callable] = None,
    mask_mod: Optional[Callable] = None,
    block_sparse_tensors: Optional["BlockSparseTensorsTorch"] = None,  # noqa: F821
    return_lse: bool = False,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
    aux_tensors: Optional[list[torch.Tensor]] = None,
    aux_scalars: Optional[tuple] = None,
    q_descale: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    gather_kv_indices: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    unused = (seqused_q, tile_mn, mma_pv_is_rs, intra_wg_overlap, pack_gqa, mask_mod, lse)
    unused = (*unused, block_sparse_tensors, aux_tensors, aux_scalars, gather_kv_indices)
    assert all(x is None for x in unused), "not emulated"
    assert q_descale is k_descale is v_descale is None, "not emulated"
    assert num_splits == 1, "SplitKV not supported on SM 9.0"
    q, k, v, qv = [maybe_contiguous(t) for t in (q, k, v, qv)]
    (total_q, num_head, head_dim), (num_head_kv, head_dim_v) = q.shape, v.shape[-2:]
    assert cu_seqlens_q is not None, "not emulated: queries as [batch, seqlen]"
    batch_size = cu_seqlens_q.shape[0] - 1
    if page_table is not None:
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert page_table.dtype == torch.int32, "page_table must be int32"
        assert page_table.stride(-1) == 1, "page_table must be contiguous in the last dimension"
        assert page_table.shape == (batch_size, page_table.shape[1])
        num_pages, page_size = v.shape[:2]
        assert k.shape == (num_pages, page_size, num_head_kv, head_dim)
    else:
        page_size = None
        assert cu_seqlens_k.shape == (batch_size + 1,), (
            "cu_seqlens_k must have shape (batch_size + 1,)"
        )
        assert k.shape == (v.shape[0], num_head_kv, head_dim)
    assert cu_seqlens_q.shape == (batch_size + 1,), "cu_seqlens_q must have shape (batch_size + 1,)"
    assert seqused_k is None or seqused_k.shape == (batch_size,), (
        "seqused_k must have shape (batch_size,)"
    )
    assert v.dtype in HALF, "inputs must be float16, bfloat16, fp8 e4m3fn, or fp8 e5m2"
    present = [t for t in (q, k, v, qv) if t is not None]
    assert len({t.dtype for t in present}) == 1, f"dtypes {[t.dtype for t in present]} differ"
    for t in (cu_seqlens_q, cu_seqlens_k, seqused_k):
        if t is not None:
            assert t.dtype == torch.int32, "cu_seqlens_q, cu_seqlens_k, … must be int32"
            assert t.stride(0) == 1, "cu_seqlens_q, cu_seqlens_k, … must be contiguous"
    for t in (*present, *([out] if out is not None else [])):  # 16 bytes at a time
        assert t.storage_offset() * t.element_size() % 16 == 0, "misaligned tensor"
        assert all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1]), "misaligned strides"
    if learnable_sink is not None:
        assert learnable_sink.shape == (num_head,)
        assert learnable_sink.dtype == torch.bfloat16, "learnable_sink must be bfloat16"
    arch = _get_device_arch() if _arch is None else _arch
    assert num_head % num_head_kv == 0, "num_head must be divisible by num_head_kv"
    _validate_head_dims(head_dim, head_dim_v, arch // 10, 16 // v.element_size())
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(head_dim if qv is None else head_dim + head_dim_v)
    if softcap:
        assert score_mod is None, "softcap and score_mod cannot be used together"
    cap = score_mod.softcap_val if score_mod is not None else softcap or 0.0
    shape = (total_q, num_head, head_dim_v)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype)
    assert out.shape == shape, f"out shape {out.shape} != expected {shape}"
    assert out.dtype == q.dtype, f"out dtype {out.dtype} != expected {q.dtype}"
    given_lse = None
    if return_lse:
        given_lse = torch.empty((num_head, total_q) if qv is None else (total_q, num_head))
    if v.shape[:-2].numel() == 0 or total_q == 0:
        if return_lse:
            given_lse.fill_(-torch.inf)
        return out.zero_(), given_lse
    causal, local, left, right = _resolve_causal_local_window(
        causal, window_size_left, window_size_right
    )
    tile_n = 128 if arch // 10 != 9 else _tile_n_sm90(head_dim, head_dim_v, causal, local)
    tma = page_size in (None, tile_n)
    paged_gap = not tma and (tile_n % 128 != 0)
    irregular = head_dim % 16 or head_dim_v % 16
    if arch // 10 == 9:
        assert qv is None, "only support Blackwell arch with qv"
        assert tma or not irregular, "Paged KV does not support irregular head dim"
        tile_m = 192 if head_dim <= 96 else 128
        if irregular and tile_m % (num_head // num_head_kv):
            raise RuntimeError("ICE IR Verification Failed")  # DSLRuntimeError, the compiler's own
    elif irregular and (page_table is not None or num_head != num_head_kv):
        raise RuntimeError("ICE IR Verification Failed")
    elif head_dim == head_dim_v == 256:
        assert not cap, "SM100 forward with head_dim=256 does not support softcap"
        assert learnable_sink is None, "SM100 forward with head_dim=256 does not support …"
        assert seqused_k is None, "SM100 forward with head_dim=256 does not support seqused_q/…"
    if qv is not None:
        assert qv.shape == (total_q, num_head, head_dim_v)
        assert (head_dim, head_dim_v) == (64, 512)
        assert not local, "local not yet supported with qv"
        assert learnable_sink is None
        assert not cap
    compiled.append((head_dim, head_dim_v, num_head // num_head_kv, causal, local, bool(cap), tma))
    if page_table is not None:
        lengths = seqused_k.tolist()
        assert max(lengths) <= page_table.shape[1] * page_size, "reads past the page table"
        keys = gather(k, page_table, lengths)
        values = gather(v, page_table, lengths, whole=tma)
        if qv is not None:
            latents = gather(v, page_table, lengths)
            keys = [torch.cat(pair, -1) for pair in zip(keys, latents, strict=True)]
            q = torch.cat([q, qv], -1)
    else:
        keys, values = split(k, cu_seqlens_k), split(v, cu_seqlens_k, tile=tile_n)
    result, sums = attend_overflowing(
        q,
        keys,
        values,
        query_lens=cu_seqlens_q.diff().tolist(),
        scale=softmax_scale,
        causal=causal,
        left=left,
        right=right,
        softcap=cap,
        sinks=learnable_sink,
    )
    if paged_gap:
        result.fill_(torch.nan)  # 128 threads fetch the addresses of as many keys, or of none
    hopper_paged = arch // 10 == 9 and page_table is not None
    if learnable_sink is not None or hopper_paged:
        for rows, key in zip(split(torch.arange(total_q), cu_seqlens_q), keys, strict=True):
            if not key.shape[0]:  # exp(sink + inf); without a sink seen on an H200
                result[rows], sums[rows] = torch.nan, torch.nan
            if learnable_sink is not None and causal:  # finalize in softmax.py: inf - inf
                sums[rows[: max(len(rows) - key.shape[0], 0)]] = torch.nan
    out.copy_(result)
    if return_lse:
        given_lse.copy_(sums.T if qv is None else sums)
    return out, given_lse


def _resolve_causal_local_window(causal, window_size_left, window_size_right, mask_mod=None):
    if causal:
        window_size_right = 0
    if window_size_left is None and window_size_right is None:
        return causal, False, None, None
    if window_size_left is None and window_size_right == 0:
        return True, False, None, None
    return False, True, window_size_left, window_size_right
