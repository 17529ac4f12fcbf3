"""Replay prompts in SGLang or vLLM: the logprobs that benchmarks.engines.parallel compares."""

from __future__ import annotations

import json
import os
import pathlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.engines import sglang_engine, vllm_engine

SGLANG, VLLM = "sglang", "vllm"
LENGTHS = (1, 700, 3, 64, 257, 1500, 5, 128)
NEW = 24  # greedy tokens of each prompt
MORE = 40  # tokens behind a prompt that the prefix cache has by then
Replies = dict[str, list[list[Any]]]  # pass → of each request: [token, logprob] of each position


def prompts(lengths: Sequence[int], vocabulary: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield passes: all prompts together, one alone, and all behind a prefix, "again"."""
    draw = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, vocabulary - 1) for _ in range(count)]

    first = [tokens(n) for n in lengths]
    longer = [prompt + tokens(MORE) for prompt in first]
    yield "together", first
    yield "alone", [tokens(300)]
    yield "again", longer


def replay(generate: Callable[..., Any], lengths: Sequence[int], vocabulary: int) -> Replies:
    """Return SGLang's logprobs of prompts, behind a prefix of the rest alone, and greedy tokens."""
    result = {}
    for name, ids in prompts(lengths, vocabulary):
        starts = [len(x) - MORE if name == "again" else 0 for x in ids]
        sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        out = generate(
            input_ids=ids,
            sampling_params=[sampling] * len(ids),
            return_logprob=[True] * len(ids),
            logprob_start_len=starts,
        )
        meta = [each["meta_info"] for each in out]
        result[name] = [
            [
                [token, logprob]
                for logprob, token, *_ in (*m["input_token_logprobs"], *m["output_token_logprobs"])
                if logprob is not None  # a prompt's first token has none
            ]
            for m in meta
        ]
    return result


def replay_vllm(
    generate: Callable[..., Any],
    sampling: Callable[..., Any],
    lengths: Sequence[int],
    vocabulary: int,
) -> Replies:
    """Return vLLM's logprobs of prompts and of greedy tokens; "again" has those of tokens alone.

    vLLM reads no prefix cache for a request that asks for a prompt's logprobs.
    """
    result = {}
    for name, ids in prompts(lengths, vocabulary):
        requested = sampling(
            temperature=0,
            max_tokens=NEW,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,  # of the token itself
            prompt_logprobs=None if name == "again" else 0,
        )
        out = generate([{"prompt_token_ids": x} for x in ids], requested, use_tqdm=False)
        result[name] = [_pairs(each) for each in out]
    return result


def _pairs(out: Any) -> list[list[Any]]:
    answer = out.outputs[0]
    of_prompt = zip(out.prompt_token_ids, out.prompt_logprobs or (), strict=False)
    pairs = (*of_prompt, *zip(answer.token_ids, answer.logprobs, strict=True))
    return [[token, known[token].logprob] for token, known in pairs if known is not None]


def sglang_arguments(
    split: Mapping[str, Any], backend: str, model: str, device: str, number: int
) -> dict[str, Any]:
    """Return SGLang's arguments; number: of the engines that run beside one another."""
    alone = not split
    result = {
        "model_path": model,
        "skip_tokenizer_init": True,
        "attention_backend": backend,
        "page_size": 1,
        "context_length": 2048,
        "max_running_requests": 2 * len(LENGTHS),
        "max_total_tokens": 16384,
        "cuda_graph_bs_decode": [1, 2, 4, len(LENGTHS)],
        "disable_prefill_cuda_graph": True,
        "mem_fraction_static": 0.9,  # engines share GPUs, and each takes little
        "random_seed": 1,
        "sampling_backend": "pytorch",
        "decode_log_interval": 10000,
        "log_level": "info",
        **sglang_engine.ports(number),
        "base_gpu_id": number % 2 if alone else 0,
        **split,
        **sglang_engine.ranks_arguments(split),
    }
    if device == "cpu":  # SGLang's defaults for a CPU
        result |= {"device": "cpu", "cuda_graph_bs_decode": None, "dtype": "float32"}
        result |= {"disable_decode_cuda_graph": True, "disable_overlap_schedule": True}
    return result


def vllm_arguments(
    split: Mapping[str, Any], backend: str, model: str, device: str
) -> dict[str, Any]:
    """Return vLLM's arguments. Prompts are cut, so that passes mix prefill and decode."""
    result = {
        "model": model,
        "skip_tokenizer_init": True,
        "attention_backend": vllm_engine.NAMES.get(backend, backend),
        "max_model_len": 2048,
        "max_num_seqs": 2 * len(LENGTHS),
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 2**30,
        "gpu_memory_utilization": 0.1,  # engines share GPUs
        "compilation_config": vllm_engine.graphs([1, 2, 4, len(LENGTHS)], alone=not split),
        "seed": 1,
        **split,
        **({"disable_custom_all_reduce": True} if split else {}),
    }
    if device == "cpu":
        result |= {"dtype": "float32", "enforce_eager": True, "compilation_config": {}}
    return result


def serve(
    engine: str, split: Mapping[str, Any], backend: str, model: str, device: str, number: int
) -> Replies:
    """Start an engine in this process and replay the prompts."""
    lengths = LENGTHS if device != "cpu" else [min(n, 70) for n in LENGTHS]
    vocabulary = json.loads(pathlib.Path(model, "config.json").read_text())["vocab_size"]
    if engine == VLLM:
        os.environ.update(vllm_engine.QUIET)
        import vllm

        vllm_engine.start_fast(vllm.SamplingParams)
        llm = vllm.LLM(**vllm_arguments(split, backend, model, device))
        try:
            return replay_vllm(llm.generate, vllm.SamplingParams, lengths, vocabulary)
        finally:
            llm.llm_engine.engine_core.shutdown()
    import sglang

    served = sglang.Engine(**sglang_arguments(split, backend, model, device, number))
    try:
        return replay(served.generate, lengths, vocabulary)
    finally:
        served.shutdown()
