"""Measure what dispatcher and wrapper add to a library's own call: `python -m benchmarks.overhead`.

A layer's direct call is the one that the wrapper was seen to make, with the same arguments. The
library's plan is the call that it was seen to plan by, or for FlashInfer the plan() of a plain
wrapper, made as in the library's examples (plain.py).
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch
from attn_core.errors import AttnError
from attn_core.plugins.dependencies import installed
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.result import NoBackendError
from attn_core.spec.device import Device

from benchmarks.added import LIMITS, Overhead, measure
from benchmarks.attention import device_name, versions
from benchmarks.cases import LATENT, ROPE, Case
from benchmarks.ours import device_kind, row_of
from benchmarks.results import FOLDER, command_of, slug

DISTRIBUTIONS = (
    "flash-attn-3",
    "flash-attn-4",
    "flashinfer-python",
    "nvidia-cutlass-dsl",
    "sgl-flash-mla",
    "sglang-kernel",
)
BACKENDS = ("fa3", "flashinfer", "fa4", "trtllm_mha", "flashmla", "triton")


def _small(phase: str, page_size: int, **shape: int) -> Case:
    return Case(phase=phase, batch=16, length=1024, page_size=page_size, **shape)  # type: ignore[arg-type]  # phases


_LATENT = {"q_heads": 128, "kv_heads": 1, "head_dim": LATENT + ROPE, "v_head_dim": LATENT}
# of each phase the first case that a backend takes; short, so that the host is the slower one
CASES: tuple[tuple[Case, ...], ...] = (
    tuple(_small("decode", page) for page in (64, 128)),
    tuple(_small("extend", page, queries=16) for page in (64, 128)),
    (_small("mla", 64, **_LATENT),),
)


def describe(result: Overhead) -> str:
    """Say what was found in one line, each figure beside its limit."""
    if result.error:
        return f"{result.backend:<11} {result.case:<36} {result.error}"
    parts = [
        f"{name} {value:.2f}" + ("" if good else f" OVER {LIMITS[name]:g}")
        for name, (value, good) in result.verdicts.items()
    ]
    calls = [
        f"{name} {pair.ours:.1f} µs, the library's {pair.direct:.1f}"
        for name, pair in (("call", result.host), ("plan", result.plan))
        if pair
    ]
    if result.written_us is not None:
        calls[0] += f", with the write {result.written_us:.1f}"
    if result.plan_from_host_us is not None:
        calls[-1] += f" or from the host {result.plan_from_host_us:.1f}"
    return f"{result.backend:<11} {result.case:<36} {'  '.join(parts)}  ({'; '.join(calls)})"


def cases_of(name: str, registry: Registry, kind: Device) -> list[Case]:
    """List, of each phase, the first case that a backend takes."""
    taken = []
    for some in CASES:
        for case in some:
            try:
                row_of(name, case, registry, kind)
            except NoBackendError:
                continue
            taken.append(case)
            break
    return taken


def save(
    path: pathlib.Path, device: torch.device, results: Sequence[Overhead], command: str
) -> None:
    """Write what was found as JSON, with the limits and the versions."""
    data = {
        "schema": 1,
        "suite": "overhead",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "versions": versions(sorted({"attn-core", "attn-nvidia", *installed(DISTRIBUTIONS)})),
        "command": command,
        "limits": LIMITS,
        "found": [asdict(f) | {"verdicts": f.verdicts} for f in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description="Measure what dispatcher and wrapper add to a library's own call.",
    )
    add = parser.add_argument
    add("--backends", default=",".join(BACKENDS), help="names with commas")
    add("--device", default="cuda", help="a torch device")
    add("--out", type=pathlib.Path, help="the JSON (default: benchmarks/results/overhead.….json)")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here")
    registry, kind, results = load_plugins(), device_kind(device), []
    for name in args.backends.split(","):
        try:
            cases = cases_of(name, registry, kind)
        except AttnError as error:
            raise SystemExit(f"--backends: {error}") from None
        if not cases:
            print(f"{name:<11} serves no case here; `attn why-not` says why", flush=True)
        for case in cases:
            results.append(measure(name, case, registry, device, kind))
            print(describe(results[-1]), flush=True)
    path = args.out or FOLDER / f"overhead.{slug(device_name(device))}.json"
    if results:
        save(path, device, results, command_of("benchmarks.overhead", argv))
        print(f"limits: {', '.join(f'{k} {v:g}' for k, v in LIMITS.items())}; {path}")
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
