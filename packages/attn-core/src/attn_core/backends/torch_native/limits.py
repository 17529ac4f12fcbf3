"""How much torch_native gathers and attends at once: what fits the caches of a CPU or a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.runtime.backend import BackendConfig
from attn_core.runtime.layer import LayerGroup

# Bytes of K and V that a core gathers at once and reads while they are in its cache. Smaller tiles
# are a little faster on an idle machine and far slower on a busy one: cores wait at every tile.
CPU_TILE = 4 << 20
DEVICE_GATHER = 256 << 20  # the same on a device, where few large calls win
CPU_COPY = 32 << 10  # bytes of a row copied at once: a longer copy may bypass the cache


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How large a piece may be.

    tile: most keys attended at once, None = all. gather: most keys gathered at once, over the
    requests of a piece; 1 leaves each request alone. few: most queries for which calls cost more
    than numbers. splits: equal parts of a long tile, one per core. block: tokens copied at once, a
    page or an even part of it.
    """

    tile: int | None
    gather: int
    few: int
    splits: int
    block: int


def limits_of(
    config: BackendConfig, layer: LayerGroup, page_size: int, device: torch.device
) -> Limits:
    """Fit what is gathered at once to the caches of the cores, or to a device.

    In deterministic mode each request is gathered alone, so its bits depend on no other.
    """
    alone = config.deterministic
    itemsize = TORCH_DTYPES[config.dtype].itemsize
    latent = config.row.kind != "mha"  # the values are part of the keys
    width = layer.head_dim if latent else layer.head_dim + layer.v_head_dim
    token = layer.num_kv_heads * width * itemsize
    if device.type != "cpu":
        gather = 1 if alone else max(1, DEVICE_GATHER // token)
        return Limits(tile=None, gather=gather, few=512, splits=1, block=page_size)
    cores = torch.get_num_threads()
    tile = max(64, CPU_TILE // token) * cores
    row = layer.num_kv_heads * layer.head_dim * itemsize
    fits = [b for b in range(1, page_size + 1) if page_size % b == 0 and b * row <= CPU_COPY]
    gather = 1 if alone else tile
    return Limits(tile=tile, gather=gather, few=64, splits=cores, block=max(fits, default=1))
