"""`attn replay` and `attn bisect`: run the file of a difference again, and make it smaller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_core.cli.check import local_device, make_folder
from attn_core.cli.console import console, print_json, print_table, progress
from attn_core.cli.options import flag, names
from attn_core.errors import UsageError
from attn_core.formatting import printable
from attn_core.plugins.registry import load_plugins
from attn_core.plugins.streams import stdout_to_stderr
from attn_core.trust.header import metadata

if TYPE_CHECKING:
    from attn_core.trust.judge import Verdict
    from attn_core.trust.replay import Replayed

FILE = typer.Argument(metavar="FILE", help="A reproducer, as a Shadow or `attn bisect` writes it.")
ON = flag("--device", "TYPE[:ARCH]: a device of this machine.", env=False)


def replay_command(
    file: Annotated[Path, FILE],
    backend: Annotated[
        list[str] | None,
        flag("--backend", "NAME,…: backends to run; default: the recorded ones.", env=False),
    ] = None,
    device: Annotated[str | None, ON] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run an attention call from a file and judge who is wrong. Exit code 1: a backend is wrong.

    The truth is a float64 oracle, the tolerance that of the conformance suite. The outputs in the
    file are judged too.
    """
    metadata(file)  # what is no reproducer is said before torch is imported
    registry, local = load_plugins(), local_device(device)
    from attn_core.trust.files import load
    from attn_core.trust.replay import described, replay

    r = load(file)
    with stdout_to_stderr():  # compilers print
        result = replay(r, names(backend), registry, local)
    if json:
        about = {"file": str(file), "device": str(local), "call": described(r), "about": r.about}
        print_json({**about, "backends": {x.name: _data(x) for x in result}})
    else:
        console().print(described(r), soft_wrap=True)
        rows = [row for x in result for row in _rows(x)]
        header = ["backend", "verdict", "worst request", "error", "allowed"]
        print_table(header, rows, title=f"on {local}")
        for x in (x for x in result if x.refused):
            console().print(f"{x.name} was not run: {x.refused}", soft_wrap=True)
    requested = names(backend)
    if any(x.wrong for x in result if not requested or x.name in requested):
        raise typer.Exit(1)


def bisect_command(
    file: Annotated[Path, FILE],
    backend: Annotated[
        str | None,
        flag("--backend", "The backend that is wrong; default: the recorded one.", env=False),
    ] = None,
    out: Annotated[
        Path | None,
        flag("--out", "Where to write it; default: beside FILE, as NAME.smallest.", env=False),
    ] = None,
    device: Annotated[str | None, ON] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Reduce a failing attention call to the smallest one that still fails, and write it.

    Requests, tokens, heads, layers and features that the fault does not need are left out.
    """
    metadata(file)
    registry, local = load_plugins(), local_device(device)
    from attn_core.trust.bisect import smallest
    from attn_core.trust.files import load, save
    from attn_core.trust.replay import described

    r, target = load(file), out or file.with_suffix(f".smallest{file.suffix}")
    if target.exists() and target.samefile(file):
        raise UsageError(f"--out {printable(str(out), 200)} is FILE itself; name another")
    if target.is_dir():
        raise UsageError(f"--out {printable(str(target), 200)} is a folder; name a file")
    make_folder("--out", target.parent)
    from rich.progress import TextColumn

    with stdout_to_stderr(), progress(TextColumn("{task.description}")) as bar:
        task = bar.add_task("")
        result = smallest(
            r, backend, registry, local, step=lambda text: bar.update(task, description=text)
        )
    save(result.smallest, target)
    call = described(result.smallest)
    if json:
        about = {"file": str(file), "device": str(local), "out": str(target), "call": call}
        print_json({**about, "not_needed": list(result.steps), "tried": result.tried})
        return
    text = console()
    for name in result.steps:
        text.print(f"not needed: {name}", soft_wrap=True)
    text.print(f"{call} ({result.tried} calls tried)", soft_wrap=True)
    text.print(f"wrote {printable(str(target))}", soft_wrap=True)


def _rows(x: Replayed) -> list[list[str]]:
    rows = []
    if x.now is not None:
        rows.append([x.name, *_cells(x.now)])
    if x.recorded is not None:
        rows.append([f"{x.name}, recorded", *_cells(x.recorded)])
    return rows


def _cells(verdict: Verdict) -> list[str]:
    measure = verdict.measure
    verdict_text = f"wrong ({verdict.of})" if verdict.wrong else "right"
    return [verdict_text, str(verdict.request), f"{measure.error:.2e}", f"{measure.budget:.2e}"]


def _data(x: Replayed) -> dict[str, Any]:
    def of(v: Verdict | None) -> dict[str, Any] | None:
        if v is None:
            return None
        numbers = {"error": v.measure.error, "allowed": v.measure.budget}
        return {"wrong": v.wrong, "of": v.of, "request": v.request, **numbers}

    return {"now": of(x.now), "recorded": of(x.recorded), "refused": x.refused}
