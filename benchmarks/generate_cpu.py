"""Time generate() of a real model on this CPU: intel_amx, torch_native and transformers' sdpa.

Run: python -m benchmarks.generate_cpu [--model FILE.gguf or FOLDER] [--dtypes bf16 fp32]
[--rounds N] [--profile]. The model is that of the demo. The contestants take turns, each on the
same weights; tokens are greedy and compared. A rate counts decode steps, from the first new token
to the last, of all requests together.
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
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.integrations.transformers import enable
from attn_core.selection.result import Overrides
from attn_core.spec.device import probe_cpu
from attn_intel.cpu.library import LEVELS, load
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo import model_file
from benchmarks.results import FOLDER
from benchmarks.torch_native_cpu import cpu_model, placement

OURS = ("intel_amx", "torch_native")
CONTESTANTS = (*OURS, "sdpa")
TEXT = (
    "A cache of keys and values grows by one row with every token that a model writes, and each "
    "step reads all of it again. Where many requests share a machine, their rows lie in pages, "
    "which are handed out and taken back, so that no request has to own a long piece of memory. "
)
BATCHES, PROMPTS = (1, 8), (32, 512)  # requests; tokens of the longest prompt of each


def read_model(path: pathlib.Path, dtype: torch.dtype) -> Any:
    """Load the weights of a GGUF file or of a model's folder."""
    folder, files = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, attn_implementation="sdpa", **files
    ).eval()


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


class Stamps:
    """A stopping criterion that never stops, and notes when each token is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@contextlib.contextmanager
def attending(model: Any, name: str) -> Iterator[None]:
    """Let the model attend by a backend of ours, or by transformers' own sdpa."""
    if name not in OURS:
        yield
        return
    with enable(model, overrides=Overrides(attention_backend=name)):
        yield


def generate(model: Any, ids: Tensor, mask: Tensor, new: int) -> tuple[float, float, Tensor]:
    """Return the seconds of the prompt and of the steps after it, and the new tokens [B, new]."""
    stamps, start = Stamps(), time.perf_counter()
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None,
        pad_token_id=0, stopping_criteria=[stamps],
    )  # fmt: skip
    times = stamps.times
    return times[0] - start, times[-1] - times[0], out[:, ids.shape[1] :]


def measure(
    model: Any, path: pathlib.Path, batch: int, prompt: int, new: int, rounds: int
) -> dict[str, Any]:
    """Time the contestants in turns, after a call of each that is not counted."""
    ids, mask = prompts_of(path, batch, prompt)
    rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    prefill: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    tokens: dict[str, Tensor] = {}
    for turn in range(rounds + 1):
        for name in CONTESTANTS if turn % 2 else CONTESTANTS[::-1]:
            with attending(model, name):
                if not turn:
                    generate(model, ids[:, -16:], mask[:, -16:], 4)
                    continue
                first, rest, got = generate(model, ids, mask, new)
            rates[name].append(batch * (new - 1) / rest)
            prefill[name].append(first)
            tokens[name] = got
    rate = {name: statistics.median(x) for name, x in rates.items()}
    return {
        "batch": batch,
        "prompt_tokens": mask.sum(1).tolist(),
        "new_tokens": new,
        "tokens_per_s": rate,
        "spread": {name: [min(x), max(x)] for name, x in rates.items()},
        "prompt_s": {name: statistics.median(x) for name, x in prefill.items()},
        "times_as_fast_as": {x: rate["intel_amx"] / rate[x] for x in CONTESTANTS[1:]},
        "tokens_as_sdpa": {x: _agreement(tokens[x], tokens["sdpa"]) for x in OURS},
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, help="default: the demo's model")
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=("fp32", "bf16"))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS)
    parser.add_argument("--new", type=int, default=32, help="tokens that each request generates")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print one step's parts, no record")
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args(arguments)
    path = args.model or model_file()
    level = LEVELS[load().level]
    output = args.output or FOLDER / f"generate_cpu.{level}.json"
    results: list[dict[str, Any]] = []
    report = {
        "benchmark": "generate_cpu",
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
        "rounds": args.rounds,
        "results": results,
    }
    with torch.inference_mode():
        for dtype in args.dtypes:
            model = read_model(path, TORCH_DTYPES[dtype])
            for prompt, batch in itertools.product(args.prompts, args.batches):
                if args.profile:
                    for name in CONTESTANTS:
                        found = profile(model, path, batch, prompt, name)
                        print(json.dumps({"of": [dtype, batch, prompt, name], **found}))
                    continue
                found = measure(model, path, batch, prompt, args.new, args.rounds)
                results.append({"dtype": dtype, **found})
                print(json.dumps(results[-1]), flush=True)
                output.write_text(json.dumps(report, indent=1) + "\n")  # what is there so far


if __name__ == "__main__":
    main()
