"""What an engine takes of each GPU if it starts beside others: weights, caches, the rest."""

from __future__ import annotations

import math

from benchmarks.engines.cases import NEW_TOKENS, Case, Configuration

REST_GB = 4.0  # CUDA, NCCL, workspaces, graphs and activations: an estimate
MOST = 0.92  # of a GPU's memory for all servers
STATES = 8  # of linear layers, for each request: the running ones, and those of cached prefixes
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


def state_slots(configuration: Configuration) -> int:
    """Return how many states a pool of linear layers has; 0 for a model without such layers."""
    if not _linear_layers(configuration):
        return 0
    return STATES * max(case.batch for case in configuration.cases)


def pool_bytes(configuration: Configuration) -> int:
    """Return the bytes of keys, values and states of the largest case on one GPU.

    Ranks split heads, layers, requests or the keys of a request, so that each has an equal share.
    """
    model, arguments = configuration.model, configuration.arguments
    width: int = 1 if str(arguments.get("kv_cache_dtype", "")).startswith("fp8") else 2
    layers = model["num_hidden_layers"] - _linear_layers(configuration)
    layers += configuration.draft_model is not None
    token: int = 2 * layers * model["num_key_value_heads"] * model["head_dim"] * width
    tokens = pool_tokens(configuration) * arguments.get("dp_size", 1)
    return math.ceil(float(tokens * token + _state_bytes(configuration)) / configuration.gpus)


def _linear_layers(configuration: Configuration) -> int:
    layers: int = configuration.model["num_hidden_layers"]
    every: int = configuration.model.get("full_attention_interval", 1)  # that has K and V
    return layers - layers // every


def _state_bytes(configuration: Configuration) -> int:
    """Return the bytes of all states, in float32; a running request keeps one for each draft."""
    slots = state_slots(configuration)
    if not slots:
        return 0
    model = configuration.model
    drafts: int = configuration.arguments.get("speculative_num_draft_tokens", 0)
    slots += slots // STATES * drafts
    state: int = model["linear_key_head_dim"] * model["linear_value_head_dim"] * 4
    heads: int = model["linear_num_value_heads"] * _linear_layers(configuration)
    return slots * heads * state


def gigabytes(configuration: Configuration) -> float:
    """Return what an engine takes of each GPU; infinite for models that are not counted here."""
    model = configuration.model
    if model["model_type"] not in ("llama", "qwen3", "qwen3_next"):
        return math.inf
    hidden, layers = model["hidden_size"], model["num_hidden_layers"]
    heads = 2 * (model["num_attention_heads"] + model["num_key_value_heads"])  # q, o, k, v
    attention = layers * hidden * heads * model["head_dim"]
    experts = model.get("num_experts", 0) * model.get("moe_intermediate_size", 0)
    others = layers * 3 * hidden * (experts or model["intermediate_size"])
    others += 2 * hidden * model["vocab_size"]
    full = configuration.arguments.get("dp_size", 1)  # its ranks have all heads
    weights: float = 2 * (attention * full + others) / configuration.gpus
    drafts = 1.0 if configuration.draft_model is not None else 0.0
    return (weights + pool_bytes(configuration)) / 2**30 + drafts + REST_GB
