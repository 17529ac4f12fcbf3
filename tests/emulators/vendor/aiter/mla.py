"""MLA over single tokens of a latent cache, in assembly: decode of up to 4 queries, prefill."""

import functools
from itertools import pairwise

import torch
from aiter_checks import check, int32
from attn_reference import attend

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
BLOCKS = {16: 128, 32: 128, 48: 64, 64: 64, 128: 32, 256: 32, 384: 32, 512: 32}


@functools.lru_cache(maxsize=1)
def get_meta_param(num_kv_splits, bs, total_kv, nhead, max_seqlen_q, dtype):
    """Choose how often keys are split; the tensor lives as long as no other call is made."""
    if num_kv_splits is None:
        num_kv_splits = 4
    if dtype in FP8:
        BLOCKS[nhead * max_seqlen_q]
    assert nhead in (16, 128), f"{nhead=} not supported"
    mgc = 64 if max_seqlen_q == 1 and nhead == 16 else 16
    indptr = torch.arange(0, (bs + 1) * num_kv_splits, num_kv_splits, dtype=torch.int)
    return num_kv_splits, mgc, indptr


def mla_decode_fwd(
    q,
    kv_buffer,
    o,
    qo_indptr,
    kv_indptr,
    kv_indices,
    kv_last_page_lens,
    max_seqlen_q,
    sm_scale=None,
    logit_cap=0.0,
    num_kv_splits=None,
    num_kv_splits_indptr=None,
    work_meta_data=None,
    work_indptr=None,
    work_info_set=None,
    reduce_indptr=None,
    reduce_final_map=None,
    reduce_partial_map=None,
    q_scale=None,
    kv_scale=None,
):
    unused = (num_kv_splits, num_kv_splits_indptr, work_meta_data, work_indptr, work_info_set)
    unused = (*unused, reduce_indptr, reduce_final_map, reduce_partial_map)
    assert all(x is None for x in unused), "not emulated"
    assert logit_cap <= 0, f"{logit_cap=} is not support yet"
    batch, heads = qo_indptr.shape[0] - 1, o.shape[1]
    get_meta_param(None, batch, kv_indices.shape[0], heads, max_seqlen_q, q.dtype)
    fp8 = q.dtype in FP8
    known = "unsupport current data type or shape. please refer to asm_mla.cu"
    check(fp8 or q.dtype == torch.bfloat16, known)
    check(kv_buffer.dtype == q.dtype, known)  # bf16 queries over FP8 are persistent mode's alone
    check(max_seqlen_q <= 4, "only support fp8 mla decoding for qo_len <= 4")
    queries = qo_indptr.diff().tolist()
    assert set(queries) <= {max_seqlen_q}, "requests are max_seqlen_q rows apart"
    scale = 1.0
    if fp8:
        for t in (q_scale, kv_scale):
            assert t.dtype == torch.float32, "one number per tensor"
            assert t.numel() == 1, "one number per tensor"
            scale *= t.item()
    args = (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)
    _computed(q, kv_buffer, o, *args, sm_scale, scale, kv_scale.item() if fp8 else 1.0)
    unwritten = torch.full(o.shape[:2], torch.nan)  # final_lse is allocated and never filled
    return torch.full((o.shape[0], 4, *o.shape[1:]), torch.nan), unwritten


def mla_prefill_fwd(
    q,
    kv_buffer,
    o,
    qo_indptr,
    kv_indptr,
    kv_indices,
    kv_last_page_lens,
    max_seqlen_q,
    sm_scale=None,
    logit_cap=0.0,
    num_kv_splits=None,
):
    assert logit_cap <= 0, f"{logit_cap=} is not support yet"
    if sm_scale is None:
        raise UnboundLocalError("cannot access local variable 'qk_head_dim'")
    check(q.dtype == torch.bfloat16, f": unsupport current Q_type:{q.dtype}")
    assert kv_buffer.dtype == q.dtype, "the kernel reads 16-bit latents"
    queries = qo_indptr.diff().tolist()
    assert max(queries) <= max_seqlen_q, "max_seqlen_q is below a query: not computed"
    args = (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)
    _computed(q, kv_buffer, o, *args, sm_scale, 1.0, 1.0)
    return o, torch.full((o.shape[0], 1, o.shape[1], 1), torch.nan)


def _computed(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, sm_scale, scale, kv_scale
):
    batch, heads = qo_indptr.shape[0] - 1, q.shape[1]
    pages, page, kv_heads, dim = kv_buffer.shape
    check(q.is_contiguous(), "only support Q.is_contiguous() for now")
    check(q.data_ptr() % 16 == 0, "an odd address")
    check(kv_heads == 1, "only support num_kv_heads==1 for now")
    check(heads in (16, 128), "only support num_q_heads/num_kv_heads==16 or 128 for now")
    check(q.shape[2] == dim == 576, "only support head_size == KV.size(3) for now")
    assert page == 1, "lengths are counted in entries"
    assert o.dtype == torch.bfloat16, "the kernels write bf16"
    assert o.is_contiguous(), "o is viewed by splits"
    assert o.shape == (*q.shape[:2], 512)
    int32(qo_indptr, "qo_indptr", (batch + 1,))
    int32(kv_indptr, "kv_indptr", (batch + 1,))
    int32(kv_last_page_lens, "kv_last_page_lens", (batch,))
    assert kv_indices.dtype == torch.int32
    ends = kv_indptr.tolist()
    raw = kv_buffer.view(pages, dim)
    raw = raw.view(torch.uint8) if raw.dtype in FP8 else raw
    keys = [raw[kv_indices[a:b].long()].view(kv_buffer.dtype)[:, None] for a, b in pairwise(ends)]
    result, _ = attend(
        q,
        keys,
        [k[..., :512] for k in keys],
        query_lens=qo_indptr.diff().tolist(),
        scale=(dim**-0.5 if sm_scale is None else sm_scale) * scale,
        causal=True,
        weights_dtype=q.dtype if q.dtype in FP8 else None,
    )
    rows = int(qo_indptr[-1])
    o[:rows] = (result[:rows] * kv_scale).to(o.dtype)
