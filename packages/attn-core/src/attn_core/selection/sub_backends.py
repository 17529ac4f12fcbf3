"""The kernels of sparse MLA that a caller names per phase: checked against what rows run."""

from __future__ import annotations

from attn_core.errors import UsageError
from attn_core.formatting import near
from attn_core.plugins.registry import Registry
from attn_core.selection.mismatch import Fix, FixCost, Mismatch
from attn_core.selection.result import Overrides
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import Requirements

PHASES = (Phase.PREFILL, Phase.DECODE)


def flag_of(field: str) -> str:
    """Return the flag of a field of Overrides: "--nsa-prefill-backend"."""
    return "--" + field.replace("_", "-")


def sub_backend_gaps(row: Capabilities, phase: Phase, overrides: Overrides) -> tuple[Mismatch, ...]:
    """Return the mismatch of a row that runs another kernel than the one that is named."""
    field, name = overrides.sub_backend(phase)
    if name is None or row.kind != "dsa" or row.sub_backend == name:
        return ()
    runs = f"runs {row.sub_backend}" if row.sub_backend else "runs no kernel of this name"
    # dearer than what lets a row of this name fit
    fix = Fix("overrides", ((field, None),), FixCost.FEATURE, f"no {flag_of(field)}")
    return (Mismatch(field, f"{flag_of(field)} {name}", runs, (fix,)),)


def check_sub_backends(overrides: Overrides, needs: Requirements, registry: Registry) -> None:
    """Raise UsageError for a name that no row runs in its phase, with what to do instead."""
    specs = registry.family("softmax")
    serving = {
        phase: {r.sub_backend for s in specs for r in s.capabilities if phase in r.phases} - {""}
        for phase in PHASES
    }
    refused = {name: reason for spec in specs for name, reason in spec.refused_sub_backends.items()}
    for phase in PHASES:
        field, name = overrides.sub_backend(phase)
        if name is None:
            continue
        flag, names = flag_of(field), serving[phase]
        if all(x.kind != "dsa" for x in needs.softmax_layers):
            raise UsageError(f"{flag} {name}: the model has no sparse MLA (dsa); drop the flag")
        if name in names:
            continue
        if name in refused:
            raise UsageError(f"{flag} {name} is not served: {refused[name]}")
        if any(name in served for served in serving.values()):
            supported = ", ".join(sorted(names))
            raise UsageError(
                f"{flag} {name}: it does not serve {phase.value} (supports {supported})"
            )
        raise UsageError(f"{flag} {name}: {near(name, names | {*refused})}")
