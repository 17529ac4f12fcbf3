"""Serve requests by vLLM on a CPU twice over and print what it answered, as one line of JSON.

Arguments: a folder for the model, its name, and arguments of vLLM's LLM as JSON. With the plugin
vllm_on_cpu attn-core attends.
"""

import collections
import json
import os
import pathlib
import sys

PROMPTS = [[3 + i * j % 7 for i in range(n)] for j, n in enumerate((37, 5, 64, 1, 90), 1)]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 16,  # so that n-grams come again
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16,
    "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
SHAPE = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


def write_model(folder, name):
    """Write a model with weights in which attention shows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPE | (GEMMA if name == "gemma2" else LLAMA)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    if name == "gemma2":  # it multiplies embeddings by 16
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.01)
    model.save_pretrained(folder)


def count_passes():
    """Count the parts of passes in this process by their mode, as attn-core plans them."""
    from attn_core import HybridDispatcher

    modes = collections.Counter()
    plan = HybridDispatcher.init_forward_metadata

    def counted(self, batch):
        modes[batch.forward_mode.value] += 1
        return plan(self, batch)

    HybridDispatcher.init_forward_metadata = counted
    return modes


def main():
    folder, name, arguments = sys.argv[1:]
    if not pathlib.Path(folder, "config.json").exists():
        write_model(folder, name)
    modes = count_passes()
    from vllm import LLM, SamplingParams

    model = LLM(
        model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
        max_model_len=160, max_num_seqs=8, block_size=32, **json.loads(arguments),
    )  # fmt: skip
    how = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    answers = []
    for _turn in range(2):
        outs = model.generate(prompts, how, use_tqdm=False)
        answers += [[list(o.outputs[0].token_ids), o.num_cached_tokens] for o in outs]
    print("ANSWERS", json.dumps({"answers": answers, "modes": modes}), flush=True)
    model.llm_engine.engine_core.shutdown()
    os._exit(0)  # the rest of vLLM's end takes seconds


if __name__ == "__main__":
    main()
