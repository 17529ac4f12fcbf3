"""Small transformers models with random weights, one of each family, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

W = 8  # the window of every windowed layer
NEW = 40
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # a tied Gemma repeats its last word
    "initializer_range": 0.2,  # far from uniform, so that a wrong token shows at once
}
MIXED = {"sliding_window": W, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
}
SPARSE = {
    **LATENT,
    "head_dim": 16,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 5,  # fewer than the tokens of a prompt: else every key is selected
    "index_n_heads": 24,  # with few heads many scores are 0
    "index_head_dim": 32,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
QWEN3_5 = {
    **HYBRID,
    "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
}
IMAGE, START, END = 120, 122, 123
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": W},
    "qwen2": {},
    "qwen3": {"use_sliding_window": True, **MIXED},
    "gemma2": {**MIXED, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 20},
    "gpt_oss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **LATENT,
        "head_dim": 16,
        "q_lora_rank": 32,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": {
        **SPARSE,
        "num_hidden_layers": 4,
        "indexer_types": ["full", "full", "shared", "full"],
    },
    "qwen3_next": {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 32},
    "kimi_linear": {
        **LATENT,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_local_experts": 4,
        "n_group": 1,
        "topk_group": 1,
    },
    "qwen2_vl": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": {**QWEN3_5, **EXPERTS, "shared_expert_intermediate_size": 32},
}
_TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3_5_TOWER = {
    **_TOWER,
    "intermediate_size": 96,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**_TOWER, "embed_dim": 64, "mlp_ratio": 2},
    "qwen3_5": _QWEN3_5_TOWER,
    "qwen3_5_moe": _QWEN3_5_TOWER,
}
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear")
LINEAR_AND_VISION = ("qwen3_5", "qwen3_5_moe")
SPARSE_MLA = ("deepseek_v32", "glm_moe_dsa")
WINDOWED = ("mistral", "qwen3", "gemma2", "gemma3_text", "gpt_oss")


def tiny(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    keys = {**TINY, **FAMILIES[name], **changes}
    if name in TOWERS:
        if name == "qwen2_vl":
            del keys["head_dim"]
        config = transformers.AutoConfig.for_model(
            name,
            text_config=keys,
            vision_config=TOWERS[name],
            image_token_id=IMAGE,
            video_token_id=121,
            vision_start_token_id=START,
            vision_end_token_id=END,
        )
        auto = AutoModelForImageTextToText
    else:
        config, auto = transformers.AutoConfig.for_model(name, **keys), AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    for module in model.modules():
        if hasattr(module, "sinks"):
            torch.nn.init.normal_(module.sinks, std=1.0)
    if name in SPARSE_MLA:  # a token of zeros ties all its scores, and eager breaks ties at random
        torch.nn.init.normal_(model.get_input_embeddings().weight[0], std=TINY["initializer_range"])
    return model


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    """Prompts of unlike lengths, padded on the left; with an image each for a model that sees."""
    torch.manual_seed(1)
    if name not in TOWERS:
        mask = torch.ones(3, 12, dtype=torch.int64)
        mask[1, :4] = 0
        mask[2, :9] = 0
        return {"input_ids": torch.randint(2, 110, (3, 12)) * mask, "attention_mask": mask}
    text = torch.randint(2, 110, (15,)).tolist()
    large = [START, *[IMAGE] * 4, END]  # 4 × 4 patches, merged by 2 × 2
    small = [START, *[IMAGE] * 2, END]
    rows = [[*large, *text[:8]], [0, 0, 0, *text[8:12], *small, *text[12:]]]
    ids = torch.tensor(rows)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(16 + 8, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]]),
    }


def generate(model: Any, inputs: dict[str, torch.Tensor], **more: Any) -> Any:
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **more})
