"""`attn check NAME --against OTHER`: compare two backends in the cases of the suite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from attn_core.cli.console import console, print_json, print_table, progress
from attn_core.errors import UsageError
from attn_core.plugins.registry import Registry
from attn_core.plugins.streams import stdout_to_stderr
from attn_core.spec.device import Device

if TYPE_CHECKING:
    from attn_core.spec.kinds import Kind
    from attn_core.testing.against import Compared

OF = ("mha", "mla")  # one pass has one right answer, of which each backend owes the whole


def compare_backends(
    registry: Registry,
    names: tuple[str, str],
    local: Device,
    kinds: tuple[Kind, ...],
    *,
    quick: bool,
    json: bool,
) -> None:
    """Compare two backends by name and print where they differ. Exit code 1: they differ.

    Raises what keeps one of them from running here, and UsageError where they share no case.
    """
    from attn_core.testing import runner
    from attn_core.testing.against import compare_all, pairs
    from attn_core.testing.plan import plan

    specs = (registry.get(names[0]), registry.get(names[1]))
    if specs[0] is specs[1]:
        raise UsageError(f"--against {names[1]}: that is the backend itself; name another")
    libraries = registry.installed_libraries()
    compared_kinds: tuple[Kind, ...] = tuple(kind for kind in kinds if kind in OF)
    if not compared_kinds:
        raise UsageError(f"--against compares layers of kind {' and '.join(OF)}")
    plans = [plan(spec, local, libraries, kinds=compared_kinds, reduced=quick) for spec in specs]
    matched = list(pairs(plans[0], plans[1]))
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with stdout_to_stderr(), progress(*columns) as bar:
        task = bar.add_task("", total=sum(pair.second is not None for pair in matched))

        def step(name: str) -> None:
            bar.update(task, advance=1, description=name)

        torch_dev = runner.torch_device(local)
        compared = compare_all(matched, specs, torch_dev, step, arch=local.arch)
    if not any(x.ran for x in compared):
        raise UsageError(f"{names[0]} and {names[1]} share no case on {local}")
    if json:
        print_json(_data(names, local, compared))
    else:
        _print(names, local, compared)
    if any(x.differs for x in compared):
        raise typer.Exit(1)


def _print(names: tuple[str, str], device: Device, compared: list[Compared]) -> None:
    groups: dict[tuple[str, str], list[Compared]] = {}
    for x in compared:
        if x.ran:
            groups.setdefault((x.kind, x.feature), []).append(x)
    rows = []
    for (kind, feature), group in groups.items():
        top = max((x.measure for x in group), key=lambda m: m.ratio)
        differ = sum(x.differs for x in group)
        numbers = [f"{top.error:.2e}", f"{top.budget:.2e}"]
        rows.append([kind, feature, str(len(group)), str(differ), *numbers])
    header = ["kind", "feature", "cases", "differ", "worst difference", "allowed"]
    print_table(header, rows, title=f"{names[0]} against {names[1]} on {device}")
    print()
    out = console()
    alone = sum(not x.ran for x in compared)
    if alone:
        out.print(f"{alone} cases were not compared: one of the two does not declare them")
    for x in compared:
        if x.differs:
            out.print(f"differ: {x.detail}", soft_wrap=True)


def _data(names: tuple[str, str], device: Device, compared: list[Compared]) -> dict[str, object]:
    finished = [x for x in compared if x.ran]
    return {
        "backend": names[0],
        "against": names[1],
        "device": str(device),
        "differ": [x.detail for x in finished if x.differs],
        "cases": {
            f"{x.kind} {x.id}": {"error": x.measure.error, "allowed": x.measure.budget}
            for x in finished
        },
        "not_compared": {f"{x.kind} {x.id}": x.detail for x in compared if not x.ran},
    }
