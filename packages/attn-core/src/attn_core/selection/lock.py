"""A lock: a decision with its reasons and all that it followed from, to be kept in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, cast, get_args

from packaging.utils import canonicalize_name

from attn_core.costs.profile import Profile
from attn_core.costs.shapes import row_key
from attn_core.costs.workload import Workload
from attn_core.errors import UsageError
from attn_core.formatting import printable
from attn_core.plugins.dependencies import alternatives
from attn_core.selection.result import LINEAR_ROLES, Selection, Verdict, label
from attn_core.spec.kinds import Family, Phase, Role
from attn_core.spec.requirements import Requirements

SCHEMA = 1
MOST_ENTRIES, MOST_TEXT, MOST_NUMBER = 4096, 10_000, 1e15
# verify and draft follow the phase that --speculative-attention-mode names
ROLES: tuple[Role, ...] = ("prefill", "decode", "encode", *LINEAR_ROLES)
BY_PASS = "by pass: "
POOL = ("page size", "kv cache", "layout")
PLACES: Mapping[str, tuple[Family, Phase]] = {
    label(role): (
        "linear" if role in LINEAR_ROLES else "softmax",
        Phase.DECODE if role == "linear_verify" else Phase(role.removeprefix("linear_")),
    )
    for role in ROLES
}
Place = tuple[Family, Phase, str]


class Chosen(NamedTuple):
    """What was chosen, and why."""

    choice: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A backend as it was weighed for a phase.

    row: the digest of its nearest row. us: its expected µs, None if it was not measured.
    libraries: the distributions that the row may take. refused: why it does not fit.
    """

    row: str = ""
    priority: int = 0
    us: float | None = None
    libraries: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A decision, what was asked, and all that it followed from.

    asked: the requirements and the workload, name → text. environment: name → version or text.
    profile: the digest of the measured costs, "" without any. decision: role, or property of the
    pool → what was chosen. weighed: every backend of each phase. conflicts: pairs that rank higher
    and cannot share a cache.
    """

    asked: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    profile: str = ""
    decision: Mapping[str, Chosen] = field(default_factory=dict)
    weighed: Mapping[Place, Weighed] = field(default_factory=dict)
    conflicts: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        selection: Selection,
        environment: Mapping[str, str],
        profile: Profile,
        workload: Workload,
    ) -> Lock:
        """Return the lock of a selection that was made in this environment, by this profile."""
        decision = {
            label(role): Chosen(_name(c.backend, c.row.sub_backend), c.reason)
            for role in ROLES
            if (c := selection.roles.get(role)) is not None
        }
        for role, choices in selection.alternatives.items():
            names = ", ".join(c.backend for c in choices)
            if role in ROLES:
                decision[BY_PASS + label(role)] = Chosen(names, "measured fastest of some passes")
        if selection.page_size is not None:
            pool = (str(selection.page_size), selection.kv_cache_dtype, selection.layout)
            reasons = (selection.page_size_reason, "", "")
            decision |= {n: Chosen(*x) for n, *x in zip(POOL, pool, reasons, strict=True)}
        return cls(
            asked=_requirement_texts(selection.requirements, workload),
            environment=environment,
            profile=profile.digest,
            decision=decision,
            weighed={
                (v.spec.family, v.phase, v.spec.name): _weighed(v) for v in selection.verdicts
            },
            conflicts=selection.conflicts,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data, the content of a file."""
        return {
            "schema": SCHEMA,
            "asked": dict(self.asked),
            "decision": {name: c._asdict() for name, c in self.decision.items()},
            "environment": dict(self.environment),
            "profile": self.profile,
            "conflicts": list(self.conflicts),
            "weighed": [
                {"family": family, "phase": phase.value, "backend": name}
                | {f.name: getattr(w, f.name) for f in fields(w)}
                | {"libraries": list(w.libraries), "refused": list(w.refused)}
                for (family, phase, name), w in self.weighed.items()
            ],
        }

    @classmethod
    def from_json(cls, data: Any) -> Lock:
        """Return the lock of plain data. Raises UsageError, which names what is wrong."""
        _need(isinstance(data, dict), "a JSON object", data)
        _need(_is_value(data.get("schema"), int, SCHEMA), f"schema {SCHEMA}", data.get("schema"))
        decision = {}
        for name, entry in _object("decision", data.get("decision")).items():
            _need(name.removeprefix(BY_PASS) in PLACES or name in POOL, "a decision", name)
            entry = _object(f"decision {name}", entry)
            decision[name] = Chosen(
                *(_text(f"{x} of {name}", entry.get(x)) for x in Chosen._fields)
            )
        return cls(
            asked=_text_dict("asked", data.get("asked")),
            environment=_text_dict("environment", data.get("environment")),
            profile=_text("profile", data.get("profile")),
            decision=decision,
            weighed=dict(map(_entry, _list("weighed", data.get("weighed")))),
            conflicts=_text_list("conflicts", data.get("conflicts")),
        )


