"""Record what `attn tune` takes for a model: `python -m benchmarks.tune_model`.

Run: `python -m benchmarks.tune_model NAME … --profile FILE --compile`, then the same without
--compile and with --minutes 5; names are configurations of benchmarks.engines. The first call
compiles and measures nothing, the second is bounded, and its own compile_s is what is left to
compile. It knows the requests that the configuration times, as a workload, and SGLang's pages of
one token. The profile is what `benchmarks.engines.run --profile FILE --workload cases` then takes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from attn_core.costs.store import locked

from benchmarks.engines.configurations import CONFIGURATIONS, Configuration
from benchmarks.engines.costs import workload_of
from benchmarks.engines.models import write
from benchmarks.results import FOLDER, slug

ATTN = [sys.executable, "-c", "from attn_core.cli import main; main()", "tune"]
PASSED_ON = (
    "kv_cache_dtype",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_attention_mode",
)
KEPT = ("environment", "points", "compile_s", "measure_s", "spent_s", "passes", "fastest", "bad")


def flags(configuration: Configuration, folder: pathlib.Path, pages: str) -> list[str]:
    """Return what `attn tune` is told of a configuration; its model is written into the folder."""
    model = write(folder, "model", configuration.model)
    workload = json.dumps(workload_of(configuration))
    told = [model, "--workload", workload, *(("--page-size", pages) if pages != "all" else ())]
    for name in PASSED_ON:
        if (value := configuration.arguments.get(name)) is not None:
            told += [f"--{name.replace('_', '-')}", str(value)]
    return told


def tune(arguments: Sequence[str]) -> dict[str, Any]:
    """Run `attn tune` in a process of its own, and return what it prints, and its seconds."""
    begin = time.monotonic()
    done = subprocess.run([*ATTN, *arguments, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"attn tune {' '.join(arguments)}: exit code {done.returncode}")
    return {**json.loads(done.stdout), "seconds": round(time.monotonic() - begin, 1)}


def entry(said: dict[str, Any]) -> dict[str, Any]:
    """Return what is recorded of what the command printed."""
    skipped: dict[str, int] = {}
    for one in said["skipped"]:
        skipped[one["reason"]] = skipped.get(one["reason"], 0) + 1
    return {
        "seconds": said["seconds"],
        **{name: said[name] for name in KEPT},
        "skipped": skipped,
        "selection": said["selection"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configurations", nargs="+", choices=CONFIGURATIONS, metavar="NAME")
    parser.add_argument("--profile", type=pathlib.Path, required=True, help="file to add to")
    parser.add_argument("--minutes", type=float, default=5.0, help="of measuring")
    parser.add_argument("--page-size", default="1", help='"all": those that attn tune picks')
    parser.add_argument("--compile", action="store_true", help="measure nothing")
    parser.add_argument("--compiled", action="store_true", help="compile nothing before")
    parser.add_argument("--out", type=pathlib.Path, help="default: results/tune.<device>.json")
    args = parser.parse_args(arguments)
    for name in args.configurations:
        with tempfile.TemporaryDirectory() as folder:
            told = flags(CONFIGURATIONS[name], pathlib.Path(folder), args.page_size)
            bound = ["--compile-only"] if args.compile else ["--minutes", str(args.minutes)]
            bound += ["--compiled"] if args.compiled else []
            message = tune([*told, "--out", str(args.profile), *bound])
        result = entry(message) | {"minutes": args.minutes}
        if args.compile:
            result = {
                "compiled_before": {
                    "seconds": message["seconds"],
                    "compile_s": message["compile_s"],
                }
            }
        label = name if args.page_size == "1" else f"{name}, pages {args.page_size}"
        out = args.out or FOLDER / f"tune.{slug(message['environment']['device'])}.json"
        save(out, label, result)
        passes = message["passes"]
        took = f"compiled {message['compile_s']:.0f} s, measured {message['measure_s']:.0f} s"
        print(f"{label}: {passes['measured']} of {passes['listed']} passes, {took}", flush=True)
    return 0


def save(path: pathlib.Path, name: str, result: dict[str, Any]) -> None:
    """Put the result of a configuration into the record; several processes may."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        record = json.loads(path.read_text()) if path.exists() else {}
        today = datetime.date.today().isoformat()
        record[name] = {**record.get(name, {}), "date": today, **result}
        record = dict(sorted(record.items()))
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
