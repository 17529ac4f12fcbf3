"""Profiles as files: what plugins ship, and what was tuned on this machine."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from attn_core.costs.environment import environment
from attn_core.costs.profile import Profile
from attn_core.errors import UsageError
from attn_core.json_text import loaded
from attn_core.plugins.data_files import data_files
from attn_core.plugins.registry import Registry
from attn_core.spec.device import Device

MOST_BYTES = 32 << 20
_T = TypeVar("_T")


def read_profile(path: pathlib.Path | str) -> Profile:
    """Read a profile. Raises UsageError, which names the file and what is wrong with it."""
    return parsed(path, "profile", Profile.from_json)


def parsed(path: pathlib.Path | str, what: str, parse: Callable[[Any], _T]) -> _T:
    """Return what `parse` makes of a JSON file; errors name the file. Raises UsageError."""
    text = content(path, what)
    try:
        return parse(loaded(text))
    except UsageError as error:
        raise UsageError(f"{what} {path}: {error}") from None
    except ValueError as error:
        raise UsageError(f"{what} {path}: it is no {what}: {error}") from None


def content(path: pathlib.Path | str, what: str) -> bytes:
    """Return what a file holds, a regular one of at most 32 MiB. Raises UsageError."""
    path = pathlib.Path(path)
    if not os.path.isfile(path):  # a pipe or a device may never end
        problem = "not a file" if os.path.exists(path) else "No such file"
        raise UsageError(f"{what} {path}: {problem}")
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror or error}") from None
    if len(text) > MOST_BYTES:
        raise UsageError(f"{what} {path}: larger than {MOST_BYTES >> 20} MiB; it is none")
    return text


def write(path: pathlib.Path, profile: Profile) -> Profile:
    """Add a profile to a file and return what it then holds.

    Other processes may read and write it at the same time: each write takes in what is there, under
    a lock, and replaces the file at once. A file of another environment is replaced, not added to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        whole = profile
        if path.exists():
            with contextlib.suppress(UsageError):  # what cannot be read is replaced
                there = read_profile(path)
                if not there.differences(profile.environment):
                    whole = there.merged(profile)
        text = json.dumps(whole.to_json(), separators=(",", ":"), sort_keys=True)
        put(path, text.replace('{"backend"', '\n{"backend"') + "\n")
    return whole


def put(path: pathlib.Path, text: str) -> None:
    """Write a file at once: another process reads the old text or the new one. Raises OSError."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name[:50], delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    os.replace(file.name, path)


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Hold the lock of a file, where the system has locks; it ends with its process."""
    try:
        import fcntl
    except ImportError:  # Windows: the last of two writers wins
        yield
        return
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def folder(name: str) -> pathlib.Path:
    """Return a folder of attn-core in the user's cache; it may not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(cache) / "attn-core" / name


def own_path(env: Mapping[str, str], kind: str = "profiles") -> pathlib.Path:
    """Return where what belongs to an environment lives: its profile, or another kind of file."""
    device = re.sub(r"[^a-z0-9]+", "-", env.get("device", "").lower()).strip("-")[:40]
    digest = hashlib.sha256(repr(sorted(env.items())).encode()).hexdigest()[:12]
    return folder(kind) / f"{device}-{digest}.json"


def tuned_profile(registry: Registry, device: Device | None = None) -> Profile | None:
    """Return what `attn tune` measured on this machine, None if nothing. Raises UsageError.

    device: this machine's; None asks the drivers.
    """
    path = own_path(environment(registry, device))
    return read_profile(path) if path.exists() else None


def others(env: Mapping[str, str]) -> Iterator[str]:
    """Say what differs in each profile of this device that was tuned in another environment."""
    path = own_path(env)
    for file in sorted(path.parent.glob(path.name.rpartition("-")[0] + "-*.json")):
        with contextlib.suppress(UsageError):
            profile = read_profile(file)
            if profile.device == env.get("device") and file != path:
                yield f"{file.name} is not used: {', '.join(profile.differences(env))}"


def shipped(modules: Iterable[str], device: str) -> Iterator[Profile]:
    """Yield what plugins ship for a device, by its driver's name.

    modules: the values of the plugins' entry points. A file that cannot be read is skipped, and
    `faults` names it.
    """
    for module in dict.fromkeys(modules):
        for _, data in _files(module):
            if not isinstance(data, str) and data.device == device:
                yield data


def faults(modules: Iterable[str]) -> list[str]:
    """Return one sentence for every shipped profile that is skipped."""
    return [
        f"profile {path} is skipped: {data}"
        for module in sorted(set(modules))
        for path, data in _files(module)
        if isinstance(data, str)
    ]


@functools.cache
def _files(module: str) -> tuple[tuple[pathlib.Path, Profile | str], ...]:
    return tuple(
        (path, data if isinstance(data, str) else Profile.from_json(data))
        for path, data in data_files(module, "profiles", _fault)
    )


def _fault(data: Any) -> str | None:
    try:
        Profile.from_json(data)
    except UsageError as error:
        return str(error)
    return None
