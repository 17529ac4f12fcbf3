"""Time intel_amx's linear layers of few rows on this CPU beside torch's, over the same weights.

Run: python -m benchmarks.few_rows [--dtypes bf16 fp32] [--rows 1 2 4 …] [--repeats N]
[--output FILE.json]
A pass goes once through many equal layers, so that no cache holds their weights. Both take turns.
With one thread (OMP_NUM_THREADS=1) the thread's own time is taken, for which a busy machine counts
little. A level has no time for more rows than it takes: torch has those.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import pathlib
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attn_intel.cpu.library import LEVELS, load
from attn_intel.cpu.linear import ROWS, LinearOfFewRows
from torch import Tensor

from benchmarks.results import FOLDER
from benchmarks.torch_native_cpu import DTYPES, cpu_model, interleave, placement

LAYERS = ((576, 1536, 32), (2048, 8192, 2))  # inputs, outputs, how many: 28 and 34 million weights
FEW = (1, 2, 4, 8, 16, 32, 64)


def measure(
    inputs: int, outputs: int, layers: int, rows: int, dtype: str, repeats: int
) -> dict[str, Any]:
    """Time both over so many layers; errors are the largest of the first layer, beside float64."""
    bound = {"device": "cpu", "dtype": DTYPES[dtype]}
    few = [LinearOfFewRows(inputs, outputs, bias=False, **bound) for _ in range(layers)]
    x = torch.randn(rows, inputs, dtype=DTYPES[dtype])
    exact = x.double() @ few[0].weight.double().T
    one: dict[str, Callable[[LinearOfFewRows], Tensor]] = {
        "torch": lambda layer: F.linear(x, layer.weight),
        "few_rows": lambda layer: layer(x),
    }

    def through(call: Callable[[LinearOfFewRows], Tensor]) -> Callable[[], Tensor]:
        return lambda: [call(layer) for layer in few][-1]

    calls = {name: through(call) for name, call in one.items()}
    for call in calls.values():
        call()
    ms = {name: statistics.median(s) * 1e3 for name, s in interleave(calls, repeats).items()}
    return {
        "inputs": inputs,
        "outputs": outputs,
        "layers": layers,
        "rows": rows,
        "dtype": dtype,
        "repeats": repeats,
        "median_ms": ms,
        "times_as_fast": ms["torch"] / ms["few_rows"],
        "largest_error": {n: (f(few[0]) - exact).abs().max().item() for n, f in one.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=("bf16", "fp32"))
    parser.add_argument("--rows", nargs="+", type=int, default=FEW)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args(arguments)
    level = LEVELS[load().level]
    torch.manual_seed(0)
    results = []
    with torch.inference_mode():
        for dtype, layers, rows in itertools.product(args.dtypes, LAYERS, args.rows):
            if rows <= ROWS.get((level, DTYPES[dtype]), 0):
                results.append(measure(*layers, rows, dtype, args.repeats))
                print(json.dumps(results[-1]), flush=True)
    report = {
        "benchmark": "few_rows",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "level": level,
        "threads": torch.get_num_threads(),
        **placement(),
        "results": results,
    }
    output = args.output or FOLDER / f"few_rows.{level}.json"
    output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
