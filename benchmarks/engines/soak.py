"""Serve random requests for a while with attn_core inside SGLang, then ask another backend.

Run: `python -m benchmarks.engines.soak --seconds 120 --seed 1 [--reference fa3] [--out FILE.json]`.
Requests have random lengths and shared prefixes; some stop early, some are aborted. Afterwards the
reference computes every kept answer again as a prompt: each token must be one that it would have
chosen too, as nearly as for its own answers. SGLang's checks of its pools are strict, so a lost
page ends the run, and memory must not grow from round to round. Exit code 0: passed.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import pathlib
import random
import sys
import tempfile
import time
import uuid
from typing import Any

from benchmarks.engines import record
from benchmarks.engines.configurations import OURS
from benchmarks.engines.soak_requests import VOCABULARY, Request, Served, Workload, named, note

ROUNDS = 6  # memory is read after each
CONCURRENT = 48  # requests at a time
KEPT = 96  # answers that the reference computes again
CONTEXT = 4096
STRICT = {  # read by SGLang's scheduler
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
# Logprobs by which a token may be worse than the reference's choice: bf16 rounds logits of 4 to
# steps of 0.016, and a batch of another size sums in another order.
WORST, MEAN = 0.1, 0.001
TIMES = 3  # the reference's own regret, where that is more
GPU_MIB, HOST_MIB = 64, 256  # growth after the first round


def engine_arguments(backend: str, model: str) -> dict[str, Any]:
    """Return the arguments of both engines."""
    return {
        "model_path": model,
        "skip_tokenizer_init": True,
        "attention_backend": backend,
        "page_size": 1,
        "context_length": CONTEXT,
        "max_running_requests": CONCURRENT,
        "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 24, 32, 40, CONCURRENT],
        "disable_prefill_cuda_graph": True,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 40000,  # small, so that prefixes are evicted and requests retracted
        "random_seed": 1,
        "sampling_backend": "pytorch",
        "decode_log_interval": 10000,
        "log_level": "info",
    }


async def serve(engine: Any, workload: Workload, seconds: float, served: Served) -> None:
    """Keep CONCURRENT requests running for some seconds, then wait for the last of them."""
    end = time.monotonic() + seconds

    async def one_after_the_other() -> None:
        while time.monotonic() < end:
            request = workload.draw()
            await answer(engine, request, served)

    await asyncio.gather(*(one_after_the_other() for _ in range(CONCURRENT)))


async def answer(engine: Any, request: Request, served: Served) -> None:
    """Send one request, abort it when its time has come, and note how it ended."""
    rid = uuid.uuid4().hex
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": request.max_new_tokens}
    sampling |= {"ignore_eos": True}
    if request.stop_token_ids:
        sampling |= {"ignore_eos": False, "stop_token_ids": list(request.stop_token_ids)}
    task = asyncio.ensure_future(
        engine.async_generate(input_ids=request.ids, sampling_params=sampling, rid=rid)
    )
    if request.abort_after_s is not None:
        await asyncio.wait({task}, timeout=request.abort_after_s)
        if not task.done():
            engine.tokenizer_manager.abort_request(rid=rid)
    try:
        out = await task
    except ValueError as error:  # SGLang raises for a request aborted in its queue
        if request.abort_after_s is None:
            served.unexpected.append(str(error))
        served.counts["abort"] += 1
        return
    note(request, out, served)


def memory_mib(device: str) -> dict[str, float]:
    """Return what is used on the GPU and by the engine's processes."""
    import psutil
    import torch

    children = psutil.Process().children(recursive=True)
    used = {"host": sum(child.memory_info().rss for child in children) / 2**20}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        used["gpu"] = (total - free) / 2**20
    return used


def flush(engine: Any) -> bool:
    """Empty the prefix cache; False where the engine still holds a request after 10 seconds."""
    for _ in range(200):
        if engine.flush_cache().success:
            time.sleep(0.3)  # SGLang checks its pools when it is idle
            return True
        time.sleep(0.05)
    return False


def regret(engine: Any, answers: list[tuple[list[int], list[int]]]) -> list[float]:
    """Return how much worse, in logprob, each new token is than the engine's own choice.

    The engine computes prompt and answer as one prompt: 0 is what it would have chosen. It is asked
    for one at a time, so that no other request changes how its sums are rounded.
    """
    result = []
    for prompt, new in answers:
        out = engine.generate(
            input_ids=prompt + new,
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )
        chosen = out["meta_info"]["input_token_logprobs"][len(prompt) :]
        best = out["meta_info"]["input_top_logprobs"][len(prompt) :]
        names = [token for _, token, *_ in chosen]
        assert names == named(new), f"logprobs of {names} for {new} after {len(prompt)} tokens"
        result += [top[0][0] - own[0] for own, top in zip(chosen, best, strict=True)]
    return result


