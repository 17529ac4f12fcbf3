"""Write what a plugin ships as a measured profile: `python -m benchmarks.profile`.

It reads the records of `benchmarks.attention` of one device, and sums for each task the time of
each backend over the shapes that all of them were timed in. Long shapes weigh most, as they do in
serving. `--check` fails if the file is another.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

from benchmarks.results import FOLDER, Measured, Report, load

PROFILES = pathlib.Path(__file__).parent.parent / "packages/attn-nvidia/src/attn_nvidia/profiles"
RECORDS = ("attention.nvidia-h200.grid.json", "attention.nvidia-h200.all.json")
BACKENDS = ("fa3", "flashinfer", "triton")  # the others take too few of these shapes
TASKS = ("prefill", "decode", "decode fp8", "verify chain", "verify tree")


def task(case: Measured) -> str:
    """Name what a case does as selection does: "decode fp8", "verify tree"."""
    if case.phase == "fp8":
        return "decode fp8"
    if case.phase == "verify":
        return "verify tree" if case.shape["tree"] else "verify chain"
    return case.phase


def times(case: Measured) -> dict[str, float]:
    """Return backend → µs; of a library's several kernels the fastest, which is its wrapper's."""
    found: dict[str, float] = {}
    for entry in (case.ours, *case.peers):
        name = entry.name.partition("-")[0]
        if entry.counts and entry.us is not None and name in BACKENDS:
            found[name] = min(entry.us, found.get(name, entry.us))
    return found


def costs(cases: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Return task → backend → its time over the fastest one's, in all shapes that both took."""
    found: dict[str, dict[str, float]] = {}
    for name in TASKS:
        timed = [times(case) for case in cases if task(case) == name]
        able = [b for b in BACKENDS if 2 * sum(b in t for t in timed) > len(timed)]
        common = [t for t in timed if all(b in t for b in able)]
        total = {b: sum(t[b] for t in common) for b in able}
        if total:
            fastest = min(total.values())
            found[name] = {b: round(us / fastest, 3) for b, us in sorted(total.items())}
    return found


def profile(reports: Mapping[str, Report]) -> dict[str, object]:
    """Return the profile of one device, from its records by file name."""
    (device,) = {report.device for report in reports.values()}
    by_name = {case.name: case for report in reports.values() for case in report.cases}
    newest = max(reports.values(), key=lambda report: report.date)
    return {
        "device": device,
        "date": newest.date,
        "records": sorted(reports),
        "versions": dict(newest.versions),
        "costs": costs(list(by_name.values())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    path = PROFILES / "nvidia-h200.json"
    text = json.dumps(profile({name: load(FOLDER / name) for name in RECORDS}), indent=1) + "\n"
    if args.check:
        same = path.exists() and path.read_text() == text
        print(f"{path.name} is {'what' if same else 'not what'} the records say")
        return 0 if same else 1
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
