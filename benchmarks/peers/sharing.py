"""Peers that are told which requests share a prefix: FlashInfer's cascade, FA3 called per level."""

from __future__ import annotations

import importlib

import torch
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.page_table import to_csr
from torch import Tensor

from benchmarks.cases import Case, Inputs
from benchmarks.contestant import Call, Contestant
from benchmarks.peers.flashinfer import WORKSPACE

# The keys of each level, outermost first, and then what each request has alone: page table
# int32 [groups, columns], lengths int32 [groups], cu_seqlens_q int32 [groups + 1].
Level = tuple[Tensor, Tensor, Tensor]


def levels(inputs: Inputs) -> list[Level]:
    """Cut the keys into levels. A request that shares nothing is a group without keys."""
    case, table, device = inputs.case, inputs.page_table, inputs.q.device
    queries, begins, result = case.queries or 1, [0] * case.batch, []
    for groups in case.groups:
        left = range(groups[-1][0] + groups[-1][1], case.batch)
        rows = [*groups, *((b, 1, 0, 0) for b in left)]
        lengths = torch.tensor([end - begin for _, _, begin, end in rows]).int()
        starts = torch.tensor([*(first * queries for first, *_ in rows), case.tokens]).int()
        begin, end = groups[0][2:]
        pages = slice(begin // case.page_size, end // case.page_size)
        first = torch.tensor([row[0] for row in rows], device=device)
        result.append((table[first, pages].contiguous(), lengths.to(device), starts.to(device)))
        for group_first, n, _, group_end in groups:
            begins[group_first : group_first + n] = [group_end] * n
    own = torch.zeros_like(table)
    for b, begin in enumerate(begins):
        kept = table[b, begin // case.page_size :]
        own[b, : len(kept)] = kept
    lengths = inputs.seq_lens - torch.tensor(begins, device=device).int()
    width = -(-int(lengths.max()) // case.page_size)
    result.append((own[:, :width].contiguous(), lengths, inputs.batch.cu_seqlens_q))
    return result


def _cascade(inputs: Inputs) -> Call:
    case, plans = inputs.case, levels(inputs)
    flashinfer = importlib.import_module("flashinfer")
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=inputs.q.device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(plans), workspace, "NHD")
    csr = [to_csr(table, lengths, case.page_size) for table, lengths, _ in plans]
    wrapper.plan(
        [cu for _, _, cu in plans],
        [x.indptr for x in csr],
        [x.indices for x in csr],
        [x.last_page_len for x in csr],
        case.q_heads,
        case.kv_heads,
        case.head_dim,
        case.page_size,
        causal=True,
        sm_scale=case.scale,
        q_data_type=inputs.q.dtype,
        kv_data_type=TORCH_DTYPES[case.kv_dtype],
    )
    return lambda: wrapper.run(inputs.q, (inputs.cache.k, inputs.cache.v))


def _fa3(inputs: Inputs) -> Call:
    attend = importlib.import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    merge = importlib.import_module("sgl_kernel").merge_state_v2
    case, cache, plans = inputs.case, inputs.cache, levels(inputs)
    most = [int(cu.diff().max()) for _, _, cu in plans]

    def call() -> Tensor:
        merged = None
        for i in reversed(range(len(plans))):
            table, lengths, cu = plans[i]
            out, lse, *_ = attend(
                inputs.q,
                cache.k,
                cache.v,
                cache_seqlens=lengths,
                page_table=table,
                cu_seqlens_q=cu,
                max_seqlen_q=most[i],
                softmax_scale=case.scale,
                causal=i == len(plans) - 1,
                return_softmax_lse=True,
            )
            state = (out, lse.T.contiguous())
            merged = state if merged is None else merge(*merged, *state)
        assert merged is not None
        result: Tensor = merged[0]
        return result

    return call


def _refuses(case: Case) -> str:
    if not case.shared:
        return "requests that share nothing (takes groups)"
    return "tree masks (takes causal masks)" if case.tree else ""


def _fa3_refuses(case: Case) -> str:
    store = "" if case.kv_dtype == case.dtype else "an FP8 store (takes queries of its dtype)"
    return _refuses(case) or store


SHARING: tuple[Contestant, ...] = (
    Contestant(
        name="flashinfer-cascade",
        distribution="flashinfer-python",
        module="flashinfer",
        phases=frozenset({"decode", "verify", "fp8"}),
        prepare=_cascade,
        refuses=_refuses,
    ),
    Contestant(
        name="fa3-levels",
        distribution="sglang-kernel",
        module="sgl_kernel.flash_attn",
        phases=frozenset({"decode", "verify", "fp8"}),
        prepare=_fa3,
        refuses=_fa3_refuses,
    ),
)
