"""FlashMLA, as sglang-kernel ships it: absorbed MLA over pages of 64."""

from __future__ import annotations

import importlib

from torch import Tensor

from benchmarks.cases import LATENT, Case, Inputs
from benchmarks.contestant import Call, Contestant

PAGE = 64


def _prepare(inputs: Inputs) -> Call:
    module = importlib.import_module("sgl_kernel.flash_mla")
    case = inputs.case
    queries = case.queries or 1
    q = inputs.q.view(case.batch, queries, case.q_heads, case.head_dim)
    schedule, splits = module.get_mla_metadata(inputs.seq_lens, queries * case.q_heads, 1)

    def call() -> Tensor:
        out: Tensor
        out, _ = module.flash_mla_with_kvcache(
            q,
            inputs.cache.k,
            inputs.page_table,
            inputs.seq_lens,
            LATENT,
            schedule,
            splits,
            softmax_scale=case.scale,
            causal=queries > 1,
        )
        return out

    return call


def _refuses(case: Case) -> str:
    if case.kv_dtype != case.dtype:
        return f"latents in {case.kv_dtype} (this call takes {case.dtype})"
    return "" if case.page_size == PAGE else f"page_size {case.page_size} (takes {PAGE})"


FLASH_MLA = Contestant(
    name="flashmla",
    distribution="sglang-kernel",
    module="sgl_kernel.flash_mla",
    phases=frozenset({"mla", "mla-verify"}),
    prepare=_prepare,
    refuses=_refuses,
)
