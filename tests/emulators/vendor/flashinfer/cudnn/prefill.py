"""flashinfer.cudnn.prefill 0.6.14 without pages: ragged requests named by offsets of elements."""

import math

import attn_reference
import torch

_graphs: dict[tuple, tuple] = {}  # what a graph knows besides its key, by the key


def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    causal: bool,
    return_lse: bool,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None,
    batch_offsets_stats: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    backend: str | None = None,
    o_data_type: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    batch = actual_seq_lens_q.shape[0]
    if q.dim() != 3 or block_tables is not None or return_lse or backend == "cubin":
        raise NotImplementedError("this emulation has packed q, k and v and no LSE only")
    if q.dtype not in (torch.float16, torch.bfloat16) or {k_cache.dtype, v_cache.dtype} != {
        q.dtype
    }:
        raise RuntimeError("cudnnGraphNotSupportedError: No valid engine configs for these dtypes")
    for dim in (q.shape[-1], v_cache.shape[-1]):
        if dim % 8 or dim > 128:
            raise RuntimeError(f"cudnnGraphNotSupportedError: hidden_dim {dim} is not supported")
    if workspace_buffer.dtype != torch.uint8 or workspace_buffer.numel() < 1 << 20:
        raise RuntimeError("cuDNN: the workspace is too small")
    lens = (actual_seq_lens_q, actual_seq_lens_kv)
    offsets = (batch_offsets_q, batch_offsets_o, batch_offsets_k, batch_offsets_v)
    for t, rows in (*((x, batch) for x in lens), *((x, batch + 1) for x in offsets)):
        if t is None or t.shape != (rows, 1, 1, 1) or t.dtype not in (torch.int32, torch.int64):
            raise RuntimeError("cuDNN: lengths are [B, 1, 1, 1], ragged offsets [B + 1, 1, 1, 1]")
    if out is None:
        out = torch.empty(
            q.shape[0], q.shape[1], v_cache.shape[2], dtype=o_data_type or q.dtype, device=q.device
        )
    q_lens, k_lens = (x.flatten().tolist() for x in lens)
    if max(q_lens) > max_token_per_sequence or max(k_lens) > max_sequence_kv:
        raise RuntimeError("cuDNN: a sequence is longer than the graph's")

    def requests(x, counts, starts, tile=1):
        """Read each request where its offset says, with the strides of x, in whole tiles."""
        at = starts.flatten().tolist()
        shape, strides, base = x.shape[1:], x.stride(), x.storage_offset()
        return [
            torch.as_strided(
                x,
                (min(n + -n % tile, x.shape[0] - first // strides[0]), *shape),
                strides,
                base + first,
            )
            for n, first in zip(counts, at, strict=False)
        ]

    key = (batch, q.dtype, max_token_per_sequence, max_sequence_kv, q.shape[1:], k_cache.shape[1])
    key += (v_cache.shape[2], return_lse, causal)
    strides = tuple(x.stride() for x in (q, k_cache, v_cache, out))
    built_in = (strides, scale, tuple(x.dtype for x in offsets))
    if _graphs.setdefault(key, built_in) != built_in:
        out.fill_(
            math.nan
        )  # the graph of another call reads elsewhere, or scales by another number
        return out, None
    values, _ = attn_reference.attend(
        torch.cat(requests(q, q_lens, batch_offsets_q)),
        requests(k_cache, k_lens, batch_offsets_k),
        requests(v_cache, k_lens, batch_offsets_v, tile=64),
        query_lens=q_lens,
        scale=scale,
        causal=causal,
    )
    # cuDNN writes rows of Hq · Dv elements, whatever the strides of `out`
    dense = torch.as_strided(out, (out.numel(),), (1,), out.storage_offset())
    row = out.shape[1] * out.shape[2]
    begin = 0
    for n, first in zip(q_lens, batch_offsets_o.flatten().tolist(), strict=False):
        dense[first : first + n * row] = values[begin : begin + n].to(out.dtype).flatten()
        begin += n
    return out, None
