"""Time transformers' generate_batch() on attn-core beside transformers' own attention.

Run: `python -m benchmarks.generate_batch [--model gemma3] [--layers 8] [--backends triton]`. The
weights are random. The attention implementations take turns, with all requests in one call, after a
call that is not counted. The record holds the first token of each request, to compare.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from attn_core.integrations.transformers import enable_batches
from attn_core.integrations.transformers.batches import PAGED
from attn_core.selection.result import NoBackendError, Overrides
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig
from transformers import GenerationConfig as Generation

from benchmarks.attention import device_name, versions
from benchmarks.engines.models import LLAMA_8B
from benchmarks.results import FOLDER, slug

_OPTIONS = ContinuousBatchingConfig.__dataclass_fields__
BLOCK = "page_size" if "page_size" in _OPTIONS else "block_size"  # since transformers 5.23
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(LLAMA_8B),
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
    "tiny": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "vocab_size": 128,
    },
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m benchmarks.generate_batch"
    )
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--implementations", default=f"{PAGED},paged|sdpa")
    parser.add_argument("--backends", help="ours by name, such as triton; default: its own choice")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens that each request generates")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens of a pass")
    parser.add_argument("--block", type=int, default=256, help="tokens of a block of the cache")
    parser.add_argument("--blocks", type=int, help="of the cache; default: what the memory holds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args(arguments)


def prompts_of(requests: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Return prompts of a quarter of the longest up to it, the same in each run."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(max(1, longest // 4), longest + 1, (requests,), generator=generator)
    return [
        torch.randint(2, vocabulary, (n,), generator=generator).tolist() for n in lengths.tolist()
    ]


def build(args: argparse.Namespace) -> Any:
    """Return the model with random weights."""
    keys = {
        k: v for k, v in MODELS[args.model].items() if k not in ("architectures", "torch_dtype")
    }
    if args.layers:
        keys["num_hidden_layers"] = args.layers
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    return model.eval()


def run(
    model: Any, name: str, prompts: list[list[int]], args: argparse.Namespace
) -> tuple[float, list[list[int]]]:
    """Return the seconds of one generate_batch() and the new tokens of each request."""
    if name == PAGED:
        enable_batches(model, overrides=Overrides(attention_backend=args.backends))
    else:
        model.set_attn_implementation(name)
    options = {
        BLOCK: args.block,
        "num_blocks": args.blocks,
        "max_batch_tokens": args.tokens,
        **({"auto_switch_to_flash": False} if "auto_switch_to_flash" in _OPTIONS else {}),
    }
    gc.collect()
    if args.device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = model.generate_batch(
        prompts,
        generation_config=Generation(
            max_new_tokens=args.new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**options),
    )
    seconds = time.perf_counter() - start
    errors = [x.error for x in outputs.values() if x.error]
    if errors or len(outputs) != len(prompts):
        raise RuntimeError(f"{name}: {len(outputs)} of {len(prompts)} answers; {errors[:1]}")
    return seconds, [x.generated_tokens for x in outputs.values()]


def entries_of(
    names: Sequence[str],
    seconds: Mapping[str, Sequence[float]],
    first: Mapping[str, Sequence[int]],
    failed: Mapping[str, str],
    total: int,
) -> dict[str, dict[str, Any]]:
    """Return what is known of each implementation; total: tokens of a round."""
    entries: dict[str, dict[str, Any]] = {}
    for name in names:
        if name in failed:
            entries[name] = {"error": failed[name]}
        elif seconds[name]:
            median = statistics.median(seconds[name])
            entries[name] = {
                "seconds": median,
                "tokens_per_s": total / median,
                "rounds": list(seconds[name]),
                "first_tokens": first[name],
            }
    return entries


def save(argv: Sequence[str], args: argparse.Namespace, entries: Mapping[str, Any]) -> None:
    """Write the record of what is known."""
    device = device_name(torch.device(args.device))
    record = {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "versions": versions(("transformers", "flash-attn-3", "flashinfer-python")),
        "arguments": argv,
        "entries": entries,
    }
    path = args.out or FOLDER / f"generate_batch.{slug(device)}.{args.model}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    args = parse(argv)
    transformers.logging.set_verbosity_error()
    model = build(args)
    prompts = prompts_of(args.requests, args.prompt, model.config.vocab_size)
    names = args.implementations.split(",")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    first: dict[str, list[int]] = {}
    failed: dict[str, str] = {}
    for round_number in range(args.rounds + 1):  # the first compiles and is not counted
        for name in names if round_number % 2 else names[::-1]:
            if name in failed:
                continue
            try:
                taken, tokens = run(model, name, prompts, args)
            except (RuntimeError, ValueError, ImportError, NoBackendError) as error:
                failed[name] = str(error).partition("\n")[0][:300]
                continue
            first[name] = [row[0] for row in tokens]
            if round_number:
                seconds[name].append(taken)
        entries = entries_of(names, seconds, first, failed, args.requests * args.new)
        save(argv, args, entries)  # a time limit leaves the rounds before it
    for name, entry in entries.items():
        rate = entry.get("tokens_per_s")
        print(f"{name:<20}", entry["error"] if rate is None else f"{rate:.1f} tokens/s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
