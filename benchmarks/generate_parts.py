"""Say where the time of a decode step of a real model goes on this CPU, and what bounds it.

Run: python -m benchmarks.generate_parts [--model FILE.gguf or FOLDER] [--dtypes bf16] [--new N].
Parts are timed on their own: what a part calls counts for the part that is called. With one
thread (OMP_NUM_THREADS=1) time is the thread's own, so a busy machine counts little; with more it
is the clock on the wall, and the machine has to be quiet. "at_most" is what a step without any
time of attention would be: so many times as fast as today's step of each contestant.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attn_core.integrations.transformers.engine import Engine
from attn_intel.cpu.backend import IntelAMX
from attn_intel.cpu.library import LEVELS, load
from attn_intel.cpu.linear import LinearOfFewRows
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from benchmarks.demo import model_file
from benchmarks.generate_calls import DTYPES, Stamps, attending, read_model
from benchmarks.generate_cpu import BATCHES, CONTESTANTS, PROMPTS, head, prompts_of
from benchmarks.results import FOLDER

ATTENTION = ("kernels", "around the kernels")  # of intel_amx; of others all is around them


class Parts:
    """Seconds of each part, without those of the parts that it calls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._inner: list[float] = []  # of the calls that run now, what they called

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = self._clock()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                seconds = self._clock() - start
                own = seconds - self._inner.pop()
                self.seconds[part] = self.seconds.get(part, 0.0) + own
                if self._inner:
                    self._inner[-1] += seconds

        return call

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Time the parts of what is inside."""
        methods: tuple[tuple[type, str, str], ...] = (
            (nn.Linear, "forward", "linear layers"),
            (LinearOfFewRows, "forward", "linear layers"),
            (IntelAMX, "_attend", "kernels"),
            (DynamicCache, "update", "around the kernels"),
            (Engine, "_begin", "around the kernels"),
            (Engine, "_end", "around the kernels"),
        )
        functions = AttentionInterface._global_mapping
        with contextlib.ExitStack() as stack:
            for owner, name, part in methods:
                before = getattr(owner, name)
                stack.callback(setattr, owner, name, before)
                setattr(owner, name, self.timed(part, before))
            for name in functions.keys() & {"attn_core", "sdpa"}:
                stack.callback(functions.__setitem__, name, functions[name])
                functions[name] = self.timed("around the kernels", functions[name])
            yield


class Steps(Stamps):
    """Forgets what was timed before the first new token, and notes how long the rest took."""

    def __init__(self, parts: Parts, clock: Callable[[], float]) -> None:
        super().__init__()
        self._parts, self._clock = parts, clock

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        stop = super().__call__(input_ids, scores, **kwargs)
        self.times[-1] = self._clock()
        if len(self.times) == 1:
            self._parts.seconds.clear()
        return stop


def step_of(model: Any, ids: Tensor, mask: Tensor, new: int, name: str) -> dict[str, float]:
    """Return milliseconds of a decode step: of its parts, and of the whole."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    parts = Parts(clock)
    steps = Steps(parts, clock)
    with attending(model, name), parts.watching():
        model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None,
            pad_token_id=0, stopping_criteria=[steps],
        )  # fmt: skip
    full = steps.times[-1] - steps.times[0]
    result = {**parts.seconds, "all else": full - sum(parts.seconds.values()), "step": full}
    return {part: seconds / (new - 1) * 1e3 for part, seconds in result.items()}


def floors(model: Any, batch: int, repeats: int = 5) -> dict[str, float]:
    """Return what no attention changes: milliseconds of the products alone, and of reading once.

    products_ms: by torch; few_rows_ms: by intel_amx's linear layers of few rows.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    layers = [x for x in model.modules() if isinstance(x, nn.Linear)]
    rows = {n: torch.randn(batch, 1, n).to(model.dtype) for n in {x.in_features for x in layers}}
    words = [x.weight.view(torch.int32) for x in layers]

    def products() -> None:
        for layer in layers:
            F.linear(rows[layer.in_features], layer.weight, layer.bias)

    def few_rows() -> None:
        for layer in layers:
            LinearOfFewRows.forward(layer, rows[layer.in_features])  # type: ignore[arg-type]

    def read() -> None:
        for x in words:
            x.max()

    result = {"weights_mb": sum(x.weight.nbytes for x in layers) / 1e6}
    calls = {"products_ms": products, "few_rows_ms": few_rows, "reading_ms": read}
    for name, call in calls.items():
        call()
        seconds = []
        for _ in range(repeats):
            start = clock()
            call()
            seconds.append(clock() - start)
        result[name] = statistics.median(seconds) * 1e3
    return result


def measure(model: Any, path: pathlib.Path, batch: int, prompt: int, new: int, rounds: int) -> Any:
    """Return medians over the rounds, in which the contestants take turns."""
    ids, mask = prompts_of(path, batch, prompt)
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for round_number in range(rounds + 1):
        for name in CONTESTANTS:
            result = step_of(model, ids, mask, new if round_number else 3, name)
            if round_number:
                seen[name].append(result)
    ms = {n: {p: statistics.median(x[p] for x in r) for p in r[0]} for n, r in seen.items()}
    least = ms["intel_amx"]["step"] - sum(ms["intel_amx"][part] for part in ATTENTION)
    return {
        "batch": batch,
        "prompt_tokens": mask.sum(1).tolist(),
        "ms": ms,
        "at_most": {name: x["step"] / least for name, x in ms.items()},
        **floors(model, batch),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, help="default: the demo's model")
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=("bf16",))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS)
    parser.add_argument("--new", type=int, default=12, help="tokens that each request generates")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args(arguments)
    path, level = args.model or model_file(), LEVELS[load().level]
    output = args.output or FOLDER / f"generate_parts.{level}.json"
    results: list[dict[str, Any]] = []
    report = {**head("generate_parts", path, level, args.rounds), "results": results}
    with torch.inference_mode():
        for dtype in args.dtypes:
            model = read_model(path, DTYPES[dtype])
            for prompt, batch in itertools.product(args.prompts, args.batches):
                result = measure(model, path, batch, prompt, args.new, args.rounds)
                results.append({"dtype": dtype, **result})
                print(json.dumps(results[-1]), flush=True)
                output.write_text(json.dumps(report, indent=1) + "\n")  # what is there so far


if __name__ == "__main__":
    main()
