"""Load plugins into a Registry. A broken plugin is recorded with its error and is never fatal."""

from __future__ import annotations

import importlib.metadata
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pluggy
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import attn_core
from attn_core.errors import UnknownBackendError
from attn_core.formatting import near, printable
from attn_core.plugins import hookspecs
from attn_core.plugins.dependencies import Libraries, Pin, installed, parse_libraries
from attn_core.plugins.streams import stdout_to_stderr
from attn_core.plugins.validation import pin_problem, problem, too_many
from attn_core.spec.capabilities import BackendSpec
from attn_core.spec.kinds import Family

BUILTIN = "attn-core"
ERROR_LENGTH = 1000  # characters of an error
SLOW_SECONDS = 1.0  # a plugin whose rows take longer is reported: every `attn` command waits for it
Key = tuple[Family, str]
RowName = tuple[Family, str, str]  # of a backend, and the digest of one of its rows


class Distribution(Protocol):
    """The attributes of an installed distribution that load_plugins reads."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def requires(self) -> list[str] | None: ...


class EntryPoint(Protocol):
    """The attributes of an entry point that load_plugins reads."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def dist(self) -> Any: ...  # a Distribution or None
    def load(self) -> Any: ...


@dataclass(frozen=True)
class Origin:
    """The plugin that a backend comes from."""

    distribution: str
    version: str
    module: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin, or one of its backends, that could not be loaded; `details` is the traceback."""

    name: str
    origin: Origin
    error: str
    details: str = ""


@dataclass(frozen=True)
class SlowPlugin:
    """A working plugin whose rows took `seconds` to load."""

    name: str
    origin: Origin
    seconds: float

    def __str__(self) -> str:
        return (
            f"its rows took {self.seconds:.1f} s to load, and every command waits for them; import "
            "torch and kernel libraries in the module that `create` names, not with the rows"
        )


@dataclass(frozen=True)
class Registry:
    """All declared backends by (family, name), their origins, and the broken or slow plugins."""

    backends: Mapping[Key, BackendSpec] = field(default_factory=dict)
    origins: Mapping[Key, Origin] = field(default_factory=dict)
    broken: tuple[BrokenPlugin, ...] = ()
    pins: tuple[Pin, ...] = ()
    slow: tuple[SlowPlugin, ...] = ()
    own_libraries: Libraries = field(default_factory=dict)  # that plugins compiled, and are here
    failed: Mapping[RowName, str] = field(default_factory=dict)  # rows whose probe failed here

    def family(self, family: Family) -> tuple[BackendSpec, ...]:
        """Return the backends of one family, sorted by name."""
        return tuple(spec for key, spec in sorted(self.backends.items()) if key[0] == family)

    def get(self, name: str, family: Family = "softmax") -> BackendSpec:
        """Return a backend by name or alias.

        Raises UnknownBackendError, which suggests similar names.
        """
        return self._named(name, (family,))

    def find(self, name: str) -> BackendSpec:
        """Return a backend of either family by name or alias, softmax first; raises like `get`."""
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
        names = [n for spec in specs for n in (spec.name, *spec.aliases)]
        kind = "linear attention backend" if families == ("linear",) else "backend"
        raise UnknownBackendError(f"unknown {kind} {name!r}: {near(name, names)}")

    def requires(self) -> tuple[str, ...]:
        """Return all requirement groups of all rows."""
        rows = (row for spec in self.backends.values() for row in spec.capabilities)
        return tuple(sorted({group for row in rows for group in row.requires}))

    def installed_libraries(self) -> dict[str, str | None]:
        """Look up the versions here of torch and libraries that rows, or known_bad, name."""
        known_bad = {x for s in self.backends.values() for k in s.known_bad for x in k.libraries}
        return {**installed({*self.requires(), *known_bad, "torch"}), **self.own_libraries}


def load_plugins(entry_points: Iterable[EntryPoint] | None = None) -> Registry:
    """Load every entry point of the group "attn_core", one by one.

    A plugin is listed in `broken` with its error if its import fails, if a hook raises or returns
    the wrong type, if it registers no backends or too many, if it uses a name or alias that is
    taken, or if its distribution requires another attn-core or names none. If two plugins use one
    name, the built-in wins, or else the alphabetically first distribution.
    A plugin that takes longer than SLOW_SECONDS is loaded and listed in `slow`.
    Everything that a plugin prints goes to stderr, including output from C code.
    """
    backends: dict[Key, BackendSpec] = {}
    origins: dict[Key, Origin] = {}
    names: dict[Key, Origin] = {}  # and aliases
    broken: list[BrokenPlugin] = []
    pins, slow = list[Pin](), list[SlowPlugin]()
    provided: dict[str, str | None] = {}
    points = _installed_points(broken) if entry_points is None else entry_points
    owned = [(_origin(p.dist, p.value), p) for p in points]
    unique = {(o.distribution, p.name, p.value): (o, p) for o, p in owned}
    for _, (origin, point) in sorted(
        unique.items(), key=lambda item: (item[0][0] != BUILTIN, item[0])
    ):
        start = time.perf_counter()
        try:
            _check_contract(point.dist, origin)
            with stdout_to_stderr():  # stdout is the command's
                specs, plugin_pins, libraries = _call(point.load(), point.name)
                problems = [problem(spec) for spec in specs]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin's code may raise anything
            broken.append(_broken(point.name, origin, error))
            continue
        if (seconds := time.perf_counter() - start) > SLOW_SECONDS:
            slow.append(SlowPlugin(_label(point.name), origin, seconds))
        pins += plugin_pins
        provided |= libraries
        for spec, fault in zip(specs, problems, strict=True):
            fault = fault or _name_clash(spec, names)
            if fault is not None:
                name = spec.name if type(spec) is BackendSpec else point.name
                broken.append(BrokenPlugin(_label(name), origin, fault))
                continue
            key = (spec.family, spec.name)
            backends[key], origins[key] = spec, origin
            names |= {(spec.family, n): origin for n in (spec.name, *spec.aliases)}
    return Registry(
        dict(sorted(backends.items())), origins, tuple(broken), tuple(pins), tuple(slow), provided
    )


def _installed_points(broken: list[BrokenPlugin]) -> Iterable[EntryPoint]:
    """Return the installed entry points; a distribution with unreadable ones is broken."""
    try:
        return importlib.metadata.entry_points(group=hookspecs.GROUP)
    except Exception:  # one distribution spoils the call for all: ask each
        return list(_points_one_by_one(broken))


def _points_one_by_one(broken: list[BrokenPlugin]) -> Iterator[EntryPoint]:
    for dist in importlib.metadata.distributions():
        try:
            yield from dist.entry_points.select(group=hookspecs.GROUP)
        except Exception as error:  # whatever the parser of its entry_points.txt raises
            origin = _origin(dist, "entry_points.txt")
            broken.append(_broken(origin.distribution, origin, error))


def _origin(dist: Any, module: str) -> Origin:
    try:
        name, version = str(canonicalize_name(dist.name)), str(dist.version or "?")
    except Exception:  # no distribution, or its METADATA is lost or no text, as loading says
        name, version = "unknown", "?"
    return Origin(printable(name), printable(version), printable(module, ERROR_LENGTH))


def _broken(name: str, origin: Origin, error: BaseException) -> BrokenPlugin:
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException as worse:  # the error's own __str__ is a plugin's code, too
        text = f"{type(error).__name__}, whose text cannot be had: {type(worse).__name__}"
    details = "".join(traceback.format_exception(error))
    return BrokenPlugin(_label(name), origin, printable(text, ERROR_LENGTH), printable(details))


def _label(name: object) -> str:
    return printable(name, 100) if isinstance(name, str) else f"a {type(name).__name__}"


def _check_contract(dist: Distribution | None, origin: Origin) -> None:
    """Raise ImportError where a distribution pins another attn-core than this one, or none.

    The pin is its own dependency: the version of attn-core is the version of the contract.
    """
    if dist is None or origin.distribution == BUILTIN or dist.name is None:
        return
    required = [Requirement(text) for text in dist.requires or ()]
    specifiers = [
        r.specifier
        for r in required
        if canonicalize_name(r.name) == BUILTIN
        and (r.marker is None or r.marker.evaluate({"extra": ""}))
    ]
    version = attn_core.__version__
    for specifier in specifiers:
        if not specifier.contains(version, prereleases=True):
            raise ImportError(
                f"requires attn-core{specifier}, {version} is installed; "
                f"pip install 'attn-core{specifier}' or another version of the plugin"
            )
    if not any(specifiers):
        contract = version.rpartition(".")[0]
        raise ImportError(
            f"pins no version of attn-core, {version} is installed; install a version of the "
            f"plugin that pins one, or add 'attn-core=={contract}.*' to the dependencies in its "
            "pyproject.toml"
        )


def _call(module: Any, name: str) -> tuple[list[Any], list[Pin], Libraries]:
    hook = hookspecs.hooks_of(module, name)
    backends = _results(hook.attn_register_backends)
    if backends is None:
        raise TypeError("no hook attn_register_backends: mark a function with @hookimpl")
    pins = _results(hook.attn_register_pins) or []
    if not backends and not pins:
        raise ValueError("registers nothing: attn_register_backends returned an empty list")
    if (excess := too_many(backends, pins)) is not None:
        raise ValueError(excess)
    pin_error = next((text for text in map(pin_problem, pins) if text), None)
    if pin_error is not None:
        raise TypeError(f"a pin is wrong: {pin_error}")
    libraries = parse_libraries(_results(hook.attn_register_libraries) or [])
    return backends, pins, libraries


def _results(hook: pluggy.HookCaller) -> list[Any] | None:
    """Return what the implementations of a hook list, None where there is none."""
    implementations, results = hook.get_hookimpls(), hook()
    if not implementations:
        return None
    if len(results) < len(implementations):  # pluggy leaves None out
        raise TypeError("a hook returned None, not a list")
    for result in results:
        if type(result) not in (list, tuple):
            raise TypeError(f"a hook returned {type(result).__name__}, not a list")
    return [item for result in results for item in result]


def _name_clash(spec: BackendSpec, names: Mapping[Key, Origin]) -> str | None:
    """Say which name or alias of a backend another one has."""
    for label, name in [("name", spec.name), *(("alias", alias) for alias in spec.aliases)]:
        if (owner := names.get((spec.family, name))) is not None:
            return f"the {label} {name!r} is taken by {owner}; rename this one"
    return None
