"""The selection inside an engine, whose flags name attn-core; ATTN_* variables name the rest."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from attn_core.costs import settings, store
from attn_core.costs.environment import environment
from attn_core.costs.profile import Profile
from attn_core.costs.workload import Workload
from attn_core.errors import UnknownBackendError
from attn_core.integrations.ranks import agreed
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.runtime.adaptive import pruned
from attn_core.runtime.picks import picks
from attn_core.runtime.trace import NVTX, switch
from attn_core.selection.checks import BACKEND_ARGUMENTS, LINEAR_ARGUMENTS
from attn_core.selection.lock import BY_PASS, POOL, Lock
from attn_core.selection.moves import require
from attn_core.selection.ranking import shipped_profile
from attn_core.selection.result import Overrides, Selection, label
from attn_core.selection.solver import select
from attn_core.spec.device import Device, probe_cpu, probe_device
from attn_core.spec.requirements import Requirements
from attn_core.tools.env_vars import unknown_variables, variable
from attn_core.tools.probes import probed

SPARSE_ARGUMENTS = ("nsa_prefill_backend", "nsa_decode_backend")
SHARED_PREFIX = variable("--shared-prefix")
LOCKED = variable("--locked")
ADAPTIVE = variable("--adaptive")
PROFILE, WORKLOAD = variable("--profile"), variable("--workload")
_LISTS = ("prefer", "allow", "deny")
_NAMED = (*BACKEND_ARGUMENTS, *LINEAR_ARGUMENTS, *SPARSE_ARGUMENTS, "mm_attention_backend")
VARIABLES = (  # that an engine reads; what `attn` reads besides are flags of the engine
    *(variable("--" + name.replace("_", "-")) for name in (*_NAMED, *_LISTS)),
    *(SHARED_PREFIX, LOCKED, ADAPTIVE, PROFILE, WORKLOAD, NVTX),
)

logger = logging.getLogger(__name__)


def choose(
    requirements: Requirements, device: torch.device, *, locked: bool = True, ranks: Any = None
) -> tuple[Selection, Registry]:
    """Select by ATTN_* variables and what was measured on this machine.

    The selection has alternatives where passes are to be picked, and only those that take some.
    locked: compare with the lock of ATTN_LOCKED.
    ranks: the process group of a model that is split over ranks, which choose alike (`agreed`).
    Raises NoBackendError, LockError, UsageError.
    """
    warn_of_unread(tuple(unknown_variables(os.environ, VARIABLES, "an engine")))
    local = probe_cpu() if device.type == "cpu" else probe_device()
    registry = probed(load_plugins(), local)
    # each is chosen for what is there: a name of others would find no such layers
    other_flags = [] if requirements.vision else ["mm_attention_backend"]
    other_flags += [] if requirements.softmax_layers else BACKEND_ARGUMENTS
    other_flags += [] if requirements.linear_layers else LINEAR_ARGUMENTS
    sparse = any(x.kind == "dsa" for x in requirements.softmax_layers)
    other_flags += [] if sparse else SPARSE_ARGUMENTS
    unused: dict[str, Any] = dict.fromkeys(other_flags)
    libraries = registry.installed_libraries()
    costs = cache(lambda: measured(registry, local))
    selections: list[Selection] = []  # with all alternatives, as a lock names them

    def decide(without: Sequence[str]) -> Selection:
        check_names(registry)  # an error of one rank is one of all
        names, backend_names = overrides(), {spec.name for spec in registry.backends.values()}
        deny = (*names.deny, *(name for name in without if name in backend_names))
        needs = replace(requirements, shared_prefix=shares_prefixes())
        names = replace(names, deny=deny, **unused)
        profile, workload = costs()
        selections[:] = [
            select(needs, local, registry, libraries, names, profile, workload=workload)
        ]
        return picking(selections[0])

    selection = decide(()) if ranks is None else agreed(decide, ranks)
    if locked and not check_lock(selections[0], registry, local, costs()[0]):
        selection = replace(selection, alternatives={})
    return selection, registry


@cache
def warn_of_unread(sentences: tuple[str, ...]) -> None:
    """Say once in the log which ATTN_* variables nothing reads: a name may be misspelt."""
    for sentence in sentences:
        logger.warning("%s", sentence)


def measured(registry: Registry, device: Device) -> tuple[Profile | None, Workload]:
    """Return the profile of ATTN_PROFILE, else the tuned one, and the workload of ATTN_WORKLOAD.

    None is what plugins ship. Raises UsageError.
    """
    profile = settings.profile_here(os.environ.get(PROFILE), registry, device, PROFILE)
    return profile, settings.workload(os.environ.get(WORKLOAD), WORKLOAD)


def picking(selection: Selection, adaptive: bool | None = None) -> Selection:
    """Return the selection with the alternatives that take some pass, with none if it must not.

    adaptive: None asks ATTN_ADAPTIVE, which is on by default.
    """
    enabled = switch(ADAPTIVE, True) if adaptive is None else adaptive
    if enabled or not selection.alternatives:
        return pruned(selection)
    return replace(selection, alternatives={})


def explained(selection: Selection) -> str:
    """Return the decision as text, and which backend takes which passes."""
    return "\n".join(filter(None, (selection.explain(), picks(selection))))


def check_lock(
    selection: Selection,
    registry: Registry,
    device: Device,
    profile: Profile | None,
    path: str | None = None,
) -> bool:
    """Refuse a selection that differs from a lock; without a file, do nothing.

    Returns whether passes may be picked by these costs: a lock fixes the costs that picks follow,
    so with others every pass takes the locked backend of its role.

    Compared are the roles and the pool of this selection: an engine asks for layers in several
    parts and in words of its own, so what was asked is not. profile: as select() took it. path: of
    the lock, by default what ATTN_LOCKED says.
    Raises LockError, which says what changed, and UsageError for a file that is no lock.
    """
    path = path or os.environ.get(LOCKED)
    if not path:
        return True
    lock = store.parsed(Path(path), "lock", Lock.from_json)
    if profile is None:
        profile, _ = shipped_profile(device, registry, registry.installed_libraries())
    current = Lock.of(selection, environment(registry, device), profile, Workload())
    names = {label(role) for role in selection.roles}
    parts = {*names, *(BY_PASS + name for name in names)}
    parts |= set(POOL) if selection.page_size is not None else set()
    lock = replace(
        lock, asked=current.asked, decision={n: c for n, c in lock.decision.items() if n in parts}
    )
    changed = require(lock, current, f"lock {path}")
    logger.info("attn_core chose as lock %s says%s", path, "".join(f"\n  {x}" for x in changed))
    same = current.profile == lock.profile
    if selection.alternatives and not same:
        logger.info("no passes are picked: the measured costs are not those of lock %s", path)
    return same


def shares_prefixes() -> bool:
    """Say whether ATTN_SHARED_PREFIX asks to read keys that requests share once: 1, 0 or unset.

    Raises UsageError.
    """
    return switch(SHARED_PREFIX, False)


def check_names(registry: Registry, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UnknownBackendError for a name that no plugin declares, with the variable it is in."""
    for name in (*BACKEND_ARGUMENTS, *LINEAR_ARGUMENTS, "mm_attention_backend", *_LISTS):
        flag = variable("--" + name.replace("_", "-"))
        for part in filter(None, map(str.strip, environ.get(flag, "").split(","))):
            try:
                registry.find(part)
            except UnknownBackendError as error:
                raise UnknownBackendError(f"{flag}: {error}") from None


def overrides(environ: Mapping[str, str] = os.environ) -> Overrides:
    """Read attn-core's own choices: an engine's flags name attn-core, ATTN_* name what is inside.

    ATTN_ATTENTION_BACKEND, ATTN_PREFILL_ATTENTION_BACKEND, ATTN_DECODE_ATTENTION_BACKEND,
    ATTN_MM_ATTENTION_BACKEND, ATTN_LINEAR_ATTN_BACKEND, ATTN_LINEAR_ATTN_PREFILL_BACKEND,
    ATTN_LINEAR_ATTN_DECODE_BACKEND, ATTN_NSA_PREFILL_BACKEND, ATTN_NSA_DECODE_BACKEND, and
    ATTN_PREFER, ATTN_ALLOW, ATTN_DENY with names between commas.
    """
    chosen: dict[str, Any] = {}
    for name in (*_NAMED, *_LISTS):
        value = environ.get(variable("--" + name.replace("_", "-")), "").strip()
        if value:
            listed = (part.strip() for part in value.split(","))
            chosen[name] = tuple(filter(None, listed)) if name in _LISTS else value
    return Overrides(**chosen)
