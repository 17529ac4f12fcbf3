"""The linear layers of a warm-up: their passes, which read and write no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, cast

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.state_pool import StatePool
from attn_core.errors import UsageError
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.batch_checks import num_chunks
from attn_core.runtime.linear import Gate, LinearLayer
from attn_core.runtime.linear_routes import LINEAR_ROLE_OF_MODE, LinearRoutes
from attn_core.spec.requirements import LayerRequirements, Requirements

_EPS = 1e-6  # of the norm of q and k, as all models have it
_PROMPTS = (1, 100)  # new tokens of two requests of a prefill: a part of a chunk, and two chunks
_BATCHES = (2, 3, 5, 9)  # prompts that leave room on a GPU, just fill it, or wait for each other


def no_slots(requests: int, device: torch.device) -> Tensor:
    """Return the slots of padded requests, int32 [requests]: no state is read or written."""
    return torch.full((requests,), -1, dtype=torch.int32, device=device)


def create_states(
    requirements: Requirements, device: torch.device
) -> tuple[list[LinearLayer], StatePool | None]:
    """Create the linear layers of a warm-up and a pool of one slot; None without such layers.

    Raises UsageError for an unknown dim or head count.
    """
    layers: list[LinearLayer] = []
    for needs in requirements.linear_layers:
        layers += _layers(needs, len(layers), device)
    speculation = requirements.speculation
    drafts = speculation.num_draft_tokens if speculation else 0
    states = StatePool(layers, num_slots=1, num_drafts=drafts, device=device) if layers else None
    return layers, states


def _layers(
    needs: LayerRequirements, layer_id: int, device: torch.device
) -> tuple[LinearLayer, LinearLayer]:
    """Return a layer whose gate the backend computes and one whose gate the engine computes.

    Kernels are compiled for each of the two. layer_id: of the first.
    """
    k, v = needs.head_dim, needs.v_head_dim or needs.head_dim
    hk, hv = needs.num_q_heads, needs.num_kv_heads or needs.num_q_heads
    if k is None or v is None or hk is None or hv is None:
        raise UsageError(
            f"linear layers of head_dim {k}, {hk} key heads: a warm-up runs kernels and must know "
            "both; name a model"
        )
    plain = LinearLayer(
        layer_id=layer_id + 1,
        num_k_heads=hk,
        num_v_heads=hv,
        head_k_dim=k,
        head_v_dim=v,
        kind=cast("Literal['gdn', 'kda']", needs.kind),
        qk_norm=_EPS,
    )
    A_log, dt_bias = (
        torch.zeros(dims, dtype=torch.float32, device=device) for dims in ((hv,), plain.g_dims)
    )
    return replace(plain, layer_id=layer_id, gate=Gate(A_log=A_log, dt_bias=dt_bias)), plain


def linear_passes(
    linear: LinearRoutes, max_bs: int
) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yield the backend, the name and the call of every pass over the states.

    Requests that start from zeros and those that do not have kernels of their own. So have prompts
    with checkpoints, where the row writes any, and prompts that are several, or many.
    """
    modes, max_size = ForwardMode, max(2, max_bs)
    for size in sorted({max_size, *(n for n in _BATCHES if n <= max_size)}):
        prompts, label = (*_PROMPTS, *(1,) * (size - 2)), f"linear prefill, batch size {size}"
        yield _pass(linear, label, modes.EXTEND, prompts)
        if linear.backend(modes.EXTEND).config.row.checkpoints:
            label = f"linear prefill with checkpoints, batch size {size}"
            yield _pass(linear, label, modes.EXTEND, prompts, checkpoints=True)
    for size in sorted({1, max_bs}):
        yield _pass(linear, f"linear decode, batch size {size}", modes.DECODE, (1,) * size)
    if "linear_verify" in linear.routes:
        config = linear.backend(modes.TARGET_VERIFY).config
        n, topk = config.num_draft_tokens or 4, max(config.topk, 1)
        tree = None
        if topk > 1:
            tree = torch.ones(1, n, n, dtype=torch.bool, device=config.device).tril()
        spec = SpecInfo(topk=topk, num_draft_tokens=n, tree_mask=tree)
        label = f"linear verify and commit, {n} drafts"
        yield _pass(linear, label, modes.TARGET_VERIFY, (n,), spec)


def _pass(
    linear: LinearRoutes,
    label: str,
    mode: ForwardMode,
    query_lens: Sequence[int],
    spec: SpecInfo | None = None,
    *,
    checkpoints: bool = False,
) -> tuple[str, str, Callable[[], None]]:
    backend, device = linear.routes[LINEAR_ROLE_OF_MODE[mode]], linear.states.device
    requests = len(query_lens)
    continued = ForwardBatch(
        forward_mode=mode,
        cu_seqlens_q=torch.tensor([0, *query_lens], device="cpu").cumsum(0).int().to(device),
        positions=torch.arange(sum(query_lens), device=device),
        max_q_len=max(query_lens),
        spec=spec,
        state_slots=no_slots(requests, device),
        query_lens_host=tuple(query_lens),
        checkpoint_slots=no_slots(num_chunks(query_lens), device) if checkpoints else None,
    )
    fresh = torch.ones(requests, dtype=torch.bool, device=device)

    def run() -> None:
        for batch in (continued, replace(continued, state_fresh=fresh)):
            parts = linear.plan(batch)
            for layer in _distinct(backend.config.linear_layers):
                tensors = _zeros(layer, batch.num_tokens, backend.config.dtype, device)
                linear.forward(*tensors, layer, batch, parts, None)
            if spec is not None:
                linear.commit(batch, parts, no_slots(requests, device))

    return backend.config.name, label, run


def _zeros(
    layer: LinearLayer, tokens: int, dtype: str, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, g and beta."""

    def zeros(*dims: int, torch_dtype: torch.dtype = TORCH_DTYPES[dtype]) -> Tensor:
        return torch.zeros(tokens, *dims, dtype=torch_dtype, device=device)

    gates = TORCH_DTYPES["fp32" if layer.gate is None else dtype]
    keys, hv = (layer.num_k_heads, layer.head_k_dim), layer.num_v_heads
    g, beta = zeros(*layer.g_dims, torch_dtype=gates), zeros(hv, torch_dtype=gates)
    return zeros(*keys), zeros(*keys), zeros(hv, layer.head_v_dim), g, beta


def _distinct(layers: Sequence[LinearLayer]) -> list[LinearLayer]:
    """Return one layer of each class that a kernel may be compiled for."""
    classes = {}
    for x in layers:
        gate = None if x.gate is None else (x.gate.lower_bound is None, x.gate.neg_eigval)
        classes[x.requirements, x.qk_norm is None, gate] = x
    return [*classes.values()]
