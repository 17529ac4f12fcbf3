"""Compare what an engine computes on two GPUs with what it computes on one: attn_core and a peer.

Run: `python -m benchmarks.engines.parallel [--kinds tp dp pp dcp] [--together 4] [--seconds 300]`,
which are SGLang's, with `--kinds tp4 dcp4` on four GPUs, or with `--kinds vllm-tp`. Prompts are
replayed in an engine of one GPU and in engines of several, with attn_core and with one of the
engine's own backends. The logprobs of prompts and of greedy tokens must not differ more between one
GPU and several than the peer's do; nor may those of attn_core and the peer, on one GPU or on
several. Weights are random, of a size that attention shows; all engines read the same. Engines run
beside one another, so nothing is timed. A kind is recorded as soon as its engines are done, and
other kinds of the record are kept. Exit code 0: all passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.engines import record
from benchmarks.engines.cases import OURS, gpus_of
from benchmarks.engines.processes import kill, last_error
from benchmarks.engines.replays import SGLANG, VLLM, Replies, serve
from benchmarks.engines.run import LOGS, devices
from benchmarks.engines.sglang_engine import QUIET, SHARED
from benchmarks.results import FOLDER, slug

ONE = "one"  # GPU
ONE_HEAD = "one-kv-head"  # one GPU, and one KV head of the model
ONE_VLLM = "one-vllm"
ONE_QWEN3 = "one-qwen3"  # SGLang's Llama has no data-parallel attention, its Qwen3 has
KINDS: Mapping[str, Mapping[str, Any]] = {
    ONE: {},
    "tp": {"tp_size": 2},
    "dp": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "pp": {"pp_size": 2, "disable_overlap_schedule": True},
    ONE_HEAD: {},
    ONE_QWEN3: {},
    "dcp": {"tp_size": 2, "dcp_size": 2},
    "tp4": {"tp_size": 4},
    "dcp4": {"tp_size": 4, "dcp_size": 4},
    ONE_VLLM: {},
    "vllm-tp": {"tensor_parallel_size": 2},
}
PEER = "fa3"
# SGLang's fa3 does not split keys, and its ranks only share keys of KV heads that all of them have
PEERS = {
    ONE_HEAD: "triton",
    "dcp": "triton",
    "dcp4": "triton",
    ONE_VLLM: "FLASH_ATTN",
    "vllm-tp": "FLASH_ATTN",
}
ONES = {"dcp": ONE_HEAD, "dcp4": ONE_HEAD, "dp": ONE_QWEN3, "vllm-tp": ONE_VLLM}
MODELS: Mapping[str, Mapping[str, Any]] = {  # kind of one GPU → what differs from the soak's model
    ONE: {},
    ONE_HEAD: {"num_key_value_heads": 1},
    ONE_QWEN3: {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    ONE_VLLM: {},
}
SPLIT = ("tp", "dp", "pp", "dcp")  # of SGLang, on two GPUs
MORE = ("tp4", "dcp4", "vllm-tp")  # on four, or of vLLM
# How much more than the peer's a difference may be, in logprobs, and what always passes: bf16
# rounds logits of 4 to steps of 0.016. A pipeline leaves the peer's arithmetic as it is.
TIMES = {"mean": 1.5, "worst": 2.0}
LEAST = {"mean": 0.003, "worst": 0.1}
LIMIT_S = 240.0  # of one engine
Difference = dict[str, float]
Named = tuple[str, str]  # kind, backend


def difference(one: Replies, other: Replies) -> Difference:
    """Return mean and worst difference of logprobs, as long as both have the same tokens behind.

    Where the greedy tokens part, both are the largest logprobs there, and are compared a last time.
    """
    apart, missing = [], 0
    for name, requests in one.items():
        for a, b in zip(requests, other[name], strict=True):
            for (token, x), (same, y) in zip(a, b, strict=True):
                apart.append(abs(x - y))
                if token != same:
                    break
            missing += any(not math.isfinite(y) for _, y in b)
    finite = [x for x in apart if math.isfinite(x)]
    return {
        "mean": round(statistics.fmean(finite), 6) if finite else math.inf,
        "worst": round(max(finite, default=math.inf), 5),
        "compared": len(finite),
        "not_finite": missing + len(apart) - len(finite),
    }


def judge(kind: str, ours: Difference, peers: Difference, what: str) -> list[str]:
    """Return what is wrong with a difference beside the peer's."""
    wrong = [f"{kind}: {what}: numbers that are not finite"] if ours["not_finite"] else []
    for name, least in LEAST.items():
        limit = max(least, TIMES[name] * peers[name])
        if not ours[name] <= limit:
            wrong.append(f"{kind}: {what}: {name} {ours[name]:.5f} (limit {limit:.5f})")
    return wrong


def engine_of(kind: str) -> str:
    """Return the engine of a kind."""
    return VLLM if "vllm" in kind else SGLANG


def one_gpu(kind: str) -> str:
    """Return the kind of one GPU that has the model of a kind."""
    return kind if kind in MODELS else ONES.get(kind, ONE)


def engines(kind: str) -> list[Named]:
    """Return the engines that a kind needs: on one GPU and on two, ours and the peer's."""
    pair = (OURS, PEERS.get(kind, PEER))
    return [(k, backend) for k in (one_gpu(kind), kind) for backend in pair]


