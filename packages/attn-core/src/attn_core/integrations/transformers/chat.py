"""Render chat templates in a separate process with limits, because a template is a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

SECONDS = 10  # of computing; a template that is meant to end takes milliseconds
MEMORY = 1 << 30  # bytes beyond what the process takes before the template runs
LENGTH = 1 << 20  # characters beyond those of the message
_STARTED = 120  # seconds, for a machine that has no limits of its own
# This file is run by its path: importing its package would load torch.
_RUN = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='chat')"


class TemplateError(Exception):
    """A chat template that fails or does not end, in a sentence."""


def render(tokenizer: Any, prompt: str) -> str:
    """Return `prompt` as a message of a user, in the chat template. Raises TemplateError."""
    try:
        template = tokenizer.get_chat_template()
    except Exception as error:  # several templates, none of them the default
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    job = {
        "template": template,
        "message": {"role": "user", "content": prompt},
        "special": dict(tokenizer.special_tokens_map),
        "limits": (SECONDS, MEMORY, len(prompt) + LENGTH),
    }
    path = [entry for entry in sys.path if entry]
    try:
        finished = subprocess.run(
            [sys.executable, "-I", "-c", _RUN, __file__, *path],
            input=json.dumps(job, default=str),
            capture_output=True,
            encoding="utf-8",
            timeout=_STARTED,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TemplateError(f"it runs for more than {_STARTED} seconds") from None
    if finished.returncode < 0:  # killed by the limit of computing
        raise TemplateError(f"it computes for more than {SECONDS} seconds")
    if finished.returncode:
        last = finished.stderr.strip().rpartition("\n")[2]
        raise TemplateError(f"its process ended with code {finished.returncode}: {last[:300]}")
    result = json.loads(finished.stdout)
    if "error" in result:
        raise TemplateError(result["error"])
    return str(result["text"])


def _limit(seconds: int, memory: int) -> None:
    """Limit what this process computes and takes from now on, where the system can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + memory, in_use + memory))
    except (OSError, ValueError):  # no Linux, or a lower limit is set already
        return


def _main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    job = json.load(sys.stdin)
    seconds, memory, longest = job["limits"]
    _limit(seconds, memory)
    try:
        (text,), _ = render_jinja_template(
            [[job["message"]]],
            chat_template=job["template"],
            add_generation_prompt=True,
            **job["special"],
        )
        result = {"text": text}
        if len(text) > longest:
            result = {"error": f"it makes {len(text)} characters out of one message"}
    except MemoryError:
        result = {"error": f"it takes more than {memory >> 20} MiB of memory"}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    json.dump(result, sys.stdout)


if __name__ == "chat":
    _main()
