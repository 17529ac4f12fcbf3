"""`attn generate`: stream text from a local model on the selected backends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_core.cli.console import console, progress
from attn_core.cli.inputs import check
from attn_core.cli.options import DTYPES, KV_DTYPES, BackendFlags, flag, takes
from attn_core.errors import UsageError
from attn_core.model_config import read_config

if TYPE_CHECKING:
    from torch import Tensor

    from attn_core.integrations.transformers.engine import Engine
    from attn_core.integrations.transformers.generate import Report, TextModel
    from attn_core.selection.result import Choice

_STEPS = 5  # of loading: importing, then those that load() names
_LONGEST = 1 << 24  # characters of a prompt: more than any context takes


@takes(BackendFlags)
def generate_command(
    flags: BackendFlags,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The prompt; - reads standard input.")
    ],
    model: Annotated[
        Path, flag("--model-path", "Model directory or GGUF file.", also="--model", env=False)
    ],
    max_new_tokens: Annotated[
        int | None,
        flag(
            "--max-new-tokens",
            "Limit of new tokens; default: 256, or less if the context is full.",
            env=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None, flag("--dtype", f"One of {', '.join(DTYPES)}; default: the model's.", env=False)
    ] = None,
    num_pages: Annotated[
        int | None,
        flag("--num-pages", "Fixed number of KV pages; default: grow on demand.", env=False),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Apply the model's chat template, if any.")
    ] = False,
    locked: Annotated[
        str | None, flag("--locked", "Refuse to differ from this file of `attn lock`.")
    ] = None,
    adaptive: Annotated[
        bool,
        flag(
            "--adaptive/--no-adaptive",
            "Other backends take the passes in which they were measured faster.",
        ),
    ] = True,
) -> None:
    """Generate text with a local model. Ctrl-C stops it and keeps the text so far."""
    check("--kv-cache-dtype", flags.kv_cache_dtype, KV_DTYPES)
    check("--dtype", dtype, DTYPES)
    if num_pages is not None and num_pages < 2:
        raise UsageError(f"--num-pages {num_pages}: at least 2, one of them is the dummy page")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {max_new_tokens}: at least 1")
    _check_model(model)
    prompt = _text(prompt)
    encoded: list[Tensor] = []

    def prepare(tokenizer: Any, context_length: int | None) -> None:
        from attn_core.integrations.transformers.generate import encode, new_tokens

        encoded.append(encode(tokenizer, prompt, chat=chat))
        new_tokens(context_length, encoded[0].shape[1], max_new_tokens)

    text = _load(flags, model, dtype, num_pages, locked, adaptive, prepare)
    for sentence in text.warnings:
        print(f"warning: {sentence}", file=sys.stderr)
    from attn_core.integrations.transformers.generate import generate

    interrupted = False
    for report in generate(text, encoded[0], _write, max_new_tokens=max_new_tokens):
        _write("\n")
        _print_report(text.engine, report)
        interrupted = report.interrupted
    if interrupted:
        raise typer.Exit(130)


def _check_model(model: Path) -> None:
    """Refuse what holds no model before torch and transformers are imported, which takes seconds.

    Raises UsageError, and ModelConfigError as read_config() does.
    """
    if os.path.isfile(model) and model.suffix != ".gguf":
        raise UsageError(
            f"--model-path {model}: give the model's directory, with its weights and tokenizer, or "
            "a GGUF file"
        )
    read_config(model)


def _text(prompt: str) -> str:
    """Return the prompt; "-" reads standard input. Raises UsageError if it is not text."""
    try:
        text = sys.stdin.read(_LONGEST + 1) if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise UsageError(f"the prompt is no text: {error}; give UTF-8") from error
    if "\0" in text:
        raise UsageError("the prompt is no text: it has NUL characters")
    if len(text) > _LONGEST:
        raise UsageError(f"the prompt has more than {_LONGEST} characters; give fewer")
    if not text:
        raise UsageError("the prompt is empty; give some text")
    return text


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()  # also where stdout is a pipe


def _load(
    flags: BackendFlags,
    path: Path,
    dtype: str | None,
    num_pages: int | None,
    locked: str | None,
    adaptive: bool,
    prepare: Callable[[Any, int | None], None],
) -> TextModel:
    # imported here: `attn select` shares the application and must start fast
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with progress(*columns) as bar:
        task = bar.add_task("importing torch and transformers", total=_STEPS)
        # read when transformers is imported: local files only, and no kernels of the hub
        os.environ.update(HF_HUB_OFFLINE="1", USE_HUB_KERNELS="0")
        try:
            from attn_core.integrations.transformers.generate import load
        except ImportError as error:
            raise UsageError(f"attn generate: {error}") from error

        def step(name: str) -> None:
            bar.update(task, advance=1, description=name)

        text = load(
            path,
            dtype=dtype,
            page_size=flags.page_size,
            kv_cache_dtype=flags.kv_cache_dtype,
            num_pages=num_pages,
            overrides=flags.overrides(),
            locked=locked,
            adaptive=adaptive,
            step=step,
            prepare=prepare,
        )
        bar.update(task, completed=_STEPS)
    return text


def _chosen(choice: Choice) -> str:
    return f"{choice.backend}: {choice.reason}"


def _linear_facts(engine: Engine) -> list[tuple[str, str]]:
    """Say which backends ran the linear layers, and what their states take."""
    roles = engine.selection.roles
    if "linear_decode" not in roles:
        return []
    names = dict.fromkeys(roles[role].backend for role in ("linear_prefill", "linear_decode"))
    return [
        ("linear", f"{' and '.join(names)}: {roles['linear_decode'].reason}"),
        ("states", f"fp32, {engine.state_bytes / 1e6:.1f} MB on {engine.selection.device}"),
    ]


def _print_report(engine: Engine, report: Report) -> None:
    chosen, out = engine.selection, console()
    steps = max(0, report.new_tokens - 1)  # the first new token is the prefill's
    rate = f"{steps / report.decode_seconds:.1f} tokens/s" if report.decode_seconds else "-"
    facts = [
        ("prefill", _chosen(chosen.roles["prefill"])),
        ("decode", _chosen(chosen.roles["decode"])),
        ("page size", f"{engine.page_size}: {chosen.page_size_reason}"),
        ("KV cache", f"{chosen.kv_cache_dtype}, {engine.kv_bytes / 1e6:.1f} MB on {chosen.device}"),
        *_linear_facts(engine),
        ("prompt", f"{report.prompt_tokens} tokens in {report.prefill_seconds:.2f} s"),
        ("new tokens", f"{report.new_tokens}, {rate}"),
        *(("assumed", sentence) for sentence in chosen.assumptions),
    ]
    if report.interrupted:
        facts.append(("ended", "by Ctrl-C"))
    out.print()
    for name, value in facts:
        out.print(f"{name:<11}{value}", soft_wrap=True)
