"""vLLM, as benchmarks.engines.steps times it.

On a CPU vLLM reads no attention_backend: there a plugin has to name attn-core for it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from benchmarks.engines import record
from benchmarks.engines.configurations import NEW_TOKENS, OURS, Case, Configuration
from benchmarks.engines.memory import pool_bytes
from benchmarks.engines.models import write

NAMES = {OURS: "CUSTOM"}  # of --attention-backend

QUIET = {
    # of several GPUs: what is fused with an all-reduce, and vLLM's own ones, use NVLink multicast
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # nvcc compiles it at a start, for more than a minute
}


def arguments(
    configuration: Configuration, backend: str, folder: pathlib.Path, beside: int | None = None
) -> dict[str, Any]:
    """Return every argument of the engine; the model's configuration is written into folder.

    One graph is captured for each batch size of the cases, and nothing that no case replays.
    beside: the number of this engine among those that share the GPUs; it takes what its cases need.
    """
    batches = sorted({case.batch for case in configuration.cases})
    name = record.split(backend)[0]
    alone = configuration.gpus == 1
    return {
        "model": write(folder, "model", configuration.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": NAMES.get(name, name),
        "max_model_len": configuration.longest + NEW_TOKENS,
        "max_num_seqs": batches[-1],
        "compilation_config": graphs(batches, alone=alone),
        "seed": 1,
        "worker_extension_cls": f"{__name__}.Inside",
        **({} if beside is None else _share(configuration)),
        **({} if alone else {"disable_custom_all_reduce": True}),
        **configuration.arguments,
    }


def graphs(batches: list[int], *, alone: bool) -> dict[str, Any]:
    """Return how vLLM compiles: a graph for each of these batches. alone: on one GPU."""
    passes = {} if alone else {"pass_config": {"fuse_allreduce_rms": False}}
    return {"cudagraph_capture_sizes": batches, **passes}


def _share(configuration: Configuration) -> dict[str, Any]:
    """Return what makes an engine take what its cases need, whatever else is on the GPU."""
    result: dict[str, Any] = {"kv_cache_memory_bytes": pool_bytes(configuration)}
    # vLLM asks for so much free memory at its start; others may have taken theirs by then
    return {**result, "gpu_memory_utilization": 0.1}


class RouterKernels(importlib.abc.MetaPathFinder):
    """Leave out kernels for other models' routers, which vLLM compiles at each start for 15 s.

    vLLM forks its workers, and they import the module that warms up. This process must not: what
    initialises CUDA here makes vLLM start workers that import all again.
    """

    module = "vllm.model_executor.warmup.kernel_warmup"
    shapes = "_LL_BF16_WARMUP_MODEL_SHAPES"

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find the module as others do, and empty its list of shapes once it has run."""
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        result = importlib.util.find_spec(name)
        if result is not None and result.loader is not None:
            run = result.loader.exec_module

            def run_without(module: ModuleType) -> None:
                run(module)
                setattr(module, self.shapes, ())

            result.loader.exec_module = run_without  # type: ignore[method-assign]
        return result


def start_fast(sampling: Any) -> None:
    """Leave out of vLLM's start what no request here runs. sampling: vLLM's SamplingParams.

    Its last warm-up samples with top-k and top-p, whose kernel Triton compiles for half a minute.
    What is timed is greedy. Workers that vLLM forks warm up so, too.
    """
    sampling.for_sampler_warmup = staticmethod(lambda: sampling(temperature=0))
    sys.meta_path.insert(0, RouterKernels())


class Inside:
    """A method of vLLM's workers, which are other processes."""

    def chosen_inside(self: Any) -> dict[str, str]:
        """Return what attn_core chose, by role; nothing where another backend serves."""
        groups = [group for groups in self.model_runner.attn_groups for group in groups]
        builders = [builder for group in groups for builder in group.metadata_builders]
        ours = [builder.passes.roles for builder in builders if hasattr(builder, "passes")]
        return {role: choice.backend for roles in ours for role, choice in roles.items()}


class Engine:
    """A running engine."""

    def __init__(
        self,
        configuration: Configuration,
        backend: str,
        folder: pathlib.Path,
        beside: int | None = None,
    ) -> None:
        os.environ.update(QUIET)
        import vllm

        start_fast(vllm.SamplingParams)
        self._engine = vllm.LLM(**arguments(configuration, backend, folder, beside))
        self._sampling = vllm.SamplingParams

    def chosen(self) -> dict[str, str]:
        """Return what attn_core chose, by role; nothing where another backend serves."""
        return dict(self._engine.collective_rpc("chosen_inside")[0])

    def generate(self, ids: Sequence[list[int]], tokens: int) -> tuple[float, int]:
        """Generate tokens for each prompt: seconds, and the steps of the first request."""
        sampling = self._sampling(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        requested = [{"prompt_token_ids": prompt} for prompt in ids]
        start = time.perf_counter()
        out = self._engine.generate(requested, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        if any(len(each.outputs[0].token_ids) != tokens for each in out):
            raise RuntimeError(f"vLLM did not generate {tokens} tokens for each prompt")
        return seconds, tokens

    def flush(self) -> None:
        """Empty the prefix cache."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM does not flush its cache: requests are still running")

    def trace(self, run: Callable[[], object], folder: pathlib.Path, case: Case) -> None:
        """Refuse: vLLM profiles into a folder that it takes at its start."""
        raise NotImplementedError("--trace with vLLM; start vLLM with a profiler_config instead")

    def stop(self) -> None:
        """End the engine's processes."""
        self._engine.llm_engine.engine_core.shutdown()
