"""Time every backend of a configuration, one process after the other.

Run: `python -m benchmarks.engines.run CONFIGURATION [--backends attn_core fa3] [--seconds 600]`.
Ours and the best built-in backend run again in each further round, in alternating order. The name
"attn_core:triton" is ours with triton for decode and verification instead of its own choice. A
process that hangs is killed. What fails is recorded with its last error instead of a time.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.engines import record, table
from benchmarks.engines.configurations import CONFIGURATIONS, OURS

ONCE = "triton"  # a built-in backend that is the best nowhere here
LOGS = pathlib.Path("build") / "engines"
LIMIT_S = 240.0  # of a process; its first start on a machine may compile kernels
LINE = 300  # characters of an error that are kept
ERROR = re.compile(r"(?:^|[\s.])(\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")
# what processes say of one another, after the one that failed has said why
CONSEQUENCES = ("scheduler died", "Initialization failed", "EOFError", "leaked", "KeyboardInter")


def processes(
    backends: Sequence[str], rounds: int, best: Callable[[], str | None]
) -> Iterator[tuple[str, int]]:
    """Yield (backend, round). The engine's Triton kernels run once, after the rounds.

    best: the fastest built-in backend by what is recorded when the second round starts.
    """
    for backend in backends:
        if backend != ONCE:
            yield backend, 1
    for number in range(2, rounds + 1):
        order = [best(), OURS] if number % 2 == 0 else [OURS, best()]
        for name in order:
            if name in backends and name != ONCE:
                yield str(name), number
    if ONCE in backends:
        yield ONCE, 1


def best_of_most(path: pathlib.Path, configuration: str) -> str | None:
    """Return the built-in backend that is the fastest in most cases of a record."""
    known = record.load(path)
    cases = CONFIGURATIONS[configuration].cases
    names = [record.best_peer(record.medians(known, case.name)) for case in cases]
    found = [name for name in names if name is not None]
    return max(found, key=found.count, default=None)


def run(command: Sequence[str], log: pathlib.Path, limit_s: float) -> int | None:
    """Run a command in a process group of its own: its exit code, None where it was stopped.

    limit_s: seconds before it and all its children are killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, process_group=0)
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # schedulers outlive a crash
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code


def last_error(text: str) -> str:
    """Return the last error of a log that says why, else its last line."""
    printed = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [found[1] for line in printed if (found := ERROR.search(line))]
    causes = [error for error in errors if not any(word in error for word in CONSEQUENCES)]
    return (causes or errors or printed or ["it printed nothing"])[-1][:LINE]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configuration", choices=CONFIGURATIONS)
    parser.add_argument("--backends", nargs="+", help="default: ours and those of the engine")
    parser.add_argument("--rounds", type=int, default=2, help="processes of ours and of the best")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all processes")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of one process")
    parser.add_argument("--again", action="store_true", help="time what is recorded, too")
    parser.add_argument("--out", type=pathlib.Path, help="default: a file in benchmarks/results")
    parser.add_argument("--logs", type=pathlib.Path, default=LOGS)
    args = parser.parse_args()
    name, start = args.configuration, time.monotonic()
    configuration = CONFIGURATIONS[name]
    path = args.out or record.default_path(device(), name)
    versions = record.installed()
    backends = args.backends or [OURS, *configuration.peers]
    for backend, number in processes(backends, args.rounds, lambda: best_of_most(path, name)):
        if number > 1 and not record.is_timed(record.load(path), backend):
            continue  # it failed in the first round
        known = {} if args.again else record.load(path)
        if not record.missing(known, configuration.cases, backend, number, versions):
            print(f"{name} {backend} round {number}: recorded (--again repeats it)", flush=True)
            continue
        left_s = args.seconds - (time.monotonic() - start)
        if left_s <= 0:
            print(f"{name} {backend} round {number}: not started, no seconds left", flush=True)
            continue
        log = args.logs / f"{name}.{backend}.{number}.log"
        module = "benchmarks.engines.sglang_steps"
        command = [sys.executable, "-m", module, name, backend, "--round", str(number)]
        command += ["--out", str(path)]
        if args.again:
            record.drop(path, backend, number)
        began = time.monotonic()
        code = run(command, log, min(args.limit, left_s))
        took_s = time.monotonic() - began
        if code is None and left_s < args.limit:
            print(f"{name} {backend} round {number}: stopped, no seconds left", flush=True)
            continue
        # SGLang exits with 0 where its scheduler died, so that the exit code says nothing
        untimed = record.missing(record.load(path), configuration.cases, backend, number, versions)
        error = last_error(log.read_text(errors="replace")) if untimed else ""
        if code is None:
            error = f"killed after {args.limit:.0f} s: {error}"
        print(f"{name} {backend} round {number}: {took_s:.0f} s {error}", flush=True)
        for case in untimed:
            row = {
                "backend": backend,
                "case": case.name,
                "round": number,
                "error": error,
                "date": datetime.date.today().isoformat(),
                "versions": versions,
            }
            record.merge(path, row, configuration=name)
    print(table.section(record.load(path)), end="")
    return 0


def device() -> str:
    """Return the GPU's name without a CUDA context in this process."""
    code = "import torch; print(torch.cuda.get_device_name())"
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()


if __name__ == "__main__":
    sys.exit(main())
