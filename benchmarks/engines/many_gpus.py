"""The configurations of one engine over several GPUs, and the trees that others draft, too."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.engines.cases import Case, Configuration
from benchmarks.engines.models import EAGLE_DRAFT, LLAMA_8B, LLAMA_8B_MQA, QWEN3_8B

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
_LONG = (  # the shorter one's servers fit beside one another on 80 GB with data parallel ranks
    Case(kind="decode", batch=16, length=8192, must=0.98, aim=1.05),
    Case(kind="decode", batch=16, length=32768, must=0.98, aim=1.05),
)


def _tensor_parallel(gpus: int, cases: tuple[Case, ...]) -> dict[str, Configuration]:
    """Return the configurations of a tensor-parallel server. cases: of bf16.

    must: what one GPU showed on an H200, less 2 points.
    """
    arguments, name, where = {"tp_size": gpus}, f"tp{gpus}", f"tensor parallel on {gpus} GPUs"
    return {
        name: Configuration(
            title=f"Llama-3.1-8B shape, bf16, {where}",
            model=LLAMA_8B,
            peers=("fa3",),
            arguments=arguments,
            cases=cases,
        ),
        f"{name}-fp8": Configuration(
            title=f"Llama-3.1-8B shape, FP8 KV cache, {where}",
            model=LLAMA_8B,
            peers=("fa3",),
            arguments={**arguments, "kv_cache_dtype": "fp8_e4m3"},
            cases=(Case(kind="decode", batch=64, length=4096, must=1.25, aim=1.27),),
        ),
        f"{name}-eagle": Configuration(
            title=f"Llama-3.1-8B shape, EAGLE trees of 8 drafts, topk 4, {where}",
            model=LLAMA_8B,
            draft_model=EAGLE_DRAFT,
            peers=("fa3",),
            arguments={**arguments, **EAGLE},
            cases=(Case(kind="decode", batch=16, length=4096, must=1.11, aim=1.13),),
        ),
    }


def _context_parallel(gpus: int) -> Configuration:
    """Return the configuration of decode context parallelism.

    SGLang's ranks share the keys of a KV head that all of them have, by its triton alone (0.5.16).
    """
    return Configuration(
        title=f"Llama-3.1-8B shape with one KV head, bf16, decode context parallel on {gpus} GPUs",
        model=LLAMA_8B_MQA,
        peers=("triton",),
        arguments={"tp_size": gpus, "dcp_size": gpus},
        cases=_LONG,
    )


_ONE = Case(kind="decode", batch=1, length=1024, must=0.97, aim=0.99)
_SIXTEEN = Case(kind="decode", batch=16, length=4096, must=0.98, aim=1.00)
MANY_GPUS: Mapping[str, Configuration] = {
    **_tensor_parallel(2, (_ONE, _SIXTEEN)),
    "dp2": Configuration(
        title="Qwen3-8B shape with 32 layers, bf16, data-parallel attention on 2 GPUs",
        model=QWEN3_8B,  # SGLang's Llama has no data-parallel attention
        peers=("fa3", "flashinfer", "triton"),
        arguments={"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
        cases=_LONG,
    ),
    "dcp2": _context_parallel(2),
    "pp2": Configuration(
        title="Llama-3.1-8B shape, bf16, pipeline parallel on 2 GPUs",
        model=LLAMA_8B,
        peers=("fa3",),
        arguments={"pp_size": 2, "disable_overlap_schedule": True},
        cases=(_SIXTEEN,),
    ),
    **_tensor_parallel(4, (_ONE,)),
    "dcp4": _context_parallel(4),
}
