"""A profile: what backends were measured to cost in one environment, validated like any input."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple, get_args

from packaging.version import InvalidVersion, Version

from attn_core.costs.shapes import Form, Pass, PassPhase
from attn_core.errors import UsageError
from attn_core.formatting import printable
from attn_core.spec.kinds import Kind

SCHEMA = 1
MOST_POINTS, MOST_TEXT, MOST_COUNT = 100_000, 300, 1 << 40
MOST_US = 1e12
TIE = 0.01  # medians that differ by less are equally fast


class Cost(NamedTuple):
    """Measured microseconds of one call of one layer.

    us: the device's time, the median of all rounds; low, high: the quartiles. On a CPU it is the
    time of the call. host_us: the least that the host takes until the call returns. plan_us: the
    least that planning the pass takes, on the host or the device, whichever is longer; None: not
    measured.
    """

    us: float
    low: float
    high: float
    host_us: float
    plan_us: float | None = None


class Key(NamedTuple):
    """What was measured. row: a digest of the backend's row; "" stands for any row of it."""

    backend: str
    row: str
    form: Form
    size: Pass


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured in one environment.

    environment: what the times depend on, name → version or text: the device, its driver, torch,
    the libraries, attn-core. costs: by what was measured. bad: backends that failed the check
    against the reference, with the reason; they have no costs there. date: ISO 8601, of the newest.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[Key, Cost] = field(default_factory=dict)
    bad: Mapping[Key, str] = field(default_factory=dict)
    date: str = ""

    @property
    def device(self) -> str | None:
        """The driver's name for the chip."""
        return self.environment.get("device")

    @property
    def digest(self) -> str:
        """A short digest of what was measured, "" for nothing."""
        if not self.costs and not self.bad:
            return ""
        data = self.to_json()
        text = json.dumps([data["series"], data["bad"]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def merged(self, other: Profile) -> Profile:
        """Return both; where both measured, `other`."""
        costs, bad = {**self.costs, **other.costs}, {**self.bad, **other.bad}
        for key in other.bad:
            costs.pop(key, None)
        for key in other.costs:
            bad.pop(key, None)
        return replace(
            self,
            environment=other.environment or self.environment,
            costs=costs,
            bad=bad,
            date=max(self.date, other.date),
        )

    def certain(self) -> tuple[int, int]:
        """Count the passes whose fastest backend is certain, and all that have two or more.

        It is certain where the quartiles of the two fastest do not overlap, or where their medians
        differ by less than TIE, as either may then be taken.
        """
        passes: dict[tuple[Form, Pass], list[Cost]] = {}
        for key, cost in self.costs.items():
            passes.setdefault((key.form, key.size), []).append(cost)
        pairs = [
            sorted(costs, key=lambda x: x[:4])[:2] for costs in passes.values() if len(costs) > 1
        ]
        sure = sum(a.high < b.low or b.us <= (1 + TIE) * a.us for a, b in pairs)
        return sure, len(pairs)

    def age(self, now: datetime.datetime) -> str:
        """Say how old the newest measurement is: "3 days old"; now: with a time zone."""
        try:
            then = datetime.datetime.fromisoformat(self.date)
        except ValueError:
            return "of an unknown date"
        if then.tzinfo is None:  # a file may leave the zone out
            then = then.replace(tzinfo=datetime.UTC)
        hours = max(0.0, (now - then).total_seconds() / 3600)
        number, unit = (hours / 24, "day") if hours >= 24 else (hours, "hour")
        return f"{number:.0f} {unit}{'' if round(number) == 1 else 's'} old"

    def differences(self, here: Mapping[str, str | None]) -> list[str]:
        """Say where another environment differs; a name that only one has is a difference too.

        A version of None in `here` is unknown, and agrees with any.
        """
        differences = []
        for name in sorted({*self.environment, *here}):
            then, now = self.environment.get(name), here.get(name, "")
            if now is not None and not _same(then or "", now):
                differences.append(f"{name} was {then or 'absent'} and is {now or 'absent'}")
        return differences

    def to_json(self) -> dict[str, Any]:
        """Return plain data; points of one backend, row, form and kind of pass share an entry."""
        series: dict[tuple[Any, ...], list[list[float]]] = {}
        for (name, row, form, size), cost in self.costs.items():
            point = [*_sizes(size), *(x for x in cost if x is not None)]
            series.setdefault((name, row, form, size.phase, size.drafts, size.tree), []).append(
                [round(x, 3) for x in point]
            )
        return {
            "schema": SCHEMA,
            "date": self.date,
            "environment": dict(self.environment),
            "series": [
                _series(key) | {"points": sorted(points)}
                for key, points in sorted(series.items(), key=str)
            ],
            "bad": [
                _series((*key[:3], key.size.phase, key.size.drafts, key.size.tree))
                | {"size": list(_sizes(key.size)), "reason": why}
                for key, why in sorted(self.bad.items(), key=str)
            ],
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """Return the profile of plain data. Raises UsageError, which names what is wrong."""
        _need(isinstance(data, dict), "a JSON object", data)
        _need(data.get("schema") == SCHEMA, f"schema {SCHEMA}", data.get("schema"))
        environment = data.get("environment")
        _need(isinstance(environment, dict), "an environment", environment)
        for name, value in environment.items():
            _text(f"environment {name}", value)
        series, bad = data.get("series"), data.get("bad", [])
        for name, value in (("series", series), ("bad", bad)):
            _need(isinstance(value, list), f"{name}: a list", value)
        costs = dict(_costs(series))
        refused = {}
        for entry in bad:
            backend, row, form, kind = _entry(entry)
            size = _size(entry.get("size"), kind)
            refused[Key(backend, row, form, size)] = _text("reason", entry.get("reason"))
        date = _text("date", data.get("date"))
        return cls(environment=environment, costs=costs, bad=refused, date=date)


def _same(then: str, now: str) -> bool:
    """Say whether two texts are equal, as versions too: 3.6 is 3.6.0."""
    try:
        return then == now or Version(then) == Version(now)
    except InvalidVersion:
        return False


def _series(key: tuple[Any, ...]) -> dict[str, Any]:
    name, row, form, phase, drafts, tree = key
    shown = {f.name: getattr(form, f.name) for f in fields(form)}
    shown = {k: v for k, v in shown.items() if v not in (None, False)}
    entry = {"backend": name, "row": row, "form": shown, "phase": phase}
    return entry | ({"drafts": drafts, "tree": tree} if phase == "verify" else {})


def _sizes(size: Pass) -> tuple[int, int, int, int]:
    return size.requests, size.kv_tokens, size.longest, size.queries


def _costs(series: list[Any]) -> Iterator[tuple[Key, Cost]]:
    total = 0
    for entry in series:
        backend, row, form, kind = _entry(entry)
        points = entry.get("points")
        _need(isinstance(points, list), "points: a list", points)
        total += len(points)
        _need(total <= MOST_POINTS, f"at most {MOST_POINTS} points", total)
        for point in points:
            listed = isinstance(point, list) and len(point) in (8, 9)
            _need(listed, "a point of 8 or 9 numbers", point)
            times = point[4:]
            for value in times:
                number = isinstance(value, int | float) and not isinstance(value, bool)
                _need(number and math.isfinite(value), "a finite number of µs", value)
            cost = Cost(*map(float, times))
            _need(0 < cost.low <= cost.us <= cost.high <= MOST_US, "0 < low <= µs <= high", times)
            for value in times[3:]:  # of the host, of a plan
                _need(0 <= value <= MOST_US, "µs of the host, and of a plan, of 0 or more", value)
            yield Key(backend, row, form, _size(point[:4], kind)), cost


def _entry(entry: Any) -> tuple[str, str, Form, dict[str, Any]]:
    _need(isinstance(entry, dict), "an entry: an object", entry)
    phase, form = entry.get("phase"), entry.get("form")
    _need(phase in get_args(PassPhase), "phase: prefill, decode or verify", phase)
    _need(isinstance(form, dict), "form: an object", form)
    drafts, tree = entry.get("drafts", 0), entry.get("tree", False)
    _need(type(drafts) is int and 0 <= drafts <= MOST_COUNT, "drafts: a number", drafts)
    _need(isinstance(tree, bool), "tree: true or false", tree)
    kind = {"phase": phase, "drafts": drafts, "tree": tree}
    return _text("backend", entry.get("backend")), _text("row", entry.get("row")), _form(form), kind


def _form(data: dict[str, Any]) -> Form:
    defaults = asdict(Form())
    for name, value in data.items():
        _need(name in defaults, f"a form of {', '.join(defaults)}", name)
        if isinstance(defaults[name], bool):
            _need(isinstance(value, bool), f"{name}: true or false", value)
        elif isinstance(defaults[name], str):
            _text(name, value)
        else:
            _need(type(value) is int and 0 < value <= MOST_COUNT, f"{name}: above 0", value)
    form = Form(**data)
    _need(form.kind in get_args(Kind), "a kind of attention", form.kind)
    return form


def _size(data: Any, kind: dict[str, Any]) -> Pass:
    _need(isinstance(data, list) and len(data) == 4, "a size of 4 numbers", data)
    for value in data:
        whole = isinstance(value, int | float) and not isinstance(value, bool)
        _need(whole and value in range(1, MOST_COUNT), "a whole number of 1 or more", value)
    n, tokens, longest, queries = map(int, data)
    _need(n <= tokens <= n * longest, "requests <= KV tokens <= requests · longest", data)
    _need(longest <= tokens, "longest <= KV tokens", data)
    _need(queries <= tokens, "queries <= KV tokens", data)
    return Pass(requests=n, kv_tokens=tokens, longest=longest, queries=queries, **kind)


def _text(name: str, value: Any) -> str:
    _need(isinstance(value, str) and len(value) <= MOST_TEXT, f"{name}: a short text", value)
    return str(value)


def _need(ok: bool, expected: str, value: Any) -> None:
    if not ok:
        raise UsageError(f"expected {expected}, found {printable(repr(value)[:80])}")
