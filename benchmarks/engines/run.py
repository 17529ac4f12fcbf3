"""Time every backend of a configuration, one process after the other or in turns.

Run: `python -m benchmarks.engines.run CONFIGURATION … [--backends attn_core fa3] [--seconds 600]`.
With --together the servers of a configuration, and of further ones if the GPU's memory allows,
start at the same time and are timed in turns; one that waits is stopped (SIGSTOP).
Ours and the best built-in backend run again in each further round, in alternating order. The name
"attn_core:triton" is ours with triton for decode and verification instead of its own choice, and
"attn_core/fa3" leaves the draft model to fa3; "attn_core+alone" is ours without ATTN_SHARED_PREFIX
in a configuration that asks for it; "attn_core+fixed" is ours with ATTN_ADAPTIVE=0. A process that
hangs is killed. What fails is recorded with its last error instead of a time.
The same command goes on where a run was cut off: what is recorded with the same versions, failures
too, is left alone. --again, with --backends and --cases, times it anew.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.engines import record, table, together
from benchmarks.engines.configurations import CONFIGURATIONS, OURS, named
from benchmarks.engines.processes import Settings, Spare, last_error, note_error, stopped
from benchmarks.results import FOLDER

ONCE = "triton"  # the best built-in backend only where it is the one that serves
LOGS = pathlib.Path("build") / "engines"
LIMIT_S = 240.0  # of a process; its first start on a machine may compile kernels


def processes(
    backends: Sequence[str], rounds: int, best: Callable[[], str | None]
) -> Iterator[tuple[str, int]]:
    """Yield (backend, round). The engine's Triton kernels run once, after the rounds of others.

    best: the fastest built-in backend by what is recorded when the second round starts.
    """
    built_in = {name for name in backends if record.split(name)[0] != OURS}
    once = {ONCE} if built_in > {ONCE} else set()
    for backend in backends:
        if backend not in once:
            yield backend, 1
    for number in range(2, rounds + 1):
        order = [best(), OURS] if number % 2 == 0 else [OURS, best()]
        for name in order:
            if name in backends and name not in once:
                yield str(name), number
    for backend in sorted(once):
        yield backend, 1


def best_of_most(path: pathlib.Path, configuration: str) -> str | None:
    """Return the built-in backend that is the fastest in most cases of a record."""
    known = record.load(path)
    cases = CONFIGURATIONS[configuration].cases
    names = [record.best_peer(record.medians(known, case.name)) for case in cases]
    named = [name for name in names if name is not None]
    return max(named, key=named.count, default=None)


def time_one(
    name: str, backend: str, number: int, path: pathlib.Path, spare: Spare, settings: Settings
) -> str:
    """Time what is missing of one round of a backend, and return what happened."""
    cases, versions = named(name, settings.cases), settings.versions
    if number > 1 and not record.is_timed(record.load(path), backend):
        return "failed in the first round"
    known = {} if settings.again else record.load(path)
    if not record.missing(known, cases, backend, number, versions):
        return "recorded (--again repeats it)"
    began = time.monotonic()
    left_s = settings.end - began
    if left_s <= 0:
        return "not started, no seconds left"
    if settings.again:
        record.drop(path, backend, number, cases)
    log = settings.logs / f"{name}.{backend.replace('/', '+')}.{number}.log"
    arguments = [
        name,
        backend,
        "--round",
        str(number),
        "--out",
        str(path),
        *settings.costs,
        "--cases",
        *settings.cases,
    ]
    code = spare.run(arguments, log, min(settings.limit_s, left_s))
    if code is None and left_s < settings.limit_s:
        return stopped(log.read_text(errors="replace"))
    # SGLang exits with 0 where its scheduler died, so that the exit code says nothing
    untimed = record.missing(record.load(path), cases, backend, number, versions)
    error = last_error(log.read_text(errors="replace")) if untimed else ""
    if code is None:
        error = f"killed after {settings.limit_s:.0f} s: {error}"
    note_error(path, name, untimed, backend, number, error, versions)
    return f"{time.monotonic() - began:.0f} s {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configurations", nargs="+", choices=CONFIGURATIONS, help="of one engine")
    parser.add_argument("--backends", nargs="+", help="default: ours and those of the engine")
    parser.add_argument("--rounds", type=int, default=2, help="of ours and the best, or of all")
    parser.add_argument("--together", action="store_true", help="start servers beside one another")
    parser.add_argument("--cases", nargs="*", default=[], help='as in "decode 16x1024"')
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all processes")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of one process")
    parser.add_argument("--again", action="store_true", help="time what is recorded, too")
    parser.add_argument("--results", type=pathlib.Path, default=FOLDER, help="folder of records")
    parser.add_argument("--logs", type=pathlib.Path, default=LOGS)
    parser.add_argument("--profile", help="a file of `attn tune`, for ours; default: as found")
    parser.add_argument(
        "--workload", help='for ours: JSON, a file of it, or "cases", the requests that are timed'
    )
    args = parser.parse_args()
    engine, *others = {CONFIGURATIONS[name].engine for name in args.configurations}
    if others:
        parser.error("configurations of two engines; name those of one")
    settings = Settings(
        end=time.monotonic() + args.seconds,
        limit_s=args.limit,
        again=args.again,
        logs=args.logs,
        versions=record.installed(engine),
        cases=args.cases,
        costs=[
            text
            for name in ("profile", "workload")
            if (value := getattr(args, name))
            for text in (f"--{name}", value)
        ],
    )
    gpu, gigabytes, gpus = devices()
    for name in args.configurations:
        if CONFIGURATIONS[name].gpus > max(gpus, 1):
            parser.error(f"{name} needs {CONFIGURATIONS[name].gpus} GPUs, here are {gpus}")
    command = [sys.executable, "-m", "benchmarks.engines.steps", "--later", engine]
    if args.together:
        paths = {n: args.results / record.file_name(gpu, n) for n in args.configurations}
        together.run(paths, args.backends, args.rounds, command, settings, gigabytes)
        return 0
    spare = Spare(command)
    atexit.register(spare.stop)
    for name in args.configurations:
        path = args.results / record.file_name(gpu, name)
        backends = args.backends or [OURS, *CONFIGURATIONS[name].peers]
        best = functools.partial(best_of_most, path, name)
        for backend, number in processes(backends, args.rounds, best):
            said = time_one(name, backend, number, path, spare, settings)
            print(f"{name} {backend} round {number}: {said}", flush=True)
        print(table.section(record.load(path)), end="", flush=True)
    return 0


def devices() -> tuple[str, float, int]:
    """Return a GPU's name, its gigabytes and how many there are; no CUDA context is left here."""
    code = "import json, torch; from benchmarks.engines.steps import device, gigabytes"
    code += "; print(json.dumps([device(), gigabytes(), torch.cuda.device_count()]))"
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    name, memory, count = json.loads(said.strip().splitlines()[-1])
    return name, memory, count


if __name__ == "__main__":
    sys.exit(main())
