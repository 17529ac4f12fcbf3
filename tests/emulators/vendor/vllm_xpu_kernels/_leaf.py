"""varlen_fwd, the compiled function of vllm-xpu-kernels 0.1.16.2, for the CPU.

Parameters, their order and the refusals are those of torch.ops._vllm_fa2_C.varlen_fwd. What it
reads without a check is read here as it reads it: rows of a block table at the distance of its
columns, whole tiles of V. No kernel receives softcap.
"""

import torch
from attn_reference import attend, gather, split

HALF = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The kernels in its wheel for pages of multiples of 64 tokens, in the terms that it names them by;
# those of Xe2 (bmg, pvc), Xe3 has the same and more.
# head, paged, causal, local, sink, lse
PREFILL = {
    *((64, True, causal, False, False, lse) for causal in (False, True) for lse in (False, True)),
    *((64, True, causal, False, True, False) for causal in (False, True)),
    *((64, True, False, True, sink, False) for sink in (False, True)),
    *((64, False, causal, False, False, False) for causal in (False, True)),
    (80, False, False, False, False, False),
    *((96, True, True, False, False, lse) for lse in (False, True)),
    (96, True, False, True, False, False),
    (96, False, False, False, False, False),
    *((128, True, causal, False, False, lse) for causal in (False, True) for lse in (False, True)),
    *((128, True, causal, False, True, False) for causal in (False, True)),
    *((128, True, False, True, sink, False) for sink in (False, True)),
    *((128, False, causal, False, False, lse) for causal in (False, True) for lse in (False, True)),
    *((192, True, True, False, False, lse) for lse in (False, True)),
    *((192, False, True, False, False, lse) for lse in (False, True)),
    (192, False, False, False, False, True),
    *((256, True, True, False, False, lse) for lse in (False, True)),
    (256, True, False, True, False, False),
    *((256, False, causal, False, False, lse) for causal in (False, True) for lse in (False, True)),
    *((512, True, True, False, False, lse) for lse in (False, True)),
}

# group (8: up to eight query heads per KV head), head, local, sink
DECODE = {
    *((16, head, False, False) for head in (64, 128, 256)),
    (16, 128, True, False),
    *((8, head, False, False) for head in (64, 96, 128, 192, 256, 512, 576)),
    *((8, head, True, False) for head in (64, 96, 128, 256)),
    *((8, head, False, True) for head in (64, 128)),
    (8, 64, True, True),
}
PART = 16  # keys: requests are cut much later in the library, which those of tests never reach
LIMITS = (64, 80, 96, 128, 192, 256, 512)  # each kernel's largest head dim


def _check(ok, message):
    if not ok:
        raise RuntimeError(message)


def _surface(t, name):
    """Check what blocks of rows are loaded from; the base is the hardware's rule."""
    _check(t.stride(-1) == 1, f"{name} expects the last dim to be contiguous (stride==1)")
    wide = t.shape[-1] * t.element_size()
    _check(wide % 16 == 0, f"{name} last dim size … is not 16-byte aligned")
    steps = [s * t.element_size() for s in t.stride()[:-1]]
    assert all(s % 16 == 0 for s in steps), f"{name}: rows at {steps} bytes"
    assert t.data_ptr() % 64 == 0, f"{name}: a surface that begins between two cache lines"


def _int32(t, name):
    _check(t.is_contiguous(), f"{name} must be contiguous")
    _check(t.dtype == torch.int32, f"{name} must have dtype torch.int32")


