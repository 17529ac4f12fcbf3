"""Passes of the Triton backend over pages that hold NaN in all that is nobody's, and float64."""

from contextlib import contextmanager

import torch
from attn_core.cache.page_table import slot_table
from attn_core.cache.pool import KVPool
from attn_core.ops.kv import read_kv, write_kv
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def oracle(layer, q, k, v, seen):
    """Attend in float64: q [n, Hq, D], k [L, Hkv, D], v [L, Hkv, Dv], seen [n, L] → out, lse."""
    group = layer.num_q_heads // layer.num_kv_heads
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.double(), k) * layer.scale
    s = s if layer.logit_cap is None else layer.logit_cap * (s / layer.logit_cap).tanh()
    s = s.masked_fill(~seen, -torch.inf)
    if layer.sinks is not None:
        sink = layer.sinks.double()[:, None, None].expand(-1, s.shape[1], 1)
        s = torch.cat((s, sink), -1)
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp()[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", p, v), lse.T


def make_layer(heads=2, group=4, dim=128, v_dim=None, **more):
    return AttentionLayer(
        layer_id=0,
        num_q_heads=heads * group,
        num_kv_heads=heads,
        head_dim=dim,
        v_head_dim=v_dim or dim,
        scale=dim**-0.5,
        **more,
    )


class Requests:
    """Requests of `lengths` tokens each in one cache, whose values are what the cache stored."""

    def __init__(self, layer, lengths, *, page, dtype="bf16", store=None, layout="NHD"):
        self.layer, self.page, self.dtype, self.store = layer, page, dtype, store or dtype
        self.kind = "mla" if layer.head_dim == 576 else "mha"
        self.lengths = list(lengths)
        pages = [-(-n // page) for n in lengths]
        rng = torch.Generator().manual_seed(0)
        order = torch.randperm(sum(pages), generator=rng).int() + 1
        self.table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for row, own in zip(self.table, order.split(pages), strict=True):
            row[: len(own)] = own
        self.table = self.table.to(DEVICE)
        pool = KVPool(
            [layer],
            num_pages=1 + sum(pages),
            page_size=page,
            kv_cache_dtype=self.store,
            device=DEVICE,
            kind=self.kind,
            layout=layout,
        )
        self.pool, self.cache = pool, pool.layer(0)
        for part, _ in self.cache.parts():
            if part.dtype.itemsize == 1:  # NaN of either float8, and of the scales of FP4
                part.view(torch.uint8).fill_(0x7F)
            else:
                part.fill_(torch.nan)
        self.keys, self.values = [], []
        for b in range(len(lengths)):
            self._write(b, rng)

    def _write(self, b, rng):
        n, layer, dtype = self.lengths[b], self.layer, DTYPES[self.dtype]
        dims = (layer.head_dim,) if self.kind == "mla" else (layer.head_dim, layer.v_head_dim)
        new = [torch.randn(n, layer.num_kv_heads, d, generator=rng) for d in dims]
        k, v = (*(x.to(dtype).to(DEVICE) for x in new), None)[:2]
        slots = slot_table(self.table[b : b + 1], self.page, n)[0].long()
        if n:
            write_kv(self.cache, k, v, slots)
        k, v = read_kv(self.cache, slots, torch.float32)
        self.keys.append(k)
        self.values.append(k[..., : layer.v_head_dim] if v is None else v)

    def backend(self, **more):
        spec = load_plugins().get("triton")
        config = BackendConfig(
            name="triton",
            row=next(row for row in spec.capabilities if row.kind == self.kind),
            layers=(self.layer,),
            page_size=self.page,
            dtype=self.dtype,
            kv_cache_dtype=self.store,
            device=DEVICE,
            **more,
        )
        return create_backend(spec, config)

    def batch(self, queries, lengths=None, mode=ForwardMode.EXTEND, spec=None):
        return ForwardBatch.build(
            mode,
            query_lens=queries,
            seq_lens=self.lengths if lengths is None else lengths,
            page_table=self.table,
            page_size=self.page,
            spec=spec,
        )

    def draw(self, tokens, seed=1):
        rng = torch.Generator().manual_seed(seed)
        shape = (tokens, self.layer.num_q_heads, self.layer.head_dim)
        return torch.randn(shape, generator=rng).to(DTYPES[self.dtype]).to(DEVICE)

    def attend(self, batch, q, **config):
        """Plan and run the pass `batch` with nothing new to write; return out and LSE."""
        backend = self.backend(**config)
        plan = backend.init_forward_metadata(batch)
        tokens = (q, None, None, self.layer, self.cache, batch, plan)
        return backend.forward(*tokens, return_lse=True)

    def check(self, got, q, queries, lengths=None, *, causal=True, trees=None):
        """Compare out and LSE with float64, request by request."""
        begin = 0
        for b, n in enumerate(self.lengths if lengths is None else lengths):
            rows = slice(begin, begin + queries[b])
            begin = rows.stop
            i = torch.arange(queries[b], device=DEVICE)[:, None] + n - queries[b]
            j = torch.arange(n, device=DEVICE)[None, :]
            seen = (j <= i) | (not causal)
            if trees is not None:
                seen[:, n - queries[b] :] = trees[b]
            window = self.layer.sliding_window
            if window is not None:
                own = i if trees is None else n - queries[b] + trees[b].sum(1, keepdim=True) - 1
                at = j.expand(seen.shape).clone()
                if trees is not None:
                    at[:, n - queries[b] :] = own.T
                seen = seen & (at > own - window)
            want, lse = oracle(self.layer, q[rows], self.keys[b][:n], self.values[b][:n], seen)
            error = (got[0][rows].double() - want).norm()
            assert error <= 6e-3 * want.norm(), (b, float(error), float(want.norm()))
            torch.testing.assert_close(got[1][rows].double(), lse, atol=2e-3, rtol=1e-3)


@contextmanager
def launches():
    """Collect the names of the kernels that run; none in the interpreter."""
    from triton import knobs

    names, hooks = [], knobs.runtime.launch_enter_hook

    def noted(metadata):
        names.append(metadata.get()["name"])

    hooks.add(noted)  # as a profiler does
    try:
        yield names
    finally:
        hooks.remove(noted)
