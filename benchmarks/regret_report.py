"""A run's report of regret as a file: begun once, and added to by every process of the run."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attn_core.costs import store
from attn_core.selection.ranking import shipped_profile

from benchmarks.cases import Case
from benchmarks.regret_table import AUTOMATIC, RULE, Record, summary

if TYPE_CHECKING:
    from benchmarks.regret import Field

SCHEMA = 1


def said(shape: Record) -> str:
    """Say in a line what became of a shape."""
    if "error" in shape:
        return str(shape["error"])
    times = (f"{name} {cost[0]:g}" for name, cost in shape["rounds"][0].items())
    names = (f"{key} {shape[key]['backend']}" for key in (AUTOMATIC, RULE))
    bad = (f"{name} is bad: {why}" for name, why in shape["bad"].items())
    return "; ".join((", ".join(names), " ".join(times) + " µs", *bad))


def begun(
    args: argparse.Namespace, field: Field, env: dict[str, str], drawn: Sequence[Case],
    path: pathlib.Path,
) -> Record:  # fmt: skip
    """Return the report so far: the file's, if it is of the same run, else a new one."""
    profile, note = field.profile, ""
    if profile is None:
        profile, note = shipped_profile(field.device, field.registry, field.libraries)
    points = json.dumps(profile.to_json()).encode()
    requested = {
        "schema": SCHEMA,
        "seed": args.seed,
        "drawn": len(drawn),
        "environment": env,
        "backends": list(field.backends),
        "profile": {
            "source": "shipped" if field.profile is None else "measured",
            "points": len(profile.costs),
            "note": note,
            "digest": hashlib.sha256(points).hexdigest()[:12],
        },
        **({"gpus": args.part[1]} if args.part[1] > 1 else {}),
    }
    if path.exists():
        result: Record = json.loads(path.read_text())
        differs = [name for name, value in requested.items() if result.get(name) != value]
        if not differs:
            return result
        raise SystemExit(f"{path} is of another run ({', '.join(differs)}); name another file")
    return {**requested, "date": "", "shapes": []}


def added(path: pathlib.Path, report: Record, shape: Record, drawn: Sequence[Case]) -> Record:
    """Add a shape to the file's report, which other parts of the run may write to, and return it.

    Shapes stay in the order in which they were drawn.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    order = {case.name: i for i, case in enumerate(drawn)}
    with store.locked(path):
        result: Record = json.loads(path.read_text()) if path.exists() else report
        shapes = sorted([*result["shapes"], shape], key=lambda s: order[s["name"]])
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        result = {**result, "date": date, "shapes": shapes, "summary": summary(shapes)}
        write(path, result)
    return result


def write(path: pathlib.Path, report: Record) -> None:
    """Replace the file at once, so that an interruption leaves a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    part.replace(path)
