"""The commands, mounted on one typer application; only the one asked for is imported."""

from __future__ import annotations

import importlib
from dataclasses import fields

import typer

from attn_core.cli.options import SituationFlags
from attn_core.environment import variable

COMMANDS = {
    "backends": "backends:backends_command",
    "matrix": "backends:matrix_command",
    "doctor": "doctor:doctor_command",
    "select": "select:select_command",
    "why-not": "select:why_not_command",
    "generate": "generate:generate_command",
}


def build_app(asked: str | None = None) -> typer.Typer:
    """Return the application; with `asked` the name of a command, only that one is built."""
    app = typer.Typer(
        help="Attention backends for LLM inference: choose, question, prove and run them. "
        "Add --debug for tracebacks.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(lambda: None)  # keeps the name of a command even where there is only one
    for name, place in COMMANDS.items():
        if asked not in COMMANDS or asked == name:
            module, _, function = place.partition(":")
            app.command(name)(getattr(importlib.import_module(f"attn_core.cli.{module}"), function))
    return app


def variables() -> list[str]:
    """Return the environment variables that some option reads."""
    return [variable("--" + f.name.replace("_", "-")) for f in fields(SituationFlags)]
