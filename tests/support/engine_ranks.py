"""Save the logprobs of an SGLang server on a CPU whose model is split over ranks.

Usage: python engine_ranks.py KIND BACKEND MODEL OUT; KIND is one of benchmarks.engines.parallel.
SGLang starts its schedulers in processes that import this file again, so that the stand-ins for
kernels of a GPU are there too.
"""

import json
import os
import pathlib
import sys

import sglang.srt.utils.common  # noqa: F401  # patched below
import torch
from engine_logits import without_own_kernels
from sglang.srt.distributed.parallel_state import GroupCoordinator

from benchmarks.engines.parallel import KINDS
from benchmarks.engines.replays import SGLANG, serve


def without_pinning(function):
    """Return a function of torch that does not pin memory: there is no device."""

    def call(*args, pin_memory=False, **named):
        return function(*args, **named)

    return call


without_own_kernels()
torch.Tensor.pin_memory = lambda self, *args, **named: self
torch.tensor, torch.empty = map(without_pinning, (torch.tensor, torch.empty))
for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):  # registered for devices alone
    setattr(GroupCoordinator, name, getattr(GroupCoordinator, f"_{name}"))
torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args: None


if __name__ == "__main__":
    kind, backend, model, out = sys.argv[1:]
    if "tp_size" in KINDS[kind]:  # SGLang binds each rank's threads to cores
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    found = serve(SGLANG, KINDS[kind], backend, model, "cpu", 0)
    pathlib.Path(out).write_text(json.dumps(found))
