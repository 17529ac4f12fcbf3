"""Start servers beside one another on the same GPUs, and time them in turns.

`benchmarks.engines.run --together` calls it. A server whose turn it is not is stopped: it takes
memory, and neither a core nor the GPU. Every server runs in every round; each round has the
reverse order of the one before.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.engines import record, table
from benchmarks.engines.configurations import CONFIGURATIONS, OURS, named
from benchmarks.engines.memory import MOST, gigabytes
from benchmarks.engines.processes import Settings, Spare, kill, last_error, note_error, stopped

Names = tuple[str, str]  # configuration, backend


@dataclass(frozen=True, eq=False)
class Server:
    """A process of benchmarks.engines.steps. key: configuration, backend."""

    key: Names
    process: subprocess.Popen[bytes]
    log: pathlib.Path


def groups(
    servers: Mapping[str, Sequence[str]], sizes: Mapping[str, float], gpu: float
) -> Iterator[list[Names]]:
    """Yield which servers start together: those of whole configurations, as many as fit.

    servers: backends by configuration. sizes: gigabytes of a server. Where the servers of one
    configuration do not fit beside one another, each is a group of its own.
    """
    group: list[Names] = []
    taken = 0.0
    for name, backends in servers.items():
        size = sizes[name] * len(backends)
        if group and taken + size > MOST * gpu:
            yield group
            group, taken = [], 0.0
        if size > MOST * gpu:
            yield from ([(name, backend)] for backend in backends)
            continue
        group, taken = [*group, *((name, backend) for backend in backends)], taken + size
    if group:
        yield group


def turns(group: Sequence[Names], rounds: int) -> Iterator[tuple[Names, int]]:
    """Yield (server, round), configuration by configuration; even rounds run backwards."""
    for name in dict.fromkeys(name for name, _ in group):
        of_it = [key for key in group if key[0] == name]
        for number in range(1, rounds + 1):
            yield from ((key, number) for key in (of_it if number % 2 else of_it[::-1]))


def waits(process: subprocess.Popen[bytes], end: float) -> bool | None:
    """Return True once a process has stopped for its next turn, False where it ended.

    None: neither by `end`, of time.monotonic().
    """
    while True:
        if process.poll() is not None:
            return False
        if os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG) is not None:
            return True
        if time.monotonic() >= end:
            return None
        time.sleep(0.05)


def time_group(
    servers: Sequence[Server],
    rounds: int,
    settings: Settings,
    failed: Callable[[Names, int, str], None],
) -> None:
    """Time all rounds of servers that are starting, and end them.

    failed: called with the server, the round and what went wrong; the server is ended by then.
    """
    began = time.monotonic()
    alive = {server.key: server for server in servers}

    def ready(key: Names, number: int, since: float) -> bool:
        """Wait for a server to stop by itself; end it and say why where it does not."""
        server = alive[key]
        state = waits(server.process, min(since + settings.limit_s, settings.end))
        if state:
            return True
        kill(alive.pop(key).process)
        text = server.log.read_text(errors="replace")
        if state is None and since + settings.limit_s > settings.end:
            print(f"{' '.join(key)} round {number}: {stopped(text)}", flush=True)
            return False
        error = last_error(text)
        hung = f"killed after {settings.limit_s:.0f} s: " if state is None else ""
        failed(key, number, hung + error)
        return False

    try:
        for key in [*alive]:
            ready(key, 1, began)
        print(f"{len(alive)} servers together after {time.monotonic() - began:.0f} s", flush=True)
        for key, number in turns([*alive], rounds):
            if key not in alive:  # it failed in an earlier turn
                continue
            since = time.monotonic()
            if since >= settings.end:
                print(f"{' '.join(key)} round {number}: not timed, no seconds left", flush=True)
                continue
            os.killpg(alive[key].process.pid, signal.SIGCONT)
            if ready(key, number, since):
                took = f"{time.monotonic() - since:.0f} s"
                print(f"{' '.join(key)} round {number}: {took}", flush=True)
    finally:
        for server in servers:
            kill(server.process)


def run(
    paths: Mapping[str, pathlib.Path],
    backends: Sequence[str] | None,
    rounds: int,
    command: Sequence[str],
    settings: Settings,
    gpu: float,
) -> None:
    """Time what is missing of configurations. paths: their records. gpu: its gigabytes.

    command: of a process that imports the engine and waits for its arguments.
    """
    missing: dict[str, list[str]] = {}
    sizes = {}
    for name, path in paths.items():
        cases = named(name, settings.cases)
        sizes[name] = gigabytes(replace(CONFIGURATIONS[name], cases=(*cases,))) if cases else 0.0
        requested = [*(backends or [OURS, *CONFIGURATIONS[name].peers])]
        if settings.again:
            _drop(path, requested, rounds, name, settings)
        missing[name] = [
            b for b in requested if _missing(path, name, b, range(1, rounds + 1), settings)
        ]
        if not missing[name]:
            print(f"{name}: recorded (--again repeats it)", flush=True)
        elif len(missing[name]) > 1 and sizes[name] * len(missing[name]) > MOST * gpu:
            print(
                f"{name}: {len(missing[name])} servers of {sizes[name]:.0f} GB do not fit into "
                f"{MOST:.0%} of {gpu:.0f} GB; they run one after the other",
                flush=True,
            )
    planned = [*groups({n: b for n, b in missing.items() if b}, sizes, gpu)]
    spares = [Spare(command) for _ in range(max(map(len, planned), default=0))]
    try:
        for group in planned:
            if time.monotonic() >= settings.end:
                print(f"{group}: not started, no seconds left", flush=True)
                continue
            servers = [
                _start(key, i, paths[key[0]], rounds, spares[i], settings)
                for i, key in enumerate(group)
            ]

            def failed(key: Names, number: int, error: str) -> None:
                """Record what a server leaves untimed in its round."""
                (name, backend), path = key, paths[key[0]]
                untimed = _missing(path, name, backend, [number], settings)
                cases = [case for case in named(name, settings.cases) if case.name in untimed]
                note_error(path, name, cases, backend, number, error, settings.versions)
                print(f"{name} {backend} round {number}: {error}", flush=True)

            time_group(servers, rounds, settings, failed)
            for name in dict.fromkeys(name for name, _ in group):
                print(table.section(record.load(paths[name])), end="", flush=True)
    finally:
        for spare in spares:
            spare.stop()


def _missing(
    path: pathlib.Path, name: str, backend: str, rounds: Iterable[int], settings: Settings
) -> set[str]:
    """Return the names of the cases that some round of a backend has not recorded."""
    known, cases = record.load(path), named(name, settings.cases)
    return {
        case.name
        for number in rounds
        for case in record.missing(known, cases, backend, number, settings.versions)
    }


def _drop(
    path: pathlib.Path, backends: Sequence[str], rounds: int, name: str, settings: Settings
) -> None:
    for backend in backends:
        for number in range(1, rounds + 1):
            record.drop(path, backend, number, named(name, settings.cases))


def _start(
    key: Names, number: int, path: pathlib.Path, rounds: int, spare: Spare, settings: Settings
) -> Server:
    """Start one server; it stops by itself before its first round."""
    name, backend = key
    log = settings.logs / f"{name}.{backend.replace('/', '+')}.together.log"
    out = ["--out", str(path), "--turns", str(rounds), "--number", str(number)]
    arguments = [name, backend, *out, *settings.costs, "--cases", *settings.cases]
    return Server(key, spare.start(arguments, log), log)
