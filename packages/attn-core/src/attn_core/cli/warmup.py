"""`attn warmup`: compile the kernels of a selection ahead of time."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from attn_core.cli.console import console, print_json, print_table, progress
from attn_core.cli.inputs import must_be_here, selection_inputs
from attn_core.cli.options import InputFlags, flag, takes
from attn_core.errors import UsageError
from attn_core.plugins.registry import load_plugins
from attn_core.plugins.streams import stdout_to_stderr
from attn_core.spec.device import probe_device
from attn_core.spec.requirements import Requirements
from attn_core.tools.probes import probed

MAX_BYTES = 16 << 30  # of the tensors of one pass, which serves no request
TOKENS, KEYS = 151, 2151  # the most of one request, in attn_core.runtime.warmup


@takes(InputFlags)
def warmup_command(
    flags: InputFlags,
    path: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="Model directory or config.json.")
    ] = None,
    max_bs: Annotated[
        int, flag("--max-bs", "Largest decode batch, in requests.", env=False, most=1 << 14)
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Select and create backends, and run every kind of pass, so that all kernels are compiled.

    Takes the options of `attn select`. Compiled kernels stay in the caches of their libraries.
    """
    if path is not None and flags.model is not None:
        raise UsageError(f"{path} and --model {flags.model}: name one model")
    registry = probed(load_plugins())
    local = probe_device()
    device = None if flags.device == local.type else flags.device  # the one of that type
    inputs = selection_inputs(replace(flags, model=path or flags.model, device=device), registry)
    must_be_here(inputs, local, "a warm-up")
    selection = inputs.select(registry)
    if not {"prefill", "decode"} <= selection.roles.keys():
        raise UsageError("this model has no softmax attention: there is nothing to warm up")

    _must_fit(inputs.requirements, max_bs, selection.page_size or 1)
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from attn_core.runtime.warmup import Warmed, create, warmup
    from attn_core.testing.runner import torch_device  # torch, which other commands do without

    text = TextColumn("{task.description}")
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with stdout_to_stderr(), progress(*columns) as bar:  # compilers print
        task = bar.add_task("creating the backends", total=None)

        def step(backend: str, label: str, passes: int) -> None:
            bar.update(task, advance=1, total=passes, description=f"{backend}: {label}")

        torch_dev = torch_device(inputs.device)
        start = time.perf_counter()
        dispatcher = create(selection, inputs.requirements, registry, torch_dev, max_bs=max_bs)
        linear = dispatcher.linear.routes if dispatcher.linear else {}
        routes = (*dispatcher.routes.values(), *linear.values())
        names = dict.fromkeys(b.config.name for b in routes)
        created = Warmed(", ".join(names), "create", time.perf_counter() - start)
        heads = (x.index_heads for x in inputs.requirements.softmax_layers)
        index_heads = next((n for n in heads if n), None)
        passes = warmup(dispatcher, max_bs=max_bs, index_heads=index_heads, step=step)
        warmed = [created, *passes]
    if json:
        print_json({"device": str(inputs.device), "passes": [asdict(w) for w in warmed]})
        return
    rows = [[w.backend, w.what, f"{w.seconds:.2f}"] for w in warmed]
    print_table(["backend", "pass", "seconds"], rows, title=f"warmed up on {inputs.device}")
    total = sum(w.seconds for w in warmed)
    console().print(f"\n{len(warmed) - 1} passes in {total:.1f} s, creation included")


def _must_fit(needs: Requirements, max_bs: int, page_size: int) -> None:
    """Refuse shapes whose tensors would not fit into the machine's memory."""
    for x in (*needs.softmax_layers, *((needs.vision,) if needs.vision else ())):
        d, heads = x.head_dim or 0, x.num_q_heads or 0
        width = d + (x.v_head_dim or d)
        tokens = max(TOKENS, max_bs) * heads * width
        pages = 2 * page_size * (x.num_kv_heads or heads) * width
        size = 4 * (tokens + pages + heads * TOKENS * KEYS)  # fp32, scores included
        shape = f"{heads} query heads, head_dim {d}, page size {page_size}"
        _refuse_size(size, f"{shape} and --max-bs {max_bs}")
    drafts = needs.speculation.num_draft_tokens if needs.speculation else 0
    for x in needs.linear_layers:
        request, token = x.state_bytes(drafts), x.state_bytes(1)
        if request is None or token is None:
            continue
        tokens = max(TOKENS, max_bs) * token.records
        shape = f"{x.num_kv_heads} value heads, head_dim {x.head_dim}, {drafts} drafts"
        size = 2 * (request.state + request.records + tokens)
        _refuse_size(size, f"{shape} and --max-bs {max_bs}")


def _refuse_size(size: int, noun: str) -> None:
    if size > MAX_BYTES:
        raise UsageError(
            f"a warm-up of {noun} takes about {size / 1e9:.0f} GB (at most "
            f"{MAX_BYTES / 1e9:.0f}); give smaller ones, or --tp for one rank's share"
        )
