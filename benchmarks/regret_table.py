"""What choices lose, from the recorded rounds: summary and Markdown; torch-free."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.plots import time
from benchmarks.results import FOLDER

Record = dict[str, Any]
AUTOMATIC, RULE = "automatic", "rule"
MEAN, WORST, FEWEST = 0.02, 0.08, 60  # what may be lost, and over how many shapes at least
SHOWN = 8
_HEAD = """
## {device}: what the automatic choice loses

{date}, {versions}. Recorded in `{file}` by `python -m benchmarks.regret`: {judged} of {drawn}
shapes, drawn from the seed "{seed}". The choice is by {profile}; the rule is the order of the
rows' priorities. A loss is the time of the chosen backend over that of the best of {backends},
less 1. One round of measurements names the best and the other judges, both ways round{again}.
{graphs} by the device's time alone, other passes take no less than the host does.
Limits: {mean} in the geometric mean and {worst} at worst, over at least {fewest} shapes: **{met}**.
The quartiles of a round lie {spread} apart (median), and the medians of the two rounds {drift}.

"""


def cost(times: Sequence[float], shape: Record) -> float:
    """Return what selection weighs: a call that is in no graph takes no less than the host does."""
    return times[0] if captured(shape) else max(times[0], times[3])


def captured(shape: Record) -> bool:
    """Say whether a CUDA graph replays the pass: records without the field are of decode alone."""
    return bool(shape.get("captured", shape["phase"] in ("decode", "mla", "fp8")))


def losses(shape: Record, who: str) -> list[float] | None:
    """Return what a choice loses by each round, against the best of the other round.

    0.03: it takes 3 % longer. Infinite: the choice is wrong or fails here. None: nothing is timed.
    """
    rounds = shape.get("rounds") or []
    if len(rounds) < 2 or not rounds[0]:
        return None
    name, result = shape[who]["backend"], []
    once = (shape.get("slower") or {}).get(name, math.inf)  # timed before the rounds alone
    for names, judges in (rounds, rounds[::-1]):
        best = min(names, key=lambda n: cost(names[n], shape))
        own = cost(judges[name], shape) if name in judges else once
        result.append(own / cost(judges[best], shape) - 1)
    return result


def loss(shape: Record, who: str) -> float | None:
    """Return the geometric mean of both rounds' losses."""
    result = losses(shape, who)
    return None if result is None else mean(result)


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean of losses: 0.02 is 2 %."""
    return math.exp(statistics.fmean(math.log1p(x) for x in values)) - 1


def summary(shapes: Sequence[Record]) -> Record:
    """Return the numbers of a run: losses by choice, and the spread of the rounds."""
    able = [s for s in shapes if losses(s, AUTOMATIC) is not None]
    result: Record = {
        "judged": len(able),
        "by_profile": sum(s[AUTOMATIC]["by"] == "profile" for s in able),
        "not_judged": {
            s["name"]: s.get("error", "no backend is right") for s in shapes if s not in able
        },
    }
    for who in (AUTOMATIC, RULE):
        lost = {s["name"]: loss(s, who) or 0.0 for s in able}
        worst = max(lost, key=lambda n: lost[n], default=None)
        result[who] = {
            "mean": _finite(mean(lost.values())) if able else None,
            "worst": _finite(lost[worst]) if worst else None,
            "worst_shape": worst,
            "failed": sum(math.isinf(x) for x in lost.values()),
        }
    times = [(s["rounds"][i][n]) for s in able for i in (0, 1) for n in s["rounds"][i]]
    drifts = [abs(s["rounds"][1][n][0] / t[0] - 1) for s in able for n, t in s["rounds"][0].items()]
    result["spread"] = statistics.median((t[2] - t[1]) / t[0] for t in times) if times else None
    result["drift"] = statistics.median(drifts) if drifts else None
    own = result[AUTOMATIC]
    small = own["mean"] is not None and own["mean"] <= MEAN and own["worst"] <= WORST
    result["met"] = bool(small and not own["failed"] and len(able) >= FEWEST)
    return result


def _finite(value: float) -> float | None:
    """Return the number as JSON can have it; a choice that fails has no loss, and is counted."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def regret_sections() -> str:
    """Write all records of regret, a section each."""
    paths = sorted(FOLDER.glob("regret.*.json"))
    files = ((p.name, json.loads(p.read_text())) for p in paths if ".profile." not in p.name)
    return "".join(page(*file) for file in files)


