"""A pool of requests whose tokens are drawn once, and the Triton backend that attends to them."""

from dataclasses import replace

import torch
from attn_core.cache.pool import KVPool
from attn_core.ops.kv import write_kv
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer

M = ForwardMode
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = load_plugins().get("triton")
HQ, HKV, D, PAGE = 4, 2, 32, 16
LONG = 1300  # keys: more than one unit of the deterministic mode, and more than a program's share


def make_layer(layer_id=0, **changes):
    heads = {"num_q_heads": HQ, "num_kv_heads": HKV, "head_dim": D, "v_head_dim": D}
    return AttentionLayer(layer_id=layer_id, **heads, scale=D**-0.5, **changes)


def make_backend(*layers, deterministic=False, device=DEVICE, **changes):
    config = BackendConfig(
        name="triton",
        row=SPEC.capabilities[0],
        layers=layers or (make_layer(),),
        page_size=PAGE,
        dtype="fp32",
        kv_cache_dtype="fp32",
        device=device,
        deterministic=deterministic,
    )
    return create_backend(SPEC, replace(config, **changes))


def make_pool(layers, num_pages, store="fp32", **more):
    more |= {"num_pages": num_pages, "page_size": PAGE, "kv_cache_dtype": store}
    return KVPool(layers, device=DEVICE, **more)


class Server:
    """Requests of a pool whose tokens are drawn once: (length, new tokens) each."""

    def __init__(self, *requests, layers=()):
        self.lengths, self.new = zip(*requests, strict=True)
        width = -(-max(self.lengths) // PAGE)
        pages = len(requests) * width
        rng = torch.Generator().manual_seed(0)
        order = torch.randperm(pages, generator=rng) + 1
        self.table = order.view(len(requests), width).int().to(DEVICE)
        self.pool = make_pool(layers or [make_layer()], pages + 1)
        for layer in layers or [make_layer()]:
            for store, _ in self.cache(layer).parts():
                store.copy_(torch.randn(store.shape, generator=rng))
        shapes = ((HQ, D), (HKV, D), (HKV, D))
        total = sum(self.new)
        self.q, self.k, self.v = (
            torch.randn(total, *shape, generator=rng).to(DEVICE) for shape in shapes
        )

    def cache(self, layer):
        return self.pool.layer(layer.layer_id)

    def batch(self, mode, chosen=None, trees=None):
        """Return the pass of the chosen requests, in that order, and their rows of q, k and v."""
        chosen = range(len(self.new)) if chosen is None else chosen
        spec = None
        if mode is M.TARGET_VERIFY:
            n = self.new[0]
            mask = None if trees is None else trees[list(chosen)]
            spec = SpecInfo(topk=1 if trees is None else 2, num_draft_tokens=n, tree_mask=mask)
        batch = ForwardBatch.build(
            mode,
            query_lens=[self.new[i] for i in chosen],
            seq_lens=[self.lengths[i] for i in chosen],
            page_table=self.table[list(chosen)],
            page_size=PAGE,
            spec=spec,
        )
        starts = [sum(self.new[:i]) for i in range(len(self.new))]
        rows = [starts[i] + j for i in chosen for j in range(self.new[i])]
        return batch, torch.tensor(rows, device=DEVICE)

    def attend(self, backend, batch, rows, layer=None, metadata=None):
        """Write the new tokens in `rows` and run one layer; return out and LSE."""
        layer = layer or make_layer()
        metadata = backend.init_forward_metadata(batch) if metadata is None else metadata
        tokens = (self.q[rows], self.k[rows], self.v[rows])
        if batch.num_tokens and layer.view in batch.views:
            write_kv(self.cache(layer), *tokens[1:], batch.views[layer.view].out_cache_loc)
        return backend.forward(*tokens, layer, self.cache(layer), batch, metadata, return_lse=True)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
