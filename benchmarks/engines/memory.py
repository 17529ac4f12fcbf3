"""What an engine takes of each GPU if it starts beside others: weights, keys, values, the rest."""

from __future__ import annotations

import math

from benchmarks.engines.cases import NEW_TOKENS, Case, Configuration

REST_GB = 4.0  # CUDA, NCCL, workspaces, graphs and activations: an estimate
MOST = 0.88  # of a GPU's memory for all servers
KEPT = 4 * NEW_TOKENS  # tokens behind a prompt: those that run, and what the prefix cache kept


def pool_tokens(configuration: Configuration) -> int:
    """Return the tokens of the largest case, those of one data parallel rank.

    What requests share is there once: every engine here has a prefix cache.
    """
    ranks: int = configuration.arguments.get("dp_size", 1)
    return math.ceil(max(map(_case_tokens, configuration.cases)) / ranks)


def _case_tokens(case: Case) -> int:
    members, common = case.shared
    again = case.batch - math.ceil(
        case.batch / members
    )  # requests whose beginning is there already
    return sum(case.lengths) - again * common + case.batch * KEPT


def pool_bytes(configuration: Configuration) -> int:
    """Return the bytes of keys and values of the largest case on one GPU.

    Ranks split heads, layers, requests or the keys of a request, so that each has an equal share.
    """
    model, arguments = configuration.model, configuration.arguments
    width: int = 1 if str(arguments.get("kv_cache_dtype", "")).startswith("fp8") else 2
    layers = model["num_hidden_layers"] + (configuration.draft_model is not None)
    token: int = 2 * layers * model["num_key_value_heads"] * model["head_dim"] * width
    tokens = pool_tokens(configuration) * arguments.get("dp_size", 1)
    return math.ceil(float(tokens * token) / configuration.gpus)


def gigabytes(configuration: Configuration) -> float:
    """Return what an engine takes of each GPU; infinite where layers are not like a Llama's."""
    model = configuration.model
    if model["model_type"] not in ("llama", "qwen3"):
        return math.inf
    hidden, layers = model["hidden_size"], model["num_hidden_layers"]
    heads = 2 * (model["num_attention_heads"] + model["num_key_value_heads"])  # q, o, k, v
    attention = layers * hidden * heads * model["head_dim"]
    others = layers * 3 * hidden * model["intermediate_size"] + 2 * hidden * model["vocab_size"]
    whole = configuration.arguments.get("dp_size", 1)  # its ranks have all heads
    weights: float = 2 * (attention * whole + others) / configuration.gpus
    drafts = 1.0 if configuration.draft_model is not None else 0.0
    return (weights + pool_bytes(configuration)) / 2**30 + drafts + REST_GB
