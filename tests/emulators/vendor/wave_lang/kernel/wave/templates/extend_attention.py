"""Extend over a prefix of single tokens: causal order or a mask, never both."""

import torch
from attn_reference import attend
from wave_checks import Kernel, dense, int32

from .attention_common import AttentionShape as AttentionShape


def get_extend_attention_kernel(
    shape,
    mfma_variant,
    q_shape,
    k_shape,
    v_shape,
    k_cache_shape,
    v_cache_shape,
    o_shape,
    input_dtype=torch.float16,
    output_dtype=torch.float32,
    size_dtype=torch.int32,
    is_causal=False,
    logit_cap=0.0,
    layer_scaling=None,
    num_waves=4,
    use_custom_mask=False,
):
    assert input_dtype in (torch.float16, torch.bfloat16), f"Unsupported input: {input_dtype}"
    message = "Cannot have both causal and custom mask at the same time"
    assert not (is_causal and use_custom_mask), message
    assert not use_custom_mask, "not emulated"
    assert (size_dtype, num_waves) == (torch.int32, 4), "not emulated"
    scale = layer_scaling or shape.head_size**-0.5

    def extend(q, k, v, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, longest, c):
        for t, of in (
            (q, q_shape), (k, k_shape), (v, v_shape), (k_cache, k_cache_shape),
            (v_cache, v_cache_shape),
        ):  # fmt: skip
            dense(t, input_dtype, of[1:])
        dense(c, output_dtype, o_shape[1:])
        for t in (qo_indptr, kv_indptr, kv_indices):
            int32(t)
        starts, before = qo_indptr.tolist(), kv_indptr.tolist()
        assert len(starts) == len(before)
        keys, values = [], []
        for b in range(len(starts) - 1):
            new = slice(starts[b], starts[b + 1])
            assert starts[b + 1] - starts[b] <= longest, "queries past `longest` have no workgroup"
            slots = kv_indices[before[b] : before[b + 1]].long()
            keys.append(torch.cat([k_cache[slots], k[new]]))
            values.append(torch.cat([v_cache[slots], v[new]]))
        result, _ = attend(
            q,
            keys,
            values,
            query_lens=qo_indptr.diff().tolist(),
            scale=scale,
            causal=is_causal,
            softcap=logit_cap,
        )
        c[: starts[-1]] = result[: starts[-1]].to(output_dtype)

    symbols = {"H": shape.num_query_heads, "H_KV": shape.num_kv_heads, "D_Q": shape.head_size}
    dynamic = ["N_Q", "N_KV", "S"]
    return Kernel(extend, symbols, dynamic), symbols, dynamic
