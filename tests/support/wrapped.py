"""A right wrapper of a library that has a vendor's conventions, cut into steps for faults."""

import math
from dataclasses import dataclass, replace

import torch
from attn_core.cache.page_table import to_csr
from attn_core.runtime.backend import AttentionBackend
from attn_core.spec.capabilities import BackendSpec, Capabilities
from torch import Tensor

# The library: paged pools [pages, page_size, H, D], tables as CSR, LSE in base 2.


@dataclass(frozen=True, eq=False)
class Plan:
    """What the library works out once for all layers: where each request's tokens lie."""

    requests: tuple[tuple[slice, Tensor, int], ...]  # queries, pages, number of keys
    causal: bool
    window_left: int


def plan_paged(
    qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size, *, causal=False, window_left=-1
):
    """Plan attention over paged keys; reads every index on the host.

    qo_indptr, kv_indptr int32 [B + 1], kv_indices int32 [pages], kv_last_page_len int32 [B]: 1 to
    page_size. causal: the last query sees the last key. window_left: how many keys before its own
    a query sees, -1 is all of them.
    """
    for t in (qo_indptr, kv_indptr, kv_indices, kv_last_page_len):
        if t.dtype is not torch.int32 or not t.is_contiguous():
            raise ValueError("index tensors must be contiguous int32")
    if window_left >= 0 and not causal:
        raise ValueError("window_left needs causal=True")
    queries, pages, last = qo_indptr.tolist(), kv_indptr.tolist(), kv_last_page_len.tolist()
    requests = tuple(
        (
            slice(queries[b], queries[b + 1]),
            kv_indices[pages[b] : pages[b + 1]].long(),
            max(0, (pages[b + 1] - pages[b] - 1) * page_size + last[b]),  # no pages, no keys
        )
        for b in range(len(last))
    )
    return Plan(requests, causal, window_left)


def run_paged(
    plan, q, k_cache, v_cache, *, sm_scale=None, k_scale=None, v_scale=None, logits_soft_cap=0.0
):
    """Attend as planned: a new output [T, Hq, D] and the LSE float32 [T, Hq], in base 2.

    sm_scale None is 1 / sqrt(D). k_scale, v_scale: float32 [1], what stored numbers are multiplied
    by, None is 1. logits_soft_cap c: c · tanh(score / c), 0 is none.
    """
    if not q.is_contiguous():
        raise ValueError("q must be contiguous")
    for scale in (k_scale, v_scale):
        if scale is not None and (scale.dtype is not torch.float32 or scale.shape != (1,)):
            raise ValueError("k_scale and v_scale must be float32 tensors [1]")
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for rows, pages, length in plan.requests:
        n = rows.stop - rows.start
        first = 0 if plan.window_left < 0 else max(0, length - n - plan.window_left)
        k = _read(k_cache, pages, k_scale)[first:length]
        v = _read(v_cache, pages, v_scale)[first:length]
        mine = q[rows].float().unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("nhgd,shd->nhgs", mine, k) * sm_scale
        if logits_soft_cap:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        if plan.causal:
            key = torch.arange(first, length, device=q.device)
            own = torch.arange(length - n, length, device=q.device)[:, None]
            unseen = key > own
            if plan.window_left >= 0:
                unseen |= key < own - plan.window_left
            scores = scores.masked_fill(unseen[:, None, None], -torch.inf)
        out[rows] = torch.einsum("nhgs,shd->nhgd", scores.softmax(-1), v).flatten(1, 2).to(q.dtype)
        lse[rows] = scores.logsumexp(-1).flatten(1) / math.log(2)
    return out, lse


def _read(pool, pages, scale):
    # not every torch indexes float8, each indexes bytes
    raw = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
    tokens = raw[pages].view(pool.dtype).flatten(0, 1).float()
    return tokens if scale is None else tokens * scale


# The wrapper.


class Wrapper(AttentionBackend):
    """Plans each window of each view once a pass and calls the library once a layer."""

    def init_forward_metadata(self, batch):
        wanted = {(x.view, x.sliding_window) for x in self.config.layers}
        return {
            (name, window): self.plan(batch, batch.views[name], window)
            for name, window in wanted
            if name in batch.views
        }

    def plan(self, batch, view, window):
        csr = self.csr(view)
        return plan_paged(
            batch.cu_seqlens_q,
            csr.indptr,
            csr.indices,
            csr.last_page_len,
            self.config.page_size,
            **self.mask(window),
        )

    def csr(self, view):
        table = view.page_table
        return to_csr(table, view.seq_lens, self.config.page_size, num_pages=table.numel())

    def mask(self, window):
        return {"causal": True, "window_left": -1 if window is None else window - 1}

    def forward(
        self, q, k, v, layer, cache, batch, metadata, *, out=None, return_lse=False,
        topk_indices=None,
    ):  # fmt: skip
        plan = metadata[layer.view, layer.sliding_window]
        q = q.contiguous()
        new, lse = run_paged(plan, q, cache.k, cache.v, **self.arguments(layer, cache))
        out = self.handed_over(new, out)
        return (out, self.natural(lse)) if return_lse else out

    def arguments(self, layer, cache):
        """What the library takes per call beside the tensors."""
        k_scale = v_scale = None
        if cache.k.dtype.itemsize == 1:
            k_scale, v_scale = (
                torch.full((1,), x, device=cache.k.device) for x in (cache.k_scale, cache.v_scale)
            )
        return {
            "sm_scale": layer.scale,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "logits_soft_cap": layer.logit_cap or 0.0,
        }

    def handed_over(self, new, out):
        return new if out is None else out.copy_(new)

    def natural(self, lse):
        return lse * math.log(2)


ROW = Capabilities(
    kind="mha",
    device="cpu",
    dtypes={"fp32", "bf16"},
    kv_dtypes={"fp32", "bf16", "fp8_e4m3", "fp8_e5m2"},
    priority=1,
    sliding_window=True,
    logit_cap=True,
    max_verify_topk=1,
    lse=True,
)


def wrapper_spec(**changes) -> BackendSpec:
    """The declaration of the wrapper; `changes` are made to its row."""
    row = replace(ROW, **changes)
    return BackendSpec(name="wrapper", capabilities=[row], create="wrapped:Wrapper")