def rows(
    replies: Mapping[tuple[str, str], Replies | str], kinds: Iterable[str]
) -> list[dict[str, Any]]:
    """Compare each kind with one GPU, for both backends; a text in place of logprobs is an error.

    "ours" and "peer": the difference between one GPU and two of one backend. "backends": of the two
    backends on two GPUs, beside "backends_on_one".
    """
    made = []
    for kind in kinds:
        peer = PEERS.get(kind, PEER)
        names = engines(kind)
        errors = [f"{k} {b}: {replies[k, b]}" for k, b in names if isinstance(replies[k, b], str)]
        row: dict[str, Any] = {"kind": kind, "arguments": KINDS[kind], "peer_backend": peer}
        if errors:
            made.append({**row, "wrong": errors})
            continue
        one, one_peer, two, two_peer = (x for name in names if isinstance(x := replies[name], dict))
        row |= {
            "ours": difference(one, two),
            "peer": difference(one_peer, two_peer),
            "backends": difference(two, two_peer),
            "backends_on_one": difference(one, one_peer),
        }
        wrong = judge(kind, row["ours"], row["peer"], "one GPU and two")
        wrong += judge(kind, row["backends"], row["backends_on_one"], f"{OURS} and {peer}")
        on_one = f"{OURS} and {peer} on one GPU"
        wrong += judge(kind, row["backends_on_one"], row["peer"], on_one)
        made.append({**row, "wrong": wrong})
    return made


def run_one(
    kind: str, backend: str, model: pathlib.Path, number: int, end: float, args: argparse.Namespace
) -> Replies | str:
    """Run one engine in a process of its own; return its logprobs, or why there are none.

    end: of time.monotonic(), for all engines.
    """
    began = time.monotonic()
    if began >= end:
        return "not started, no seconds left"
    folder, logs, device = model.parent, args.logs, args.device
    out, log = folder / f"{kind}.{backend}.json", logs / f"parallel.{kind}.{backend}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", __spec__.name, "--one", kind, backend, "--out", str(out)]
    command += ["--model", str(model), "--device", device, "--number", str(number)]
    with log.open("wb") as text:
        process = subprocess.Popen(command, stdout=text, stderr=text, process_group=0)
        try:
            process.wait(min(LIMIT_S, end - began))
        except subprocess.TimeoutExpired:
            out.unlink(missing_ok=True)
        finally:
            kill(process)
    took = f"{time.monotonic() - began:.0f} s"
    print(f"{kind} {backend}: {took}{'' if out.exists() else ', failed'}", flush=True)
    if not out.exists():
        return f"after {took}: {last_error(log.read_text(errors='replace'))}"
    return dict(json.loads(out.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=(*SPLIT, *MORE), default=SPLIT)
    parser.add_argument("--together", type=int, default=4, help="engines at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all engines")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=pathlib.Path, help="default: in benchmarks/results/")
    parser.add_argument("--logs", type=pathlib.Path, default=LOGS)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "BACKEND"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if len({engine_of(kind) for kind in args.kinds}) > 1:
        parser.error("kinds of two engines; name those of one")
    os.environ |= QUIET | SHARED
    if args.one:
        kind, backend = args.one
        split, engine = KINDS[kind], engine_of(kind)
        result = serve(engine, split, backend, args.model, args.device, args.number)
        args.out.write_text(json.dumps(result))
        return 0
    return compare(args)


def compare(args: argparse.Namespace) -> int:
    """Run all engines; record and print each kind once its engines are done."""
    from benchmarks.engines.soak_model import CONFIG, write_model

    names = list(dict.fromkeys(name for kind in args.kinds for name in engines(kind)))
    gpu = "cpu"
    if args.device != "cpu":
        gpu, _memory, gpus = devices()
        for kind in args.kinds:
            if (needed := gpus_of(KINDS[kind])) > gpus:
                print(f"{kind} needs {needed} GPUs, here are {gpus}", file=sys.stderr)
                return 2
    engine = engine_of(args.kinds[0])
    path = args.out or FOLDER / f"{engine}-parallel.{slug(gpu)}.json"
    end, made = time.monotonic() + args.seconds, []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.together) as pool:
        models = {kind: pathlib.Path(folder, kind) for kind in MODELS}
        for kind, model in models.items():
            model.mkdir()
            write_model(model, {**CONFIG, **MODELS[kind]}, seed=1)
        runs = {
            (kind, backend): pool.submit(
                run_one,
                kind,
                backend,
                models[one_gpu(kind)],
                number,
                end,
                args,
            )
            for number, (kind, backend) in enumerate(names)
        }
        for kind in args.kinds:
            [row] = rows({name: runs[name].result() for name in engines(kind)}, [kind])
            made.append(row)
            print(json.dumps(row, indent=2), flush=True)
            keep(path, gpu, row)
    return 1 if any(row["wrong"] for row in made) else 0


def keep(path: pathlib.Path, gpu: str, row: Mapping[str, Any]) -> None:
    """Put a kind's row in the place of the recorded one, with when and by what it was made."""
    others = [old for old in record.load(path).get("rows", []) if old["kind"] != row["kind"]]
    made = {
        "command": f"python -m {__spec__.name} --kinds {row['kind']}",
        "variables": {k: v for k, v in os.environ.items() if k.startswith("ATTN_")},
        "date": datetime.date.today().isoformat(),
        "versions": record.installed(engine_of(row["kind"])),
    }
    rows = sorted([*others, {**row, **made}], key=lambda x: x["kind"])
    record.save(path, {"device": gpu, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