def soak(engine: Any, seed: int, seconds: float, device: str) -> tuple[Served, dict[str, Any]]:
    """Serve for some seconds in rounds: what was served, and memory and flushes after each."""
    served, workload = Served(), Workload(seed, VOCABULARY)
    after: dict[str, Any] = {"memory_mib": [], "flushed": []}
    for _ in range(ROUNDS):
        engine.loop.run_until_complete(serve(engine, workload, seconds / ROUNDS, served))
        after["flushed"].append(flush(engine))
        after["memory_mib"].append(memory_mib(device))
    served.answers = random.Random(seed).sample(served.answers, min(KEPT, len(served.answers)))
    return served, after


def replay(engine: Any, answers: list[tuple[list[int], list[int]]]) -> list[tuple[Any, Any]]:
    """Return the engine's own answers to the same prompts, as long as the given ones."""
    sampling = [
        {"temperature": 0, "max_new_tokens": len(new), "ignore_eos": True} for _, new in answers
    ]
    out = engine.generate(input_ids=[prompt for prompt, _ in answers], sampling_params=sampling)
    return [(prompt, list(o["output_ids"])) for (prompt, _), o in zip(answers, out, strict=True)]


def judge(report: dict[str, Any]) -> list[str]:
    """Return what is wrong with a soak, nothing where it passed."""
    wrong = list(report["unexpected"][:5])
    if not all(report["flushed"]):
        wrong.append("SGLang still holds requests after all have ended")
    for end in ("length", "stop", "abort", "cached_tokens"):
        if not report["counts"][end]:
            wrong.append(f"no {end}: run longer")
    # the first round compiles and grows what stays
    for name, limit in (("gpu", GPU_MIB), ("host", HOST_MIB)):
        used = [reading[name] for reading in report["memory_mib"][1:] if name in reading]
        if used and used[-1] - used[0] > limit:
            wrong.append(f"{name} memory grew by {used[-1] - used[0]:.0f} MiB (limit {limit})")
    ours, own = report["regret"]["ours"], report["regret"]["reference"]
    for name, least in (("worst", WORST), ("mean", MEAN)):
        limit = max(least, TIMES * own[name])
        if not ours[name] <= limit:  # NaN is wrong too
            wrong.append(f"{name} regret {ours[name]:.4f} (limit {limit:.4f})")
    return wrong


def summary(regrets: list[float]) -> dict[str, float]:
    """Return mean and worst of regrets, and the share of tokens that are the first choice."""
    if not regrets or any(value != value for value in regrets):
        return {"mean": float("nan"), "worst": float("nan"), "first_choice": 0.0}
    first = sum(value <= 0 for value in regrets) / len(regrets)
    mean = sum(regrets) / len(regrets)
    return {
        "mean": round(mean, 6),
        "worst": round(max(regrets), 5),
        "first_choice": round(first, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", default=OURS)
    parser.add_argument("--reference", default="fa3")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    os.environ.update(STRICT)
    import sglang
    import torch

    from benchmarks.engines.soak_model import CONFIG, write_model

    with tempfile.TemporaryDirectory() as folder:
        write_model(pathlib.Path(folder), CONFIG, seed=1)
        more: dict[str, Any] = {}
        if args.device == "cpu":  # SGLang's defaults for a CPU
            more = {"device": "cpu", "cuda_graph_bs_decode": None}
            more |= {"disable_decode_cuda_graph": True, "disable_overlap_schedule": True}
        engine = sglang.Engine(**engine_arguments(args.backend, folder) | more)
        served, after = soak(engine, args.seed, args.seconds, args.device)
        own = summary(regret(engine, served.answers))
        engine.shutdown()
        engine = sglang.Engine(**engine_arguments(args.reference, folder) | more)
        regrets = {
            "ours": summary(regret(engine, served.answers)),
            "ours_by_ours": own,
            "reference": summary(regret(engine, replay(engine, served.answers))),
        }
        engine.shutdown()
    result = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "versions": record.installed(),
        "backend": args.backend,
        "reference": args.reference,
        "seed": args.seed,
        "seconds": args.seconds,
        "counts": served.counts,
        "kept": len(served.answers),
        "unexpected": served.unexpected,
        **after,
        "regret": regrets,
    }
    result["wrong"] = judge(result)
    print(json.dumps(result, indent=2))
    if args.out:
        record.save(args.out, result)
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
