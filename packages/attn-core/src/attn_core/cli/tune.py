"""`attn tune`: measure what is installed here, and keep it."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from attn_core.cli.check import make_folder
from attn_core.cli.console import console, print_json
from attn_core.cli.measurement import (
    Json,
    Measurement,
    Minutes,
    Model,
    inputs_of,
    part_of,
    terminable,
)
from attn_core.cli.options import InputFlags, flag, takes
from attn_core.costs import store
from attn_core.costs.environment import environment
from attn_core.costs.profile import Profile
from attn_core.errors import UsageError
from attn_core.measure.spent import Spent
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.inputs import SelectionInputs
from attn_core.selection.result import NoBackendError
from attn_core.tools.probes import probed

KEEP_S = 2.0  # between writes of what was measured: each reads the whole file


@takes(InputFlags)
def tune_command(
    flags: InputFlags,
    path: Model = None,
    minutes: Minutes = 10.0,
    quick: Annotated[
        bool, flag("--quick", "Only the workload's own passes, no grid around them.", env=False)
    ] = False,
    compile_only: Annotated[
        bool, flag("--compile-only", "Compile what would be called, measure nothing.", env=False)
    ] = False,
    compiled: Annotated[
        bool, flag("--compiled", "Begin at once: all is compiled on this machine.", env=False)
    ] = False,
    out: Annotated[
        Path | None,
        flag("--out", "Profile to write or to continue; default: this machine's own.", env=False),
    ] = None,
    part: Annotated[
        str,
        flag("--part", "I/N: every N-th shape from the I-th on; N runs share a file.", env=False),
    ] = "1/1",
    json: Json = False,
) -> None:
    """Measure every backend that is installed here, and keep it as this machine's profile.

    Measures a model's layers, or one shape; without either, layers of common models, with drafts
    and an FP8 cache. First all kernels are compiled, in parallel and outside of --minutes, as is
    what compiles later; --compiled leaves that out.
    Every backend is compared with the reference; one that is wrong is listed and has no times. An
    interrupted run goes on where it ended, and several may write one file: with --part, one on
    each GPU. `attn select` then weighs by what was measured.
    """
    if compile_only and compiled:
        raise UsageError("--compile-only and --compiled: nothing would be done; give one of them")
    registry = probed(load_plugins())
    inputs = inputs_of(flags, path, registry)
    env = environment(registry, inputs.device)
    file = out or store.own_path(env)
    known = Profile()
    if os.path.exists(file):
        known = store.read_profile(file)
        if differs := known.differences(env):
            if out is not None:
                raise UsageError(
                    f"{file} is of another environment: {'; '.join(differs)}; name another file"
                )
            known = Profile()
    if not compile_only:
        make_folder("--out" if out is not None else "the default --out", file.parent)
    work = Measurement(
        inputs, registry, env, known, minutes, grid=not quick, usual=True, part=part_of(part)
    )
    skipped, passes = [], 0
    spent = Spent()
    new, written = Profile(), time.monotonic()
    try:
        with terminable(), work.steps(compile_only=compile_only, compiled=compiled) as steps:
            for step in steps:
                spent.add(step.spent)
                passes += bool(step.profile.costs)
                new = new.merged(step.profile)
                if step.skipped:
                    skipped.append(step)
                if (new.costs or new.bad) and time.monotonic() > written + KEEP_S:
                    store.write(file, new)
                    new, written = Profile(), time.monotonic()
    except (KeyboardInterrupt, SystemExit):
        if new.costs or new.bad:
            store.write(file, new)
            new = Profile()
        summary = (
            f"{passes} passes were measured and are kept in {file}" if passes else "nothing yet"
        )
        print(f"attn: {summary}; run again to go on", file=sys.stderr)
        raise
    finally:  # what was measured is kept, whatever ended the run
        if new.costs or new.bad:
            store.write(file, new)
    known = store.read_profile(file) if os.path.exists(file) else known
    compile_s, measure_s = work.compile_s + spent.compiling, work.measure_s - spent.compiling
    failed = sorted({(key.backend, reason) for key, reason in known.bad.items()})
    sure_pairs, all_pairs = known.certain()
    if json:
        data = {
            "profile": str(file),
            "environment": env,
            "points": len(known.costs),
            "compile_s": round(compile_s, 3),
            "measure_s": round(measure_s, 3),
            "spent_s": spent.by_backend(),
            "passes": {"listed": work.listed, "measured": passes},
            "fastest": {"certain": sure_pairs, "passes": all_pairs},
            "bad": [{"backend": name, "reason": reason} for name, reason in failed],
            "skipped": [{"pass": str(s.job.size), "reason": s.skipped} for s in skipped],
        }
        print_json(data | {"selection": _selected(inputs, registry, known)})
        return
    from attn_core.measure.session import LONGER, SPENT

    lines = console()
    if work.not_compiled:
        lines.print(work.not_compiled, soft_wrap=True)
    for name, error in failed:
        lines.print(f"known bad: {name}: {error}", soft_wrap=True)
    for reason, number in Counter(s.skipped for s in skipped).items():
        hint = {SPENT: "; run again to go on", LONGER: "; --minutes takes more"}.get(reason, "")
        lines.print(f"not measured: {number} shapes, {reason}{hint}", soft_wrap=True)
    lines.print(
        f"{compile_s:.0f} s of compiling, {measure_s:.0f} s of measuring: {spent}",
        soft_wrap=True,
    )
    lines.print(
        f"{len(known.costs)} points in {file}; the fastest of {all_pairs} passes is certain in "
        f"{sure_pairs}",
        soft_wrap=True,
    )
    for role, text in _selected(inputs, registry, known).items():
        lines.print(f"  {role:<11}{text}", soft_wrap=True)


def _selected(inputs: SelectionInputs, registry: Registry, profile: Profile) -> dict[str, str]:
    try:
        chosen = replace(inputs, profile=profile).select(registry, advise=False)
    except NoBackendError as error:
        return {"none": str(error)}
    return {role: f"{c.backend}: {c.reason}" for role, c in chosen.roles.items()}
