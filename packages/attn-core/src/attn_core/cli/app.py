"""The typer application. Only the command that runs is imported."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated, cast

import typer

import attn_core

if TYPE_CHECKING:
    import click

COMMANDS = {
    "backends": "backends:backends_command",
    "matrix": "backends:matrix_command",
    "doctor": "doctor:doctor_command",
    "select": "select:select_command",
    "why-not": "select:why_not_command",
    "lock": "lock:lock_command",
    "diff": "lock:diff_command",
    "generate": "generate:generate_command",
    "check": "check:check_command",
    "replay": "replay:replay_command",
    "bisect": "replay:bisect_command",
    "warmup": "warmup:warmup_command",
    "tune": "tune:tune_command",
    "bench": "bench:bench_command",
}


def _version(show: bool) -> None:
    if show:
        print(f"attn-core {attn_core.__version__}")
        raise typer.Exit


def build_app(only: str | None = None) -> typer.Typer:
    """Return the application. If `only` names a command, no other command is built."""
    app = typer.Typer(
        help="Attention backends for LLM inference: select, explain, test and run them. "
        "Add --debug for tracebacks.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)  # keeps the name of a command even where there is only one
    for name, place in COMMANDS.items():
        if only not in COMMANDS or only == name:
            module, _, function = place.partition(":")
            app.command(name)(getattr(importlib.import_module(f"attn_core.cli.{module}"), function))
    return app


def command(name: str) -> click.Group:
    """Return the function of the command `name`."""
    return cast("click.Group", typer.main.get_command(build_app(name)))


def variables(group: click.Group) -> list[str]:
    """Return the environment variables that options of the commands in `group` read."""
    options = (option for subcommand in group.commands.values() for option in subcommand.params)
    return [str(option.envvar) for option in options if option.envvar]


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    pass
