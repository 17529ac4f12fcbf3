"""FlashMLA's compiled decode and sparse kernels of sm90, in float32, as both builds call them."""

import attn_reference
import torch

PROCESSORS = 132
PAGE = 64
_SIZE = 8  # integers of a multiprocessor's schedule
_FP8 = torch.float8_e4m3fn


def schedule(seqlens_k, rows, h_k, fp8=False):
    """Cut the keys into tiles: int32 [parts, 8], and the splits of each request int32 [B + 1].

    FP8's scheduler is another function, whose tiles other kernels are not promised to take.
    """
    _check(seqlens_k, "seqlens_k", torch.int32)
    parts = max(PROCESSORS // h_k // -(-rows // 64), 1)
    tiles = torch.zeros(parts, _SIZE, dtype=torch.int32)
    # what a schedule is for: the kernel never looks at a key that no tile names
    tiles[0, :3] = torch.tensor([int(seqlens_k.sum()), rows, fp8], dtype=torch.int32)
    blocks = -(-seqlens_k // PAGE)
    return tiles, torch.nn.functional.pad(blocks.cumsum(0, dtype=torch.int32), (1, 0))


def decode(
    q, kcache, block_table, seqlens_k, head_size_v, tiles, num_splits, softmax_scale, is_causal
):
    """Attend with q [B, s, H, 576]; returns out [B, s, H, 512] and the natural LSE [B, H, s]."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("Expected q_dtype == torch::kBFloat16 || q_dtype == torch::kHalf")
    lengths = (seqlens_k, tiles, num_splits)
    return _attend(q, kcache, block_table, *lengths, head_size_v, softmax_scale, is_causal)


def decode_fp8(
    q, kcache, block_table, seqlens_k, head_size_v, tiles, num_splits, softmax_scale, is_causal,
    descale_q, descale_k,
):  # fmt: skip
    """Attend as `decode` does, with e4m3 queries and probabilities; the output is bfloat16."""
    if q.dtype != _FP8:
        raise RuntimeError("Expected q.dtype() == torch::kFloat8_e4m3fn to be true")
    if descale_q is None or descale_k is None:
        raise RuntimeError("descale is required when input dtype is fp8")
    for name, t in (("descale_q_", descale_q), ("descale_k_", descale_k)):
        if t.dtype != torch.float32:
            raise RuntimeError(f"Expected {name}.dtype() == torch::kFloat to be true")
        if t.shape != (1,):
            raise RuntimeError(f"{name} must have shape (1)")
    lengths = (seqlens_k, tiles, num_splits)
    scales = (descale_q.item(), descale_k.item())
    return _attend(q, kcache, block_table, *lengths, head_size_v, softmax_scale, is_causal, scales)


def sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink=None, topk_length=None):
    """Attend with q [T, H, 576] to kv [slots, 1, 576] at indices [T, 1, K], those in range.

    Returns out [T, H, 512], the largest logit and the natural LSE, both [T, H]: without keys they
    are zeros, -inf and +inf. Sinks shrink the output and leave the LSE.
    """
    tokens, heads, dim = q.shape
    for name, t in (("q", q), ("kv", kv)):
        if t.dtype != torch.bfloat16:
            raise RuntimeError(f"{name} must have dtype ScalarType::BFloat16")
    if indices.dtype != torch.int32:
        raise RuntimeError("indices must have dtype ScalarType::Int")
    for name, t in (("q", q), ("kv", kv), ("indices", indices)):
        if t.dim() != 3:
            raise RuntimeError(f"{name} must have 3 dimensions")
        if t.stride(-1) != 1:
            raise RuntimeError(f"{name} must have contiguous last dimension")
    if dim != 576:
        raise RuntimeError(f"Unsupported d_qk: {dim}")
    if kv.shape[1:] != (1, dim):
        raise RuntimeError("kv must have shape (s_kv, h_kv, d_qk)")
    if d_v != 512:
        raise RuntimeError("Invalid d_v")
    if heads not in (64, 128):
        raise RuntimeError(f"Unsupported h_q: {heads}")
    topk = indices.shape[2]
    if indices.shape != (tokens, 1, topk):
        raise RuntimeError("indices must have shape (s_q, h_kv, topk)")
    if topk % 128 or not topk:
        raise RuntimeError(f"Invalid topk: {topk}")
    misplaced = [x % 8 for x in (q.data_ptr() // 2, *q.stride()[:2])]
    assert not any(misplaced), "TMA takes addresses and strides of 16 bytes"
    if attn_sink is not None:
        if attn_sink.dtype != torch.float32:
            raise RuntimeError("attn_sink must have dtype ScalarType::Float")
        if attn_sink.shape != (heads,):
            raise RuntimeError("attn_sink must have shape (h_q)")
        if not attn_sink.is_contiguous():
            raise RuntimeError("attn_sink must have contiguous last dimension")
    if topk_length is not None:
        raise NotImplementedError("no emulation of this one")
    keys = []
    for row in indices[:, 0]:
        slots = row[(row >= 0) & (row < len(kv))].long()
        keys.append(kv[slots])
    values = [k[..., :512] for k in keys]
    found, total = attn_reference.attend(
        q, keys, values, query_lens=[1] * tokens, scale=sm_scale, sinks=attn_sink,
        sinks_in_lse=False,
    )  # fmt: skip
    peak = torch.full((tokens, heads), -torch.inf)
    for t, k in enumerate(keys):
        if len(k):
            peak[t] = (q[t].float() @ k[:, 0].float().T * sm_scale).amax(-1)
    return found.bfloat16(), peak, total.masked_fill(total == -torch.inf, torch.inf)


def sparse_decode(
    q, kv, indices, topk_length, attn_sink, tiles, num_splits, extra_kv, extra_indices,
    extra_topk_length, d_v, sm_scale,
):  # fmt: skip
    """Attend with q [B, s, H, 576] to FP8 latents [pages, 64, 1, 656] at indices [B, s, K].

    Returns out [B, s, H, 512], the natural LSE [B, H, s] and the schedule, made where none was
    given, int32 [parts, 8] and [B + 1]. Without keys out is 0 and the LSE +inf. Exactly -1 is no
    key. Any other slot out of range is an address of other memory: here, NaN.
    """
    if q.dim() != 4 or q.dtype != torch.bfloat16:
        raise RuntimeError("q must be a bfloat16 tensor with 4 dimensions")
    batch, queries, heads, dim = q.shape
    if kv.dtype not in (_FP8, torch.int8, torch.uint8):
        raise RuntimeError("key must have dtype fp8_e4m3fn, int8 or uint8")
    if indices.dtype != torch.int32:
        raise RuntimeError("indices must have dtype torch.int32")
    for name, t in (("q", q), ("key", kv), ("indices", indices)):
        if t.stride(-1) != 1:
            raise RuntimeError(f"{name} must have contiguous last dimension")
    if heads not in (64, 128):
        raise RuntimeError(f"Unsupported h_q: {heads}")
    if dim != 576 or d_v != 512:
        raise RuntimeError(f"Unsupported d_qk {dim}, d_v {d_v}")
    if kv.dim() != 4 or kv.shape[1:] != (PAGE, 1, 656):
        raise RuntimeError("kcache must have shape (num_blocks, 64, 1, bytes of a token)")
    if kv.stride(1) != 656:
        raise RuntimeError("kcache: the whole block must be contiguous")
    topk = indices.shape[-1]
    if indices.shape != (batch, queries, topk):
        raise RuntimeError("indices must have shape (b, s_q, topk)")
    if topk % 64 or not topk:
        raise RuntimeError(f"Invalid topk: {topk}")
    misplaced = [x % 8 for x in (q.data_ptr() // 2, *q.stride()[:3])]
    assert not any(misplaced), "TMA takes addresses and strides of 16 bytes"
    others = (topk_length, attn_sink, extra_kv, extra_indices, extra_topk_length)
    if any(x is not None for x in others):
        raise NotImplementedError("no emulation of this one")
    now = torch.zeros(PROCESSORS, _SIZE, dtype=torch.int32)
    now[0, :4] = torch.tensor([batch, queries, heads, topk], dtype=torch.int32)
    splits = torch.arange(batch + 1, dtype=torch.int32)
    if tiles is None:
        tiles, num_splits = now, splits
    raw = kv.view(torch.uint8).reshape(-1, 656)
    values = raw[:, :512].view(_FP8).float().view(-1, 4, 128)
    # the kernel dequantises to bfloat16, by scales in bfloat16
    values = values.bfloat16() * raw[:, 512:528].view(torch.float32).bfloat16()[..., None]
    latents = torch.cat([values.flatten(1), raw[:, 528:].view(torch.bfloat16)], 1)[:, None]
    beyond = torch.full((1, 1, 576), torch.nan, dtype=torch.bfloat16)
    keys = []
    for row in indices.flatten(0, 1):
        slots = row[row != -1].long()
        known = (slots >= 0) & (slots < len(latents))
        keys.append(torch.where(known[:, None, None], latents[slots.where(known, 0)], beyond))
    found, total = attn_reference.attend(
        q.flatten(0, 1), keys, [k[..., :512] for k in keys], query_lens=[1] * (batch * queries),
        scale=sm_scale,
    )  # fmt: skip
    out = found.bfloat16().view(batch, queries, heads, 512)
    lse = total.masked_fill(total == -torch.inf, torch.inf).view(batch, queries, heads)
    if not torch.equal(tiles, now) or not torch.equal(num_splits, splits):
        out, lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    return out, lse.transpose(1, 2).contiguous(), tiles, num_splits


def _attend(
    q, kcache, block_table, seqlens_k, tiles, num_splits, head_size_v, softmax_scale, is_causal,
    scales=None,
):  # fmt: skip
    batch, queries, heads, dim = q.shape
    _check(seqlens_k, "seqlens_k", torch.int32)
    _check(tiles, "tile_scheduler_metadata", torch.int32)
    _check(num_splits, "num_splits", torch.int32)
    for name, t in (("q", q), ("kcache", kcache), ("block_table", block_table)):
        if t.stride(-1) != 1:
            raise RuntimeError(f"{name} must have contiguous last dimension")
    if kcache.dtype != q.dtype:
        raise RuntimeError("query and key must have the same dtype")
    if dim != 576:
        raise RuntimeError("Only head_size_k == 576 is supported")
    if head_size_v != 512:
        raise RuntimeError("Only head_size_v == 512 is supported")
    if kcache.dim() != 4 or kcache.shape[1] != PAGE:
        raise RuntimeError("Currently page_block_size must be 64")
    if heads % kcache.shape[2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    if block_table.dtype != torch.int32:
        raise RuntimeError("block_table must have dtype torch.int32")
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        raise RuntimeError("block_table must have shape (batch_size, max_num_blocks_per_seq)")
    if tiles.shape[1] != _SIZE:
        raise RuntimeError("tile_scheduler_metadata must have shape (num_sm_parts, 8)")
    if num_splits.shape != (batch + 1,):
        raise RuntimeError("num_splits must have shape (batch_size+1)")
    lens = seqlens_k.tolist()
    dtype, (q_scale, k_scale) = q.dtype, scales or (1.0, 1.0)
    out = torch.full(
        (batch, queries, heads, 512), torch.nan, dtype=torch.bfloat16 if scales else dtype
    )
    lse = torch.full((batch, heads, queries), torch.nan)
    now, splits = schedule(seqlens_k, queries * heads, kcache.shape[2], fp8=scales is not None)
    if not torch.equal(now, tiles) or not torch.equal(splits, num_splits):
        return out, lse  # a schedule of other lengths: rows are skipped
    keys = attn_reference.gather(kcache, block_table, lens)
    found, total = attn_reference.attend(
        q.flatten(0, 1),
        keys,
        [k[..., :512] for k in keys],
        query_lens=[queries] * batch,
        scale=softmax_scale * q_scale * k_scale,
        causal=is_causal,
        weights_dtype=_FP8 if scales else None,
    )
    out.copy_(found.view(out.shape) * k_scale)
    lse.copy_(total.view(batch, queries, heads).transpose(1, 2))
    return out, lse


def _check(t, name, dtype):
    if t.dtype != dtype:
        raise RuntimeError(f"{name} must have dtype {dtype}")
    if not t.is_contiguous():
        raise RuntimeError(f"{name} must be contiguous")
