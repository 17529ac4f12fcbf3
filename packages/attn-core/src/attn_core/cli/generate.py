"""`attn generate`: text out of a local model, streamed, on the selected backends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_core.cli.console import console, progress
from attn_core.cli.options import DTYPES, KV_DTYPES, BackendFlags, flag, takes
from attn_core.cli.situation import check
from attn_core.errors import UsageError

if TYPE_CHECKING:
    from attn_core.integrations.transformers.engine import Engine
    from attn_core.integrations.transformers.text import Report, TextModel

_STEPS = 5  # of loading: importing, then those that load() names


@takes(BackendFlags)
def generate_command(
    flags: BackendFlags,
    prompt: Annotated[str, typer.Argument(help="The text to answer; - reads standard input.")],
    model: Annotated[
        Path, flag("--model-path", "Model directory or GGUF file.", also="--model", env=False)
    ],
    max_new_tokens: Annotated[
        int | None,
        flag("--max-new-tokens", "At most; 256 or what the context has room for.", env=False),
    ] = None,
    dtype: Annotated[
        str | None, flag("--dtype", f"One of {', '.join(DTYPES)}; the model's.", env=False)
    ] = None,
    num_pages: Annotated[
        int | None, flag("--num-pages", "Pages of the KV cache; it grows on demand.", env=False)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Wrap it in the model's chat template, if any.")
    ] = False,
) -> None:
    """Generate text with a local model. Ctrl-C ends it and keeps what was written."""
    check("--kv-cache-dtype", flags.kv_cache_dtype, KV_DTYPES)
    check("--dtype", dtype, DTYPES)
    if model.is_file() and model.suffix != ".gguf":
        raise UsageError(
            f"--model-path {model}: give the model's directory, with its weights and tokenizer, or "
            "a GGUF file"
        )
    if num_pages is not None and num_pages < 2:
        raise UsageError(f"--num-pages {num_pages}: at least 2, one of them is the dummy page")
    text = _load(flags, model, dtype, num_pages)
    from attn_core.integrations.transformers.text import encode, generate

    ids = encode(text.tokenizer, sys.stdin.read() if prompt == "-" else prompt, chat=chat)
    interrupted = False
    for report in generate(text, ids, _write, max_new_tokens=max_new_tokens):
        _write("\n")
        _print_report(text.engine, report)
        interrupted = report.interrupted
    if interrupted:
        raise typer.Exit(130)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()  # also where stdout is a pipe


def _load(flags: BackendFlags, path: Path, dtype: str | None, num_pages: int | None) -> TextModel:
    # imported here: `attn select` shares the application and must start fast
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with progress(*columns) as bar:
        task = bar.add_task("importing torch and transformers", total=_STEPS)
        try:
            from attn_core.integrations.transformers.text import load
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
            step=step,
        )
        bar.update(task, completed=_STEPS)
    return text


def _print_report(engine: Engine, report: Report) -> None:
    chosen, out = engine.selection, console()
    steps = max(0, report.new_tokens - 1)  # the first new token is the prefill's
    rate = f"{steps / report.decode_seconds:.1f} tokens/s" if report.decode_seconds else "-"
    lines = [
        ("prefill", f"{chosen.prefill}: {chosen.why['prefill']}"),
        ("decode", f"{chosen.decode}: {chosen.why['decode']}"),
        ("page size", f"{engine.page_size}: {chosen.why['page_size']}"),
        ("KV cache", f"{chosen.kv_cache_dtype}, {engine.kv_bytes / 1e6:.1f} MB on {chosen.device}"),
        ("prompt", f"{report.prompt_tokens} tokens in {report.prefill_seconds:.2f} s"),
        ("new tokens", f"{report.new_tokens}, {rate}"),
        *(("assumed", sentence) for sentence in chosen.assumptions),
    ]
    if report.interrupted:
        lines.append(("ended", "by Ctrl-C"))
    out.print()
    for name, value in lines:
        out.print(f"{name:<11}{value}", soft_wrap=True)
