"""Processes that work as the ranks of one model: gloo connects them, each holds a share.

Nothing here is part of a backend. What the ranks exchange is what an engine's communicator would.
"""

from __future__ import annotations

import multiprocessing
import pathlib
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _run(
    rank: int, size: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    try:
        result = work(rank, size, *args)
        pathlib.Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    finally:
        dist.destroy_process_group()


def on_ranks(size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Call work(rank, size, *args) in `size` processes; return what each rank returned.

    work is a function of a module, and what it returns can be pickled. A rank that raises ends all.
    """
    # one process imports torch, the ranks of all tests are forked from it
    multiprocessing.set_forkserver_preload(["torch", "attn_core.runtime.dispatcher"])
    with tempfile.TemporaryDirectory() as folder:
        how = {"nprocs": size, "start_method": "forkserver"}
        mp.start_processes(_run, (size, folder, work, args), **how)
        return [pickle.loads(pathlib.Path(folder, str(i)).read_bytes()) for i in range(size)]


def gathered(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the tensors of all ranks, [size, *x.shape]."""
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts)
