"""A record of one configuration on one device: rows by backend, case and round, in JSON.

Run: `python -m benchmarks.engines.record INTO.json FROM.json …` puts rows of other runs into a
record; they take the place of the same backend's, case's and round's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from attn_core.costs.store import locked

from benchmarks.engines.configurations import ALONE, CONFIGURATIONS, FIXED, OURS, Case
from benchmarks.results import slug

LIBRARIES = {  # of an engine
    "sglang": ("sglang", "torch", "triton", "sglang-kernel", "flashinfer-python", "attn-core"),
    "vllm": ("vllm", "torch", "triton", "flashinfer-python", "attn-core"),
}
Row = dict[str, Any]  # backend, case, round, date, versions, and ms with spread_ms, or error


def file_name(device: str, configuration: str) -> str:
    """Return <engine>.<device>.<configuration>.json."""
    engine = CONFIGURATIONS[configuration].engine
    return f"{engine}.{slug(device)}.{configuration.removeprefix(engine + '-')}.json"


def load(path: pathlib.Path) -> dict[str, Any]:
    """Read a record, {} where there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Write a record, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=2) + "\n")
    part.replace(path)


def merge(path: pathlib.Path, row: Row, **head: Any) -> None:
    """Put a row in the place of the one of the same backend, case and round.

    head: what the record says of itself: configuration, device. Runs on several GPUs may write to
    one record: each takes in what is there, under a lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        record = load(path)
        rows = [old for old in record.get("rows", []) if key(old) != key(row)]
        save(path, {**record, **head, "rows": sorted([*rows, row], key=key)})


def join(path: pathlib.Path, other: pathlib.Path, without: Collection[str] = ()) -> int:
    """Put the rows of another run into a record, and return how many.

    without: parts of errors that say nothing of the backend, such as "no seconds left": rows that
    have them stay out. Raises ValueError where the other is of another configuration or device.
    """
    record, result = load(path), load(other)
    for name in ("configuration", "device"):
        if record.get(name, result[name]) != result[name]:
            raise ValueError(f"{other}: {name} {result[name]}; {path} has {record[name]}")
    rows = [r for r in result["rows"] if not any(part in r.get("error", "") for part in without)]
    for row in rows:
        merge(path, row, configuration=result["configuration"], device=result["device"])
    return len(rows)


def drop(path: pathlib.Path, backend: str, number: int, cases: Iterable[Case]) -> None:
    """Forget a round of a backend in these cases."""
    gone = {(case.name, backend, number) for case in cases}
    if not path.exists():
        return
    with locked(path):
        record = load(path)
        save(path, {**record, "rows": [r for r in record.get("rows", []) if key(r) not in gone]})


def key(row: Row) -> tuple[str, str, int]:
    """Return what a row is of."""
    return row["case"], row["backend"], row["round"]


def missing(
    record: Mapping[str, Any],
    cases: Iterable[Case],
    backend: str,
    number: int,
    versions: Mapping[str, str | None],
) -> list[Case]:
    """Return the cases that this round of a backend has not recorded with these versions.

    A case that failed is recorded too.
    """
    recorded = {key(row) for row in record.get("rows", []) if row["versions"] == versions}
    return [case for case in cases if (case.name, backend, number) not in recorded]


def installed(engine: str = "sglang") -> dict[str, str | None]:
    """Return the versions of an engine and of what runs attention in it."""
    versions: dict[str, str | None] = {}
    for name in LIBRARIES[engine]:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def medians(record: Mapping[str, Any], case: str) -> dict[str, float]:
    """Return milliseconds by backend: the median over the rounds of a case."""
    rounds: dict[str, list[float]] = {}
    for row in record.get("rows", []):
        if row["case"] == case and "ms" in row:
            rounds.setdefault(row["backend"], []).append(row["ms"])
    return {backend: statistics.median(values) for backend, values in rounds.items()}


def split(backend: str) -> tuple[str, str, str]:
    """Return the engine's backend, what decodes in it and what runs the draft model.

    "attn_core:triton" is attn_core that decodes and verifies by triton, "attn_core/fa3" leaves the
    draft model to fa3. "" is the backend's own choice, and the same backend for the draft model.
    "attn_core+alone" and "attn_core+fixed" are attn_core, too.
    """
    name, _, draft = backend.removesuffix(ALONE).removesuffix(FIXED).partition("/")
    name, _, inside = name.partition(":")
    return name, inside, draft


def is_timed(record: Mapping[str, Any], backend: str) -> bool:
    """Say whether a backend has a time in any case."""
    return any("ms" in row for row in record.get("rows", []) if row["backend"] == backend)


def best_peer(times: Mapping[str, float]) -> str | None:
    """Return the fastest of the engine's own backends, None where none was timed."""
    peers = {backend: ms for backend, ms in times.items() if split(backend)[0] != OURS}
    return min(peers, key=peers.__getitem__, default=None)


def speedup(times: Mapping[str, float]) -> float | None:
    """Return the best built-in time / our time, None where one of them is missing."""
    best = best_peer(times)
    return times[best] / times[OURS] if best and OURS in times else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("into", type=pathlib.Path)
    parser.add_argument("others", nargs="+", type=pathlib.Path)
    parser.add_argument("--without", nargs="*", default=["killed after"], help="errors left out")
    args = parser.parse_args(arguments)
    for other in args.others:
        print(f"{join(args.into, other, args.without)} rows of {other} are in {args.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
