"""Entry points become a Registry; a broken plugin is recorded with its error, never fatal."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pluggy
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import attn_core
from attn_core import hookspecs
from attn_core.capabilities import BackendSpec, Family
from attn_core.declared import pin_problem, problem
from attn_core.errors import UnknownBackendError, near
from attn_core.libraries import Pin, installed

BUILTIN = "attn-core"
SLOW_SECONDS = 1.0  # a plugin whose rows take longer is reported: every `attn` command waits for it
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
class SlowPlugin:
    """A plugin that works, but whose rows took `seconds` to load."""

    name: str
    origin: Origin
    seconds: float

    def __str__(self) -> str:
        return (
            f"its rows took {self.seconds:.1f} s to load, and every command waits for them; import "
            "torch and kernel libraries in the module that `create` names, not beside the rows"
        )


@dataclass(frozen=True)
class Registry:
    """Every declared backend by (family, name), its origin, and what is broken or slow."""

    backends: Mapping[Key, BackendSpec] = field(default_factory=dict)
    origins: Mapping[Key, Origin] = field(default_factory=dict)
    broken: tuple[BrokenPlugin, ...] = ()
    pins: tuple[Pin, ...] = ()
    slow: tuple[SlowPlugin, ...] = ()

    def family(self, family: Family) -> tuple[BackendSpec, ...]:
        """Return the backends of one family, by name."""
        return tuple(spec for key, spec in sorted(self.backends.items()) if key[0] == family)

    def get(self, name: str, family: Family = "softmax") -> BackendSpec:
        """Return a backend by name or alias. Raises UnknownBackendError with the near names."""
        return self._named(name, (family,))

    def find(self, name: str) -> BackendSpec:
        """Return a backend of either family by name or alias, softmax first; raises as get."""
        return self._named(name, ("softmax", "linear"))

    def _named(self, name: str, families: tuple[Family, ...]) -> BackendSpec:
        specs = [spec for family in families for spec in self.family(family)]
        called = [s for s in specs if s.name == name] + [s for s in specs if name in s.aliases]
        if called:
            return called[0]
        broken = [b for b in self.broken if b.name == name]
        if broken:
            raise UnknownBackendError(
                f"backend {name!r} is broken in {broken[0].origin}: {broken[0].error}"
            )
        known = [n for spec in specs for n in (spec.name, *spec.aliases)]
        kind = "linear attention backend" if families == ("linear",) else "backend"
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

    A plugin that fails to import, whose hook raises or returns something else, that registers
    nothing, takes a name or an alias that is taken, or whose distribution requires another
    attn-core is listed in `broken` with its error. What it prints goes to stderr.
    Of two plugins with one name the built-in wins, else the alphabetically first distribution.
    One that takes longer than SLOW_SECONDS is taken in and listed in `slow`.
    """
    points: Iterable[EntryPoint] = (
        importlib.metadata.entry_points(group=hookspecs.GROUP)
        if entry_points is None
        else entry_points
    )
    backends: dict[Key, BackendSpec] = {}
    origins: dict[Key, Origin] = {}
    names: dict[Key, Origin] = {}  # and aliases
    broken: list[BrokenPlugin] = []
    pins: list[Pin] = []
    slow: list[SlowPlugin] = []
    found = {(o.distribution, p.name, p.value): (o, p) for p in points for o in [_origin(p)]}
    for _, (origin, point) in sorted(
        found.items(), key=lambda item: (item[0][0] != BUILTIN, item[0])
    ):
        start = time.perf_counter()
        try:
            _check_contract(point)
            with contextlib.redirect_stdout(sys.stderr):  # stdout is the command's
                specs, more = _call(point.load(), point.name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin's code may raise anything
            text = f"{type(error).__name__}: {error}"
            broken.append(BrokenPlugin(point.name, origin, text, traceback.format_exc()))
            continue
        if (seconds := time.perf_counter() - start) > SLOW_SECONDS:
            slow.append(SlowPlugin(point.name, origin, seconds))
        pins += more
        for spec in specs:
            wrong = problem(spec) or _taken(spec, names)
            if wrong is not None:
                name = str(getattr(spec, "name", point.name))
                broken.append(BrokenPlugin(name, origin, wrong))
                continue
            key = (spec.family, spec.name)
            backends[key], origins[key] = spec, origin
            names |= {(spec.family, n): origin for n in (spec.name, *spec.aliases)}
    return Registry(
        dict(sorted(backends.items())), origins, tuple(broken), tuple(pins), tuple(slow)
    )


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
    backends = _results(manager.hook.attn_register_backends)
    if backends is None:
        raise TypeError("no hook attn_register_backends: mark a function with @hookimpl")
    pins = _results(manager.hook.attn_register_pins) or []
    if not backends and not pins:
        raise ValueError("registers nothing: attn_register_backends returned an empty list")
    wrong = next((text for text in map(pin_problem, pins) if text), None)
    if wrong is not None:
        raise TypeError(f"a pin is wrong: {wrong}")
    return backends, pins


def _results(hook: pluggy.HookCaller) -> list[Any] | None:
    """Return what the implementations of a hook list, None where there is none."""
    implementations, results = hook.get_hookimpls(), hook()
    if not implementations:
        return None
    if len(results) < len(implementations):  # pluggy leaves None out
        raise TypeError("a hook returned None, not a list")
    for result in results:
        if not isinstance(result, list | tuple):
            raise TypeError(f"a hook returned {type(result).__name__}, not a list")
    return [item for result in results for item in result]


def _taken(spec: BackendSpec, names: Mapping[Key, Origin]) -> str | None:
    """Say which name or alias of a backend another one has."""
    for what, name in [("name", spec.name), *(("alias", alias) for alias in spec.aliases)]:
        if (owner := names.get((spec.family, name))) is not None:
            return f"the {what} {name!r} is taken by {owner}; rename this one"
    return None
