"""`attn`: the command, its exit codes and its error messages."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from typing import Any

from attn_core.errors import AttnError, ModelConfigError, UsageError
from attn_core.formatting import printable
from attn_core.selection.result import NoBackendError
from attn_core.tools.env_vars import unknown_variables


def main() -> None:
    """Run `attn`. Exit codes: 0 success, 1 error, 2 usage error, 3 no backend fits.

    With --json an error is one object on standard output too, {"error": text}.
    """
    options = _options()
    debug = "--debug" in options
    sys.argv = [x for x in options if x != "--debug"] + sys.argv[len(options) :]
    if sys.stdout is None:  # it was closed before the start
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for the rest of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # any text can be written
    try:
        try:
            _run(sys.argv[1] if len(sys.argv) > 1 else "")
        finally:
            sys.stdout.flush()  # at exit it would be too late to say that this fails
    except AttnError as error:
        _end(str(error), exit_code(error), debug)
    except BrokenPipeError:
        # the reader of our output has gone: nothing is left to say
        _discard_output()
        sys.exit(1)
    except OSError as error:  # the system refuses: a full disk, a file that cannot be read
        _discard_output()
        _end(str(error), 1, debug)
    except Exception as error:
        text = f"internal error: {type(error).__name__}: {error}"
        _end(f"{text}{'' if debug else '; run again with --debug'}", 1, debug)


def _run(name: str) -> None:
    from attn_core.cli.app import COMMANDS, command, variables

    run = command(name)
    if name in COMMANDS:
        for sentence in unknown_variables(os.environ, variables(run), f"`attn {name}`"):
            print(f"warning: {printable(sentence)}", file=sys.stderr)
    if not _wants_json():
        run()
        return
    import typer

    usage_error: Any = typer.BadParameter.__base__  # any wrong option or argument
    try:
        sys.exit(run(standalone_mode=False) or 0)
    except usage_error as error:
        raise UsageError(error.format_message()) from None
    except typer.Abort:
        sys.exit(1)


def _options() -> list[str]:
    """Return the command line as far as `--`, behind which there are only arguments."""
    return sys.argv[: sys.argv.index("--") if "--" in sys.argv else None]


def _wants_json() -> bool:
    return "--json" in _options()


def _end(text: str, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"attn: {printable(text)}", file=sys.stderr)
    if _wants_json():
        from attn_core.cli.console import print_json

        with contextlib.suppress(OSError):  # its reader may be what failed
            print_json({"error": text})
            sys.stdout.flush()
    sys.exit(code)


def _discard_output() -> None:
    """Discard buffered standard output that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(error: AttnError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, NoBackendError):
        return 3
    return 2 if isinstance(error, UsageError | ModelConfigError) else 1