def _name(backend: str, sub_backend: str) -> str:
    return f"{backend} ({sub_backend})" if sub_backend else backend


def _weighed(verdict: Verdict) -> Weighed:
    names = (w.name for group in verdict.row.requires for w in alternatives(group))
    return Weighed(
        row=row_key(verdict.row),
        priority=verdict.row.priority,
        us=None if verdict.expected is None else round(verdict.expected.us, 3),
        libraries=tuple(sorted({str(canonicalize_name(n)) for n in names})),
        refused=tuple(map(str, verdict.reasons)),
    )


def _requirement_texts(needs: Requirements, workload: Workload) -> dict[str, str]:
    """Return what was asked as texts: each layer, and every other value."""
    texts = {f"layer {i}": _value_text(x) for i, x in enumerate(needs.layers)}
    for f in fields(needs):
        if f.name not in ("layers", "assumptions") and getattr(needs, f.name) is not None:
            texts[f.name] = _value_text(getattr(needs, f.name))
    return texts | {"workload": _value_text(workload)}


def _value_text(value: Any) -> str:
    """Write a value; of a dataclass the fields by which two are compared, unless plain."""
    if not is_dataclass(value):
        return str(value)
    texts = []
    for f in (f for f in fields(value) if f.compare):
        plain = f.default if f.default_factory is MISSING else f.default_factory()
        if f.name == "kind" or getattr(value, f.name) != plain:
            texts.append(f"{f.name} {_value_text(getattr(value, f.name))}")
    return ", ".join(texts) or "the default"


def _entry(entry: Any) -> tuple[Place, Weighed]:
    entry = _object("an entry of weighed", entry)
    family, phase, us = (entry.get(x) for x in ("family", "phase", "us"))
    _need(isinstance(family, str) and family in get_args(Family), "a family", family)
    _need(isinstance(phase, str) and phase in [p.value for p in Phase], "a phase", phase)
    _need(us is None or (_number(us) and us >= 0), "us: 0 or more, or null", us)
    priority = entry.get("priority")
    _need(_number(priority) and type(priority) is int, "priority: a whole number", priority)
    place = (cast("Family", family), Phase(phase), _text("backend", entry.get("backend")))
    return place, Weighed(
        row=_text("row", entry.get("row")),
        priority=priority,
        us=us,
        libraries=_text_list("libraries", entry.get("libraries")),
        refused=_text_list("refused", entry.get("refused")),
    )


def _is_value(value: Any, kind: type, expected: Any) -> bool:
    return type(value) is kind and value == expected


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MOST_NUMBER and math.isfinite(value)


def _text(name: str, value: Any) -> str:
    _need(isinstance(value, str) and len(value) <= MOST_TEXT, f"{name}: a text", value)
    return str(value)


def _object(name: str, value: Any) -> dict[str, Any]:
    fits = isinstance(value, dict) and len(value) <= MOST_ENTRIES
    _need(fits and all(len(key) <= MOST_TEXT for key in value), f"{name}: an object", value)
    return cast("dict[str, Any]", value)


def _text_dict(name: str, value: Any) -> dict[str, str]:
    return {key: _text(f"{name} {key}", text) for key, text in _object(name, value).items()}


def _list(name: str, value: Any) -> list[Any]:
    fits = isinstance(value, list) and len(value) <= MOST_ENTRIES
    _need(fits, f"{name}: a list of at most {MOST_ENTRIES}", value)
    return cast("list[Any]", value)


def _text_list(name: str, value: Any) -> tuple[str, ...]:
    return tuple(_text(name, text) for text in _list(name, value))


def _need(ok: bool, expected: str, value: Any) -> None:
    if not ok:
        raise UsageError(
            f"expected {printable(expected, 200)}, found {printable(repr(value)[:80])}"
        )
