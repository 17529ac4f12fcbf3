"""`attn`: the command, its exit codes and its error messages."""

from __future__ import annotations

import os
import sys
import traceback

from attn_core.environment import unknown_variables
from attn_core.errors import (
    AttnError,
    ModelConfigError,
    NoBackendError,
    UsageError,
)


def main() -> None:
    """Run `attn`. Exit codes: 0 fine, 1 an error while running, 2 bad usage, 3 no backend fits."""
    debug = "--debug" in sys.argv
    sys.argv = [a for a in sys.argv if a != "--debug"]
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        from attn_core.cli.app import COMMANDS, command, variables

        run = command(asked)
        if asked in COMMANDS:
            for sentence in unknown_variables(os.environ, variables(run), f"`attn {asked}`"):
                print(f"warning: {sentence}", file=sys.stderr)
        run()
    except AttnError as error:
        if debug:
            traceback.print_exc()
        print(f"attn: {error}", file=sys.stderr)
        sys.exit(exit_code(error))
    except BrokenPipeError:
        # the reader of our output has gone: nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            traceback.print_exc()
        text = f"internal error: {type(error).__name__}: {error}"
        print(f"attn: {text}{'' if debug else '; run again with --debug'}", file=sys.stderr)
        sys.exit(1)


def exit_code(error: AttnError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, NoBackendError):
        return 3
    return 2 if isinstance(error, UsageError | ModelConfigError) else 1
