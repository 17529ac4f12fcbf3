"""What became of the probes of rows on this machine: kept by environment, read by the selection."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

from attn_core.costs import store
from attn_core.costs.environment import chip, environment
from attn_core.errors import UsageError
from attn_core.formatting import printable
from attn_core.plugins.registry import Registry, RowName
from attn_core.spec.device import Device, probe_device
from attn_core.spec.kinds import Family
from attn_core.tools.finding import Finding

SCHEMA = 1
FOLDER = "probes"
MOST_ROWS, MOST_TEXT = 4096, 1000


@dataclass(frozen=True, kw_only=True)
class Probes:
    """The verdicts of one environment: row → why its probe failed, "" where it passed.

    date: ISO 8601, of the last probe.
    """

    verdicts: Mapping[RowName, str] = field(default_factory=dict)
    date: str = ""

    @property
    def failed(self) -> dict[RowName, str]:
        """The rows whose probe failed, with the reason."""
        return {name: why for name, why in self.verdicts.items() if why}

    def to_json(self) -> dict[str, Any]:
        """Return plain data, the content of a file."""
        rows = [
            {"family": family, "backend": name, "row": row, "failed": why}
            for (family, name, row), why in sorted(self.verdicts.items())
        ]
        return {"schema": SCHEMA, "date": self.date, "rows": rows}

    @classmethod
    def from_json(cls, data: Any) -> Probes:
        """Return the verdicts of plain data. Raises UsageError, which names what is wrong."""
        _need(isinstance(data, dict) and data.get("schema") == SCHEMA, f"schema {SCHEMA}", data)
        rows = data.get("rows")
        _need(isinstance(rows, list) and len(rows) <= MOST_ROWS, "rows: a list", rows)
        verdicts = {}
        for entry in rows:
            _need(isinstance(entry, dict), "an object for each row", entry)
            family, name, row, why = (
                _text(x, entry.get(x)) for x in ("family", "backend", "row", "failed")
            )
            _need(family in get_args(Family), "a family", family)
            verdicts[cast("Family", family), name, row] = why
        return cls(verdicts=verdicts, date=_text("date", data.get("date")))


def read(registry: Registry, device: Device | None = None) -> Probes | None:
    """Return what `attn doctor --probe` found on this machine, None if it never ran.

    device: this machine's; None asks the drivers. Raises UsageError for a file that is spoilt.
    """
    if not store.folder(FOLDER).exists():  # usual: spares to look all versions up
        return None
    path = store.own_path(environment(registry, device), FOLDER)
    return store.parsed(path, "probes", Probes.from_json) if path.exists() else None


def write(verdicts: Mapping[RowName, str], registry: Registry, device: Device) -> Probes:
    """Keep verdicts for this environment in the place of older ones. Raises OSError."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    cut = {name: printable(why, MOST_TEXT - 50) for name, why in verdicts.items()}
    kept = Probes(verdicts=cut, date=now)
    path = store.own_path(environment(registry, device), FOLDER)
    path.parent.mkdir(parents=True, exist_ok=True)
    store.put(path, json.dumps(kept.to_json(), indent=1) + "\n")
    return kept


def probed(registry: Registry, device: Device | None = None) -> Registry:
    """Return the registry with what failed its probe here, which select() then avoids.

    device: this machine's; None asks the drivers. Raises UsageError for a file that is spoilt.
    """
    found = read(registry, device)
    if found is None or not found.failed:
        return registry
    where = f"on {chip(device or probe_device())}"
    return replace(registry, failed={n: f"{where}: {why}" for n, why in found.failed.items()})


def findings(registry: Registry, here: Device) -> Iterator[Finding]:
    """Say what became of the probes on this machine, and name each row that failed."""
    fix = "attn doctor --probe"
    try:
        found = read(registry, here)
    except UsageError as error:
        yield Finding("probes", "unreadable", "problem", str(error), fix)
        return
    if found is None:
        yield Finding("probes", "none", "note", "whether the backends run was not tried", fix)
        return
    passed = f"{len(found.verdicts) - len(found.failed)} rows"
    yield Finding("probes", passed, "ok", f"passed, on {found.date}")
    for (_, name, row), why in found.failed.items():
        what, text = f"{name}, row {row}", f"not selected: {why}"
        yield Finding(what, "failed", "problem", text, f"attn check {name}")


def _text(name: str, value: Any) -> str:
    _need(isinstance(value, str) and len(value) <= MOST_TEXT, f"{name}: a text", value)
    return cast("str", value)


def _need(ok: bool, expected: str, value: Any) -> None:
    if not ok:
        raise UsageError(
            f"expected {expected}, found {printable(repr(value)[:80])}; `attn doctor --probe` "
            "writes it anew"
        )