def varlen_fwd(
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes,
    max_seqlen_q, max_seqlen_k, p_dropout, q_scale, k_scale, v_scale, softmax_scale, softmax_sink,
    zero_tensors, is_causal, window_size_left, window_size_right, softcap, return_softmax, gen,
    num_splits, mix_batch, splits_per_seq, work_list,
):  # fmt: skip
    unused = (leftpad_k, alibi_slopes, q_scale, gen, splits_per_seq, work_list)
    assert all(x is None for x in unused), "not emulated"
    paged = block_table is not None
    assert not any((p_dropout, zero_tensors)), "not emulated"
    assert not (paged and mix_batch), "not emulated: prefill and decode in one pass"
    _check(q.dtype in HALF, "VLLM Kernel XPU only supports fp16, bf16, and fp8 (e4m3/e5m2) query")
    _check(v.dtype == k.dtype, "key and value must have the same dtype")
    fp8 = k.dtype in FP8
    _check(fp8 or k.dtype == q.dtype, "query and key must have the same dtype")
    for t, name in ((q, "q"), (k, "k"), (v, "v")):
        _surface(t, name)
    _check(q.dim() == 3, "query must be in ragged format")
    _int32(cu_seqlens_q, "cu_seqlens_q")
    _int32(cu_seqlens_k, "cu_seqlens_k")
    queries = cu_seqlens_q.diff().tolist()
    decodes = paged and max_seqlen_q == 1
    sinks = softmax_sink is not None
    local = window_size_left != -1 or window_size_right != -1
    causal = is_causal and not decodes
    if local and causal:  # a window has its own order
        causal, window_size_right = False, 0
    if paged:
        lengths, tile = _pages(k, v, block_table, seqused_k, decodes)
        table = block_table.as_strided(block_table.shape, (block_table.shape[1], 1))
        keys = gather(k, table, lengths)
        values = gather(v, table, lengths, whole=True)
        values = [x[: -(-n // tile) * tile] for x, n in zip(values, lengths, strict=True)]
    else:
        lengths = cu_seqlens_k.diff().tolist()
        keys, values = split(k, cu_seqlens_k), split(v, cu_seqlens_k)
    assert max_seqlen_q >= max(queries, default=0), "a query is longer: its end is not computed"
    assert max_seqlen_k >= max(lengths, default=0), "a request is longer than max_seqlen_k"
    group, head = q.shape[1] // k.shape[-2], next(x for x in LIMITS if q.shape[2] <= x)
    if decodes:
        assert all(n == 1 for n in queries), "decode: a request without one token"
        built = (8 if group <= 8 else 16, head, local, sinks) in DECODE
    else:
        _check(not return_softmax or not (local or sinks), "softmax_lse … is_local=false and …")
        built = (head, paged, causal, local, sinks, return_softmax) in PREFILL
    _check(built, "kernel not compiled for this configuration.")
    if sinks:
        assert softmax_sink.dtype == q.dtype, "sinks are read as numbers of q's dtype"
        assert softmax_sink.is_contiguous()
    if fp8:
        _check(k_scale.numel() == 1, "FP8 KV k_scale must be a float32 tensor with a single …")
        keys, values = _read(keys, k_scale), _read(values, v_scale)
    shape = (*q.shape[:2], v.shape[-1])
    if out is None:
        out = q.new_empty(shape)
    assert out.shape == shape
    assert out.dtype == q.dtype, "written as numbers of q's dtype"
    _surface(out, "out")
    how = {
        "query_lens": queries,
        "scale": softmax_scale,
        "causal": causal,
        "left": window_size_left if window_size_left >= 0 else None,
        "right": window_size_right if window_size_right >= 0 and not decodes else None,
    }
    sink = softmax_sink if sinks else None
    splits = 1
    if decodes and num_splits != 1:  # by the longest request and how many there are
        splits = min(4, -(-max_seqlen_k // PART) // len(queries))
    if splits > 1:
        result, lse = _reduced(q, keys, values, lengths, splits, sink, how)
    else:
        result, lse = attend(q, keys, values, sinks=sink, **how)
    # 0 / 0 where a query sees no key: undefined, and so are rows that no request has
    unseen = (lse == -torch.inf).any(1)
    result[unseen], lse[unseen] = torch.nan, torch.nan
    written = sum(queries)
    out[:written] = result[:written].to(out.dtype)
    return [out, lse.T.contiguous()]


def _pages(k, v, block_table, seqused_k, decodes):
    _check(block_table.dtype == torch.int32, "page_table must have dtype torch.int32")
    _check(block_table.stride(-1) == 1, "page_table must have contiguous last dimension")
    for t in (k, v):
        _check(t.stride(0) % t.stride(1) == 0, "Paged … page stride must be divisible by …")
    same = k.stride(0) // k.stride(1) == v.stride(0) // v.stride(1)
    _check(same, "Paged K/V page strides must match in sequence-position units")
    page = k.shape[1]
    _check(page > 0 and page % 16 == 0, "unsupported block_size … any positive multiple of 16")
    assert page % 64 == 0, "not emulated: kernels for other pages"
    assert seqused_k.dtype == torch.int32, "lengths are read as int32"
    assert seqused_k.is_contiguous()
    return seqused_k.tolist(), 64 if decodes else 32


def _read(parts, scale):
    return [x.float() * scale for x in parts]


def _reduced(q, keys, values, lengths, splits, sink, how):
    """Attend in parts of each request's keys, whose results are rounded before they are merged."""
    parts = []
    for s in range(splits):
        masks = []
        for n in lengths:
            units = -(-n // PART)
            tokens = -(-units // splits) * PART  # of one part
            masks.append((torch.arange(n) // tokens == s)[None])
        parts.append(attend(q, keys, values, masks=masks, **how))
    lses = torch.stack([lse for _, lse in parts])
    total = lses.logsumexp(0)
    with_sink = total if sink is None else torch.logaddexp(total, sink.float())
    weights = (lses - with_sink).exp()
    rounded = torch.stack([out.to(q.dtype).float() for out, _ in parts])
    return (weights[..., None] * rounded).sum(0), with_sink
