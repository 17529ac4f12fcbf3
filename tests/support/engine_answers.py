"""Save the answers of an SGLang server on a CPU: a small Qwen3-Next, requests with common prefixes.

Usage: python engine_answers.py BACKEND TOPK OUT. TOPK 0: no speculation; else MTP drafts are
verified, which leaves the answers as they are. The prefix cache keeps states inside prompts, and
prompts are cut into chunks that are mixed with decode. SGLang starts its scheduler in a process
that imports this file again, so that the stand-ins for kernels of a GPU are there too.
"""

import json
import pathlib
import random
import sys
import tempfile

import torch
from engine_linear import OnTheHost, stand_ins
from engine_logits import draw_weights, make_model, without_own_kernels
from sglang.kernels.ops.speculative import cache_locs
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative import eagle_utils

ROUNDS, NEW = 2, 12


def draw(result, runner, *args, **named):
    """Draw the weights of a loaded model; a draft of MTP mostly continues its token."""
    draw_weights(runner.model)
    without_own_kernels()
    for name, weight in runner.model.named_parameters():
        if name == "fc.weight":
            hidden = weight.shape[0]
            weight.data.zero_()[:, :hidden] = 20 * torch.eye(hidden)
        scale = {"embed_tokens": 60, "out_proj": 0.35, "o_proj": 0.35, "down_proj": 0.03}
        weight.data.mul_(scale.get(name.removesuffix(".weight").rpartition(".")[2], 1))


def without_pinning(function):
    """Return a function of torch that does not pin memory: there is no device."""

    def call(*args, pin_memory=False, **named):
        return function(*args, **named)

    return call


def prepare():
    """Let a server run without a GPU."""
    stand_ins()
    without_own_kernels()
    OnTheHost().__enter__()
    torch.Tensor.pin_memory = lambda self, *args, **named: self
    torch.tensor, torch.empty = map(without_pinning, (torch.tensor, torch.empty))
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args: None
    eagle_utils._is_xpu = cache_locs._is_xpu = True  # whose trees are built by Triton's kernels
    runner = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    HookRegistry.register(runner, draw, HookType.AFTER)
    check = "sglang.srt.server_args.ServerArgs._validate_mamba_extra_buffer"  # wants a GPU
    HookRegistry.register(check, lambda *args, **named: None, HookType.REPLACE)


prepare()


def main(backend, topk, out):
    import sglang

    folder, drafts = tempfile.mkdtemp(), {}
    make_model(pathlib.Path(folder), "qwen3_next")
    if int(topk):
        drafts = {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": folder,
            "speculative_num_steps": 3,
            "speculative_eagle_topk": int(topk),
            "speculative_num_draft_tokens": 4 if topk == "1" else 8,
            "speculative_attention_mode": "decode",
        }
    engine = sglang.Engine(
        model_path=folder, load_format="dummy", device="cpu", dtype="float32", page_size=1,
        attention_backend=backend, max_total_tokens=4096, max_running_requests=8,
        max_mamba_cache_size=48, chunked_prefill_size=64, enable_mixed_chunk=not drafts,
        disable_overlap_schedule=True, disable_prefill_cuda_graph=True,
        disable_decode_cuda_graph=True, skip_tokenizer_init=True, random_seed=7,
        mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=16,
        sampling_backend="pytorch", log_level="warning", **drafts,
    )  # fmt: skip
    generator = random.Random(1)
    tokens = [[generator.randrange(10000) for _ in range(n)] for n in (90, 40, 3, 100, 1, 130, 17)]
    prompts = [tokens[0] + own for own in tokens[1:4]] + tokens[4:]
    answers, cached = [], []
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    for _ in range(ROUNDS):
        done = engine.generate(input_ids=prompts, sampling_params=sampling)
        answers.append([x["output_ids"] for x in done])
        cached.append([x["meta_info"]["cached_tokens"] for x in done])
        prompts = [p + a[:7] + [5, 6] for p, a in zip(prompts, answers[-1], strict=True)]
    pathlib.Path(out).write_text(json.dumps({"answers": answers, "cached": cached}))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
