"""Say what is measured on a device, and what measuring brings."""

from __future__ import annotations

import datetime
from collections import Counter
from typing import NamedTuple

from attn_core.costs import store
from attn_core.costs.environment import environment
from attn_core.costs.profile import Profile
from attn_core.costs.shapes import Form
from attn_core.errors import AttnError, UsageError
from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.registry import Registry
from attn_core.selection.ranking import shipped_profile
from attn_core.selection.result import Overrides, Selection
from attn_core.selection.solver import select
from attn_core.spec.device import Device
from attn_core.spec.kinds import Phase, Role
from attn_core.spec.requirements import LayerRequirements, Requirements

TUNE = "attn tune"
LLAMA = Form(q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128)


class Tuning(NamedTuple):
    """What was found, whether it is as it should be, the verdict, the command that helps."""

    found: str
    good: bool
    verdict: str
    fix: str = ""


def tuning(registry: Registry, device: Device, libraries: Libraries, *, here: bool) -> Tuning:
    """Return what is measured for a device. here: it is this machine's, where files of `attn tune`
    count.
    """
    now, user_profile = datetime.datetime.now(datetime.UTC), None
    if here:
        env = environment(registry, device)
        try:
            user_profile = store.tuned_profile(registry, device)
        except UsageError as error:
            return Tuning("unreadable", False, str(error), TUNE)
    shipped, stale = shipped_profile(device, registry, libraries)
    profile = user_profile or shipped
    if profile.costs:
        source = "measured here" if user_profile else f"shipped for {profile.device}"
        brings = _brings(registry, device, libraries, profile)
        text = f"{source}, {profile.age(now)}; {brings}"
        return Tuning(
            f"{len(profile.costs)} points", True, text, "" if user_profile or not here else TUNE
        )
    if here and not stale:
        stale = next(iter(store.others(env)), "")
    fitting = _fitting(registry, device, libraries)
    compared = "; ".join(f"{phase}: {', '.join(names)}" for phase, names in fitting.items())
    if not compared:
        return Tuning("nothing", True, "one backend fits each phase, so there is nothing to order")
    text = f"priorities order what fits, and measuring could change that ({compared})"
    return Tuning("stale" if stale else "nothing", False, f"{stale}; {text}" if stale else text,
                  TUNE if here else "")  # fmt: skip


def _needs(profile: Profile) -> Requirements:
    """Return requirements of the form that a profile has most of."""
    forms = Counter(key.form for key in profile.costs)
    form = forms.most_common(1)[0][0] if forms else LLAMA
    layer = LayerRequirements(
        kind="mla" if form.kind == "mla" else "mha",
        head_dim=form.head_dim,
        v_head_dim=form.v_head_dim,
        num_q_heads=form.q_heads,
        num_kv_heads=form.kv_heads,
        sliding_window=form.window,
        logit_cap=30.0 if form.logit_cap else None,
        sinks=form.sinks,
    )
    store_dtype = "auto" if form.store == form.dtype else form.store
    return Requirements(layers=(layer,), dtype=form.dtype, kv_cache_dtype=store_dtype)


def _select(
    registry: Registry, device: Device, libraries: Libraries, profile: Profile, needs: Requirements
) -> Selection | None:
    try:
        return select(
            needs, device, registry, libraries, Overrides(), profile, simulated=True, advise=False
        )
    except AttnError:
        return None


def _brings(registry: Registry, device: Device, libraries: Libraries, profile: Profile) -> str:
    """Say what the measured choice takes less than the choice by priority."""
    needs = _needs(profile)
    by_time = _select(registry, device, libraries, profile, needs)
    by_priority = _select(registry, device, libraries, Profile(), needs)
    if by_time is None or by_priority is None:
        return "no pair of backends serves what was measured"
    texts = []
    for phase in (Phase.PREFILL, Phase.DECODE):
        costs = {
            v.spec.name: v.expected
            for v in by_time.verdicts
            if v.phase is phase and v.expected is not None
        }
        role: Role = "prefill" if phase is Phase.PREFILL else "decode"
        new, old = by_time.roles[role].backend, by_priority.roles[role].backend
        if new == old:
            texts.append(f"{role} keeps {new}")
        elif new in costs and old in costs:
            saving = 100 * (1 - costs[new].us / costs[old].us)
            texts.append(f"{role} takes {saving:.0f} % less with {new} than with {old}")
        else:
            texts.append(f"{role} goes to {new} from {old}, which was not measured")
    return f"{needs.layers[0].num_q_heads} query heads: " + ", ".join(texts)


def _fitting(registry: Registry, device: Device, libraries: Libraries) -> dict[str, list[str]]:
    """Return the implemented backends that fit a common layer, of phases that have several."""
    selection = _select(registry, device, libraries, Profile(), _needs(Profile()))
    fitting = {}
    for phase in (Phase.PREFILL, Phase.DECODE):
        names = [
            v.spec.name
            for v in (selection.verdicts if selection else ())
            if v.phase is phase and v.fits and v.spec.creator(v.row)
        ]
        if len(names) > 1:
            fitting[phase.value] = names
    return fitting
