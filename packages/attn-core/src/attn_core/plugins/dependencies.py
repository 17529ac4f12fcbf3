"""Which distributions are installed, and whether they satisfy what a row requires."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from attn_core.errors import BackendError, UsageError
from attn_core.spec.device import torch_build


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A kernel library that is tied to one torch: with `torch` (a specifier), use `version`.

    options: extra pip options, such as "--no-deps".
    why: the reason, for people.
    indexed: False if no index has the library, so pip cannot install it; `why` then says how to
    get it.
    module: what it is imported as, where an unrelated distribution installs a module of that name.
    replaces: a distribution whose module it has, as a build of it for other hardware: the two write
    the same files, so one machine has one of them.
    """

    distribution: str
    torch: str
    version: str
    why: str
    options: str = ""
    indexed: bool = True
    module: str = ""
    replaces: str = ""

    @property
    def pip(self) -> str:
        """The pip command that installs it, or "" if none does."""
        if not self.indexed:
            return ""
        options = f"{self.options} " if self.options else ""
        return f"pip install {options}'{self.distribution}{self.version}'"

    def accepts(self, requirement: Requirement) -> bool:
        """Say whether the installed distribution is the right one, in an accepted version."""
        versions = SpecifierSet(self.version)
        exact = [s.version for s in versions if s.operator == "==" and "*" not in s.version]
        return self.distribution == requirement.name and all(
            requirement.specifier.contains(v, prereleases=True) for v in exact
        )

    def loads(self, torch: str | None) -> bool:
        """Say whether this pin applies to a version of torch. Without torch, none applies."""
        if torch is None:
            return False
        return SpecifierSet(self.torch).contains(Version(torch).public, prereleases=True)


def strangers(pin: Pin) -> list[str]:
    """List the installed distributions, other than the pin's, that have its module."""
    if not pin.module:
        return []
    try:
        owners = importlib.metadata.packages_distributions().get(pin.module, [])
    except UnicodeDecodeError:  # the METADATA of one distribution spoils the call for all
        return []
    return sorted({canonicalize_name(o) for o in owners} - {canonicalize_name(pin.distribution)})


# distribution → version; None: taken as installed, in a version that is new enough
Libraries = Mapping[str, str | None]


@functools.cache
def alternatives(group: str) -> tuple[Requirement, ...]:
    """Parse one any-of group: "flash-attn-3 or sglang-kernel>=0.4"."""
    return tuple(Requirement(part) for part in group.split(" or "))


def satisfies(requirement: Requirement, libraries: Libraries) -> bool:
    """Say whether `libraries` holds the distribution in a version that fits."""
    name = canonicalize_name(requirement.name)
    return name in libraries and _fits(requirement.specifier, libraries[name])


def used(group: str, libraries: Libraries) -> Requirement | None:
    """Return the first satisfied alternative of a group, which backends load, or None."""
    return next(
        (
            w
            for name, w in _named(group)
            if name in libraries and _fits(w.specifier, libraries[name])
        ),
        None,
    )


@functools.cache
def _named(group: str) -> tuple[tuple[str, Requirement], ...]:
    return tuple((canonicalize_name(w.name), w) for w in alternatives(group))


@functools.lru_cache(4096)
def _fits(specifier: SpecifierSet, version: str | None) -> bool:
    return version is None or specifier.contains(version, prereleases=True)


def shortfall(group: str, libraries: Libraries) -> str | None:
    """Say what is installed instead of `group`, or what is missing; None if it is satisfied."""
    if used(group, libraries) is not None:
        return None
    requirements = alternatives(group)
    present = [
        f"{w.name} {libraries[name]}"
        for w in requirements
        if (name := canonicalize_name(w.name)) in libraries
    ]
    return " and ".join(present) or f"{' or '.join(w.name for w in requirements)} not installed"


def version_of(name: str) -> str | None:
    """Return the installed version of a distribution; None if there is none that can be read."""
    try:
        if version := importlib.metadata.version(name):
            return version
    except importlib.metadata.PackageNotFoundError:
        return None
    except UnicodeDecodeError:
        pass
    # a removal may leave a folder without METADATA, also in front of that of another version
    for distribution in importlib.metadata.distributions(name=name):
        with contextlib.suppress(UnicodeDecodeError):
            if version := distribution.version:
                return version
    return None


def installed(groups: Iterable[str]) -> dict[str, str | None]:
    """Look up the installed version of every distribution in `groups` without importing any.

    Of torch it is the build, such as 2.11.0+cu130.
    """
    names = {canonicalize_name(w.name) for group in groups for w in alternatives(group)}
    versions: dict[str, str | None] = {}
    for name in names:
        if version := version_of(name):
            versions[name] = version
    build = torch_build().get("version") if "torch" in names else None
    return {**versions, "torch": build} if build else versions


def parse_libraries(names: Iterable[str]) -> dict[str, str | None]:
    """Parse NAME or NAME==VERSION as given to --assume-installed. Raises UsageError."""
    libraries: dict[str, str | None] = {}
    for text in names:
        try:
            requirement = Requirement(text)
            pins = [s.version for s in requirement.specifier if s.operator == "=="]
            if len(pins) != len(requirement.specifier) or len(pins) > 1:
                raise InvalidRequirement("only == is possible")
            version = str(Version(pins[0])) if pins else None
        except ValueError as error:  # InvalidRequirement, InvalidVersion, too long a number
            reason = str(error).partition("\n")[0]  # packaging draws an arrow below the text
            raise UsageError(
                f"--assume-installed {text}: not NAME or NAME==VERSION ({reason}); "
                "for example triton or flashinfer-python==0.6.14"
            ) from None
        libraries[canonicalize_name(requirement.name)] = version
    return libraries


def chosen_distribution(name: str, group: str) -> str:
    """Return the installed distribution of an any-of group that the backend `name` uses.

    Raises BackendError if none is installed, because the backend was created without select().
    """
    versions = installed([group])
    requirement = used(group, versions)
    if requirement is None:
        raise BackendError(
            f"{name} needs {group}, here: {shortfall(group, versions)}; install the one that "
            "`attn doctor` names"
        )
    return requirement.name
