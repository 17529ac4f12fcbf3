"""Time SGLang's steps with one attention backend: one process, every case of a configuration.

Run: `python -m benchmarks.engines.sglang_steps CONFIGURATION BACKEND --out FILE.json`, or
`benchmarks.engines.run`, which calls it for each backend. A case that the file has with the same
versions is skipped. Weights are random. With speculation the number of accepted drafts is fixed by
SGLang's own simulation: text means nothing, step times are those of a real run. Needs a GPU with
SGLang, and for EAGLE sgl-deep-gemm.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.engines import record
from benchmarks.engines.configurations import CONFIGURATIONS, NEW_TOKENS, OURS, Case, Configuration

ACCEPTED = {  # read by SGLang's workers
    "SGLANG_SIMULATE_ACC_LEN": "3",
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "fixed",
}
FEW_TOKENS = 17
REPEATS = 3

# Generate this many tokens for each prompt: seconds, and the steps of the first request.
Generate = Callable[[list[list[int]], int], tuple[float, int]]


def model(folder: pathlib.Path, name: str, config: Mapping[str, Any]) -> str:
    """Write a model's configuration and return its path."""
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def arguments(configuration: Configuration, backend: str, folder: pathlib.Path) -> dict[str, Any]:
    """Return every argument of the engine; the models' configurations are written into folder."""
    engine = configuration.engine_arguments(record.split(backend)[0])
    engine["model_path"] = model(folder, "model", configuration.model)
    if configuration.draft_model is not None:
        draft = model(folder, "draft", configuration.draft_model)
        engine["speculative_draft_model_path"] = draft
        engine["speculative_draft_attention_backend"] = record.split(backend)[2] or None
    return engine


def inside(backend: str) -> dict[str, str]:
    """Return the environment that names what decodes inside attn_core."""
    name = record.split(backend)[1]
    return {"ATTN_DECODE_ATTENTION_BACKEND": name} if name else {}


def inside_of(engine: Any) -> dict[str, str]:
    """Return what attn_core chose, by role; nothing where another backend serves."""
    states = engine.get_server_info().get("internal_states") or [{}]
    return dict(states[0].get(OURS) or {})


def prompts(case: Case) -> list[list[int]]:
    """Return the same random tokens for every backend."""
    generator = random.Random(case.name)
    return [[generator.randrange(10000) for _ in range(case.length)] for _ in range(case.batch)]


def measure(
    case: Case, generate: Generate, flush: Callable[[], None], repeats: int
) -> dict[str, Any]:
    """Return the milliseconds of a prefill or a step: the median of the repeats and their spread.

    A step is what a longer run takes more than a shorter one of the same prompts. The prefix cache
    has the prompts by then, so that neither run computes them again; a prefill flushes it first.
    """
    ids = prompts(case)
    flush()
    if case.kind == "prefill":
        generate(ids, 1)
        times = []
        for _ in range(repeats):
            flush()
            times.append(generate(ids, 1)[0] * 1e3)
    else:
        for _ in range(3):  # fills the prefix cache; a hybrid model's is full after the second run
            generate(ids, FEW_TOKENS)
        times = [step_ms(generate, ids) for _ in range(repeats)]
    median = statistics.median(times)
    tokens = case.batch * (case.length if case.kind == "prefill" else 1)
    return {
        "ms": round(median, 3),
        "spread_ms": [round(min(times), 3), round(max(times), 3)],
        "tokens_per_s": round(tokens / median * 1e3),
    }


def step_ms(generate: Generate, ids: list[list[int]]) -> float:
    """Return the milliseconds of one step."""
    (short_s, short), (long_s, long) = generate(ids, FEW_TOKENS), generate(ids, NEW_TOKENS)
    return (long_s - short_s) / (long - short) * 1e3


def calls(engine: Any, speculative: bool) -> tuple[Generate, Callable[[], None]]:
    """Return what `measure` calls: generate and flush, of a running engine."""

    def generate(ids: list[list[int]], tokens: int) -> tuple[float, int]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        start = time.perf_counter()
        out = engine.generate(input_ids=ids, sampling_params=sampling)
        seconds = time.perf_counter() - start
        steps = out[0]["meta_info"]["spec_verify_ct"] if speculative and tokens > 1 else tokens
        return seconds, steps

    def flush() -> None:
        for _ in range(200):  # the engine is idle only some milliseconds after its last answer
            if engine.flush_cache().success:
                return
            time.sleep(0.02)
        raise RuntimeError("SGLang does not flush its cache: requests are still running")

    return generate, flush


def trace(engine: Any, run: Callable[[], object], folder: pathlib.Path, case: Case) -> None:
    """Write a profile of a run for a trace viewer: <kind>.<batch>x<length>-….trace.json.gz."""
    engine.start_profile(
        output_dir=str(folder),
        activities=["CPU", "GPU"],
        with_stack=False,
        record_shapes=False,
        profile_prefix=case.name.replace(" ", "."),
    )
    run()
    engine.stop_profile()


def later() -> list[str]:
    """Import the engine, then wait for a line with the arguments and the file to print to."""
    importlib.import_module("sglang")
    said = json.loads(sys.stdin.readline())
    log = os.open(said["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    return list(said["arguments"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configuration", choices=CONFIGURATIONS)
    parser.add_argument("backend", help="fa3, attn_core, attn_core:triton …")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--round", type=int, default=1, help="number of this process")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--trace", type=pathlib.Path, help="folder for a profile of each case")
    args = parser.parse_args(later() if sys.argv[1:] == ["--later"] else None)
    configuration = CONFIGURATIONS[args.configuration]
    versions = record.installed()
    known = record.load(args.out)
    cases = record.missing(known, configuration.cases, args.backend, args.round, versions)
    if not cases:
        return
    os.environ.update(ACCEPTED if configuration.is_speculative else {})
    os.environ.update(inside(args.backend))
    import sglang
    import torch

    device = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        engine = sglang.Engine(**arguments(configuration, args.backend, pathlib.Path(folder)))
        start_s = time.perf_counter() - start
        chosen = inside_of(engine)
        generate, flush = calls(engine, configuration.is_speculative)
        for case in cases:
            row = {
                "backend": args.backend,
                "case": case.name,
                "round": args.round,
                **measure(case, generate, flush, args.repeats),
                "start_s": round(start_s, 1),
                **({"chosen": chosen} if chosen else {}),
                "date": datetime.date.today().isoformat(),
                "versions": versions,
            }
            print(json.dumps(row), flush=True)
            record.merge(args.out, row, configuration=args.configuration, device=device)
            if args.trace is not None:
                run = functools.partial(generate, prompts(case), FEW_TOKENS)
                trace(engine, run, args.trace, case)
        engine.shutdown()


if __name__ == "__main__":
    main()
