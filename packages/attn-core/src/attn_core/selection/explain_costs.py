"""Print what every pass of the workload costs with every backend that was measured."""

from __future__ import annotations

from attn_core.selection.expected import micros
from attn_core.selection.result import Selection


def explain_costs(selection: Selection) -> str:
    """Return the expected costs as text: a line for each phase, backend and pass."""
    lines = ["costs, per request and layer:"]
    for verdict in selection.verdicts:
        cost = verdict.expected
        if not verdict.fits or cost is None:
            continue
        shape = "" if cost.measured else ", some of a layer or page like this one"
        lines.append(
            f"  {verdict.phase.value:<8} {verdict.spec.name:<15} {cost}; "
            f"{100 * cost.covered:.0f} % of the phase's requests are in measured passes{shape}"
        )
        for part in cost.parts:
            estimate = part.estimate
            bounds = f"{micros(estimate.low)} to {micros(estimate.high)}"
            likeness = "" if estimate.measured else ", of one like it"
            lines.append(
                f"           {part.size!s:<36} {part.weight:9.3f} x {micros(estimate.us)} "
                f"({bounds}{likeness})"
            )
    if len(lines) == 1:
        return "costs: nothing that fits was measured, so priorities decide; `attn tune` measures"
    return "\n".join(lines)
