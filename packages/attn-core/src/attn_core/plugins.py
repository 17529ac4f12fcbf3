"""Entry points become a Registry; a broken plugin is recorded with its error, never fatal."""

from __future__ import annotations

import importlib.metadata
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import pluggy
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import attn_core
from attn_core import hookspecs
from attn_core.capabilities import BackendSpec, Capabilities, Family, Kind, Phase
from attn_core.errors import UnknownBackendError, near
from attn_core.libraries import Pin, alternatives, installed

BUILTIN = "attn-core"
Key = tuple[Family, str]


class Distribution(Protocol):
    """What load_plugins reads of an installed distribution."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def requires(self) -> list[str] | None: ...


class EntryPoint(Protocol):
    """What load_plugins reads of an entry point."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def dist(self) -> Any: ...  # a Distribution or None
    def load(self) -> Any: ...


@dataclass(frozen=True)
class Origin:
    """Where a backend comes from."""

    distribution: str
    version: str
    module: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin, or one backend of it, that could not be taken in; `details` is the traceback."""

    name: str
    origin: Origin
    error: str
    details: str = ""


@dataclass(frozen=True)
class Registry:
    """Every declared backend by (family, name), where each comes from, and what is broken."""

    backends: Mapping[Key, BackendSpec] = field(default_factory=dict)
    origins: Mapping[Key, Origin] = field(default_factory=dict)
    broken: tuple[BrokenPlugin, ...] = ()
    pins: tuple[Pin, ...] = ()

    def family(self, family: Family) -> tuple[BackendSpec, ...]:
        """Return the backends of one family, by name."""
        return tuple(spec for key, spec in sorted(self.backends.items()) if key[0] == family)

    def get(self, name: str, family: Family = "softmax") -> BackendSpec:
        """Return a backend by name or alias. Raises UnknownBackendError with the near names."""
        for spec in self.family(family):
            if name == spec.name or name in spec.aliases:
                return spec
        broken = [b for b in self.broken if b.name == name]
        if broken:
            raise UnknownBackendError(
                f"backend {name!r} is broken in {broken[0].origin}: {broken[0].error}"
            )
        known = [s.name for s in self.family(family)]
        kind = "linear attention backend" if family == "linear" else "backend"
        raise UnknownBackendError(f"unknown {kind} {name!r}: {near(name, known)}")

    def requires(self) -> tuple[str, ...]:
        """Return every requirement group that any row names."""
        rows = (row for spec in self.backends.values() for row in spec.capabilities)
        return tuple(sorted({group for row in rows for group in row.requires}))

    def installed_libraries(self) -> dict[str, str | None]:
        """Look up the libraries that the rows require, importing none of them."""
        return installed(self.requires())


def load_plugins(entry_points: Iterable[EntryPoint] | None = None) -> Registry:
    """Load every entry point of the group "attn_core", one by one.

    A plugin that fails to import, whose hook raises or returns something else, that duplicates a
    name, or whose distribution requires another attn-core is listed in `broken` with its error.
    Of two plugins with one name the built-in wins, else the alphabetically first distribution.
    """
    points: Iterable[EntryPoint] = (
        importlib.metadata.entry_points(group=hookspecs.GROUP)
        if entry_points is None
        else entry_points
    )
    backends: dict[Key, BackendSpec] = {}
    origins: dict[Key, Origin] = {}
    broken: list[BrokenPlugin] = []
    pins: list[Pin] = []
    found = {(o.distribution, p.name, p.value): (o, p) for p in points for o in [_origin(p)]}
    for _, (origin, point) in sorted(
        found.items(), key=lambda item: (item[0][0] != BUILTIN, item[0])
    ):
        try:
            _check_contract(point)
            specs, more = _call(point.load(), point.name)
        except (Exception, SystemExit) as error:  # a plugin's code may raise anything
            text = f"{type(error).__name__}: {error}"
            broken.append(BrokenPlugin(point.name, origin, text, traceback.format_exc()))
            continue
        pins += more
        for spec in specs:
            problem = _problem(spec)
            key = (spec.family, spec.name) if problem is None else None
            if key in origins:
                problem = f"the name {spec.name!r} is taken by {origins[key]}; rename this one"
            if problem is not None or key is None:
                name = str(getattr(spec, "name", point.name))
                broken.append(BrokenPlugin(name, origin, problem or "no name"))
                continue
            backends[key], origins[key] = spec, origin
    return Registry(dict(sorted(backends.items())), origins, tuple(broken), tuple(pins))


def _origin(point: EntryPoint) -> Origin:
    if point.dist is None:
        return Origin("unknown", "?", point.value)
    return Origin(canonicalize_name(point.dist.name), point.dist.version, point.value)


def _check_contract(point: EntryPoint) -> None:
    for text in (point.dist.requires if point.dist is not None else None) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if canonicalize_name(requirement.name) != BUILTIN or (
            marker is not None and not marker.evaluate({"extra": ""})
        ):
            continue
        if not requirement.specifier.contains(attn_core.__version__, prereleases=True):
            raise ImportError(
                f"requires attn-core{requirement.specifier}, {attn_core.__version__} is installed; "
                f"pip install 'attn-core{requirement.specifier}' or another version of the plugin"
            )


def _call(module: Any, name: str) -> tuple[list[Any], list[Pin]]:
    manager = pluggy.PluginManager(hookspecs.GROUP)
    manager.add_hookspecs(hookspecs)
    manager.register(module, name)  # refuses a hook with arguments that do not exist
    backends = manager.hook.attn_register_backends()
    if not backends:
        raise TypeError("no hook attn_register_backends: mark a function with @hookimpl")
    pins = manager.hook.attn_register_pins()
    for result in (*backends, *pins):
        if not isinstance(result, list | tuple):
            raise TypeError(f"a hook returned {type(result).__name__}, not a list")
    all_pins = [pin for result in pins for pin in result]
    wrong = [pin for pin in all_pins if not isinstance(pin, Pin)]
    if wrong:
        raise TypeError(f"attn_register_pins returned a {type(wrong[0]).__name__}, not a Pin")
    return [spec for result in backends for spec in result], all_pins


def _problem(spec: Any) -> str | None:
    """Say what is wrong with a declaration, value by value: it comes from foreign code."""
    if not isinstance(spec, BackendSpec):
        return f"attn_register_backends returned a {type(spec).__name__}, not a BackendSpec"
    if not isinstance(spec.name, str) or not spec.name:
        return f"name {spec.name!r} is no text"
    if not isinstance(spec.create, str) or spec.create.count(":") != 1:
        return f"create {spec.create!r} is not 'module:Class'"
    if not spec.capabilities:
        return "no rows: a backend declares at least one Capabilities"
    for row in spec.capabilities:
        if not isinstance(row, Capabilities):
            return f"a row is a {type(row).__name__}, not Capabilities"
        if row.kind not in get_args(Kind):
            return f"kind {row.kind!r} ({near(row.kind, get_args(Kind))})"
        if not row.phases <= set(Phase):
            return f"phases {set(row.phases)} are no Phase"
        if not isinstance(row.priority, int):
            return f"priority {row.priority!r} is no int"
        for group in row.requires:
            try:
                alternatives(group)
            except Exception as error:
                return f"requires {group!r}: {error}"
    families = {row.family for row in spec.capabilities}
    return "rows of both families, softmax and linear" if len(families) > 1 else None
