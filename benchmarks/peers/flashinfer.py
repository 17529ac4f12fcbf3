"""FlashInfer: paged decode, XQA, ragged and paged prefill, verification by mask, absorbed MLA."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.page_table import PageCsr, to_csr
from torch import Tensor

from benchmarks.cases import LATENT, ROPE, Case, Inputs
from benchmarks.contestant import Call, Contestant

WORKSPACE = 512 << 20  # bytes, for partial results of split KV
XQA_PAGES = (16, 32, 64)
XQA_SEMAPHORES = 8 << 20  # bytes at the front of XQA's workspace that must be zero at first


def _csr(inputs: Inputs) -> PageCsr:
    return to_csr(inputs.page_table, inputs.seq_lens, inputs.case.page_size)


def _workspace(inputs: Inputs) -> Tensor:
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=inputs.q.device)
    workspace[:XQA_SEMAPHORES] = 0
    return workspace


def visible(inputs: Inputs) -> Tensor:
    """Write a tree mask as FlashInfer takes it: bool [sum over requests of n · length], flat."""
    spec = inputs.batch.spec
    assert spec is not None
    assert spec.tree_mask is not None
    masks = []
    for tree, length in zip(spec.tree_mask, inputs.case.seq_lens, strict=True):
        mask = tree.new_ones(tree.shape[0], length)
        mask[:, length - tree.shape[0] :] = tree
        masks.append(mask.flatten())
    return torch.cat(masks)


def _decode(inputs: Inputs) -> Call:
    case, csr = inputs.case, _csr(inputs)
    wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        _workspace(inputs), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        csr.indptr,
        csr.indices,
        csr.last_page_len,
        case.q_heads,
        case.kv_heads,
        case.head_dim,
        case.page_size,
        q_data_type=inputs.q.dtype,
        kv_data_type=TORCH_DTYPES[case.kv_dtype],
        sm_scale=case.scale,
    )
    return lambda: wrapper.run(inputs.q, (inputs.cache.k, inputs.cache.v))


def _xqa(inputs: Inputs) -> Call:
    decode = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
    case, workspace = inputs.case, _workspace(inputs)
    return lambda: decode(
        inputs.q,
        (inputs.cache.k, inputs.cache.v),
        workspace,
        inputs.page_table,
        inputs.seq_lens,
        case.longest,
        bmm1_scale=case.scale,
        bmm2_scale=1.0,
        kv_layout="NHD",
        backend="xqa",
    )


def _xqa_refuses(case: Case) -> str:
    pages = ", ".join(map(str, XQA_PAGES))
    return "" if case.page_size in XQA_PAGES else f"page_size {case.page_size} (takes {pages})"


def _ragged(inputs: Inputs, backend: str) -> Call:
    case, indptr = inputs.case, inputs.batch.cu_seqlens_q
    wrapper = importlib.import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(
        _workspace(inputs), "NHD", backend=backend
    )
    wrapper.plan(
        indptr,
        indptr,
        case.q_heads,
        case.kv_heads,
        case.head_dim,
        causal=True,
        q_data_type=inputs.q.dtype,
        sm_scale=case.scale,
    )
    return lambda: wrapper.run(inputs.q, inputs.k, inputs.v)


def _paged(inputs: Inputs, backend: str) -> Call:
    case, csr = inputs.case, _csr(inputs)
    wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
        _workspace(inputs), "NHD", backend=backend
    )
    wrapper.plan(
        inputs.batch.cu_seqlens_q,
        csr.indptr,
        csr.indices,
        csr.last_page_len,
        case.q_heads,
        case.kv_heads,
        case.head_dim,
        case.page_size,
        custom_mask=visible(inputs) if case.tree else None,
        causal=not case.tree,
        q_data_type=inputs.q.dtype,
        kv_data_type=TORCH_DTYPES[case.kv_dtype],
        sm_scale=case.scale,
    )
    return lambda: wrapper.run(inputs.q, (inputs.cache.k, inputs.cache.v))


def _prefill(backend: str) -> Callable[[Inputs], Call]:
    """Without a cached prefix ragged, as an engine does; else over the pages."""
    return lambda inputs: (_ragged if inputs.case.queries is None else _paged)(inputs, backend)


def _no_trees(case: Case) -> str:
    return "tree masks (fa2 alone takes them)" if case.tree else ""


def _no_fp8(case: Case) -> str:
    return "" if case.kv_dtype == case.dtype else f"latents in {case.kv_dtype} (fa3 alone)"


def _mla(backend: str) -> Callable[[Inputs], Call]:
    def prepare(inputs: Inputs) -> Call:
        case, csr = inputs.case, _csr(inputs)
        wrapper = importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(
            _workspace(inputs), backend=backend
        )
        wrapper.plan(
            inputs.batch.cu_seqlens_q,
            csr.indptr,
            csr.indices,
            inputs.seq_lens,
            case.q_heads,
            LATENT,
            ROPE,
            case.page_size,
            case.queries != 1,
            case.scale,
            inputs.q.dtype,
            TORCH_DTYPES[case.kv_dtype],
        )
        pages = inputs.cache.k.squeeze(2)
        latent, rope = pages[..., :LATENT], pages[..., LATENT:]
        q_latent, q_rope = inputs.q[..., :LATENT].contiguous(), inputs.q[..., LATENT:].contiguous()
        return lambda: wrapper.run(q_latent, q_rope, latent, rope)

    return prepare


def _contestant(
    name: str,
    phases: set[str],
    prepare: Callable[[Inputs], Call],
    refuses: Callable[[Case], str] = lambda case: "",
) -> Contestant:
    return Contestant(
        name=f"flashinfer-{name}",
        distribution="flashinfer-python",
        module="flashinfer",
        phases=frozenset(phases),
        prepare=prepare,
        refuses=refuses,
    )


_PREFILL, _DECODES = {"verify", "prefill", "extend"}, {"decode", "fp8"}
_LATENT = {"mla", "mla-verify"}
FLASHINFER: tuple[Contestant, ...] = (
    _contestant("decode", _DECODES, _decode),
    _contestant("xqa", _DECODES, _xqa, _xqa_refuses),
    _contestant("fa3", _PREFILL, _prefill("fa3"), _no_trees),
    _contestant("fa2", _PREFILL, _prefill("fa2")),
    _contestant("mla-fa3", _LATENT, _mla("fa3")),
    _contestant("mla-fa2", _LATENT, _mla("fa2"), _no_fp8),
)
