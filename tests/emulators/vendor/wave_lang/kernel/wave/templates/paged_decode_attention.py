"""Decode over single tokens: parts of a request's keys, and their merge."""

import math
from collections import namedtuple

import torch
from attn_reference import attend
from wave_checks import Kernel, dense, int32

from ..constraints import GenericDot, MMAType

paged_decode_attention_shape = namedtuple(
    "paged_decode_attention_shape",
    ["num_query_heads", "num_kv_heads", "head_size", "head_size_kv", "block_size", "num_seqs"],
)


def get_paged_decode_attention_kernels(
    shape,
    mfma_variant,
    num_kv_splits,
    input_dtype=torch.float16,
    output_dtype=torch.float16,
    layer_scaling=None,
    logit_cap=0.0,
):
    heads, kv_heads = shape.num_query_heads, shape.num_kv_heads
    kind = GenericDot if heads == kv_heads else MMAType
    assert all(isinstance(x, kind) for x in mfma_variant), "the wrong instruction for this group"
    scale = layer_scaling or shape.head_size**-0.5

    def parts(q, k, v, indptr, indices, output, output_max):
        dense(q, input_dtype, (heads, shape.head_size))
        dense(k, input_dtype, (kv_heads, shape.head_size))
        dense(v, input_dtype, (kv_heads, shape.head_size_kv))
        int32(indptr)
        int32(indices)
        requests = q.shape[0]
        assert indptr.shape == (requests + 1,)
        dense(output, torch.float32, (requests, heads, shape.head_size_kv))
        dense(output_max, torch.float32, (requests, heads))
        assert output.shape[0] == output_max.shape[0] == num_kv_splits
        ends = indptr.tolist()
        for b in range(requests):
            length = ends[b + 1] - ends[b]
            each = -(-length // num_kv_splits)
            for u in range(num_kv_splits):
                first, last = min(u * each, length), min((u + 1) * each, length)
                slots = indices[ends[b] + first : ends[b] + last].long()
                if first == last:
                    output[u, b], output_max[u, b] = 0.0, -1e6
                    continue
                out, lse = attend(
                    q[b : b + 1],
                    [k[slots]],
                    [v[slots]],
                    query_lens=[1],
                    scale=scale,
                    softcap=logit_cap,
                )
                output[u, b], output_max[u, b] = out[0], lse[0] / math.log(2)

    def merge(logits, logits_max, indptr, output):
        requests = output.shape[0]
        dense(output, output_dtype, (heads, shape.head_size_kv))
        dense(logits, torch.float32, (requests, heads, shape.head_size_kv))
        dense(logits_max, torch.float32, (requests, heads))
        int32(indptr)
        for b, length in enumerate(indptr.diff().tolist()):
            active = min(length, num_kv_splits)
            weights = torch.softmax(logits_max[:active, b] * math.log(2), 0)
            output[b] = (weights[..., None] * logits[:active, b]).sum(0).to(output_dtype)

    symbols = {"B": heads, "N": shape.head_size_kv, "U": num_kv_splits}
    both = Kernel(parts, symbols, ["K2", "N_KV", "S"]), Kernel(merge, dict(symbols), ["S"])
    return (*both, symbols, dict(symbols), ["K2", "N_KV", "S"], ["S"])
