"""vLLM's layer of MLA on a CPU, with what vLLM has for GPUs alone written out."""

from functools import partial
from itertools import pairwise

import torch
import vllm._custom_ops as ops
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backends.mla.prefill import registry
from vllm_passes import BLOCK, BLOCKS, dense, forward_context

LORA, ROPE, NOPE, VALUE, HEADS = 512, 64, 32, 32, 2


class Projection(nn.Module):
    """kv_b_proj: the latent of a token → its keys without rope and its values, for each head."""

    def __init__(self):
        super().__init__()
        weight = torch.randn(HEADS * (NOPE + VALUE), LORA) * LORA**-0.5
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method = None

    def forward(self, x):
        return (x @ self.weight.T, None)


def write_latents(latent, rope, cache, slots, kv_cache_dtype, scale):
    """Write as vLLM's kernel for GPUs does: nothing for a slot of -1."""
    real = slots >= 0
    rows = torch.cat([latent, rope], -1)[: len(slots)][real]
    cache[slots[real] // BLOCK, slots[real] % BLOCK] = rows


def gather(src_cache, dst, block_table, cu_seq_lens, seq_starts, **_options):
    """Gather a chunk of each prefix as vLLM's kernel for GPUs does."""
    for row, (first, last) in enumerate(pairwise(cu_seq_lens.tolist())):
        at = torch.arange(last - first) + seq_starts[row]
        dst[first:last] = src_cache[block_table[row, at // BLOCK].long(), at % BLOCK]


def merge(output, prefix_output, prefix_lse, suffix_output, suffix_lse, **_options):
    """Merge two parts by their LSE [H, T], as vLLM's kernel for GPUs does."""
    weights = torch.stack([prefix_lse, suffix_lse]).softmax(0).transpose(1, 2)[..., None]
    output.copy_(weights[0] * prefix_output + weights[1] * suffix_output)


def _unpinned(create, *size, pin_memory=False, **options):
    return create(*size, **options)


def put_on_cpu(monkeypatch):
    """Let vLLM's layer find the parts that its CPU platform has not, and attn-core's classes."""
    from attn_core.integrations.vllm.latent import LatentBackend
    from attn_core.integrations.vllm.unfolded import PrefillBackend

    monkeypatch.setattr(ops, "concat_and_cache_mla", write_latents)
    monkeypatch.setattr(ops, "gather_and_maybe_dequant_cache", gather, raising=False)
    monkeypatch.setattr(mla_attention, "merge_attn_states", merge)
    for name in ("empty", "zeros"):
        create = getattr(torch, name)
        monkeypatch.setattr(torch, name, partial(_unpinned, create))
    monkeypatch.setattr(mla_attention, "get_attn_backend", lambda *a, **k: LatentBackend)
    monkeypatch.setattr(registry.MLAPrefillBackendEnum, "get_class", lambda member: PrefillBackend)


def layer(config, name="layers.0.attn"):
    """Return vLLM's layer of MLA, with NaN in its cache."""
    with set_current_vllm_config(config):
        module = mla_attention.MLAAttention(
            HEADS, (NOPE + ROPE) ** -0.5, NOPE, ROPE, VALUE, None, LORA, Projection(),
            cache_config=config.cache_config, prefix=name,
        )  # fmt: skip
        module.process_weights_after_loading(torch.float32)
    module.impl.dcp_world_size = 1  # vLLM asks its process group in the first pass
    module.kv_cache = torch.full((BLOCKS, BLOCK, LORA + ROPE), float("nan"))
    return module


def error(config, plan, made, module):
    """Run a pass through vLLM's layer; return the largest difference from unfolded heads."""
    common = made.common()
    metadata = plan.build(0, common)
    tokens = sum(made.new)
    q = torch.randn(tokens, HEADS, NOPE + ROPE)
    latent, rope = torch.randn(tokens, LORA), torch.randn(tokens, 1, ROPE)
    histories, start = [], 0
    for row, (new, cached) in enumerate(zip(made.new, made.cached, strict=True)):
        prefix, slots = torch.randn(cached, LORA + ROPE), made.slots(row, 0, cached)
        module.kv_cache[slots // BLOCK, slots % BLOCK] = prefix
        own = torch.cat([latent, rope[:, 0]], -1)[start : start + new]
        histories.append(torch.cat([prefix, own]))
        start += new
    with forward_context(config, metadata, common, module):
        out = module(q, latent, rope, output_shape=(tokens, HEADS * VALUE))
    worst, start = 0.0, 0
    for rows, new in zip(histories, made.new, strict=True):
        unfolded = module.kv_b_proj(rows[:, :LORA])[0].view(len(rows), HEADS, NOPE + VALUE)
        shared = rows[:, None, LORA:].expand(-1, HEADS, -1)
        keys = torch.cat([unfolded[..., :NOPE], shared], -1)
        here = dense(q[start : start + new], keys, unfolded[..., NOPE:], module.scale)
        result = out[start : start + new].view(new, HEADS, VALUE).double()
        assert result.isfinite().all()
        worst = max(worst, (result - here).abs().max().item())
        start += new
    return worst
