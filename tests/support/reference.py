"""A small right backend, cut into steps so that a test can plant one fault in one of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.ops.quant import from_fp4, from_fp8, to_fp4, to_fp8
from attn_core.ops.vertical_slash import ROWS, choose_vertical_slash, parts_of, seen_keys, to_lists
from attn_core.runtime.backend import AttentionBackend
from attn_core.runtime.batch import ForwardMode
from attn_core.spec.capabilities import ANY_TOPK, BackendSpec, Capabilities
from attn_core.spec.kinds import Phase
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The queries of one request: their tokens in the batch, its pages and its keys."""

    tokens: slice
    table: Tensor
    length: int  # keys, those of this pass included
    tree: Tensor | None  # bool [n, n]
    index: int  # of the request in the batch

    @property
    def queries(self) -> int:
        return self.tokens.stop - self.tokens.start


class Reference(AttentionBackend):
    """Gathers the keys of one request at a time and forms its scores in float32."""

    def __init__(self, config):
        super().__init__(config)
        self.dtype = TORCH_DTYPES[config.dtype]

    # the plan

    def init_forward_metadata(self, batch):
        return {"batch": batch}

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.static = {}

    def init_forward_metadata_capture_cuda_graph(self, batch):
        self.static["batch"] = batch
        return self.static

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        metadata["batch"] = batch

    def rows(self, batch, view):
        """Take the batch apart, request by request."""
        ends = batch.cu_seqlens_q.tolist()
        lengths = batch.views[view].seq_lens.tolist()
        tree = None if batch.spec is None else batch.spec.tree_mask
        if batch.forward_mode is not ForwardMode.TARGET_VERIFY:
            tree = None
        return [
            Rows(
                tokens=slice(ends[b], ends[b + 1]),
                table=batch.views[view].page_table[b],
                length=lengths[b],
                tree=None if tree is None else self.tree(tree, b),
                index=b,
            )
            for b in range(batch.batch_size)
        ]

    def tree(self, mask, b):
        return mask[b]

    # the passes

    def forward(
        self, q, k, v, layer, cache, batch, metadata, *, out=None, return_lse=False,
        topk_indices=None,
    ):  # fmt: skip
        if k is not None and self.config.row.fused_kv_write and layer.view in batch.views:
            slots = batch.views[layer.view].out_cache_loc
            if slots is not None:
                self.write(cache, k, v, slots)
        planned = metadata["batch"]
        out = self.buffer(q, layer, out)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
        for rows in self.rows(planned, layer.view):
            if rows.queries:
                keys, values = self.read(cache, rows, layer)
                values = self.without_what_is_behind(values, rows, layer)
                part = self.attend(self.queries(q)[rows.tokens], keys, values, layer, rows)
                out[rows.tokens], lse[rows.tokens] = part
        return (out, lse) if return_lse else out

    def forward_ragged(
        self, q, k, v, layer, cu_seqlens_q, cu_seqlens_k, max_q, max_k, *, causal, out=None,
        return_lse=False,
    ):  # fmt: skip
        out = self.buffer(q, layer, out)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
        layer = dataclasses.replace(layer, is_causal=causal)
        cq, ck = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for b in range(len(cq) - 1):
            mine = slice(ck[b], ck[b + 1])
            rows = Rows(
                tokens=slice(cq[b], cq[b + 1]),
                table=q,
                length=ck[b + 1] - ck[b],
                tree=None,
                index=b,
            )
            if rows.queries:
                part = self.attend(q[rows.tokens], k[mine], v[mine], layer, rows)
                out[rows.tokens], lse[rows.tokens] = part
        return (out, lse) if return_lse else out

    def buffer(self, q, layer, out):
        shape = (q.shape[0], layer.num_q_heads, layer.v_head_dim)
        return q.new_empty(shape) if out is None else out

    def queries(self, q):
        return q

    # the cache

    def slots(self, rows, page_size):
        """The token slots of a request's keys, in order."""
        position = torch.arange(rows.length, device=rows.table.device)
        return rows.table[position // page_size].long() * page_size + position % page_size

    def scales(self, cache):
        return cache.k_scale, cache.v_scale

    def side(self, pool, blocks, scale, slots, layout):
        """One of K and V, [n, H, D] in float32."""
        pool = pool if layout == "NHD" else pool.transpose(1, 2)
        size = pool.shape[1]
        picked = self.bytes(pool)[slots // size, slots % size].view(pool.dtype)
        if blocks is not None:
            blocks = blocks if layout == "NHD" else blocks.transpose(1, 2)
            unit = self.bytes(blocks)[slots // size, slots % size].view(blocks.dtype)
            return self.decode_fp4(picked, unit, scale)
        if pool.dtype.itemsize == 1:
            return self.decode_fp8(picked, scale)
        return picked.float()

    def decode_fp4(self, codes, unit, scale):
        return from_fp4(codes, unit, scale, torch.float32)

    def decode_fp8(self, x, scale):
        return from_fp8(x, scale, torch.float32)

    def bytes(self, t):
        return t.view(torch.uint8) if t.dtype.itemsize == 1 else t

    def read(self, cache, rows, layer):
        slots = self.slots(rows, cache.page_size)
        k_blocks, v_blocks = cache.block_scales or (None, None)
        k_scale, v_scale = self.scales(cache)
        keys = self.side(cache.k, k_blocks, k_scale, slots, cache.layout)
        if cache.v is None:
            return keys, keys[..., : layer.v_head_dim]
        return keys, self.side(cache.v, v_blocks, v_scale, slots, cache.layout)

    def without_what_is_behind(self, values, rows, layer):
        """Pages behind the window were given back: their keys weigh nothing, but 0 · NaN is NaN."""
        first = rows.length - rows.queries - (layer.sliding_window or rows.length) + 1
        return values.index_fill(0, torch.arange(max(0, first), device=values.device), 0)

    def write(self, cache, k, v, slots):
        blocks = cache.block_scales or (None, None)
        k_scale, v_scale = self.scales(cache)
        for x, pool, unit, scale in (
            (k, cache.k, blocks[0], k_scale),
            (v, cache.v, blocks[1], v_scale),
        ):
            if x is None or pool is None:
                continue
            if unit is not None:
                x, block = to_fp4(x, scale)
                self.put(unit, block, slots, cache.layout)
            elif pool.dtype.itemsize == 1:
                x = self.encode_fp8(x, pool.dtype, scale)
            self.put(pool, x.to(pool.dtype), slots, cache.layout)

    def encode_fp8(self, x, dtype, scale):
        return to_fp8(x, dtype, scale)

    def put(self, pool, x, slots, layout):
        pool = pool if layout == "NHD" else pool.transpose(1, 2)
        size = pool.shape[1]
        self.bytes(pool)[slots // size, slots % size] = self.bytes(x)

    # the attention

    def visible(self, layer, rows, n, s, device):
        """Which of the s keys each of the n queries sees, bool [n, s]."""
        query, key = torch.arange(n, device=device)[:, None], torch.arange(s, device=device)
        if layer.is_cross or not layer.is_causal:
            return torch.ones(n, s, dtype=torch.bool, device=device)
        prefix = s - n
        if rows.tree is None:
            seen = key <= self.last_key(query, n, s)
            at, of = self.position(prefix + query, rows), key
        else:
            seen = self.seen_drafts(rows.tree, prefix)
            depth = self.depth(rows.tree)
            of = torch.cat([torch.arange(prefix, device=device), prefix + depth])
            at = (prefix + depth)[:, None]
        if layer.sliding_window is not None:
            seen = seen & self.in_window(of, at, layer.sliding_window)
        return seen

    def position(self, position, rows):
        return position

    def last_key(self, query, n, s):
        return query + (s - n)

    def seen_drafts(self, tree, prefix):
        return torch.cat([tree.new_ones(tree.shape[0], prefix), tree], 1)

    def depth(self, tree):
        return tree.sum(-1) - 1

    def in_window(self, key, query, window):
        return key > query - window

    def scale(self, layer):
        return layer.scale

    def kv_head(self, k, layer):
        """Give each query head its KV head, [n, Hq, D]."""
        return k.repeat_interleave(layer.num_q_heads // layer.num_kv_heads, 1)

    def cap_and_mask(self, scores, seen, cap):
        return self.mask(self.cap(scores, cap), seen)

    def cap(self, scores, cap):
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def mask(self, scores, seen):
        return scores.masked_fill(~seen, -torch.inf)

    def score(self, q, k):
        return torch.einsum("nhd,shd->hns", q, k)

    def products(self, q, k, layer, rows):
        """The products of queries and keys [Hq, n, s]; a key's chunk decides which query it meets.

        Dual chunk attention has queries [n, 3, Hq, D].
        """
        if layer.dual_chunk is None:
            return self.score(q, k)
        products = torch.stack([self.score(x, k) for x in self.rotations(q[:, :3])])
        apart = self.chunks_apart(layer, rows, k.shape[0], q.device)
        return products.gather(0, apart.expand(1, *products.shape[1:]))[0]

    def rotations(self, q):
        return q.unbind(1)

    def chunks_apart(self, layer, rows, s, device):
        """How many chunks each key lies before each query [n, s], at most 2."""
        query = self.chunk_of(self.query_position(rows, device), layer.dual_chunk)
        key = self.chunk_of(torch.arange(s, device=device), layer.dual_chunk)
        return self.apart(query[:, None], key)

    def query_position(self, rows, device):
        return torch.arange(rows.length - rows.queries, rows.length, device=device)

    def chunk_of(self, position, chunks):
        return position // chunks.chunk_len

    def apart(self, query_chunk, key_chunk):
        return (query_chunk - key_chunk).clamp(0, 2)

    def attend(self, q, k, v, layer, rows):
        """Attend with the queries of one request: out [n, Hq, Dv], LSE [n, Hq]."""
        q, k, v = q.float(), k.float(), v.float()
        n, s = q.shape[0], k.shape[0]
        k, v = self.kv_head(k, layer), self.kv_head(v, layer)
        scores = self.products(q, k, layer, rows) * self.scale(layer)
        seen = self.visible(layer, rows, n, s, q.device)
        if self.is_sparse(layer, n, s):
            seen = seen & self.on_lines(q, k, layer)
        scores = self.cap_and_mask(scores, seen, layer.logit_cap)  # [Hq, n, s]
        out, lse = self.softmax(scores, v)
        return self.with_sinks(out, lse, layer)

    # sparse prompts of dual chunk attention

    def is_sparse(self, layer, n, s):
        threshold = layer.dual_chunk and layer.dual_chunk.sparse_threshold
        return threshold is not None and n == s > threshold

    def on_lines(self, q, k, layer):
        """Which keys are listed for each query of a prompt, bool [Hq, n, n]; k [n, Hq, D]."""
        n, length = len(k), layer.dual_chunk.chunk_len
        listed = torch.zeros(layer.num_q_heads, n, n, dtype=torch.bool)
        for begin in range(0, n, length):
            end = min(begin + length, n)
            for head, size in enumerate(layer.vertical_slash):
                own = slice(head, head + 1)
                lines = self.lines(q[:, :, own], k[:, head], begin, end, [size], layer)
                for part in self.parts(begin, end, length):
                    lists = self.lists(lines, part)
                    for block, first in enumerate(range(begin, end, ROWS)):
                        seen = seen_keys(lists, block, part.hi)
                        listed[own, first : min(first + ROWS, end), : part.hi] |= seen[:, None]
        return listed

    def lines(self, q, k, begin, end, size, layer):
        last = self.choosing(begin, end, layer.dual_chunk.sparse_last_queries)
        chosen = q[last, self.choosers()]
        return choose_vertical_slash(chosen, k[:end], size, layer.scale, layer.dual_chunk.chunk_len)

    def choosing(self, begin, end, last):
        return slice(max(begin, end - last), end)

    def choosers(self):
        return [0, 3, 4]

    def parts(self, begin, end, length):
        return parts_of(begin, end, length)

    def lists(self, lines, part):
        return to_lists(lines, part)

    def softmax(self, scores, v):
        top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(1)
        p = (scores - top).exp()
        total = p.sum(-1)
        out = torch.einsum("hns,shd->nhd", p, v) / total.T.clamp(min=1)[..., None]
        return out, scores.logsumexp(-1).T

    def with_sinks(self, out, lse, layer):
        if layer.sinks is None:
            return out, self.natural(lse)
        total = torch.logaddexp(lse, layer.sinks.float())
        return out * (lse - total).exp()[..., None], self.natural(total)

    def natural(self, lse):
        return lse


ROW = Capabilities(
    kind="mha",
    device="cpu",
    dtypes={"fp32", "bf16"},
    kv_dtypes={"fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"},
    priority=1,
    head_dim_pairs="any",
    sliding_window=True,
    logit_cap=True,
    sinks=True,
    cross_attention=True,
    encoder=True,
    dual_chunk=None,
    sparse_prefill=True,
    max_verify_topk=ANY_TOPK,
    lse=True,
    deterministic=True,
    tensor_scales=True,
    cuda_graph="uniform",
)
LATENT = dataclasses.replace(
    ROW,
    kind="mla",
    chunked_prefix=True,
    sliding_window=False,
    logit_cap=False,
    sinks=False,
    cross_attention=False,
    encoder=False,
    dual_chunk=False,
    sparse_prefill=False,
)
VISION = dataclasses.replace(ROW, phases={Phase.ENCODE}, dual_chunk=False, sparse_prefill=False)


def spec_of(*, fused: bool = False, **changes) -> BackendSpec:
    """The declaration of the reference; `changes` are made to every row."""
    rows = [
        dataclasses.replace(row, fused_kv_write=fused, **changes) for row in (ROW, LATENT, VISION)
    ]
    return BackendSpec(name="reference", capabilities=rows, create="reference:Reference")
