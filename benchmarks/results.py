"""What a run found, as plain data: written as JSON, read back for tables; torch-free."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

FOLDER = pathlib.Path(__file__).parent / "results"
PATTERN = "attention.*.json"
SCHEMA = 1
REFUSES, SKIPPED = "refuses ", "skipped: "  # how the error of such an entry begins


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One contestant on one case. No `us`: `error` says why; `wrong`: measured, never the best.

    tflops counts the causal work, gbs the K and V that are read; roofline is the floor's share of
    the time; graph_us the replay of a captured graph; prepare_s the plan and the first call.
    """

    name: str
    us: float | None = None
    p20: float | None = None
    p80: float | None = None
    reps: int | None = None
    tflops: float | None = None
    gbs: float | None = None
    roofline: float | None = None
    rel_err: float | None = None
    wrong: bool = False
    error: str | None = None
    prepare_s: float | None = None
    graph_us: float | None = None
    graph_error: str | None = None

    @property
    def counts(self) -> bool:
        return self.us is not None and not self.wrong

    @property
    def skipped(self) -> bool:
        """It takes the shape, and was not timed: whether it is the best is not known."""
        return (self.error or "").startswith(SKIPPED)

    @property
    def refuses(self) -> bool:
        """It declares that it does not take the shape."""
        return (self.error or "").startswith(REFUSES)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One case: its shape, the least that it must move and compute, and everyone's entry.

    commit: of an earlier run that the report's went on with; None: the report's own.
    """

    name: str
    phase: str
    shape: Mapping[str, Any]
    kv_bytes: int
    bytes: int
    flops: int
    floor_us: float
    tolerance: float
    ours: Entry
    peers: tuple[Entry, ...] = ()
    commit: str | None = None

    @property
    def best_peer(self) -> Entry | None:
        """The fastest peer whose result is right."""
        right = [(e.us, e.name, e) for e in self.peers if e.us is not None and e.counts]
        return min(right)[2] if right else None

    @property
    def untimed(self) -> tuple[str, ...]:
        """The peers that take this shape and were not timed."""
        return tuple(e.name for e in self.peers if e.skipped)

    @property
    def ratio(self) -> float | None:
        """Our time over the best peer's: below 1 ours is faster. None where one is missing.

        None too where a peer was not timed, which could be the best. Of the digits that a file
        keeps, so that it is the same before and after.
        """
        ours, best = _digits(self.ours.us), _digits(self.best_peer.us if self.best_peer else None)
        if ours is None or best is None or self.ours.wrong or self.untimed:
            return None
        return ours / best


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run. versions: distribution → version; ceilings: copy_gbs and matmul_tflops."""

    suite: str
    date: str
    device: str
    versions: Mapping[str, str | None]
    ceilings: Mapping[str, float]
    command: str = ""
    cases: tuple[Measured, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def ranked(self) -> list[tuple[float, Measured]]:
        """The cases that have a ratio, the worst first."""
        ranked = [(m.ratio, m) for m in self.cases if m.ratio is not None]
        return sorted(ranked, key=lambda pair: (-pair[0], pair[1].name))

    @property
    def completed(self) -> Report:
        """The same report, in which each case names every peer that its phase has in it.

        A peer that is named in one case of a phase and not in another was not timed there.
        """
        cases = []
        for m in self.cases:
            here = names([m])
            others = tuple(
                Entry(name=name, error=SKIPPED + "timed in other cases of this phase alone")
                for name in names(c for c in self.cases if c.phase == m.phase)
                if name not in here
            )
            cases.append(replace(m, peers=m.peers + others))
        return replace(self, cases=tuple(cases))

    def join(self, path: pathlib.Path, order: Sequence[str]) -> None:
        """Write the report with the cases that other parts of the same run have written there.

        order: the names of all cases. Another run's file is replaced.
        """
        from attn_core.costs.store import locked  # whoever reads results has no attn_core

        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            there, full = load(path) if path.exists() else self, self
            run = ("suite", "device", "versions", "command")
            if all(getattr(there, name) == getattr(self, name) for name in run):
                own = {m.name for m in self.cases}
                cases = (*self.cases, *(m for m in there.cases if m.name not in own))
                cases = tuple(sorted(cases, key=lambda m: order.index(m.name)))
                full = replace(
                    there, cases=cases, notes=tuple(dict.fromkeys((*there.notes, *self.notes)))
                )
            full.save(path)

    def save(self, path: pathlib.Path) -> None:
        """Write the report; best peers and ratios are added for whoever reads the JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json())

    def to_json(self) -> str:
        """Return what a file of results holds, the cases completed."""
        full = self.completed
        data = asdict(full) | {"schema": SCHEMA, "worst": None}
        data["cases"] = [
            _lean(asdict(m))
            | {
                "ours": _lean(asdict(m.ours)),
                "peers": [_lean(asdict(e)) for e in m.peers],
                "best_peer": m.best_peer.name if m.best_peer else None,
                "ratio": _digits(m.ratio),
            }
            for m in full.cases
        ]
        if full.ranked:
            ratio, case = full.ranked[0]
            data["worst"] = {"case": case.name, "ratio": _digits(ratio), "of": len(full.ranked)}
        return json.dumps(data, indent=1) + "\n"


def load(path: pathlib.Path) -> Report:
    """Read a report back, its cases completed. Raises ValueError for another schema."""
    data = json.loads(path.read_text())
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path.name}: schema {data.get('schema')} (reads {SCHEMA}); measure anew")
    cases = [
        Measured(
            **{k: v for k, v in m.items() if k not in ("ours", "peers", "best_peer", "ratio")},
            ours=Entry(**m["ours"]),
            peers=tuple(Entry(**e) for e in m["peers"]),
        )
        for m in data["cases"]
    ]
    plain = {k: v for k, v in data.items() if k not in ("schema", "worst", "cases", "notes")}
    return Report(**plain, cases=tuple(cases), notes=tuple(data["notes"])).completed


def load_all(folder: pathlib.Path = FOLDER) -> dict[str, Report]:
    """Read every report of a folder: file name → report, by name."""
    return {path.name: load(path) for path in sorted(folder.glob(PATTERN))}


def default_path(device: str, suite: str) -> pathlib.Path:
    """Return results/attention.<device>.<suite>.json."""
    return FOLDER / f"attention.{slug(device)}.{suite}.json"


def command_of(module: str, arguments: Sequence[str]) -> str:
    """Return the command line that repeats a run, without where it writes and which part it is."""
    places = ("--out", "--part")
    joined = tuple(f"{option}=" for option in places)
    left = [x for x in arguments if x != "--resume" and not x.startswith(joined)]
    for option in places:
        while option in left:
            at = left.index(option)
            del left[at : at + 2]
    return shlex.join(["python", "-m", module, *left])


def slug(device: str) -> str:
    """Return a device's name as a file's name has it."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _lean(record: dict[str, Any]) -> dict[str, Any]:
    """Drop what is absent and keep four digits of what was measured."""
    return {
        k: _digits(v) if isinstance(v, float) else v
        for k, v in record.items()
        if v is not None and v is not False
    }


def names(cases: Iterable[Measured]) -> list[str]:
    """List the peers that appear in any of the cases, in order of appearance."""
    return list(dict.fromkeys(e.name for m in cases for e in m.peers))
