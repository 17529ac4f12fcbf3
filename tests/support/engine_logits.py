"""Save logits, print the chosen backends: SGLang on a CPU, prefill and six decode steps.

Usage: python engine_logits.py MODEL BACKEND PAGE_SIZE OUT. A process of its own: SGLang keeps its
state in modules. BACKEND "dense" is the one of engine_dense.py.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import sglang.srt.utils.common  # noqa: F401  # patched below
import torch

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "gpt_oss": SHAPE
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek": SHAPE
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 2,  # no layer of experts
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "rope_scaling": {
            "rope_type": "deepseek_yarn",
            "factor": 1.0,
            "original_max_position_embeddings": 2048,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}
CONFIGS["qwen3_next"] = SHAPE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "mlp_only_layers": [0, 1],  # no layer of experts
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
CONFIGS["kimi_linear"] = CONFIGS["deepseek"] | {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "num_experts": 4,
    "num_experts_per_token": 1,
    "num_shared_experts": 1,
    "num_nextn_predict_layers": 0,
}
CONFIGS["deepseek_v32"] = CONFIGS["deepseek"] | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "q_lora_rank": 64,
    "index_topk": 16,  # fewer than the tokens of the longer prompts
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk_freq": 2,  # the last layer shares the selection of the layer before it
}
HYBRID = ("qwen3_next", "kimi_linear")
SPARSE = ("deepseek_v32",)
DENSE = "triton"  # the name under which SGLang creates the dense backend: its models accept it
PROMPTS = (37, 5, 64, 1)
STEPS = 6


def make_model(folder: pathlib.Path, model: str = "llama", **changed) -> None:
    """Write a configuration and a tokenizer of two words; weights are drawn."""
    words = {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 3}, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": words}
    (folder / "config.json").write_text(json.dumps(CONFIGS[model] | changed))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})
    )


def without_own_kernels() -> None:
    """Tell every loaded module of SGLang to leave its Triton kernels, which need a GPU."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.") and "support_triton" in vars(module):
            module.support_triton = lambda backend: False


def load(folder: str, flags: str):
    """Return SGLang's arguments, ports and ModelRunner of a folder's model, with the plugin."""
    without_own_kernels()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    without_own_kernels()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = f"""{flags} --model-path {folder} --load-format dummy --device cpu --dtype float32
        --max-total-tokens 4096 --disable-overlap-schedule --disable-prefill-cuda-graph
        --disable-decode-cuda-graph --random-seed 7 --log-level warning"""
    args = ServerArgs.from_cli_args(parser.parse_args(flags.split()))
    one_batch._set_envs_and_config(args)
    ports = PortArgs.init_new(args)
    loaded = one_batch.load_model(args, ports, 0, 0)
    runner = loaded[0] if isinstance(loaded, tuple) else loaded
    return args, ports, getattr(runner, "torch_runner", runner)


def draw_weights(model: torch.nn.Module) -> torch.Generator:
    """Replace dummy weights, which are too small for attention to show."""
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            weight.data.normal_(generator=generator)
        elif weight.dim() > 1 or "sinks" in name:
            weight.data.normal_(0, 2.0 if "sinks" in name else 0.15, generator=generator)
        else:
            weight.data.fill_(1.0)
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()  # MLA's absorbed heads are copies of what was drawn
    elif type(model).__name__ == "KimiLinearForCausalLM":
        model.load_weights(())  # makes those copies at its end
    return generator


def main(model: str, backend: str, page_size: str, out: str) -> None:
    if backend == "dense":
        from engine_dense import register_as

        backend = DENSE
        register_as(backend)
    with tempfile.TemporaryDirectory() as folder:
        make_model(pathlib.Path(folder), model)
        flags = f"--attention-backend {backend} --page-size {page_size}"
        if model in HYBRID:
            from engine_linear import stand_ins

            stand_ins()
            torch.cuda.Stream = type("Stream", (), {})  # Kimi Linear makes one on every device
        if model in SPARSE:
            import engine_sparse

            engine_sparse.stand_ins()
            if backend == DENSE:
                engine_sparse.dsa_indexer.Indexer.forward = engine_sparse.select_densely
        _args, _ports, runner = load(folder, flags)
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import get_server_args

    print(vars(get_server_args()).get("attn_core"))  # what /server_info prints of a scheduler
    generator = draw_weights(runner.model)
    if model in SPARSE:
        engine_sparse.in_float32(runner.model)
    ids = [torch.randint(0, 10000, (n,), generator=generator).tolist() for n in PROMPTS]
    logits = []
    with torch.no_grad():
        requests = one_batch.prepare_synthetic_inputs_for_latency_test(len(ids), 0, ids)
        following, scores, batch = one_batch.extend(requests, runner)
        logits.append(scores.float())
        for _ in range(STEPS):
            following, scores = one_batch.decode(following, batch, runner)
            logits.append(scores.float())
    torch.save(torch.stack(logits), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
