"""Time SGLang's steps with one attention backend.

Run: `python -m benchmarks.engines.sglang_steps BACKEND --out FILE.json --cases 16x4096 …`. One
process per backend and configuration has all its cases; results of the same configuration are
merged by case into one JSON file. Weights are random. With speculation the number of accepted
drafts is fixed by SGLang's own simulation: text means nothing, step times are those of a real run.
Needs a GPU with SGLang, and for EAGLE sgl-deep-gemm.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import random
import tempfile
import time
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRAFT: dict[str, Any] = LLAMA_8B | {
    "architectures": ["LlamaForCausalLMEagle"],
    "num_hidden_layers": 1,
}
ACCEPTED = {  # read by SGLang's workers
    "SGLANG_SIMULATE_ACC_LEN": "3",
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "fixed",
}
FEW_TOKENS, NEW_TOKENS = 33, 161  # a step is a part of the difference of two runs


def model(folder: pathlib.Path, name: str, config: dict[str, Any]) -> str:
    """Write a model's configuration and return its path."""
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def arguments(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Return the arguments of the engine."""
    cases = [case(text) for text in args.cases]
    engine: dict[str, Any] = {
        "model_path": model(folder, "llama8b", LLAMA_8B),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": args.backend,
        "page_size": 1,
        "context_length": max(length for _, length in cases) + 2 * NEW_TOKENS + 64,
        "max_running_requests": max(batch for batch, _ in cases),
        "cuda_graph_max_bs_decode": max(batch for batch, _ in cases),
        "disable_prefill_cuda_graph": True,
        "disable_radix_cache": True,
        "mem_fraction_static": 0.8,
        "random_seed": 1,
        "log_level": "warning",
        "kv_cache_dtype": args.kv_cache_dtype,
    }
    if args.speculation != "none":
        engine |= {
            "speculative_algorithm": args.speculation,
            "speculative_num_draft_tokens": 8,
            "speculative_attention_mode": "decode",
        }
    if args.speculation == "EAGLE":
        engine |= {
            "speculative_draft_model_path": model(folder, "eagle", DRAFT),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 4,
            "speculative_draft_attention_backend": "fa3",
        }
    if args.speculation == "NGRAM":
        engine |= {"speculative_ngram_max_bfs_breadth": 4}
    return engine


def case(text: str) -> tuple[int, int]:
    """Read "16x4096": requests x tokens of each."""
    batch, length = text.split("x")
    return int(batch), int(length)


def measure(engine: Any, batch: int, length: int, rounds: int) -> dict[str, Any]:
    """Return seconds of the prefill and milliseconds of a step, each the median of `rounds`.

    A step is what a longer run takes more than a shorter one of the same prompts, so that the
    prefill and its noise fall out.
    """
    generator = random.Random(1)
    ids = [[generator.randrange(10000) for _ in range(length)] for _ in range(batch)]

    def run(tokens: int) -> tuple[float, int]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        start = time.perf_counter()
        out = engine.generate(input_ids=ids, sampling_params=sampling)
        seconds = time.perf_counter() - start
        return seconds, out[0]["meta_info"].get("spec_verify_ct") or tokens - 1

    run(8)
    prefill = sorted(run(1)[0] for _ in range(rounds))
    steps_ms = []
    for _ in range(rounds):
        (short_s, short), (long_s, long) = run(FEW_TOKENS), run(NEW_TOKENS)
        steps_ms.append((long_s - short_s) / (long - short) * 1e3)
    steps_ms.sort()
    return {
        "batch": batch,
        "length": length,
        "prefill_s": round(prefill[rounds // 2], 4),
        "step_ms": round(steps_ms[rounds // 2], 3),
        "step_ms_spread": [round(steps_ms[0], 3), round(steps_ms[-1], 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", help="attn_core, fa3, flashinfer or triton")
    parser.add_argument("--speculation", choices=("none", "EAGLE", "NGRAM"), default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--cases", nargs="+", default=["16x4096"], help="REQUESTSxTOKENS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    os.environ.update(ACCEPTED if args.speculation != "none" else {})
    import sglang
    import torch

    record: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    record |= {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"sglang": sglang.__version__, "torch": torch.__version__},
        "model": "Llama-3.1-8B shape, random weights",
        "speculation": args.speculation,
        "kv_cache_dtype": args.kv_cache_dtype,
    }
    with tempfile.TemporaryDirectory() as folder:
        engine = sglang.Engine(**arguments(args, pathlib.Path(folder)))
        for text in args.cases:
            row = {"backend": args.backend, **measure(engine, *case(text), args.rounds)}
            print(json.dumps(row), flush=True)
            rows = [
                old
                for old in record.get("rows", [])
                if (old["backend"], old["batch"], old["length"])
                != (row["backend"], row["batch"], row["length"])
            ]
            record["rows"] = [*rows, row]
            args.out.write_text(json.dumps(record, indent=2) + "\n")
        engine.shutdown()


if __name__ == "__main__":
    main()
