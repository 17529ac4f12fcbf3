"""flashinfer 0.6.14's latent attention of trtllm-gen, ragged and over pages, in float32."""

import math

import attn_reference
import torch

from flashinfer._kernels import require
from flashinfer._raw_memory import dense

_MIB = 1 << 20


def _generation():
    """Return the major compute capability of the emulated GPU, which flashinfer.mla holds."""
    from flashinfer import mla

    return mla.compute_capability[0]


def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sage_attn_sfs: tuple[
        torch.Tensor | None,
        torch.Tensor | None,
        torch.Tensor | None,
        torch.Tensor | None,
    ] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    dims = query.shape[2], key.shape[2], value.shape[2]
    assert dims in ((192, 192, 128), (128, 128, 128), (256, 256, 256)), (
        f"Unsupported head dimensions: query={dims[0]}, key={dims[1]}, value={dims[2]}."
    )
    if backend != "trtllm-gen":
        raise NotImplementedError("no emulation of this one")
    if _generation() != 10:
        raise RuntimeError("Unsupported architecture")
    shape = (*query.shape[:2], value.shape[2])
    if out is None:
        out = torch.full(shape, torch.nan, dtype=query.dtype)
    elif tuple(out.shape) != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    assert query.dtype == key.dtype == value.dtype == out.dtype == torch.bfloat16
    assert type(bmm1_scale) is type(bmm2_scale) is float, "scales are doubles"
    assert (window_left, attention_sinks) == (-1, None), "no emulation of this one"
    assert all(t.dtype == torch.int32 for t in (seq_lens, cum_seq_lens_q, cum_seq_lens_kv))
    for t in (key, value):
        assert [t.stride(2), *(s * 2 % 16 for s in t.stride()[:2])] == [1, 0, 0], "TMA's strides"
    lens = dense(seq_lens).tolist()
    query_lens = dense(cum_seq_lens_q).diff().tolist()
    assert dense(cum_seq_lens_kv).diff().tolist() == lens, "lengths that are not of the same pass"
    assert len(lens) == batch_size
    assert max(query_lens) <= max_q_len
    assert max(lens) <= max_kv_len
    assert not workspace_buffer[: 8 * _MIB].any(), "counters must be 0"
    slots = query.shape[1] * batch_size * -(-max_q_len // 256) * 256
    if workspace_buffer.numel() < 8 * _MIB + (8 * slots + _MIB) * return_lse:
        raise RuntimeError("Buffer overflow when allocating memory for trtllm_gen workspace")
    found, total = attn_reference.attend(
        dense(query),
        attn_reference.split(key, cum_seq_lens_kv),
        attn_reference.split(value, cum_seq_lens_kv, tile=128),  # by TMA, as far as is known
        query_lens=query_lens,
        scale=bmm1_scale,
        causal=is_causal,
    )
    blind = torch.repeat_interleave(seq_lens == 0, torch.tensor(query_lens))
    found[blind] = torch.nan  # rows of requests without keys are not written
    total[blind] = torch.nan
    dense(out).copy_(found * bmm2_scale)
    if not return_lse:
        return out
    lse = torch.empty(query.shape[:2]) if lse is None else lse
    lse.copy_(total * math.log2(math.e))  # ComputeLSEFromMD: base 2
    return out, lse


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: list[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if backend == "auto" and _generation() != 10:
        raise ValueError("XQA MLA requires SM120a (CUDA >= 12.8) or SM121a (CUDA >= 13.0)")
    if _generation() != 10:
        raise RuntimeError("Unsupported architecture")
    if max_q_len is not None and cum_seq_lens_q is None:
        raise ValueError("max_q_len is only supported when cum_seq_lens_q is provided")
    if backend == "cute-dsl":
        raise NotImplementedError("no emulation of this one")
    if seq_lens is None:
        raise ValueError("seq_lens is required for trtllm-gen and cute-dsl MLA backends")
    if cum_seq_lens_q is not None:
        ragged(query, seq_lens, cum_seq_lens_q, max_q_len, return_lse or lse is not None)
    elif query.ndim != 4:
        raise ValueError("batch_size and max_q_len are required when query.ndim == 3")
    page = kv_cache.shape[-2]
    if page not in (32, 64):
        raise ValueError(f"trtllm-gen requires block_size in (32, 64), got {page}")
    if kv_cache.ndim == 3:
        kv_cache = kv_cache.unsqueeze(1)
    if kv_cache.ndim != 4:
        raise ValueError(f"Expected kv_cache.ndim == 3 or 4, got {kv_cache.ndim}")
    if (kv_lora_rank, qk_rope_head_dim) != (512, 64):
        raise ValueError(f"Unsupported MLA dimensions, got {kv_lora_rank=} {qk_rope_head_dim=}")
    if query.shape[-1] != 576 or kv_cache.shape[3] != 576:
        raise ValueError(
            f"Expected head dim 576 for query and kv_cache, got {query.shape[-1]} and "
            f"{kv_cache.shape[3]}"
        )
    batch = query.shape[0] if cum_seq_lens_q is None else cum_seq_lens_q.shape[0] - 1
    if sparse_mla_top_k:
        sparse(query, block_tables, sparse_mla_top_k, cum_seq_lens_q, return_lse)
    elif block_tables.ndim != 2 or block_tables.shape[0] != batch:
        raise ValueError(f"Expected batch size {batch} for query and block_table")
    elif block_tables.shape[-1] % (128 / page) != 0:
        raise ValueError(
            "Expected block_num % (128 / block_size) == 0, got "
            f"block_num={block_tables.shape[-1]} and block_size={page}"
        )
    heads = query.shape[-2]
    if cum_seq_lens_q is None:
        queries, counts = query.shape[1], [query.shape[1]] * batch
    else:
        queries, counts = max_q_len, dense(cum_seq_lens_q).diff().tolist()
        require(max(counts) <= max_q_len, f"{counts} queries, max_q_len {max_q_len}")
    if out is None:
        out = torch.full((*query.shape[:-1], 512), torch.nan, dtype=torch.bfloat16)
    else:
        check(out, (*query.shape[:-1], 512), torch.bfloat16, "out")
    flat = (batch * queries, heads)
    if return_lse and lse is not None and tuple(lse.shape) not in (flat, tuple(query.shape[:3])):
        raise ValueError(f"lse must have shape {flat}; got {tuple(lse.shape)}")
    fp8 = query.dtype == torch.float8_e4m3fn
    if not (fp8 or query.dtype == torch.bfloat16) or kv_cache.dtype != query.dtype:
        raise RuntimeError(f"Missing TRTLLM-GEN kernel (decode): {query.dtype}, {kv_cache.dtype}")
    require(type(bmm1_scale) is type(bmm2_scale) is float, "scales are doubles")
    require(block_tables.dtype == seq_lens.dtype == torch.int32, "read as int32")
    require(query.stride(-1) == kv_cache.stride(-1) == 1, "head_dim must have stride 1")
    require(not workspace_buffer[: 8 * _MIB].any(), "counters must be 0")
    need = 8 * _MIB + (8 * heads * batch * -(-queries // 256) * 256 + _MIB) * return_lse
    if workspace_buffer.numel() < need:
        raise RuntimeError("Buffer overflow when allocating memory for trtllm_gen workspace")
    lens = dense(seq_lens).tolist()
    require(max(lens) <= max_seq_len, f"lengths {lens} above max_seq_len {max_seq_len}")
    pages = kv_cache.transpose(1, 2)
    if sparse_mla_top_k:  # tables of slots
        require(min(lens) > 0 and max(lens) <= sparse_mla_top_k, f"{lens} of {sparse_mla_top_k}")
        slots = dense(block_tables)[:, 0]
        kinds = [row[:n].long() for row, n in zip(slots, lens, strict=True)]
        require(all((s >= 0).all() and (s < kv_cache[..., 0].numel()).all() for s in kinds), "slot")
        keys = [pages.flatten(0, 1)[s] for s in kinds]
    else:
        keys = attn_reference.gather(pages, dense(block_tables), lens)
    found, total = attn_reference.attend(
        query.flatten(0, -3),
        keys,
        [k[..., :512] for k in keys],
        query_lens=counts,
        scale=bmm1_scale,
        causal=True,
        weights_dtype=query.dtype if fp8 else None,
    )
    dense(out).copy_((found * bmm2_scale).view(out.shape))
    if not return_lse:
        return out
    lse = torch.empty(flat) if lse is None else lse
    lse.copy_((total * math.log2(math.e)).view(lse.shape))  # ComputeLSEFromMD: base 2
    return out, lse


def sparse(query, block_tables, topk, cum_seq_lens_q, with_lse):
    """Refuse what selections do not have here: more queries of a request than one, an LSE."""
    if query.ndim == 4 and block_tables.shape != (*query.shape[:2], topk):
        raise ValueError(
            f"Expected page_table.shape == {(*query.shape[:2], topk)}, got {block_tables.shape}"
        )
    if cum_seq_lens_q is not None or query.shape[1] != 1 or with_lse:
        raise NotImplementedError("no emulation of this one")


def ragged(query, seq_lens, cum_seq_lens_q, max_q_len, with_lse):
    """Refuse what the kernel does not take beside queries of different lengths."""
    if with_lse:
        raise NotImplementedError(
            "trtllm-gen MLA does not support return_lse/lse with cum_seq_lens_q"
        )
    if query.ndim != 3:
        raise ValueError("query must have shape [total_q, num_heads, head_dim_qk]")
    if cum_seq_lens_q.dtype != torch.int32 or cum_seq_lens_q.ndim != 1:
        raise ValueError("cum_seq_lens_q must be int32 [batch_size + 1]")
    if cum_seq_lens_q.shape[0] - 1 != seq_lens.shape[0]:
        raise ValueError("Batch size mismatch: cum_seq_lens_q and seq_lens")
    if max_q_len is None:
        raise NotImplementedError("no emulation of a copy to the host in every call")
    if max_q_len <= 0:
        raise ValueError("max_q_len must be greater than 0")
    if max_q_len > query.shape[0]:
        raise ValueError("max_q_len cannot exceed the flattened query length")


def check(x, shape, dtype, name):
    if x.shape != torch.Size(shape):
        raise ValueError(f"Invalid shape of {name}: expected {shape}, got {x.shape}")
    if x.dtype != dtype:
        raise ValueError(f"Invalid dtype of {name}: expected {dtype}, got {x.dtype}")
