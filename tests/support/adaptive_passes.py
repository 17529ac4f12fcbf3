"""Passes of many sizes through a dispatcher that picks by made-up costs, against the oracle.

What is tested is the way of a pass, so no cost is measured: `quick` is said to be fastest while a
pass has few keys, `steady` from about 500 on.
"""

from __future__ import annotations

import torch
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.pool import KVPool
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Pass, forms
from attn_core.costs.workload import Workload
from attn_core.ops.kv import write_kv
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.graphs import GraphRunner
from attn_core.runtime.layer import AttentionLayer
from attn_core.selection.result import NoBackendError, Overrides
from attn_core.selection.solver import select
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from attn_core.testing.oracle import attend_request, yardstick
from attn_core.testing.tolerance import within_budget

M = ForwardMode
DRAFTS, LONGEST = 4, 1024
BATCHES = (1, 4, 16)
LENGTHS = (16, 128, LONGEST)
WORKLOAD = Workload(prompts={LONGEST - 64: 1}, requests={BATCHES[-1]: 1}, output=16)


def costs(name, quick, x):
    us = 1 + x.kv_tokens / 50 if name == quick else 10 + x.kv_tokens / 1000
    return Cost(us, us * 0.99, us * 1.01, 0.0)


def profile(names, form, device):
    sizes = [Pass.even("decode", b, n) for b in BATCHES for n in LENGTHS]
    sizes += [Pass.even("verify", b, n, DRAFTS) for b in BATCHES for n in LENGTHS]
    sizes += [Pass.even("prefill", b, n, q) for b in BATCHES for n in LENGTHS for q in (1, 16, n)]
    quick = names[0]
    return Profile(
        environment={"device": device.name or "cpu"},
        date="2026-11-25T00:00:00+00:00",
        costs={Key(name, "", form, x): costs(name, quick, x) for name in names for x in sizes},
    )


def first_pair(pairs, here, device, **shape):
    """Return the passes of the first pair of which one may take over from the other.

    Without one, return None.
    """
    for names in pairs:
        try:
            result = Passes(here, device, names, **shape)
        except NoBackendError:
            continue
        if result.dispatcher.pickers.by_role.keys() == {"prefill", "decode", "verify"}:
            return result
    return None


class Passes:
    """One layer over one cache, served by two backends: names are (quick, steady).

    Raises NoBackendError where they do not fit together.
    """

    def __init__(self, here, device, names, *, dtype, page_size, registry=None, graphs=None):
        registry, heads, dim = registry or load_plugins(), (8, 2), 128
        self.names, self.device, self.dtype = names, device, TORCH_DTYPES[dtype]
        needs = Requirements(
            layers=(LayerRequirements(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dim),),
            dtype=dtype,
            page_size=page_size,
            graphs=device.type == "cuda" if graphs is None else graphs,
            speculation=Speculation(topk=1, num_draft_tokens=DRAFTS, mode="decode"),
        )
        (form,) = forms(needs, page_size)
        self.selection = select(
            needs,
            here,
            registry,
            registry.installed_libraries(),
            Overrides(allow=names),
            profile(names, form, here),
            workload=WORKLOAD,
            advise=False,
        )
        self.layer = AttentionLayer(
            layer_id=0,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=dim,
            v_head_dim=dim,
            scale=dim**-0.5,
        )
        pages = -(-LONGEST // page_size)
        most = BATCHES[-1]
        self.pool = KVPool(
            [self.layer],
            num_pages=1 + most * pages,
            page_size=page_size,
            kv_cache_dtype=self.selection.kv_cache_dtype,
            layout=self.selection.layout,
            device=device,
        )
        self.dispatcher = HybridDispatcher.from_selection(
            self.selection, registry, [self.layer], self.pool, max_bs=most, max_seq_len=LONGEST,
            max_num_tokens=most * 64, adaptive=True,
        )  # fmt: skip
        shuffled = torch.randperm(most * pages, generator=torch.Generator().manual_seed(0)) + 1
        self.tables = shuffled.view(most, pages).int().to(device)
        self.runner = None

    def capture(self):
        """Capture decode and verification at every batch size."""
        self.runner = GraphRunner(
            self.dispatcher, batch_sizes=BATCHES, max_seq_len=LONGEST, max_query_len=DRAFTS
        )

        def step(batch, metadata, q, k, v):
            return self.dispatcher.forward(q, k, v, self.layer, batch, metadata)

        x = self.layer
        shapes = [(x.num_q_heads, x.head_dim), *[(x.num_kv_heads, x.head_dim)] * 2]
        like = [torch.empty(1, *s, dtype=self.dtype, device=self.device) for s in shapes]
        self.runner.capture(M.DECODE, step, inputs=like, query_len=1)
        self.runner.capture(M.TARGET_VERIFY, step, inputs=like, query_len=DRAFTS)

    def run(self, mode, requests, length, new, seed=0):
        """Run a pass of equal requests, their cache filled before; compare with the oracle.

        Returns the names of the backends whose counters grew.
        """
        rng = torch.Generator().manual_seed(seed)
        x, before = self.layer, dict(self.dispatcher.passes)
        keys, values, queries = (
            torch.randn(requests, n, h, x.head_dim, generator=rng).to(self.dtype)
            for n, h in ((length, x.num_kv_heads), (length, x.num_kv_heads), (new, x.num_q_heads))
        )
        table = self.tables[:requests]
        old = length - new
        if old:
            slots = CacheView.build(
                page_table=table, page_size=self.pool.page_size, seq_lens=[old] * requests,
                new_lens=[old] * requests,
            ).out_cache_loc  # fmt: skip
            cached = (t[:, :old].flatten(0, 1).to(self.device) for t in (keys, values))
            write_kv(self.pool.layer(0), *cached, slots)
        spec = SpecInfo(topk=1, num_draft_tokens=new) if mode is M.TARGET_VERIFY else None
        batch = ForwardBatch.build(
            mode, query_lens=[new] * requests, seq_lens=[length] * requests, page_table=table,
            page_size=self.pool.page_size, spec=spec,
        )  # fmt: skip
        own = [t.flatten(0, 1).to(self.device) for t in (queries, keys[:, old:], values[:, old:])]
        if self.runner is not None and self.runner.fits(batch):
            out = self.runner.replay(batch, *own).clone()
        else:
            metadata = self.dispatcher.init_forward_metadata(batch)
            out = self.dispatcher.forward(*own, x, batch, metadata)
        self._check(out.unflatten(0, (requests, new)).cpu(), queries, keys, values)
        return {k.backend for k, n in self.dispatcher.passes.items() if n != before.get(k, 0)}

    def _check(self, out, queries, keys, values):
        for b in {0, len(out) - 1}:
            seen = sorted({0, queries.shape[1] - 1})

            def solve(dtype, order=0, b=b, seen=seen):
                return attend_request(
                    queries[b], keys[b], values[b], dtype=dtype, causal=True,
                    scale=self.layer.scale, queries=seen, order=order,
                )  # fmt: skip

            truth = solve(torch.float64)
            beside = yardstick(solve, self.dtype, truth)
            within_budget(f"request {b}", out[b][seen], truth[0], beside[0], self.dtype)
