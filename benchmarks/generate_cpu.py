"""Time generate() of a real model on this CPU: intel_amx, torch_native and transformers' sdpa.

"linear layers too" has intel_amx's linear layers of few rows, as `attn generate` has them; the
others have the model's own. Where they gain nothing in a dtype, it is intel_amx again.

Run: python -m benchmarks.generate_cpu [--model FILE.gguf or FOLDER] [--dtypes bf16 fp32]
[--rounds N] [--profile]. The model is that of the demo. The contestants take turns, each on the
same weights; tokens are greedy and compared. A rate counts decode steps, from the first new token
to the last, of all requests together.
[--since FOLDER]: another contestant, torch_native of an earlier commit, of which FOLDER is a
checkout. It has a process and a copy of the weights of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import pathlib
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from attn_core.spec.device import probe_cpu
from attn_intel.cpu.library import LEVELS, load
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.demo import model_file
from benchmarks.generate_calls import DTYPES, LINEAR, Earlier, attending, generate, read_model
from benchmarks.results import FOLDER
from benchmarks.torch_native_cpu import cpu_model, placement

CONTESTANTS = (LINEAR, "intel_amx", "torch_native", "sdpa")
Call = Callable[[Tensor, Tensor, int], tuple[float, float, Tensor]]  # as generate() without a model
TEXT = (
    "A cache of keys and values grows by one row with every token that a model writes, and each "
    "step reads all of it again. Where many requests share a machine, their rows lie in pages, "
    "which are handed out and taken back, so that no request has to own a long piece of memory. "
)
BATCHES, PROMPTS = (1, 8), (32, 512)  # requests; tokens of the longest prompt of each


def prompts_of(path: pathlib.Path, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return int64 [B, T] and its padding mask: requests of different lengths, padded before.

    The first has `tokens` tokens, each further one about a sixteenth less.
    """
    folder, files = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **files)
    ids: list[int] = tokenizer(TEXT * (tokens // 32 + 1))["input_ids"]
    rows = torch.tensor([ids[i : i + tokens] for i in range(batch)])
    mask = torch.ones_like(rows)
    for i in range(batch):
        mask[i, : i * tokens // 16] = 0
    return rows, mask


def contestants(model: Any, since: Mapping[str, Earlier]) -> dict[str, Call]:
    """Return what takes turns: each name's generate() with the same arguments."""

    def of(name: str) -> Call:
        def call(ids: Tensor, mask: Tensor, new: int) -> tuple[float, float, Tensor]:
            with attending(model, name):
                return generate(model, ids, mask, new)

        return call

    return {**{name: of(name) for name in CONTESTANTS}, **since}


def measure(
    calls: Mapping[str, Call], path: pathlib.Path, batch: int, prompt: int, new: int, rounds: int
) -> dict[str, Any]:
    """Time the contestants in turns, after a call of each that is not counted."""
    ids, mask = prompts_of(path, batch, prompt)
    rates: dict[str, list[float]] = {name: [] for name in calls}
    prefill: dict[str, list[float]] = {name: [] for name in calls}
    tokens: dict[str, Tensor] = {}
    for round_number in range(rounds + 1):
        for name in list(calls) if round_number % 2 else reversed(list(calls)):
            if not round_number:
                calls[name](ids[:, -16:], mask[:, -16:], 4)
                continue
            first, rest, tokens[name] = calls[name](ids, mask, new)
            rates[name].append(batch * (new - 1) / rest)
            prefill[name].append(first)
    rate = {name: statistics.median(x) for name, x in rates.items()}
    return {
        "batch": batch,
        "prompt_tokens": mask.sum(1).tolist(),
        "new_tokens": new,
        "tokens_per_s": rate,
        "spread": {name: [min(x), max(x)] for name, x in rates.items()},
        "prompt_s": {name: statistics.median(x) for name, x in prefill.items()},
        "times_as_fast_as": {x: rate["intel_amx"] / rate[x] for x in rate if x != "intel_amx"},
        "linear_too_times_as_fast_as": {x: rate[LINEAR] / rate[x] for x in rate if x != LINEAR},
        "tokens_as_sdpa": {x: _agreement(tokens[x], tokens["sdpa"]) for x in rate if x != "sdpa"},
    }


def _agreement(got: Tensor, wanted: Tensor) -> list[int]:
    """Return how many tokens of each request agree before the first that differs."""
    return (got == wanted).int().cumprod(1).sum(1).tolist()


def profile(model: Any, path: pathlib.Path, batch: int, prompt: int, name: str) -> dict[str, Any]:
    """Say where the time of a decode step goes: milliseconds of each kind of operator, its own."""
    ids, mask = prompts_of(path, batch, prompt)
    with attending(model, name):
        generate(model, ids, mask, 4)
        first, rest, _ = generate(model, ids, mask, 17)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            generate(model, ids, mask, 17)
    own = sorted(seen.key_averages(), key=lambda x: -x.self_cpu_time_total)[:12]
    return {
        "step_ms": rest / 16 * 1e3,
        "prompt_ms": first * 1e3,
        "operators_ms": {x.key: [x.self_cpu_time_total / 1e3, x.count] for x in own},
    }


def head(benchmark: str, path: pathlib.Path, level: str, rounds: int) -> dict[str, Any]:
    """Return what a record says before its results: the model, versions and the CPU."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": path.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "device": str(probe_cpu()),
        "level": level,
        "threads": torch.get_num_threads(),
        **placement(),
        "rounds": rounds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, help="default: the demo's model")
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=("fp32", "bf16"))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS)
    parser.add_argument("--new", type=int, default=32, help="tokens that each request generates")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print one step's parts, no record")
    parser.add_argument("--since", type=pathlib.Path, help="checkout of an earlier commit")
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args(arguments)
    path = args.model or model_file()
    level = LEVELS[load().level]
    output = args.output or FOLDER / f"generate_cpu.{level}.json"
    results: list[dict[str, Any]] = []
    report = {**head("generate_cpu", path, level, args.rounds), "results": results}
    with torch.inference_mode():
        for dtype in args.dtypes:
            model = read_model(path, DTYPES[dtype])
            if args.profile:
                for prompt, batch in itertools.product(args.prompts, args.batches):
                    for name in CONTESTANTS:
                        result = profile(model, path, batch, prompt, name)
                        print(json.dumps({"of": [dtype, batch, prompt, name], **result}))
                continue
            with contextlib.ExitStack() as stack:
                since = {}
                if args.since:
                    earlier = Earlier(args.since, path, dtype, "torch_native")
                    since[f"torch_native of {earlier.commit}"] = stack.enter_context(earlier)
                calls = contestants(model, since)
                for prompt, batch in itertools.product(args.prompts, args.batches):
                    result = measure(calls, path, batch, prompt, args.new, args.rounds)
                    results.append({"dtype": dtype, **result})
                    print(json.dumps(results[-1]), flush=True)
                    output.write_text(json.dumps(report, indent=1) + "\n")  # what is there so far


if __name__ == "__main__":
    main()
