"""The profile and the workload that a user names, by a flag or by a variable."""

from __future__ import annotations

from pathlib import Path

from attn_core.costs import store
from attn_core.costs.environment import environment
from attn_core.costs.profile import Profile
from attn_core.costs.workload import Workload
from attn_core.errors import UsageError
from attn_core.plugins.registry import Registry
from attn_core.spec.device import Device

NONE = "none"  # as the name of a profile: nothing was measured


def profile_here(
    name: str | None, registry: Registry, device: Device, flag: str = "--profile"
) -> Profile | None:
    """Return the named profile of this machine, else what was tuned on it.

    name: a file, or "none". None or "" takes what `attn tune` wrote; without that the result is
    None, by which select() takes what is shipped. flag: what the error calls the name. Raises
    UsageError for a profile of another environment, with what differs.
    """
    if not name:
        return store.tuned_profile(registry, device)
    if name == NONE:
        return Profile()
    profile = store.read_profile(Path(name))
    refuse_foreign(profile.differences(environment(registry, device)), name, flag)
    return profile


def refuse_foreign(differs: list[str], name: str, flag: str = "--profile") -> None:
    """Raise UsageError where a profile belongs to another environment."""
    if differs:
        raise UsageError(
            f"{flag} {name}: measured in another environment: {'; '.join(differs)}; run "
            f"`attn tune` here, or leave {flag} out"
        )


def workload(text: str | None, flag: str = "--workload") -> Workload:
    """Return the workload of JSON text, or of the file that has it; the default without either."""
    if not text:
        return Workload()
    if text.lstrip().startswith(("{", "[")):  # a list is no workload, and no file either
        return Workload.parse(text)
    return store.parsed(Path(text), flag, Workload.from_json)
