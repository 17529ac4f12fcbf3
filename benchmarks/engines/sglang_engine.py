"""SGLang, as benchmarks.engines.steps times it. Needs a GPU, and for EAGLE sgl-deep-gemm."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.engines import record
from benchmarks.engines.configurations import NEW_TOKENS, OURS, Case, Configuration
from benchmarks.engines.memory import pool_tokens, state_slots
from benchmarks.engines.models import write

# NVLink multicast stays off in all that a process of several GPUs may use
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
SHARED = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}  # engines share GPUs
MARGIN = 64  # tokens of the context for drafts that are not accepted
ACCEPTED = {  # read by SGLang's workers
    "SGLANG_SIMULATE_ACC_LEN": "3",
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "fixed",
}


def ranks_arguments(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an engine of several GPUs needs: its ranks talk through NCCL alone.

    SGLang's own all-reduce is compiled at the first start, and the fused one of FlashInfer uses
    NVLink multicast. named: the arguments that say how the model is split.
    """
    if max(named.get("tp_size", 1), named.get("pp_size", 1)) == 1:
        return {}
    return {
        "disable_custom_all_reduce": True,
        "enforce_disable_flashinfer_allreduce_fusion": True,
    }


def ports(number: int) -> dict[str, int]:
    """Return the ports of an engine, the number-th among those started together on its GPUs.

    Engines on other GPUs of the host take others. All are below those that Linux hands out itself:
    SGLang picks a free one for NCCL and opens it later, when another engine may have taken it.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    first = 10000 + 2800 * (int(gpu) % 8 if gpu.isdigit() else 0) + 280 * number
    return {"port": first, "nccl_port": first + 260}  # data parallel ranks take first + 233 to 239


def arguments(
    configuration: Configuration, backend: str, folder: pathlib.Path, beside: int | None = None
) -> dict[str, Any]:
    """Return every argument of the engine; the models' configurations are written into folder.

    One graph is captured for each batch size of the cases, and nothing that no case replays.
    beside: the number of this engine among those that share the GPUs; it takes what its cases need.
    """
    result = {
        "model_path": write(folder, "model", configuration.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": record.split(backend)[0],
        "page_size": 1,
        "context_length": configuration.longest + NEW_TOKENS + MARGIN,
        "max_running_requests": max(case.batch for case in configuration.cases),
        "cuda_graph_bs_decode": configuration.batches,
        "disable_prefill_cuda_graph": True,
        "mem_fraction_static": 0.8,
        "random_seed": 1,
        "sampling_backend": "pytorch",  # greedy; the other compiles kernels first
        "decode_log_interval": 10000,
        "log_level": "info",  # attn_core's decision
        **ranks_arguments(configuration.arguments),
        **configuration.arguments,
    }
    if beside is not None:
        tokens = pool_tokens(configuration)
        shared = {"max_total_tokens": tokens, "mem_fraction_static": 0.9}  # of what is left
        if states := state_slots(configuration):
            shared["max_mamba_cache_size"] = states  # SGLang's default is half of the memory
        result |= {**shared, **ports(beside)}
    if configuration.draft_model is not None:
        draft = write(folder, "draft", configuration.draft_model)
        result["speculative_draft_model_path"] = draft
        result["speculative_draft_attention_backend"] = record.split(backend)[2] or None
    return result


class Engine:
    """A running engine."""

    def __init__(
        self,
        configuration: Configuration,
        backend: str,
        folder: pathlib.Path,
        beside: int | None = None,
    ) -> None:
        if beside is not None:
            os.environ.update(SHARED)
        os.environ.update(QUIET | (ACCEPTED if configuration.is_speculative else {}))
        import sglang

        self._speculative = configuration.is_speculative
        self._engine = sglang.Engine(**arguments(configuration, backend, folder, beside))

    def chosen(self) -> dict[str, str]:
        """Return what attn_core chose, by role; nothing where another backend serves."""
        states = self._engine.get_server_info().get("internal_states") or [{}]
        return dict(states[0].get(OURS) or {})

    def generate(self, ids: Sequence[list[int]], tokens: int) -> tuple[float, int]:
        """Generate tokens for each prompt: seconds, and the steps of the first request."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        start = time.perf_counter()
        out = self._engine.generate(input_ids=list(ids), sampling_params=sampling)
        seconds = time.perf_counter() - start
        speculates = self._speculative and tokens > 1
        return seconds, out[0]["meta_info"]["spec_verify_ct"] if speculates else tokens

    def flush(self) -> None:
        """Empty the prefix cache."""
        for _ in range(200):  # the engine is idle only some milliseconds after its last answer
            if self._engine.flush_cache().success:
                return
            time.sleep(0.02)
        raise RuntimeError("SGLang does not flush its cache: requests are still running")

    def trace(self, run: Callable[[], object], folder: pathlib.Path, case: Case) -> None:
        """Write a profile of a run for a trace viewer: <kind>.<batch>x<length>-….trace.json.gz."""
        self._engine.start_profile(
            output_dir=str(folder),
            activities=["CPU", "GPU"],
            with_stack=False,
            record_shapes=False,
            profile_prefix=case.name.replace(" ", "."),
        )
        run()
        self._engine.stop_profile()

    def stop(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()