def page(file: str, report: Record) -> str:
    """Write the tables of one record as Markdown."""
    shapes, result = report["shapes"], summary(report["shapes"])
    able = [s for s in shapes if losses(s, AUTOMATIC) is not None]
    env = report["environment"]
    profile = report["profile"]
    kind = "profile measured here" if profile["source"] == "measured" else "shipped profile"
    source = f"a {kind} ({profile['points']} points)"
    if profile["note"]:
        source += f" ({profile['note']})"
    if report.get("gpus"):
        source += f", over {report['gpus']} GPUs of one host, each with a part of the shapes,"
    if report.get("chosen"):
        source += f", chosen again on {report['chosen'][:10]} over the times of that run,"
    text = _HEAD.format(
        device=env.get("device", "CPU"),
        date=report["date"][:10],
        versions=", ".join(f"{k} {v}" for k, v in env.items() if k != "device"),
        file=file,
        seed=report["seed"],
        drawn=report["drawn"],
        judged=result["judged"],
        profile=f"{source} {_chosen_by(result)}",
        backends=", ".join(dict.fromkeys(n for s in able for n in s["rounds"][0])),
        again=_again(able),
        graphs=_graphs(able),
        mean=f"{MEAN:.0%}",
        worst=f"{WORST:.0%}",
        fewest=FEWEST,
        met="met" if result["met"] else "not met",
        spread=_percent(result["spread"]),
        drift=_percent(result["drift"]),
    )
    rows = [["phase", "shapes", "by profile", "automatic, mean", "worst", "rule, mean", "worst"]]
    rows.append(["---"] + ["---:"] * 6)
    for phase in (*dict.fromkeys(s["phase"] for s in able), None):
        part = [s for s in able if phase in (None, s["phase"])]
        rows.append(_line(phase or "all", part))
    text += _table(rows) + "\nThe shapes in which the automatic choice loses most:\n\n"
    worst = sorted(able, key=lambda s: -(loss(s, AUTOMATIC) or 0.0))[:SHOWN]
    rows = [["shape", "automatic", "loss", "rule", "loss", "times, µs (first round)"], ["---"] * 6]
    for s in worst:
        cells = [(s[who]["backend"], _percent(loss(s, who))) for who in (AUTOMATIC, RULE)]
        times = ", ".join(f"{n} {time(t[0])}" for n, t in s["rounds"][0].items())
        rows.append([s["name"], *cells[0], *cells[1], times])
    text += _table(rows)
    return text + _left_out(shapes, result)


def _chosen_by(result: Record) -> str:
    """Say in how many shapes the profile chose, and what chose in the others, if there are any."""
    n, others = result["by_profile"], result["judged"] - result["by_profile"]
    return f"in {n} shapes, by priority in the others" if others else f"in all {n} shapes"


def _graphs(able: Sequence[Record]) -> str:
    """Say which passes CUDA graphs replay: older records judged verification as if none did."""
    verifies = [s for s in able if s["phase"].endswith("verify")]
    all_of_them = all(map(captured, verifies))
    return "Decode and verification count" if verifies and all_of_them else "Decode counts"


def _again(able: Sequence[Record]) -> str:
    """Say how many shapes were timed in more than two rounds; older records have two of each."""
    rounds = [s["rounds_timed"] for s in able if "rounds_timed" in s]
    if not rounds:
        return ""
    more = sum(n > 2 for n in rounds)
    return f"; both are the last of up to {max(rounds)}, as {more} shapes' first two disagreed"


def _line(name: str, part: Sequence[Record]) -> list[str]:
    result = summary(part)
    cells = [name, str(result["judged"]), str(result["by_profile"])]
    for who in (AUTOMATIC, RULE):
        one = result[who]
        failed = f"{one['failed']} fail" if one["failed"] else ""
        cells += [failed or _percent(one["mean"]), failed or _percent(one["worst"])]
    return cells


def _left_out(shapes: Sequence[Record], report: Record) -> str:
    """Say which shapes are not judged, and which backends took too few."""
    lines = [f"- not judged: {name}: {why}" for name, why in report["not_judged"].items()]
    names = dict.fromkeys(n for s in shapes for n in (*s.get("refused", ()), *s.get("bad", ())))
    none = []
    for name in names:
        refused = [s["refused"][name] for s in shapes if name in s.get("refused", ())]
        bad = [s["bad"][name] for s in shapes if name in s.get("bad", ())]
        if len(refused) == len(shapes):
            none.append(name)
            continue
        message = [f"refuses {len(refused)} shapes, first: {refused[0]}"] if refused else []
        message += [f"fails in {len(bad)}, first: {bad[0]}"] if bad else []
        lines.append(f"- {name} {'; '.join(message)}")
    lines += [f"- take none of these shapes here: {', '.join(none)}"] if none else []
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def _percent(value: float | None) -> str:
    return "-" if value is None else "fails" if math.isinf(value) else f"{100 * value:.1f} %"


def _table(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
