"""The layers, inputs and batches of a case of linear attention."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.runtime.batch import ForwardBatch, SpecInfo
from attn_core.runtime.graphs import without_host_lengths
from attn_core.runtime.linear import Gate, LinearLayer
from attn_core.testing.linear_cases import LinearCase, LinearPass
from attn_core.testing.oracle import tree_mask
from attn_core.testing.strides import restrided

EPS = 1e-6  # of the norm of q and k


def make_layers(case: LinearCase, rng: torch.Generator) -> tuple[LinearLayer, ...]:
    """Return the layers of a case, on the host; each has a gate of its own."""
    (hk, hv), (k, v) = case.heads, case.dims
    layers = []
    for i in range(case.num_layers):
        gate = None
        if case.gate is not None:
            # from e^-5, at which f of 100 leaves some of a state, to e^2.8
            a_log = torch.rand(hv, generator=rng) * 7.8 - 5
            dims = (hv, k) if case.kind == "kda" else (hv,)
            gate = Gate(
                A_log=a_log.clamp(max=0.5) if case.gate == "bounded" else a_log,
                dt_bias=torch.randn(dims, generator=rng),
                lower_bound=-5.0 if case.gate == "bounded" else None,
                neg_eigval=case.gate == "neg_eigval",
            )
        layer = LinearLayer(
            layer_id=3 * i + 1,
            num_k_heads=hk,
            num_v_heads=hv,
            head_k_dim=k,
            head_v_dim=v,
            kind=cast("Literal['gdn', 'kda']", case.kind),
            scale=case.scale_by * k**-0.5,
            qk_norm=EPS if case.qk_norm else None,
            gate=gate,
        )
        layers.append(layer)
    return tuple(layers)


def draw(
    case: LinearCase,
    pass_: LinearPass,
    layer: LinearLayer,
    dtype: str,
    rng: torch.Generator,
    padding: float = torch.nan,
) -> list[Tensor]:
    """Return q, k, v, g and beta of a pass, on the host.

    padding: fills those of requests without a slot. Between what is strided lies NaN.
    """
    tokens = sum(pass_.query_lens)

    def randn(*dims: int) -> Tensor:
        return torch.randn(tokens, *dims, generator=rng)

    keys, hv = (layer.num_k_heads, layer.head_k_dim), layer.num_v_heads
    q, k, v = randn(*keys), randn(*keys), randn(hv, layer.head_v_dim)
    if case.near_equal_keys:
        shared = normalize(torch.randn(1, *keys, generator=rng), dim=-1)
        k = shared + 0.05 * normalize(k, dim=-1)
    if layer.qk_norm is None:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    else:  # small enough for the eps to count, also 0
        sizes = torch.tensor([3.0, 1e-3, 5.0, 0.0])[torch.arange(tokens) % 4]
        q, k = q * sizes.roll(1)[:, None, None], k * sizes[:, None, None]
    uniform = torch.rand(tokens, *layer.g_dims, generator=rng)
    beta = torch.rand(tokens, hv, generator=rng)
    if layer.gate is not None:
        g, beta = randn(*layer.g_dims) * 8, randn(hv) * 3
        g[::9] = 100.0  # exp overflows in float32
        g, beta = g.to(TORCH_DTYPES[dtype]), beta.to(TORCH_DTYPES[dtype])
    else:
        g = -case.decay * (torch.ones_like(uniform) if case.constant_decay else uniform)
        beta = beta * 0.05 + 0.95 if case.near_equal_keys else beta
    q, k, v = restrided(case.strides, [x.to(TORCH_DTYPES[dtype]) for x in (q, k, v)])
    if case.strides != "packed":
        g, beta = _among_others(g), _among_others(beta)
    first = 0
    for n, slot in zip(pass_.query_lens, pass_.slots, strict=True):
        for x in (q, k, v, g, beta):
            if slot < 0:
                x[first : first + n] = padding
        first += n
    return [q, k, v, g, beta]


def _among_others(x: Tensor) -> Tensor:
    """Return x as a slice of a wider tensor of NaN."""
    storage = x.new_full((x.shape[0], 2, *x.shape[1:]), torch.nan)
    return storage[:, 1].copy_(x)


def make_batch(pass_: LinearPass, device: torch.device) -> ForwardBatch:
    """Return the batch of a pass."""

    def int32(values: tuple[int, ...] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    lens, spec = pass_.query_lens, None
    if pass_.drafts:
        mask = None
        if pass_.trees is not None:
            mask = torch.stack([tree_mask(t) for t in pass_.trees]).to(device)
        spec = SpecInfo(topk=pass_.topk, num_draft_tokens=pass_.drafts, tree_mask=mask)
    state_fresh = torch.tensor([i in pass_.fresh for i in range(len(lens))], device=device)
    batch = ForwardBatch(
        forward_mode=pass_.mode,
        cu_seqlens_q=torch.tensor([0, *lens]).cumsum(0).int().to(device),
        positions=torch.arange(sum(lens), device=device),
        max_q_len=max(lens, default=0),
        spec=spec,
        state_slots=int32(pass_.slots),
        query_lens_host=lens,
        state_slots_out=int32(pass_.slots_out),
        state_fresh=state_fresh if pass_.fresh else None,
        checkpoint_slots=int32(pass_.checkpoint_slots),
    )
    return without_host_lengths(batch) if pass_.device_lengths else batch
