"""flashinfer.xqa 0.6.14: TensorRT-LLM's decode kernels of sm90 and sm120, in float32."""

from types import SimpleNamespace

import attn_reference
import torch

from flashinfer._raw_memory import dense

# Of the emulated GPU; tests set it.
compute_capability = (9, 0)

PROCESSORS = 132
_TILE = 256  # tokens of a block of csrc/xqa/mha.cu


def get_xqa_module(
    input_dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    page_size: int,
    head_dim: int,
    head_group_ratio: int,
    use_sliding_window: bool,
    output_dtype: torch.dtype,
    q_seq_len: int,
):
    if input_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"Invalid dtype: {input_dtype} for XQA, only float16 and bfloat16 input are supported"
        )
    if page_size not in [16, 32, 64, 128]:
        raise ValueError(f"Invalid page_size: {page_size}, only 16, 32, 64, 128 are supported")
    if head_dim % 16 != 0 or head_dim > 256 or head_dim < 16:
        raise ValueError(
            f"Invalid head_dim: {head_dim}, must be divisible by 16 and in range [16, 256]"
        )
    built = (input_dtype, kv_cache_dtype, page_size, head_dim, head_group_ratio)
    built += (use_sliding_window, output_dtype, q_seq_len)

    def xqa(
        run_sm90_fp8_mha: bool,
        sm_count: int,
        num_kv_heads: int,
        sliding_win_size: int,
        q_scale: float | torch.Tensor,
        output: torch.Tensor,
        rcp_out_scale: float,
        q: torch.Tensor,
        sinks: torch.Tensor | None,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_sf_cache: torch.Tensor | None,
        v_sf_cache: torch.Tensor | None,
        page_table: torch.Tensor,
        max_seq_len: int,
        seq_lens: torch.Tensor,
        batch_size: int,
        kv_scale: float | torch.Tensor,
        semaphores: torch.Tensor,
        workspace_buffer: torch.Tensor,
        enable_pdl: bool,
        q_seq_len: int,
        mask: torch.Tensor | None,
    ) -> None:
        asked = (q.dtype, k_cache.dtype, k_cache.shape[1], q.shape[-1])
        asked += (q.shape[-2] // num_kv_heads, sliding_win_size > 0, output.dtype, q_seq_len)
        assert asked == built, f"a module built for {built} was called with {asked}"
        assert {type(q_scale), type(kv_scale)} == {float}, "scales are doubles"
        assert max_seq_len == page_table.shape[-1] * page_size
        assert page_table.dtype == torch.int32
        assert seq_lens.element_size() == 4
        assert sinks is None or sinks.dtype == torch.float32
        assert not run_sm90_fp8_mha or compute_capability[0] == 9
        assert not semaphores.any(), "semaphores must be 0"
        need = _scratch(sm_count, batch_size, num_kv_heads, q, q_seq_len, max_seq_len)
        room = workspace_buffer.numel()
        assert room >= need, f"writes {need} bytes into a scratch of {room}"
        out = _attend(
            q, k_cache, v_cache, k_sf_cache, v_sf_cache, page_table, seq_lens, batch_size,
            q_seq_len, mask, sinks, sliding_win_size, q_scale, kv_scale, run_sm90_fp8_mha,
        )  # fmt: skip
        dense(output).view(out.shape).copy_(out * rcp_out_scale)

    return SimpleNamespace(xqa=xqa)


def _scratch(processors, batch, kv_heads, q, q_len, max_seq_len) -> int:
    """Count what launchMHAFlashInfer of csrc/xqa/mha.cu and its segments take."""
    rows = q_len * (q.shape[-2] // kv_heads)
    blocks = -(-rows // 32) if q_len > 1 else 1
    valid = 32 if q_len > 1 else rows
    dim = next(d for d in (64, 128, 256) if d >= q.shape[-1])
    parts = min(max(1, processors // (batch * kv_heads)), -(-max_seq_len // _TILE))
    if parts == 1:
        return 0
    row_max = -(-valid // 16) * 16 * 4
    return parts * kv_heads * blocks * batch * (2 * row_max + valid * dim * 2)


def _attend(
    q, k_cache, v_cache, k_blocks, v_blocks, page_table, seq_lens, batch, q_len, mask, sinks,
    window, q_scale, kv_scale, in_fp8,
) -> torch.Tensor:  # fmt: skip
    assert q.data_ptr() % 16 == 0, "addresses of 16 bytes"
    heads, dim = q.shape[-2:]
    query = dense(q).reshape(batch * q_len, heads, dim).float()
    if in_fp8:  # mha_sm90.cu converts the queries to the dtype of the cache, without a scale
        query = query.to(torch.float8_e4m3fn).float()
    lens = dense(seq_lens).view(-1).tolist()
    assert min(lens) >= q_len, f"lengths {lens} of {q_len} queries"
    table = dense(page_table).view(batch, -1)
    keys, values = (
        [_stored(x, b) for x, b in zip(*_gathered(pages, blocks, table, lens), strict=True)]
        for pages, blocks in ((k_cache, k_blocks), (v_cache, v_blocks))
    )
    quantised = k_cache.element_size() == 1
    scale = q_scale * (kv_scale if quantised else 1.0) * dim**-0.5
    masks, left = None, None
    if q_len > 1:
        # the leading mask of a window is not compiled in: whole tiles before it are left out alone
        masks = [_mask(m, n) for m, n in zip(dense(mask), lens, strict=True)]
    elif window:
        left = window - 1
    out, _ = attn_reference.attend(
        query, keys, values, query_lens=[q_len] * batch, scale=scale, causal=q_len == 1,
        left=left, sinks=None if sinks is None else dense(sinks).view(-1), masks=masks,
    )  # fmt: skip
    return out * (kv_scale if quantised else 1.0)


def _gathered(pages, blocks, table, lens):
    found = attn_reference.gather(pages, table, lens)
    more = [None] * len(lens) if blocks is None else attn_reference.gather(blocks, table, lens)
    return found, more


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _stored(x: torch.Tensor, blocks: torch.Tensor | None) -> torch.Tensor:
    """Give stored numbers in float32; e2m1: two a byte, the low nibble first."""
    if blocks is None:
        return x.float()
    codes = torch.stack((x & 15, x >> 4), -1).flatten(-2).long()
    values = _E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return values * blocks.float().repeat_interleave(16, -1)


def _mask(packed: torch.Tensor, n: int) -> torch.Tensor:
    """Unpack uint16 [q_len, words] into what q_len queries see of n keys: all before theirs."""
    q_len = packed.shape[0]
    bits = packed.to(torch.int64)[..., None] >> torch.arange(16) & 1
    seen = torch.ones(q_len, n, dtype=torch.bool)
    seen[:, n - q_len :] = bits.flatten(1)[:, :q_len].bool()
    return seen


def xqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: torch.Tensor | None = None,
    q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: torch.Tensor | None = None,
    *,
    k_sf_cache: torch.Tensor | None = None,
    v_sf_cache: torch.Tensor | None = None,
) -> None:
    assert k_cache.dtype == v_cache.dtype, "K and V cache must have the same dtype"
    assert output.dtype == q.dtype, "Output and query must have the same dtype"
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(-3, -2), v_cache.transpose(-3, -2)
        k_sf_cache = None if k_sf_cache is None else k_sf_cache.transpose(-3, -2)
        v_sf_cache = None if v_sf_cache is None else v_sf_cache.transpose(-3, -2)
    in_fp8 = k_cache.dtype == torch.float8_e4m3fn and compute_capability[0] == 9
    if k_cache.dtype == torch.uint8:
        assert compute_capability[0] == 12, "XQA NVFP4 KV is only supported on SM120 GPUs"
        assert k_sf_cache is not None, "K SF cache is required when NVFP4 KV is used"
        assert v_sf_cache is not None, "V SF cache is required when NVFP4 KV is used"
    if compute_capability[0] not in [9, 10, 12]:
        raise RuntimeError("XQA is only supported on SM90, SM100, SM120/SM121 GPUs")
    head_dim = q.shape[-1]
    module = get_xqa_module(
        q.dtype, k_cache.dtype, page_size, head_dim, q.shape[-2] // num_kv_heads,
        sliding_win_size > 0, output.dtype, q_seq_len,
    )  # fmt: skip
    if q_seq_len > 1:
        assert mask is not None, "Mask is required for speculative decoding"
        if sinks is not None:
            in_fp8 = False
    module.xqa(
        in_fp8, sm_count or PROCESSORS, num_kv_heads, sliding_win_size, q_scale, output,
        rcp_out_scale, q, sinks, k_cache, v_cache, k_sf_cache, v_sf_cache, page_table,
        page_table.shape[-1] * page_size, seq_lens, q.shape[0], kv_scale, semaphores,
        workspace_buffer, bool(enable_pdl), q_seq_len, mask,
    )  # fmt: skip
