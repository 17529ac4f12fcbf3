"""The compiled functions of FlashAttention-3 as sglang-kernel 0.4.5 has them, for the CPU.

Parameters, their order and the refusals are those of torch.ops.sgl_kernel.fwd and
get_scheduler_metadata.
"""

import torch
from attn_reference import attend_overflowing, gather, split
from fa3_tiles import schedule, sees, tile, without_keys

ARCH = 90  # tests set 80
HALF = (torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
MOST_SINKS = 64  # heads that the kernel has shared memory for; it does not check


def _check(ok, message):
    if not ok:
        raise RuntimeError(message)


def _int32(t, name, shape, *, row=False):
    _check(t.dtype == torch.int32, f"{name} must have dtype torch.int32")
    _check(tuple(t.shape) == shape, f"{name} must have shape {shape}")
    contiguous = t.stride(-1) == 1 if row else t.is_contiguous()
    _check(contiguous, f"{name} must be contiguous")


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads,
    num_heads_k,
    headdim,
    headdim_v,
    qkv_dtype,
    seqused_k,
    cu_seqlens_q,
    cu_seqlens_k,
    cu_seqlens_k_new,
    seqused_q,
    leftpad_k,
    page_size,
    max_seqlen_k_new=0,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    _check(qkv_dtype in (*HALF, E4M3), "FlashAttention only supports fp16, bf16, and fp8_e4m3")
    _check(num_heads % num_heads_k == 0, "Number of heads in key/value must divide")
    unused = (cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k)
    assert all(x is None for x in unused), "not emulated"
    assert not any((max_seqlen_k_new, attention_chunk, sm_margin)), "not emulated"
    _int32(seqused_k, "seqused_k", (batch_size,))
    _int32(cu_seqlens_q, "cu_seqlens_q", (batch_size + 1,))
    causal, left, right = sees(
        max_seqlen_q, max_seqlen_k, headdim, page_size is not None, is_causal,
        window_size_left, window_size_right,
    )  # fmt: skip
    key = (
        max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, str(qkv_dtype),
        page_size, causal, left, right, bool(has_softcap), num_splits, pack_gqa,
    )  # fmt: skip
    local = (left >= 0 or right >= 0) and not causal
    return schedule(seqused_k.tolist(), cu_seqlens_q.diff().tolist(), causal, local, key)


def fwd(
    q,
    k,
    v,
    k_new,
    v_new,
    q_v,
    out,
    cu_seqlens_q,
    cu_seqlens_k,
    cu_seqlens_k_new,
    seqused_q,
    seqused_k,
    max_seqlen_q,
    max_seqlen_k,
    page_table,
    kv_batch_idx,
    leftpad_k,
    rotary_cos,
    rotary_sin,
    seqlens_rotary,
    q_descale,
    k_descale,
    v_descale,
    softmax_scale,
    is_causal,
    window_size_left,
    window_size_right,
    attention_chunk,
    softcap,
    is_rotary_interleaved,
    scheduler_metadata,
    num_splits,
    pack_gqa,
    sm_margin,
    sinks,
    sparse_mask_fine,
    only_qv,
):
    unused = (k_new, v_new, cu_seqlens_k_new, seqused_q, kv_batch_idx, leftpad_k, rotary_cos)
    unused = (*unused, rotary_sin, seqlens_rotary, sparse_mask_fine)
    assert all(x is None for x in unused), "not emulated"
    assert not any((attention_chunk, only_qv, sm_margin)), "not emulated"
    _check(isinstance(is_causal, bool), f"expected bool, got {type(is_causal).__name__}")
    for value in (window_size_left, window_size_right, num_splits, max_seqlen_q):
        _check(type(value) is int, f"expected int, got {type(value).__name__}")
    for value in (softmax_scale, softcap):
        _check(isinstance(value, int | float), f"expected float, got {type(value).__name__}")
    fp8 = q.dtype == E4M3
    supported = HALF if ARCH < 90 else (*HALF, E4M3)
    _check(
        q.dtype in supported, f"FlashAttention only supports fp16, bf16, and fp8_e4m3: {q.dtype}"
    )
    _check(k.dtype == q.dtype, "query and key must have the same dtype")
    _check(v.dtype == q.dtype, "query and value must have the same dtype")
    for t in (q, k, v):
        _check(t.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        steps = [s * t.element_size() for s in t.stride()[:-1]]
        assert all(s % 16 == 0 for s in steps), f"TMA takes strides of 16 bytes, not {steps}"
        assert t.data_ptr() % 16 == 0, "TMA takes addresses of 16 bytes"
    paged = page_table is not None
    batch = cu_seqlens_q.shape[0] - 1
    (total, heads, d), kv_heads, dv = q.shape, k.shape[-2], v.shape[-1]
    _int32(cu_seqlens_q, "cu_seqlens_q", (batch + 1,))
    _check(d <= 256, "FlashAttention forward only supports head dimension at most 256")
    _check(
        heads % kv_heads == 0, "Number of heads in key/value must divide number of heads in query"
    )
    if d != dv:
        fits = (128 < d <= 192 and 96 < dv <= 128) or (d <= 64 and dv <= 512)
        _check(fits, "If V headdim is different from Q/K dim, we only support Q/K headdim in …")
        _check(ARCH == 90, "Only Hopper supports different V headdim")
    step = 16 if fp8 else 8
    _check(d % step == 0, f"head_size should be a multiple of {step}")
    _check(dv % step == 0, f"head_size_v should be a multiple of {step}")
    if paged:
        _check(
            cu_seqlens_k is None, "If cu_seqlens_k is passed in, then page table is not supported"
        )
        _int32(page_table, "page_table", (batch, page_table.shape[1]), row=True)
        _int32(seqused_k, "seqused_k", (batch,))
        pages, size = k.shape[:2]
        _check(k.shape == (pages, size, kv_heads, d), "k must have shape (num_pages, page_size, …)")
        _check(
            v.shape == (pages, size, kv_heads, dv), "v must have shape (num_pages, page_size, …)"
        )
        max_seqlen_k = page_table.shape[1] * size
        lengths = seqused_k.tolist()
        assert max(lengths, default=0) <= max_seqlen_k, "reads past the page table"
    else:
        _int32(cu_seqlens_k, "cu_seqlens_k", (batch + 1,))
        _check(
            max_seqlen_k is not None, "max_seqlen_k must be provided if cu_seqlens_k is provided"
        )
        _check(k.shape == (k.shape[0], kv_heads, d), "k must have shape (total_k, …)")
        _check(v.shape == (k.shape[0], kv_heads, dv), "v must have shape (total_k, …)")
        lengths = cu_seqlens_k.diff().tolist()
        assert max(lengths, default=0) <= max_seqlen_k, "max_seqlen_k is below a length"
    queries = cu_seqlens_q.diff().tolist()
    assert max(queries, default=0) <= max_seqlen_q, "max_seqlen_q is below a query: not computed"
    if q_v is not None:
        _check(d <= 64 and dv >= 256, "q_v is only supported for head_size <= 64, hdim_v >= 256")
        _check(ARCH == 90, "q_v is only supported for Hopper GPUs")
        _check(q_v.dtype == q.dtype and not fp8, "q_v is only supported for fp16 and bf16")
        _check(q_v.stride(-1) == 1, "q_v tensor must have contiguous last dimension")
        _check(
            q_v.shape == (total, heads, dv), "q_v must have shape (total_q, num_heads, head_size_v)"
        )
    elif d != dv and d <= 64 and dv > 256:
        raise AssertionError("the emulated build has (64, 512) with q_v only")
    if sinks is not None:
        _check(sinks.dtype == torch.bfloat16, "sinks must have dtype bfloat16")
        _check(sinks.shape == (heads,), "sinks must have shape (num_heads)")
        _check(sinks.is_contiguous(), "sinks must be contiguous")
        assert heads <= MOST_SINKS, "writes past the shared memory of the sinks"
        sinks = sinks if ARCH == 90 else None  # the kernels of sm80 never read them
    owed = torch.bfloat16 if fp8 else q.dtype
    if out is None:
        out = q.new_empty(total, heads, dv, dtype=owed)
    _check(out.dtype == owed, "output must have the same dtype as inputs. For FP8 input … BF16")
    _check(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
    _check(out.shape == (total, heads, dv), "out must have shape (total_q, num_heads, head_size_v)")
    none = torch.empty(0)
    if total and not (k.shape[0] if not paged else batch * k.shape[1]):
        return out.zero_(), torch.full((heads, total), torch.inf), none, none  # +inf, by mistake
    causal, left, right = sees(
        max_seqlen_q, max_seqlen_k, d, paged, is_causal, window_size_left, window_size_right
    )
    local = (left >= 0 or right >= 0) and not causal
    if scheduler_metadata is not None:
        key = (
            max_seqlen_q, max_seqlen_k, heads, kv_heads, d, dv, str(q.dtype),
            size if paged else None, causal, left, right, softcap > 0, num_splits, pack_gqa,
        )  # fmt: skip
        right_one = schedule(lengths, queries, causal, local, key)
        _check(scheduler_metadata.dtype == torch.int32, "scheduler_metadata must have dtype int32")
        _check(
            scheduler_metadata.shape == right_one.shape,
            "scheduler_metadata must have shape (metadata_size)",
        )
        _check(scheduler_metadata.is_contiguous(), "scheduler_metadata must be contiguous")
        if not torch.equal(scheduler_metadata, right_one):  # blocks would be missed, or done twice
            return out.fill_(torch.nan), torch.full((heads, total), torch.nan), none, none
    if paged:
        tile_m, tile_n = tile(d, dv, causal, local)
        tma = size % tile_n == 0 and max_seqlen_q * (heads // kv_heads) > tile_m
        keys = gather(k, page_table, lengths)
        values = gather(v, page_table, lengths, whole=tma)  # a copy of a page takes its tail along
    else:
        columns = tile(d, dv, causal, local)[1] if ARCH == 90 else 1  # Ampere clears the rest
        keys, values = split(k, cu_seqlens_k), split(v, cu_seqlens_k, tile=columns)
    queries_of = q
    if q_v is not None:
        queries_of = torch.cat([q, q_v], -1)
        latents = gather(v, page_table, lengths)
        keys = [torch.cat(pair, -1) for pair in zip(keys, latents, strict=True)]
    if fp8:
        group = heads // kv_heads

        def scaled(x, descale, repeat=1):
            if descale is None:
                return [t.float() for t in x]
            _check(
                descale.shape == (batch, kv_heads),
                "descale must have shape (batch_size, num_heads_k)",
            )
            assert descale.dtype == torch.float32
            return [
                t.float() * s.repeat_interleave(repeat)[:, None]
                for t, s in zip(x, descale, strict=True)
            ]

        per_request = list(split(q, cu_seqlens_q))
        queries_of = torch.cat(scaled(per_request, q_descale, group)) if batch else q.float()
        keys, values = scaled(keys, k_descale), scaled(values, v_descale)
    else:
        assert q_descale is k_descale is v_descale is None, "descales go with FP8"
    result, lse = attend_overflowing(
        queries_of,
        keys,
        values,
        query_lens=queries,
        scale=softmax_scale,
        causal=causal,
        left=left if left >= 0 else None,
        right=right if right >= 0 else None,
        softcap=softcap,
        sinks=sinks,
        weights_dtype=E4M3 if fp8 else None,
    )
    tile_m, _ = tile(d, dv, causal, local)
    for rows, n in zip(split(torch.arange(total), cu_seqlens_q), lengths, strict=True):
        unread = without_keys(len(rows), n, heads // kv_heads, tile_m, right)
        lse[rows] = (
            lse[rows].unflatten(1, (kv_heads, -1)).masked_fill(unread, -torch.inf).flatten(1)
        )
    out.copy_(result)
    return out, lse.T.contiguous(), none, none
