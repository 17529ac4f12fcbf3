"""The configurations of one engine over several GPUs, and the trees that others draft, too."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.engines.cases import Case, Configuration
from benchmarks.engines.models import EAGLE_DRAFT, LLAMA_8B, LLAMA_8B_MQA

TREES = {
    "speculative_num_draft_tokens": 8,
    "speculative_attention_mode": "decode",
}
EAGLE = {
    **TREES,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,  # the draft model runs on the same backend
}
# must: what one GPU showed on an H200, less 2 points
_TP2, _TP4 = {"tp_size": 2}, {"tp_size": 4}
_LONG = (  # the shorter one's servers fit beside one another on 80 GB with data parallel ranks
    Case(kind="decode", batch=16, length=8192, must=0.98, aim=1.05),
    Case(kind="decode", batch=16, length=32768, must=0.98, aim=1.05),
)
MANY_GPUS: Mapping[str, Configuration] = {
    "tp2": Configuration(
        title="Llama-3.1-8B shape, bf16, tensor parallel on 2 GPUs",
        model=LLAMA_8B,
        peers=("fa3",),
        arguments=_TP2,
        cases=(
            Case(kind="decode", batch=1, length=1024, must=0.97, aim=0.99),
            Case(kind="decode", batch=16, length=4096, must=0.98, aim=1.00),
        ),
    ),
    "tp2-fp8": Configuration(
        title="Llama-3.1-8B shape, FP8 KV cache, tensor parallel on 2 GPUs",
        model=LLAMA_8B,
        peers=("fa3",),
        arguments={**_TP2, "kv_cache_dtype": "fp8_e4m3"},
        cases=(Case(kind="decode", batch=64, length=4096, must=1.25, aim=1.27),),
    ),
    "tp2-eagle": Configuration(
        title="Llama-3.1-8B shape, EAGLE trees of 8 drafts, topk 4, tensor parallel on 2 GPUs",
        model=LLAMA_8B,
        draft_model=EAGLE_DRAFT,
        peers=("fa3",),
        arguments={**_TP2, **EAGLE},
        cases=(Case(kind="decode", batch=16, length=4096, must=1.11, aim=1.13),),
    ),
    "dp2": Configuration(
        title="Llama-3.1-8B shape, bf16, data-parallel attention on 2 GPUs",
        model=LLAMA_8B,
        peers=("fa3", "flashinfer", "triton"),
        arguments={**_TP2, "dp_size": 2, "enable_dp_attention": True},
        cases=_LONG,
    ),
    "dcp2": Configuration(  # SGLang's ranks share the keys of a KV head that all of them have
        title="Llama-3.1-8B shape with one KV head, bf16, decode context parallel on 2 GPUs",
        model=LLAMA_8B_MQA,
        peers=("triton",),  # the one backend of SGLang 0.5.16 that splits K and V
        arguments={**_TP2, "dcp_size": 2},
        cases=_LONG,
    ),
    "pp2": Configuration(
        title="Llama-3.1-8B shape, bf16, pipeline parallel on 2 GPUs",
        model=LLAMA_8B,
        peers=("fa3",),
        arguments={"pp_size": 2, "disable_overlap_schedule": True},
        cases=(Case(kind="decode", batch=16, length=4096, must=0.98, aim=1.00),),
    ),
    "tp4": Configuration(
        title="Llama-3.1-8B shape, bf16, tensor parallel on 4 GPUs",
        model=LLAMA_8B,
        peers=("fa3",),
        arguments=_TP4,
        cases=(Case(kind="decode", batch=1, length=1024, must=0.97, aim=0.99),),
    ),
    "tp4-fp8": Configuration(
        title="Llama-3.1-8B shape, FP8 KV cache, tensor parallel on 4 GPUs",
        model=LLAMA_8B,
        peers=("fa3",),
        arguments={**_TP4, "kv_cache_dtype": "fp8_e4m3"},
        cases=(Case(kind="decode", batch=64, length=4096, must=1.25, aim=1.27),),
    ),
    "tp4-eagle": Configuration(
        title="Llama-3.1-8B shape, EAGLE trees of 8 drafts, topk 4, tensor parallel on 4 GPUs",
        model=LLAMA_8B,
        draft_model=EAGLE_DRAFT,
        peers=("fa3",),
        arguments={**_TP4, **EAGLE},
        cases=(Case(kind="decode", batch=16, length=4096, must=1.11, aim=1.13),),
    ),
    "dcp4": Configuration(
        title="Llama-3.1-8B shape with one KV head, bf16, decode context parallel on 4 GPUs",
        model=LLAMA_8B_MQA,
        peers=("triton",),
        arguments={**_TP4, "dcp_size": 4},
        cases=_LONG,
    ),
}
