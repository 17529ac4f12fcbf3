"""A small right backend of sparse MLA, cut into steps so that a test can plant one fault in one."""

from __future__ import annotations

import dataclasses

import torch
from attn_core.spec.capabilities import BackendSpec
from reference import LATENT, Reference


class SparseReference(Reference):
    """Scores one query after the other, and gathers the slots of its selection."""

    # the selection

    def index_topk(self, q_index, weights, layer, cache, batch, metadata):
        planned, topk = metadata["batch"], layer.index_topk
        chosen = torch.full((q_index.shape[0], topk), -1, dtype=torch.int32, device=q_index.device)
        for rows in self.rows(planned, layer.view):
            slots = self.slots(rows, cache.page_size)
            for i in range(rows.queries):
                token = rows.tokens.start + i
                seen = self.index_slots(slots, rows, cache.page_size)[: self.seen(rows, i)]
                keys = self.index_keys(cache, seen)
                scores = self.index_scores(
                    q_index[token].float(), self.weights(weights, token), keys
                )
                picked = self.pick(scores, topk)
                chosen[token, : len(picked)] = self.named(seen, picked, rows, cache).int()
        return chosen

    def seen(self, rows, i):
        """How many keys query i of a request sees."""
        return rows.length - rows.queries + i + 1

    def index_slots(self, slots, rows, page_size):
        return slots

    def weights(self, weights, token):
        return weights[token]

    def index_keys(self, cache, slots):
        """The keys of these slots, float32 [n, Di]."""
        size = cache.page_size
        page, offset = slots // size, slots % size
        if cache.index.dtype != torch.uint8:
            return cache.index[page, offset].float()
        dim = cache.index.shape[1] // size - 4
        values, scales = self.planes(cache.index, size, dim)
        values = values.contiguous().view(torch.float8_e4m3fn)[page, offset].float()
        return self.scaled(values, scales.contiguous().view(torch.float32)[page, offset])

    def planes(self, index, size, dim):
        """The bytes of the values [pages, size, dim] and of their scales [pages, size, 4]."""
        values, scales = index[:, : size * dim], index[:, size * dim :]
        return values.unflatten(1, (size, dim)), scales.unflatten(1, (size, 4))

    def scaled(self, values, scales):
        return values * scales

    def index_scores(self, q, w, keys):
        return w @ self.relu(q @ keys.T)

    def relu(self, products):
        return products.relu()

    def pick(self, scores, topk):
        """The positions of the greatest scores, which rise."""
        return scores.argsort(descending=True, stable=True)[:topk].sort().values

    def named(self, seen, picked, rows, cache):
        return seen[picked]

    # the attention

    def forward(
        self, q, k, v, layer, cache, batch, metadata, *, out=None, return_lse=False,
        topk_indices=None,
    ):  # fmt: skip
        if topk_indices is None and cache.latent_dim:
            topk_indices = self.every_slot(layer, cache, metadata["batch"])
        if topk_indices is None:
            return super().forward(
                q, k, v, layer, cache, batch, metadata, out=out, return_lse=return_lse
            )
        out = self.buffer(q, layer, out)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        latents = self.latents(cache)
        for token in range(q.shape[0]):
            keys = latents[self.used(topk_indices[token]).long()]
            scores = q[token].float() @ keys.T * self.scale(layer)
            p = scores.softmax(-1) if len(keys) else scores
            out[token] = p @ keys[:, : layer.v_head_dim]
            lse[token] = scores.logsumexp(-1)
        return (out, lse) if return_lse else out

    def every_slot(self, layer, cache, batch):
        result = torch.full((batch.num_tokens, batch.views[layer.view].max_seq_len), -1)
        for rows in self.rows(batch, layer.view):
            slots = self.slots(rows, cache.page_size)
            for i in range(rows.queries):
                seen = self.seen(rows, i)
                result[rows.tokens.start + i, :seen] = slots[:seen]
        return result

    def latents(self, cache):
        """The latents of every slot, float32 [slots, D]."""
        if not cache.latent_dim:
            return cache.k.flatten(0, 1).squeeze(-2).float()
        values, scales, rope = self.parts(cache.k.flatten(0, 2), cache.latent_dim)
        values = self.e4m3(values).unflatten(1, (-1, 128))
        values = values * self.of_blocks(scales.contiguous().view(torch.float32))[..., None]
        return torch.cat([values.flatten(1), self.rope(rope.contiguous())], 1)

    def parts(self, tokens, dim):
        """The bytes of the values, of their scales and of the rope part of each token."""
        return tokens[:, :dim], tokens[:, dim : dim + dim // 32], tokens[:, dim + dim // 32 :]

    def e4m3(self, values):
        return values.contiguous().view(torch.float8_e4m3fn).float()

    def of_blocks(self, scales):
        """The scale of each block of 128 values of a token."""
        return scales

    def rope(self, raw):
        return raw.view(torch.bfloat16).float()

    def used(self, slots):
        return slots[slots >= 0]


ROW = dataclasses.replace(
    LATENT,
    kind="dsa",
    kv_dtypes={"fp32", "bf16", "fp8_e4m3"},
    kv_dtype_may_differ=True,
    max_verify_topk=1,
    tensor_scales=False,
)


def sparse_spec(*, dtypes=("fp32", "bf16")) -> BackendSpec:
    """The declaration of the sparse reference."""
    row = dataclasses.replace(ROW, dtypes=set(dtypes))
    return BackendSpec(
        name="sparse_reference",
        capabilities=[row],
        create="sparse_reference:SparseReference",
    )
