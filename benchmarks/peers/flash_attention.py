"""FlashAttention 3, as sglang-kernel ships it, and FlashAttention 4."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from benchmarks.cases import LATENT, Case, Inputs
from benchmarks.contestant import Call, Contestant

FA4_PAGE = 128  # the one page size of its Hopper kernel


def _no_trees(case: Case) -> str:
    return "tree masks (takes causal masks)" if case.tree else ""


def _fa3_refuses(case: Case) -> str:
    if case.kind == "mla" and case.kv_dtype != case.dtype:
        return f"latents in {case.kv_dtype} (takes {case.dtype})"
    return _no_trees(case)


def _fa3(inputs: Inputs) -> Call:
    module = importlib.import_module("sgl_kernel.flash_attn")
    case, batch, cache = inputs.case, inputs.batch, inputs.cache
    if case.queries is None:
        cu = batch.cu_seqlens_q
        return lambda: module.flash_attn_varlen_func(
            inputs.q,
            inputs.k,
            inputs.v,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=batch.max_q_len,
            max_seqlen_k=batch.max_q_len,
            softmax_scale=case.scale,
            causal=True,
        )
    paged = {
        "cache_seqlens": inputs.seq_lens,
        "page_table": inputs.page_table,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "max_seqlen_q": batch.max_q_len,
        "softmax_scale": case.scale,
        "causal": True,
    }
    if case.kind == "mla":  # the latent is V, and a second query against it joins the logits
        q_latent, q_rope = inputs.q[..., :LATENT].contiguous(), inputs.q[..., LATENT:].contiguous()
        latent, rope = cache.k[..., :LATENT], cache.k[..., LATENT:]
        return lambda: module.flash_attn_with_kvcache(
            q=q_rope, k_cache=rope, v_cache=latent, qv=q_latent, **paged
        )
    q = inputs.q
    if case.kv_dtype != case.dtype:  # it takes q in the cache's dtype only
        q = q.to(cache.k.dtype)
        one = torch.ones(case.batch, case.kv_heads, device=q.device)
        paged |= {"q_descale": one, "k_descale": one, "v_descale": one}
    return lambda: module.flash_attn_with_kvcache(q, cache.k, cache.v, **paged)


def _fa4(inputs: Inputs) -> Call:
    attend = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    case, batch = inputs.case, inputs.batch
    shape = {
        "cu_seqlens_q": batch.cu_seqlens_q,
        "max_seqlen_q": batch.max_q_len,
        "softmax_scale": case.scale,
        "causal": True,
    }
    if case.queries is None:
        k, v = inputs.k, inputs.v
        shape |= {"cu_seqlens_k": batch.cu_seqlens_q, "max_seqlen_k": batch.max_q_len}
    else:
        k, v = inputs.cache.k, inputs.cache.v
        table = inputs.page_table
        shape |= {
            "seqused_k": inputs.seq_lens,
            "page_table": table,
            "max_seqlen_k": table.shape[1] * case.page_size,
        }

    def call() -> Tensor:
        out = attend(inputs.q, k, v, **shape)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return call


def _fa4_refuses(case: Case) -> str:
    if case.queries is not None and case.page_size != FA4_PAGE:
        return f"page_size {case.page_size} (takes {FA4_PAGE})"
    return _no_trees(case)


FA3 = Contestant(
    name="fa3",
    distribution="sglang-kernel",
    module="sgl_kernel.flash_attn",
    phases=frozenset({"decode", "verify", "prefill", "extend", "mla", "mla-verify", "fp8"}),
    prepare=_fa3,
    refuses=_fa3_refuses,
)
FA4 = Contestant(
    name="fa4",
    distribution="flash-attn-4",
    module="flash_attn.cute",
    phases=frozenset({"decode", "verify", "prefill", "extend"}),
    prepare=_fa4,
    refuses=_fa4_refuses,
)
