"""Run attention on several ranks, and compare with one device: heads, keys and the choice.

Run: `python -m benchmarks.ranks [--ranks 2] [--device cuda] [--backends fa3 triton] [--out FILE]`.
NCCL connects the ranks of a GPU each, gloo those on a CPU. On a GPU the passes also run in CUDA
graphs that captured the exchange. Every rank must hold the same bits, and they must lie within the
budget of the backends' suite. Exit code 0: all passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import pathlib
import pickle
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from attn_core import AttnError, LayerRequirements, Requirements
from attn_core.integrations import choice
from attn_core.plugins.registry import load_plugins
from attn_core.testing.tolerance import judged
from torch import Tensor

from benchmarks.attention import versions
from benchmarks.engines.record import save
from benchmarks.rank_passes import GRAPHS, PASSES, Problem, passes, plain
from benchmarks.results import FOLDER, slug

# NCCL and PyTorch use NVLink multicast where they can; no result here needs it.
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
PROBLEMS = {  # with two ranks, the second has no key of the requests of one token
    "cpu": Problem(
        device="cpu", dtype="fp32", heads=8, kv_heads=4, dim=64, page=4,
        lengths=((1, 3, 70, 37), (41, 1, 2, 90)), new=(5, 1, 7, 64),
    ),
    "cuda": Problem(
        device="cuda", dtype="bf16", heads=32, kv_heads=8, dim=128, page=16,
        lengths=((1, 3, 4096, 700, 129, 64), (2049, 1, 1, 3500, 15, 1000)),
        new=(5, 1, 300, 64, 17, 128),
    ),
}  # fmt: skip
BACKENDS = {"cpu": ["torch_native", "intel_amx"], "cuda": ["fa3", "triton"]}
LIBRARIES = ("sglang-kernel", "flash-attn-3", "flashinfer-python", "attn-core")
Row = dict[str, Any]


def start(
    size: int, device: str, work: Callable[..., Any], *args: Any, limit_s: float = 200.0
) -> list[Any]:
    """Call work(rank, size, *args) in `size` processes; return what each rank returned.

    work is a function of a module. A rank that raises ends all, and a rank that hangs after
    limit_s seconds.
    """
    os.environ |= {name: os.environ.get(name, value) for name, value in QUIET.items()}
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = torch.multiprocessing
        context = processes.start_processes(
            _rank, (size, device, folder, work, args), nprocs=size, join=False, start_method="spawn"
        )
        end = time.monotonic() + limit_s
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > end:
                    raise TimeoutError(f"{size} ranks took more than {limit_s:.0f} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return [pickle.loads(pathlib.Path(folder, str(i)).read_bytes()) for i in range(size)]


def _rank(
    rank: int, size: int, device: str, folder: str, work: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        pathlib.Path(folder, str(rank)).write_bytes(pickle.dumps(work(rank, size, *args)))
        if device == "cuda":  # a communicator waits for the graphs that hold it: end with them
            dist.barrier()
            os._exit(0)
    finally:
        dist.destroy_process_group()


def attend(
    rank: int, size: int, problem: Problem, backends: Sequence[str], names: Sequence[str]
) -> dict[Any, Any]:
    """Run all passes on one rank: (backend, pass) → tensors, of the ranks and of this rank alone.

    An error takes the tensors' place; the ranks ask the same of the same libraries, so all have it.
    """
    result: dict[Any, Any] = {}
    for backend in backends:
        for name in names:
            try:
                result[backend, name] = (
                    passes(problem, rank, size, backend, name),
                    passes(problem, 0, 1, backend, name),
                )
            except (AttnError, RuntimeError, AssertionError) as error:
                traceback.print_exc()
                result[backend, name] = f"{type(error).__name__}: {error}"
    return result


def judge(problem: Problem, size: int, ranks: Sequence[dict[Any, Any]]) -> Iterator[Row]:
    """Compare what all ranks have in the end with float64, and with one device."""
    rounding = problem.torch_dtype
    for (backend, name), first in ranks[0].items():
        row: Row = {"backend": backend, "pass": name, "ranks": size}
        actual = [rank[backend, name] for rank in ranks]
        errors = [x for x in actual if isinstance(x, str)]
        if errors:
            yield {**row, "passed": False, "error": errors[0][:300]}
            continue
        truth, yardstick = plain(problem, name, torch.float64), plain(problem, name, rounding)
        same = all(torch.equal(a, b) for x in actual for a, b in zip(x[0], first[0], strict=True))

        def used(tensors: Sequence[Tensor], truth: Any = truth, near: Any = yardstick) -> float:
            pairs = zip(tensors, truth, near, strict=True)
            return max(judged(x, t, y, rounding).ratio for x, t, y in pairs)

        split, alone = used(first[0]), used(first[1])
        apart = max(
            float((a.double() - b.double()).abs().max()) for a, b in zip(*first, strict=True)
        )
        yield {
            **row,
            "same_bits": same,
            "budget_used": round(split, 4),
            "budget_used_by_one_device": round(alone, 4),
            "largest_difference_from_one_device": apart,
            "passed": same and split <= 1,
        }


def choose(rank: int, size: int, device: str, lacking: str | None) -> Row:
    """Choose on one rank; the last one has not installed the backend `lacking`."""
    registry, handler = load_plugins(), _LogLines()
    logging.getLogger("attn_core.integrations.ranks").handlers = [handler]
    if lacking and rank == size - 1:
        rest = {key: spec for key, spec in registry.backends.items() if key[1] != lacking}
        registry = replace(registry, backends=rest)
    problem = PROBLEMS[device]
    needs = Requirements(
        layers=(LayerRequirements.of(problem.layer()),),
        dtype=problem.dtype,
        page_size=problem.page,
        graphs=device == "cuda",
    )
    with mock.patch.object(choice, "load_plugins", return_value=registry):
        selection, _ = choice.choose(needs, torch.device(device), ranks=dist.group.WORLD)
    names = {role: chosen.backend for role, chosen in selection.roles.items()}
    return {"chosen": names, "said": handler.lines}


class _LogLines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def choices(rank: int, size: int, device: str) -> list[Row]:
    """Choose with all ranks alike, then without what they chose for decode on the last."""
    alike = choose(rank, size, device, None)
    lacking = alike["chosen"]["decode"]
    return [alike, {**choose(rank, size, device, lacking), "lacking": lacking}]


def judge_choices(size: int, ranks: Sequence[list[Row]]) -> Iterator[Row]:
    """Compare the choices of all ranks: one for all, and what was dropped is said once."""
    for result in zip(*ranks, strict=True):
        lacking, chosen = result[0].get("lacking"), result[0]["chosen"]
        lines = [line for each in result for line in each["said"]]
        agree = all(each["chosen"] == chosen for each in result)
        once = len(lines) == bool(lacking) and len(result[0]["said"]) == bool(lacking)
        yield {
            "pass": "choice",
            "ranks": size,
            **({"last_rank_lacks": lacking} if lacking else {}),
            "chosen": chosen,
            "said": lines,
            "passed": agree and once and lacking not in chosen.values(),
        }


def run(rank: int, size: int, device: str, backends: Sequence[str]) -> tuple[Any, Any]:
    """Do all on one rank."""
    names = (*PASSES, *(GRAPHS if device == "cuda" else ()))
    return attend(rank, size, PROBLEMS[device], backends, names), choices(rank, size, device)


def rows(size: int, device: str, backends: Sequence[str]) -> list[Row]:
    """Run on so many ranks, and judge what they found."""
    result = start(size, device, run, device, backends)
    of_passes = judge(PROBLEMS[device], size, [each for each, _ in result])
    return [*of_passes, *judge_choices(size, [each for _, each in result])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=PROBLEMS, default="cuda")
    parser.add_argument("--backends", nargs="+", help="default: fa3 triton on a GPU")
    parser.add_argument("--out", type=pathlib.Path, help="default: in benchmarks/results/")
    args = parser.parse_args()
    if args.device == "cuda" and args.ranks > torch.cuda.device_count():
        parser.error(f"{args.ranks} ranks need a GPU each, here are {torch.cuda.device_count()}")
    began = time.monotonic()
    result = rows(args.ranks, args.device, args.backends or BACKENDS[args.device])
    for row in result:
        print(json.dumps(row), flush=True)
    cuda = args.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else platform.machine()
    module: Any = torch.cuda.nccl
    nccl = {"nccl": ".".join(map(str, module.version()))} if cuda else {}
    head = {
        "command": f"python -m benchmarks.ranks --ranks {args.ranks} --device {args.device}",
        "device": name,
        "date": datetime.date.today().isoformat(),
        "versions": {**versions(LIBRARIES), **nccl},
        "seconds": round(time.monotonic() - began, 1),
    }
    out = args.out or FOLDER / f"ranks.{slug(name)}.{args.ranks}.json"
    save(out, {**head, "rows": result})
    return 0 if all(row["passed"] for row in result) else 1


if __name__ == "__main__":
    sys.exit(main())
