"""A backend that records its calls and returns what it owes, and a dispatcher over two of them."""

import dataclasses

import torch
from attn_core.cache.pool import KVPool
from attn_core.ops.kv import read_kv
from attn_core.runtime.backend import AttentionBackend, BackendConfig
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.capabilities import ANY_TOPK, Capabilities

M = ForwardMode
TABLE = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
HQ, HKV, D, DV = 4, 2, 8, 4


class Recorder(AttentionBackend):
    """Records each call, and what the cache held at that moment."""

    def __init__(self, config):
        super().__init__(config)
        self.calls = []
        self.returned = None

    def _attend(self, q, layer, out, return_lse):
        out = q.new_zeros(len(q), layer.num_q_heads, layer.v_head_dim) if out is None else out
        lse = q.new_zeros(len(q), layer.num_q_heads, dtype=torch.float32)
        self.returned = (out, lse) if return_lse else out
        return self.returned

    def _record(self, name, *args, **kwargs):
        self.calls.append((name, args, kwargs))
        return f"{self.config.name}.{name}"

    def init_forward_metadata(self, batch):
        return self._record("init_forward_metadata", batch)

    def forward_extend(self, q, k, v, layer, cache, batch, metadata, *, out, return_lse, **kwargs):
        stored = None
        if layer.view in batch.views and batch.views[layer.view].out_cache_loc is not None:
            stored = read_kv(cache, batch.views[layer.view].out_cache_loc, torch.float32)
        kwargs |= {"out": out, "return_lse": return_lse}
        self._record("forward_extend", q, k, v, layer, stored, batch, metadata, **kwargs)
        return self._attend(q, layer, out, return_lse)

    def forward_decode(self, q, k, v, layer, cache, batch, metadata, *, out, return_lse, **kwargs):
        stored = read_kv(cache, batch.views[layer.view].out_cache_loc, torch.float32)
        kwargs |= {"out": out, "return_lse": return_lse}
        self._record("forward_decode", q, k, v, layer, stored, batch, metadata, **kwargs)
        return self._attend(q, layer, out, return_lse)

    def forward_ragged(self, q, k, v, layer, *args, out, return_lse, **kwargs):
        kwargs |= {"out": out, "return_lse": return_lse}
        self._record("forward_ragged", q, k, v, layer, *args, **kwargs)
        return self._attend(q, layer, out, return_lse)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self._record("init_cuda_graph_state", max_bs, max_num_tokens)

    def init_forward_metadata_capture_cuda_graph(self, batch):
        return self._record("init_forward_metadata_capture_cuda_graph", batch)

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        self._record("init_forward_metadata_replay_cuda_graph", batch, metadata)

    def get_cuda_graph_seq_len_fill_value(self):
        self._record("get_cuda_graph_seq_len_fill_value")
        return 3


ROW = Capabilities(
    kind="mha",
    device="any",
    dtypes={"fp32"},
    kv_dtypes={"fp32"},
    priority=1,
    head_dim_pairs="any",
    lse=True,
    max_verify_topk=ANY_TOPK,
    cuda_graph="uniform",
)
LAYERS = tuple(
    AttentionLayer(
        layer_id=i,
        num_q_heads=HQ,
        num_kv_heads=HKV,
        head_dim=D,
        v_head_dim=DV,
        scale=1.0,
        view=view,
    )
    for i, view in enumerate(("full", "window"))
)
CONFIG = BackendConfig(
    name="prefiller",
    row=ROW,
    layers=LAYERS,
    page_size=4,
    dtype="fp32",
    kv_cache_dtype="fp32",
    device=torch.device("cpu"),
)


def recorder(name, *, layers=LAYERS, **row):
    row = dataclasses.replace(ROW, **row)
    return Recorder(dataclasses.replace(CONFIG, name=name, row=row, layers=layers))


def make(mode="prefill", prefill=None, decode=None, **more):
    """Two backends; `mode` is the one that verifies and drafts, None without speculation."""
    pre, dec = prefill or recorder("prefiller"), decode or recorder("decoder")
    routes = {"prefill": pre, "decode": dec, **more}
    if mode:
        routes["verify"] = routes["draft"] = pre if mode == "prefill" else dec
    pool = KVPool(LAYERS, num_pages=5, page_size=4, kv_cache_dtype="fp32")
    return HybridDispatcher(routes, pool), pre, dec


def batch(mode, **changes):
    decodes = mode in (M.DECODE, M.DRAFT_DECODE)
    n, rows = (1 if decodes else 2), (0 if mode is M.IDLE else 2)
    spec = SpecInfo(topk=1, num_draft_tokens=2) if mode is M.TARGET_VERIFY else None
    lens, new = [6, 3][:rows], [n, n][:rows]
    window = CacheView.build(
        page_table=TABLE[:rows].flip(0), page_size=4, seq_lens=lens, new_lens=new
    )
    return ForwardBatch.build(
        mode,
        query_lens=new,
        seq_lens=lens,
        page_table=TABLE[:rows],
        page_size=4,
        **{"spec": spec, "views": {"window": window}, **changes},
    )


def qkv(n):
    g = torch.Generator().manual_seed(n)
    return [torch.randn(n, h, d, generator=g) for h, d in ((HQ, D), (HKV, D), (HKV, DV))]
