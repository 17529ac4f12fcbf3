"""A small model with random weights of a size that attention shows in its answers.

SGLang's "dummy" weights are ±0.001, so that every token is equally likely whatever attention does.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch

from benchmarks.engines.soak_requests import VOCABULARY

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 8192,
    "vocab_size": VOCABULARY,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: pathlib.Path, config: dict[str, Any], seed: int) -> None:
    """Write config.json and model.safetensors, whose weights depend on the seed alone."""
    from safetensors.torch import save_file

    dtype = getattr(torch, config["torch_dtype"])
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        # queries and keys are sharper, so that a token attends to few others
        gain = 2.0 if any(f"{x}_{y}" in name for x in "qk" for y in ("proj", "norm")) else 1.0
        if len(shape) == 1:
            weights[name] = torch.full(shape, gain, dtype=dtype)
            continue
        scale = 1.0 if "embed" in name else gain * shape[1] ** -0.5
        weights[name] = (torch.randn(shape, generator=generator) * scale).to(dtype)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every weight of a Llama or a Qwen3."""
    hidden, inner, vocabulary = (
        config[k] for k in ("hidden_size", "intermediate_size", "vocab_size")
    )
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        if config["model_type"] == "qwen3":
            of_layer |= {f"self_attn.{x}_norm": (config["head_dim"],) for x in "qk"}
        result |= {f"model.layers.{layer}.{n}.weight": shape for n, shape in of_layer.items()}
    return result | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
