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
        return {name: reason for name, reason in self.verdicts.items() if reason}

    def to_json(self) -> dict[str, Any]:
        """Return plain data, the content of a file."""
        rows = [
            {"family": family, "backend": name, "row": row, "failed": reason}
            for (family, name, row), reason in sorted(self.verdicts.items())
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
            family, name, row, reason = (
                _text(x, entry.get(x)) for x in ("family", "backend", "row", "failed")
            )
            _need(family in get_args(Family), "a family", family)
            verdicts[cast("Family", family), name, row] = reason
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
    shortened = {name: printable(why, MOST_TEXT - 50) for name, why in verdicts.items()}
    probes = Probes(verdicts=shortened, date=now)
    path = store.own_path(environment(registry, device), FOLDER)
    path.parent.mkdir(parents=True, exist_ok=True)
    store.put(path, json.dumps(probes.to_json(), indent=1) + "\n")
    return probes


def probed(registry: Registry, device: Device | None = None) -> Registry:
    """Return the registry with what failed its probe here, which select() then avoids.

    device: this machine's; None asks the drivers. Raises UsageError for a file that is spoilt.
    """
    probes = read(registry, device)
    if probes is None or not probes.failed:
        return registry
    device_text = f"on {chip(device or probe_device())}"
    return replace(
        registry, failed={n: f"{device_text}: {reason}" for n, reason in probes.failed.items()}
    )


def findings(registry: Registry, device: Device) -> Iterator[Finding]:
    """Say what became of the probes on this machine, and name each row that failed."""
    fix = "attn doctor --probe"
    try:
        probes = read(registry, device)
    except UsageError as error:
        yield Finding("probes", "unreadable", "problem", str(error), fix)
        return
    if probes is None:
        yield Finding("probes", "none", "note", "whether the backends run was not tried", fix)
        return
    passed = f"{len(probes.verdicts) - len(probes.failed)} rows"
    yield Finding("probes", passed, "ok", f"passed, on {probes.date}")
    for (_, name, row), reason in probes.failed.items():
        subject, text = f"{name}, row {row}", f"not selected: {reason}"
        yield Finding(subject, "failed", "problem", text, f"attn check {name}")


def _text(name: str, value: Any) -> str:
    _need(isinstance(value, str) and len(value) <= MOST_TEXT, f"{name}: a text", value)
    return cast("str", value)


def _need(ok: bool, expected: str, value: Any) -> None:
    if not ok:
        raise UsageError(
            f"expected {expected}, found {printable(repr(value)[:80])}; `attn doctor --probe` "
            "writes it anew"
        )
