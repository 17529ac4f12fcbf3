"""`attn bench`: one measurement, as a table with bars."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from attn_core.cli.console import print_json, print_table
from attn_core.cli.measurement import Json, Measurement, Minutes, Model, inputs_of
from attn_core.cli.options import InputFlags, takes
from attn_core.costs.environment import environment
from attn_core.costs.profile import Profile
from attn_core.plugins.registry import load_plugins
from attn_core.selection.expected import micros
from attn_core.tools.probes import probed

if TYPE_CHECKING:
    from attn_core.measure.session import Step

WIDTH = 24  # characters of the longest bar


@takes(InputFlags)
def bench_command(
    flags: InputFlags,
    path: Model = None,
    minutes: Minutes = 2.0,
    json: Json = False,
) -> None:
    """Measure a model's layers, or one shape, on every backend here: print a table with bars.

    This is the measurement of `attn tune`, of the workload's own passes; no file is written.
    """
    registry = probed(load_plugins())
    inputs = inputs_of(flags, path, registry)
    env = environment(registry, inputs.device)
    work = Measurement(inputs, registry, env, Profile(), minutes, grid=False)
    rows, data = [], []
    with work.steps() as steps:
        for step in steps:
            shape = [str(step.job.size), str(step.job.form)]
            costs = step.profile.costs
            slowest = max((cost.us for cost in costs.values()), default=0.0)
            for key, cost in sorted(costs.items(), key=lambda item: item[1].us):
                spread = f"{micros(cost.low)} to {micros(cost.high)}"
                host = micros(cost.host_us) if cost.host_us else ""
                bar_text = bar(cost.us / slowest)
                rows.append([*shape, key.backend, micros(cost.us), bar_text, spread, host])
                data.append({"backend": key.backend, **_shape(step), **cost._asdict()})
            for key, reason in step.profile.bad.items():
                rows.append([*shape, key.backend, reason, "", "", ""])
                data.append({"backend": key.backend, **_shape(step), "bad": reason})
            if step.skipped:
                rows.append([*shape, "", step.skipped, "", "", ""])
                data.append({"backend": None, **_shape(step), "skipped": step.skipped})
    if json:
        print_json({"environment": env, "measured": data})
        return
    header = ["pass", "layer", "backend", "time", "of the slowest", "quartiles", "host"]
    print_table(header, rows, title=f"one call of one layer on {env['device']}")


def bar(part: float) -> str:
    """Return a bar of so much of the longest; at least one character."""
    block = "\N{FULL BLOCK}"
    try:
        block.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        block = "#"
    return block * max(1, round(WIDTH * part))


def _shape(step: Step) -> dict[str, Any]:
    return {"pass": str(step.job.size), "layer": str(step.job.form)}
