"""Time an engine's steps with one attention backend: one process, every case of a configuration.

Run: `python -m benchmarks.engines.steps CONFIGURATION BACKEND --out FILE.json`, or
`benchmarks.engines.run`, which calls it for each backend. A case that the file has with the same
versions is skipped. Weights are random. With speculation the number of accepted drafts is fixed by
SGLang's own simulation: text means nothing, step times are those of a real run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.engines import record, sglang_engine, vllm_engine
from benchmarks.engines.configurations import (
    ALONE,
    CONFIGURATIONS,
    FIXED,
    NEW_TOKENS,
    OURS,
    Case,
    Configuration,
    named,
)
from benchmarks.engines.costs import by_costs, variables

ENGINES: dict[str, type[sglang_engine.Engine] | type[vllm_engine.Engine]] = {
    "sglang": sglang_engine.Engine,
    "vllm": vllm_engine.Engine,
}
IMPORTS = {  # what takes long
    "sglang": "sglang.srt.entrypoints.engine",
    "vllm": "vllm.entrypoints.llm",
}
FEW_TOKENS = 17
REPEATS = 3
SETTLE_S = 0.5  # an engine may run a step more than was asked for

# Generate this many tokens for each prompt: seconds, and the steps of the first request.
Generate = Callable[[list[list[int]], int], tuple[float, int]]


def environment(configuration: Configuration, backend: str) -> dict[str, str]:
    """Return the variables that attn_core reads: what decodes in it, if it shares and adapts."""
    name, inside, _draft = record.split(backend)
    shares = configuration.shared_prefix and name == OURS and not backend.endswith(ALONE)
    result = {
        "ATTN_DECODE_ATTENTION_BACKEND": inside,
        "ATTN_SHARED_PREFIX": "1" * shares,
        "ATTN_ADAPTIVE": "0" * backend.endswith(FIXED),
    }
    return {name: value for name, value in result.items() if value}


def device() -> str:
    """Return the GPU's name, "cpu" where there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def gigabytes() -> float:
    """Return the memory of the GPU, infinite where there is none."""
    import torch

    if not torch.cuda.is_available():
        return float("inf")
    return float(torch.cuda.get_device_properties(0).total_memory) / 2**30


def prompts(case: Case) -> list[list[int]]:
    """Return the same random tokens for every backend."""
    generator = random.Random(case.name)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(10000) for _ in range(count)]

    members, common = case.shared
    result: list[list[int]] = []
    for number, length in enumerate(case.lengths):
        shared = result[-1][:common] if number % members else tokens(common)
        result.append(shared + tokens(length - common))
    if case.sigma:
        generator.shuffle(result)
    return result


def measure(
    case: Case, generate: Generate, flush: Callable[[], None], repeats: int
) -> dict[str, Any]:
    """Return the milliseconds of a prefill or a step: the median of the repeats and their spread.

    A step is what a longer run takes more than a shorter one of the same prompts. The prefix cache
    has the prompts by then, so that neither run computes them again; a prefill flushes it first.
    The first pair of runs is not timed: an engine may still compile kernels for it.
    """
    ids = prompts(case)
    flush()
    if case.kind == "prefill":
        generate(ids, 1)
        times = []
        for _ in range(repeats):
            flush()
            times.append(generate(ids, 1)[0] * 1e3)
    else:
        for _ in range(3):  # fills the prefix cache; a hybrid model's is full after the second run
            generate(ids, FEW_TOKENS)
        step_ms(generate, ids)
        times = [step_ms(generate, ids) for _ in range(repeats)]
    if min(times) <= 0:
        raise RuntimeError(
            f"{case.name}: a longer run took less time than a shorter one ({times} ms a step): the "
            "prefix cache lost the prompts; a case needs more memory for them, or fewer requests"
        )
    median = statistics.median(times)
    tokens = sum(case.lengths) if case.kind == "prefill" else case.batch
    return {
        "ms": round(median, 3),
        "spread_ms": [round(min(times), 3), round(max(times), 3)],
        "tokens_per_s": round(tokens / median * 1e3),
    }


def step_ms(generate: Generate, ids: list[list[int]]) -> float:
    """Return the milliseconds of one step."""
    (short_s, short), (long_s, long) = generate(ids, FEW_TOKENS), generate(ids, NEW_TOKENS)
    return (long_s - short_s) / (long - short) * 1e3


def later(engine: str) -> list[str]:
    """Import the engine, then wait for a line with the arguments and the file to print to."""
    importlib.import_module(IMPORTS[engine])
    message = json.loads(sys.stdin.readline())
    log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    return list(message["arguments"])


def pause() -> None:
    """Stop this process and its children until SIGCONT: they take no core and no GPU then.

    No rank may stop before a kernel that waits for it is done.
    """
    time.sleep(SETTLE_S)
    os.killpg(0, signal.SIGSTOP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configuration", choices=CONFIGURATIONS)
    parser.add_argument("backend", help="fa3, attn_core, attn_core:triton …")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--round", type=int, default=1, help="number of this process")
    parser.add_argument("--turns", type=int, help="rounds, each when this process is continued")
    parser.add_argument("--number", type=int, default=0, help="of the servers beside one another")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--cases", nargs="*", default=[], help="default: all")
    parser.add_argument("--profile", type=pathlib.Path, help="of `attn tune`; default: as found")
    parser.add_argument("--workload", default="", help="JSON, a file of it, or: cases")
    parser.add_argument("--trace", type=pathlib.Path, help="folder for a profile of each case")
    args = parser.parse_args(later(sys.argv[2]) if sys.argv[1:2] == ["--later"] else None)
    configuration = CONFIGURATIONS[args.configuration]
    versions = record.installed(configuration.engine)
    selected = named(args.configuration, args.cases)
    rounds = range(1, args.turns + 1) if args.turns else [args.round]

    def missing(number: int) -> list[Case]:
        return record.missing(record.load(args.out), selected, args.backend, number, versions)

    if not any(map(missing, rounds)):
        return
    costs = by_costs(args.profile, args.workload)
    os.environ.update(environment(configuration, args.backend))
    os.environ.update(variables(args.profile, args.workload, configuration))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        engine_class = ENGINES[configuration.engine]
        where, requested = (
            pathlib.Path(folder),
            dataclasses.replace(configuration, cases=(*selected,)),
        )
        if args.turns:
            engine = engine_class(requested, args.backend, where, beside=args.number)
        else:
            engine = engine_class(configuration, args.backend, where)
        start_s = time.perf_counter() - start
        chosen = engine.chosen()
        for number in rounds:
            if args.turns:
                pause()
            for case in missing(number):
                row = {
                    "backend": args.backend,
                    "case": case.name,
                    "round": number,
                    **measure(case, engine.generate, engine.flush, args.repeats),
                    "start_s": round(start_s, 1),
                    **({"together": True} if args.turns else {}),
                    **({"chosen": chosen} if chosen else {}),
                    **({"costs": costs} if chosen and costs else {}),
                    "date": datetime.date.today().isoformat(),
                    "versions": versions,
                }
                print(json.dumps(row), flush=True)
                record.merge(args.out, row, configuration=args.configuration, device=device())
                if args.trace is not None:
                    run = functools.partial(engine.generate, prompts(case), FEW_TOKENS)
                    engine.trace(run, args.trace, case)
        if args.turns:
            pause()  # the turn ends at once, and with it this process
        engine.stop()


if __name__ == "__main__":
    main()
