"""The passes of a warm-up that read no cache, and what all its passes are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer, LayerGroup
from attn_core.spec.kinds import Role

MORE = (0, 1000, 2000)  # keys before those of a pass: backends choose kernels by length
_MLA_RAGGED = (192, 128)  # head dims of MLA's prefill without absorption, as all its models have


def ragged_passes(
    dispatcher: HybridDispatcher, role: Role
) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yield backend, name and run of encoders' and vision towers' passes, and of MLA's prefill."""
    config = dispatcher.routes[role].config
    for layer in distinct(config.layers):
        if not (layer.is_causal or layer.is_cross):
            label = "vision" if role == "encode" else "encoder"
            yield config.name, label, _without_cache(dispatcher, role, layer, causal=False)
        elif config.row.chunked_prefix:
            d, dv = _MLA_RAGGED
            heads = layer.num_q_heads
            ragged_layer = replace(layer, num_kv_heads=heads, head_dim=d, v_head_dim=dv)
            run = _without_cache(dispatcher, role, ragged_layer, causal=True, lse=True)
            yield config.name, "ragged prefill", run
            run = _without_cache(dispatcher, role, ragged_layer, causal=False, lse=True)
            yield config.name, "chunk of a prefix", run


def _without_cache(
    dispatcher: HybridDispatcher,
    role: Role,
    layer: AttentionLayer,
    *,
    causal: bool,
    lse: bool = False,
) -> Callable[[], None]:
    def run() -> None:
        for extra in (0,) if causal else MORE:
            run_at(extra)

    def run_at(extra: int) -> None:
        config = dispatcher.routes[role].config
        options = config.dtype, config.device
        ends = torch.tensor([0, 17, 50], dtype=torch.int32, device=config.device)
        key_ends = torch.tensor([0, 17, 50 + extra], dtype=torch.int32, device=config.device)
        dispatcher.forward_ragged(
            zeros(50, *options, layer.num_q_heads, layer.head_dim),
            zeros(50 + extra, *options, layer.num_kv_heads, layer.head_dim),
            zeros(50 + extra, *options, layer.num_kv_heads, layer.v_head_dim),
            layer,
            ends,
            key_ends,
            33,
            33 + extra,
            causal=causal,
            return_lse=lse and config.row.lse,
            role="encode" if role == "encode" else "prefill",
        )

    return run


def distinct(layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """Return the first layer of each class that a kernel may be compiled for.

    The first of sparse MLA has an indexer: others may share its selection.
    """
    classes: dict[tuple[object, ...], AttentionLayer] = {}
    for x in layers:
        options = (x.logit_cap, x.sinks is None, x.is_causal, x.is_cross, x.index_topk)
        classes.setdefault((LayerGroup.of(x), *options), x)
    return [*classes.values()]


def zeros(tokens: int, dtype: str, device: torch.device, *shape: int) -> Tensor:
    """Return zeros [tokens, *shape] in a dtype of the contract."""
    return torch.zeros(tokens, *shape, dtype=TORCH_DTYPES[dtype], device=device)
