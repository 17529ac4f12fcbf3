"""Passes as SGLang makes them, over pools as SGLang has them, and a dense softmax beside them."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

CONTEXT, ROWS, SLOTS = 128, 9, 2048
EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND_V2)


def server_args(**changed):
    """Return the server arguments that the adapter reads."""
    values = {
        "speculative_algorithm": None,
        "speculative_eagle_topk": None,
        "speculative_draft_attention_backend": None,
        "speculative_num_draft_tokens": None,
        "speculative_ngram_max_bfs_breadth": 4,
        "speculative_attention_mode": "prefill",
        "enable_deterministic_inference": False,
        "get_attention_backends": lambda: ("attn_core", "attn_core"),
    }
    return SimpleNamespace(**(values | changed))


def mha_pool(layers=1, page=1, heads=2, dim=32, dtype=torch.float32):
    """Return SGLang's pool of K and V."""
    pool = MHATokenToKVPool(
        size=SLOTS - page, page_size=page, dtype=dtype, head_num=heads, head_dim=dim,
        layer_num=layers, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    pool.use_native_move_kv_cache = True  # not by a kernel, which needs a GPU
    return pool


def swa_pool(page=1, heads=2, dim=32):
    """Return SGLang's two pools: layer 0 has a window, layer 1 has none."""
    pool = SWAKVPool(
        size=SLOTS - page, size_swa=SLOTS - page, page_size=page, dtype=torch.float32,
        head_num=heads, head_dim=dim, swa_attention_layer_ids=[0], full_attention_layer_ids=[1],
        device="cpu", enable_kv_cache_copy=False,
    )  # fmt: skip
    pages = torch.randperm(SLOTS // page - 1) + 1  # page 0 is the dummy of both
    pages = torch.cat([torch.zeros(1, dtype=torch.int64), pages])
    slots = pages[:, None] * page + torch.arange(page)
    pool.register_mapping(torch.cat([slots.flatten(), torch.tensor([-1])]))
    return pool


def mla_pool(page=1, layers=1, dtype=torch.float32):
    """Return SGLang's pool of latents, 64 + 16 numbers a token."""
    return MLATokenToKVPool(
        size=SLOTS - page, page_size=page, dtype=dtype, kv_lora_rank=64,
        qk_rope_head_dim=16, layer_num=layers, device="cpu", enable_memory_saver=False,
    )  # fmt: skip


def dsa_pool(layers=1, dtype=torch.bfloat16):
    """Return SGLang's pool of sparse MLA: latents of 64 + 16 numbers and index keys of 128."""
    return DSATokenToKVPool(
        size=SLOTS - 64, page_size=64, dtype=dtype, kv_lora_rank=64, qk_rope_head_dim=16,
        layer_num=layers, device="cpu", index_head_dim=128, enable_memory_saver=False,
        kv_cache_dim=80,
    )  # fmt: skip


def runner(modules, pool, page, *, draft=False, config=None, **args):
    """Return what the adapter reads of a ModelRunner; requests lie on shuffled pages.

    config: of transformers, which is read for sparse MLA.
    """
    table = torch.zeros(ROWS, CONTEXT, dtype=torch.int32)
    each = -(-CONTEXT // page)
    pages = torch.randperm(SLOTS // page - 1)[: (ROWS - 1) * each] + 1
    slots = pages.view(ROWS - 1, each, 1) * page + torch.arange(page)
    table[1:] = slots.view(ROWS - 1, -1)[:, :CONTEXT].int()
    return SimpleNamespace(
        server_args=server_args(**args),
        device="cpu",
        dtype=torch.float32,
        page_size=page,
        is_draft_worker=draft,
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=table, size=ROWS - 1),
        model_config=SimpleNamespace(hf_config=config),
        model=torch.nn.ModuleList(modules),
    )


def attention(layer_id=0, heads=4, kv_heads=2, dim=32, **changed):
    """Return SGLang's module of one layer."""
    return RadixAttention(heads, dim, dim**-0.5, kv_heads, layer_id, **changed)


@dataclass
class Pass:
    """One pass: rows of the token table, their lengths before it and their new tokens."""

    mode: ForwardMode
    rows: tuple[int, ...]
    prefix: tuple[int, ...]
    new: tuple[int, ...]
    tree: torch.Tensor | None = None  # bool [B, n, n]
    full_mask: bool = False
    padding: int = 0  # tokens behind the real ones

    def batch(self, runner):
        """Return SGLang's ForwardBatch."""
        table = runner.req_to_token_pool.req_to_token
        verify = self.mode is ForwardMode.TARGET_VERIFY
        lengths = [p if verify else p + n for p, n in zip(self.prefix, self.new, strict=True)]
        slots = [
            table[r, p : p + n] for r, p, n in zip(self.rows, self.prefix, self.new, strict=True)
        ]
        positions = [torch.arange(p, p + n) for p, n in zip(self.prefix, self.new, strict=True)]
        if self.tree is not None:
            positions = [p + t.sum(-1) - 1 for p, t in zip(self.prefix, self.tree, strict=True)]
        extend = self.mode in EXTENDS
        zeros = torch.zeros(self.padding, dtype=torch.int64)
        return SimpleNamespace(
            forward_mode=self.mode,
            batch_size=len(self.rows),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            req_pool_indices=torch.tensor(self.rows),
            out_cache_loc=torch.cat([torch.cat(slots).long(), zeros]),
            positions=torch.cat([torch.cat(positions), zeros]),
            extend_seq_lens=torch.tensor(self.new, dtype=torch.int32) if extend else None,
            extend_seq_lens_cpu=list(self.new) if extend else None,
            extend_prefix_lens=torch.tensor(self.prefix, dtype=torch.int32) if extend else None,
            extend_prefix_lens_cpu=list(self.prefix) if extend else None,
            attn_attend_prefix_cache=None,
            mha_return_lse=None,
            mha_one_shot=None,
            spec_info=SimpleNamespace(custom_mask=self._mask()) if verify else None,
        )

    def _mask(self):
        if self.tree is None:
            return None
        if not self.full_mask:
            return self.tree.flatten()
        parts = [
            torch.cat([torch.ones(t.shape[0], p, dtype=torch.bool), t], 1).flatten()
            for p, t in zip(self.prefix, self.tree, strict=True)
        ]
        return torch.cat(parts)

    def seen(self, request, window=None):
        """Return bool [new, prefix + new]: what each new token of a request sees."""
        p, n = self.prefix[request], self.new[request]
        if self.tree is not None:
            tree = self.tree[request]
            depth = p + tree.sum(-1) - 1
            positions = torch.cat([torch.arange(p), depth])
            seen = torch.cat([torch.ones(n, p, dtype=torch.bool), tree], 1)
        else:
            positions = torch.arange(p + n)
            seen = positions[None] <= positions[p:, None]
        if window is not None:
            seen = seen & (positions[None] > positions[p:, None] - window)
        return seen


def dense(q, k, v, seen, scale, sinks=None, cap=None):
    """Return attention of q [n, Hq, D] over k, v [m, Hkv, *] in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        x.double() for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    s = s if cap is None else cap * torch.tanh(s / cap)
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(-1, s.shape[1], 1)], -1)
    p = s.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", p, v)


def error(backend, run, made, module, *, window=None, sinks=None, shared=0):
    """Run one layer of a pass; return the largest difference from the dense softmax.

    shared: the first tokens of all requests, which lie in the same slots.
    """
    pool, table = run.token_to_kv_pool, run.req_to_token_pool.req_to_token
    heads, kv, d = module.tp_q_head_num, module.tp_k_head_num, module.qk_head_dim
    latent = type(pool).__name__ == "MLATokenToKVPool"
    keys, queries = [], []
    for row, prefix, new in zip(made.rows, made.prefix, made.new, strict=True):
        k, v = torch.randn(2, prefix + new, kv, d)
        v = k[..., : module.v_head_dim] if latent else v
        for own, first in zip((k, v), keys[0] if keys else (), strict=False):
            own[:shared] = first[:shared]
        slots = table[row, :prefix].long()
        if backend.pool.has_window(module.layer_id):
            slots = pool.full_to_swa_index_mapping[slots]
        pool.get_key_buffer(module.layer_id)[slots] = k[:prefix]
        if not latent:
            pool.get_value_buffer(module.layer_id)[slots] = v[:prefix]
        keys.append((k, v))
        queries.append(torch.randn(new, heads, d))
    batch = made.batch(run)
    padded = torch.zeros(made.padding, kv, d)
    k = torch.cat([*(k[p:] for (k, _), p in zip(keys, made.prefix, strict=True)), padded])
    v = torch.cat(
        [*(v[p:] for (_, v), p in zip(keys, made.prefix, strict=True)), padded[..., : v.shape[-1]]]
    )
    q = torch.cat([*queries, torch.randn(made.padding, heads, d)])
    backend.init_forward_metadata(batch)
    lengths = backend._pass[0].views["full"].seq_lens  # torch_native reads those of the host
    assert lengths.tolist() == [p + n for p, n in zip(made.prefix, made.new, strict=True)]
    call = backend.forward_decode if made.mode is ForwardMode.DECODE else backend.forward_extend
    out = call(q.flatten(1), k, v, module, batch, **({} if sinks is None else {"sinks": sinks}))
    out = out.view(len(q), heads, module.v_head_dim)
    start, worst = 0, 0.0
    for request, ((k, v), q) in enumerate(zip(keys, queries, strict=True)):
        expected = dense(q, k, v, made.seen(request, window), module.scaling, sinks,
                         module.logit_cap or None)  # fmt: skip
        worst = max(worst, (out[start : start + len(q)] - expected).abs().max().item())
        start += len(q)
    assert not out[start:].any()
    return worst
