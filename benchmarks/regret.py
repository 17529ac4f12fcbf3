"""Measure what a choice of backends loses against the best: `python -m benchmarks.regret`.

Shapes that no tuning has seen are drawn from the release's version. For each, `select()` names a
backend by the profile of this machine and, as the rule, by priorities alone. Every installed
backend that takes the shape is compared with the reference and then timed in two rounds, again
while they disagree. One round names the best of the shape, the other judges it, and the other way
round, so that nothing is best by its luck alone. An interrupted run goes on where it ended.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from attn_core.cli.measurement import terminable
from attn_core.costs import store
from attn_core.costs.environment import environment
from attn_core.costs.profile import Profile
from attn_core.costs.shapes import Pass
from attn_core.costs.workload import Mix, Workload
from attn_core.errors import AttnError, UsageError
from attn_core.measure.compiling import SIZES
from attn_core.measure.session import release
from attn_core.measure.timing import Clock, clock_of, measure
from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.result import NoBackendError, Overrides
from attn_core.selection.solver import select
from attn_core.spec.device import Device, parse_device
from attn_core.spec.kinds import Phase, Role
from attn_core.spec.requirements import Speculation

from benchmarks.attention import device_name
from benchmarks.cases import Case, build
from benchmarks.contestant import Call, Contestant
from benchmarks.ours import device_kind, needs_of, our_backend
from benchmarks.regret_report import added, begun, said, write
from benchmarks.regret_shapes import COUNT, captured, default_seed, draw, pass_of
from benchmarks.regret_table import AUTOMATIC, RULE, Record, cost, page, summary
from benchmarks.regret_tune import compiled, part_of, tuned, tuning_jobs
from benchmarks.results import FOLDER, slug
from benchmarks.runner import poison, tolerance, usable

ROUND_SECONDS = 0.5  # of one round of a shape
TRIES, SLOWER = 3, 4.0  # what takes so many times the fastest, each at its best, is not timed on
AGREE, MOST_ROUNDS = 0.05, 6  # rounds are repeated until two in a row differ by no more


@dataclass(frozen=True, kw_only=True)
class OnePass(Workload):
    """A workload of one pass alone: select() then weighs what this pass costs."""

    size: Pass

    def passes(self, phase: Phase, speculation: Speculation | None) -> Mix:
        own = Phase.DECODE if self.size.phase == "decode" else Phase.PREFILL
        if self.size.phase == "verify" and speculation is not None:
            own = Phase(speculation.mode)
        return ((self.size, 1.0),) if phase is own else ()


@dataclass(frozen=True)
class Field:
    """Who is judged, and by what: the backends, and the profile as select() takes it."""

    registry: Registry
    device: Device
    backends: Mapping[str, Contestant]
    profile: Profile | None
    libraries: Libraries

    def choice(self, case: Case, profile: Profile | None) -> tuple[Record, Record]:
        """Return which backend select() takes for this pass and by what, and who refuses it.

        A row of MLA that prefills without its cache has no such pass: the next one is taken.
        """
        size, refused = pass_of(case), Record()
        role: Role = "verify" if size.phase == "verify" else size.phase
        while True:
            chosen = select(
                needs_of(case),
                self.device,
                self.registry,
                self.libraries,
                Overrides(allow=tuple(self.backends), deny=tuple(refused)),
                profile,
                workload=OnePass(size=size),
                advise=False,
            )
            result = chosen.roles[role]
            if result.row.absorbed:
                break
            refused[result.backend] = "its row prefills MLA without the cache"
        phase = Phase.DECODE if case.phase in ("decode", "mla") else Phase.PREFILL
        verdicts = {v.spec.name: v for v in chosen.verdicts if v.phase is phase}
        for name in self.backends.keys() - refused.keys():
            v = verdicts[name]
            if not v.fits or not v.row.absorbed:
                message = "; ".join(map(str, v.reasons)) or "its row prefills MLA without the cache"
                refused[name] = message[:300]
        cost = verdicts[result.backend].expected
        record: Record = {"backend": result.backend, "by": "profile" if cost else "priority"}
        if cost:
            record["expected_us"] = round(cost.us, 2)
            record["this_form"] = cost.measured  # else of one near it
        return record, dict(sorted(refused.items()))


def judged(case: Case, field: Field, device: torch.device, clock: Clock, seconds: float) -> Record:
    """Choose, check and time one shape; half of `seconds` bounds a round.

    The last two rounds judge. That they agree is asked of every backend, whoever was chosen.
    """
    record: Record = {"name": case.name, "phase": case.phase, "captured": captured(case)}
    try:
        record[AUTOMATIC], refused = field.choice(case, field.profile)
        record[RULE], _ = field.choice(case, Profile())
    except NoBackendError as error:
        return record | {"error": f"nothing fits: {error}"[:300]}
    record["refused"] = refused
    try:
        inputs = build(case, device)
    except torch.OutOfMemoryError as error:
        return record | {"error": f"OutOfMemoryError: {error}"[:300]}
    calls: dict[str, Call] = {}
    bad: dict[str, str] = {}
    for name in [n for n in field.backends if n not in refused]:
        try:
            call = field.backends[name].prepare(inputs)
            poison(inputs)
            off = inputs.error(call())  # the first call may compile
            if off <= tolerance(case):
                calls[name] = call
            else:
                bad[name] = f"wrong: error {off:.1e}"
        except NoBackendError as error:  # it fits alone, and with no other over one cache
            refused[name] = str(error)[:300]
        except Exception as raised:  # a plugin's code: what it raises is the finding
            bad[name] = f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}"
            if not usable(device):
                raise SystemExit(f"{name} broke the device on {case.name}: {bad[name]}") from None
    record["bad"] = bad
    named = {record[AUTOMATIC]["backend"], record[RULE]["backend"]}
    tries = [{name: clock.sample(call)[0] for name, call in calls.items()} for _ in range(TRIES)]
    first = {name: min(one[name] for one in tries) for name in calls}
    slow = {n: us for n, us in first.items() if us > SLOWER * min(first.values())}
    record["slower"] = {n: round(us, 1) for n, us in slow.items() if n not in named}
    timed = {name: call for name, call in calls.items() if name not in record["slower"]}
    rounds: list[dict[str, list[float]]] = []
    while len(rounds) < MOST_ROUNDS and not agreeing(rounds[-2:], record):
        costs = measure(timed, clock, seconds / 2)
        without_plans = {name: cost[:4] for name, cost in costs.items()}
        rounds.append({n: [float(f"{x:.5g}") for x in cost] for n, cost in without_plans.items()})
    record["rounds"] = rounds[-2:]
    record["rounds_timed"] = len(rounds)
    del inputs, calls, timed
    release(device)
    return record


def agreeing(rounds: Sequence[Mapping[str, Sequence[float]]], shape: Record) -> bool:
    """Say whether two rounds give every backend about the same cost: no hiccup of the machine."""
    if len(rounds) < 2:
        return False
    pairs = [[cost(r[name], shape) for r in rounds] for name in rounds[0]]
    return all(max(pair) <= (1 + AGREE) * min(pair) for pair in pairs)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regret", description=__doc__)
    add = parser.add_argument
    add("--backends", help="names with commas (default: all that are installed)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="a torch device")
    add("--profile", help="a file of `attn tune --out`, or none (default: as `attn select`)")
    add("--tune", type=float, metavar="SECONDS", help="first tune for so long, beside --out")
    add("--compile", action="store_true", help="compile what tuning and judging call, and end")
    add("--sizes", type=int, default=SIZES, help=f"of each kind of pass to compile ({SIZES})")
    add("--part", type=part_of, default=(1, 1), metavar="I/N", help="of N that run side by side")
    add("--seconds", type=float, default=600.0, help="no shape begins later (default: 600)")
    add("--count", type=int, default=COUNT, help=f"shapes to draw (default: {COUNT})")
    add("--seed", default=default_seed(), help="what draws them (default: the version)")
    add("--out", type=pathlib.Path, help="default: benchmarks/results/regret.<device>.json")
    add("--again", action="store_true", help="choose again over the times of a record, --out")
    return parser.parse_args(arguments)


def contestants(names: str | None, registry: Registry, device: torch.device) -> list[Contestant]:
    """Return the named backends, or all of the registry; those that are not here refuse."""
    known = [spec.name for spec in registry.family("softmax")]
    requested = names.split(",") if names else known
    return [our_backend(name, registry, device) for name in requested]


def profile_of(
    args: argparse.Namespace, registry: Registry, env: dict[str, str], device: Device
) -> Profile | None:
    """Return the profile that select() is given: as for `attn select`. Raises UsageError."""
    if args.profile == "none":
        return Profile()
    if args.profile is None:
        return store.tuned_profile(registry, device)
    result = store.read_profile(pathlib.Path(args.profile))
    if differs := result.differences(env):
        raise UsageError(f"--profile {args.profile}: another environment: {'; '.join(differs)}")
    return result


@torch.no_grad()
def main(
    arguments: Sequence[str] | None = None, *, cases: list[Case] | None = None, clock: Any = None
) -> int:
    """Run; `cases` and `clock` are for tests. Return 1 if a limit is exceeded."""
    args = parse(list(sys.argv[1:] if arguments is None else arguments))
    begin, registry = time.monotonic(), load_plugins()
    if args.again:
        return chosen_again(args, registry)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; --device cpu judges small shapes on the CPU")
    here = device_kind(device)
    path = args.out or FOLDER / f"regret.{slug(device_name(device))}.json"
    env = environment(registry, here)
    drawn = draw(args.seed, device.type, args.count) if cases is None else cases
    try:
        backends = {c.name: c for c in contestants(args.backends, registry, device)}
        libraries = registry.installed_libraries()
        field = Field(registry, here, backends, profile_of(args, registry, env, here), libraries)
    except AttnError as error:
        raise SystemExit(str(error)) from None
    file, (part, parts) = path.with_suffix(".profile.json"), args.part
    known = store.read_profile(file) if file.exists() else field.profile or Profile()
    if args.compile or args.tune:
        todo = tuning_jobs(drawn, registry, here, libraries, [*backends])[part - 1 :: parts]
    if args.compile:
        return compiled(todo, known, device, here.arch, args.sizes)
    if args.tune and not path.exists():  # else the run goes on, with its first profile
        with terminable():
            known = tuned(todo, known, env, device, here.arch, args.tune, file)
        if parts > 1:  # judging takes what all parts measured
            return 0
    if parts > 1 and args.profile is None and not known.costs:
        raise SystemExit(f"{file} has no times: tune all parts first, or name a --profile")
    if args.tune or (parts > 1 and args.profile is None):
        field = replace(field, profile=known)
    clock, report = clock or clock_of(device), begun(args, field, env, drawn, path)
    done = {shape["name"] for shape in report["shapes"]}
    for number, case in list(enumerate(drawn, 1))[part - 1 :: parts]:
        left = args.seconds - (time.monotonic() - begin)
        if case.name in done:
            continue
        if left <= 0:
            break
        shape = judged(case, field, device, clock, min(2 * ROUND_SECONDS, left))
        report = added(path, report, shape, drawn)  # it survives whatever comes next
        took = time.monotonic() - begin
        print(f"[{number}/{len(drawn)}] {took:5.1f} s {case.name}: {said(shape)}", flush=True)
    print(page(path.name, report))
    return int(not summary(report["shapes"])["met"])


def chosen_again(args: argparse.Namespace, registry: Registry) -> int:
    """Replace the choices of a record by this version's, for its device, libraries and profile.

    The times stay, so that a change of the selection is judged without the device; --device names
    that, as in cuda:sm90.
    """
    if args.out is None:
        raise SystemExit("--again needs --out: the record to choose again for")
    path: pathlib.Path = args.out
    report: Record = json.loads(path.read_text())
    env = report["environment"]
    libraries = {**registry.installed_libraries(), **env}
    here = replace(parse_device(args.device), name=env["device"], runtime=env.get("runtime"))
    profile = store.read_profile(path.with_suffix(".profile.json"))
    backends = {
        name: our_backend(name, registry, torch.device("cpu")) for name in report["backends"]
    }
    field = Field(registry, here, backends, profile, libraries)
    cases = {c.name: c for c in draw(report["seed"], here.type, report["drawn"])}
    for shape in report["shapes"]:
        if "error" not in shape:
            shape[AUTOMATIC], _ = field.choice(cases[shape["name"]], profile)
            shape[RULE], _ = field.choice(cases[shape["name"]], Profile())
            shape["captured"] = captured(cases[shape["name"]])
    report["chosen"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report["summary"] = summary(report["shapes"])
    write(path, report)
    print(page(path.name, report))
    return 0 if report["summary"]["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
