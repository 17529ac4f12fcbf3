"""`attn select` and `attn why-not`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from attn_core.cli.console import print_json
from attn_core.cli.options import SituationFlags, takes
from attn_core.cli.situation import situation
from attn_core.errors import NoBackendError
from attn_core.explain import explain, to_json
from attn_core.plugins import load_plugins
from attn_core.why_not import WhyNot, describe, why_not

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@takes(SituationFlags)
def select_command(flags: SituationFlags, json: Json = False) -> None:
    """Choose the backends of a model on a device, and say why. Exit code 3: none fits."""
    registry = load_plugins()
    asked = situation(flags, registry)
    try:
        selection = asked.select(registry)
    except NoBackendError as error:
        if json:
            print_json(to_json(error.selection, str(error)))
            raise typer.Exit(3) from None
        print(explain(error.selection))
        raise
    if json:
        print_json(to_json(selection))
    else:
        print(explain(selection))


@takes(SituationFlags)
def why_not_command(
    flags: SituationFlags,
    backend: Annotated[str, typer.Argument(help="The backend in question.")],
    json: Json = False,
) -> None:
    """Say why a backend is not chosen, and the smallest change that would make it fit."""
    registry = load_plugins()
    asked = situation(flags, registry)
    answer = why_not(
        backend,
        asked.requirements,
        asked.device,
        registry,
        asked.libraries,
        asked.overrides,
        simulated=asked.simulated,
    )
    if json:
        print_json(_as_data(answer))
    else:
        print(describe(answer))


def _as_data(answer: WhyNot) -> dict[str, Any]:
    return {
        "backend": answer.backend,
        "fits": answer.fits,
        "chosen": list(answer.chosen),
        "reasons": [{"phase": phase, "reason": reason} for phase, reason in answer.reasons],
        "changes": None if answer.changes is None else [c.text for c in answer.changes],
        "selection": None if answer.selection is None else to_json(answer.selection),
    }
