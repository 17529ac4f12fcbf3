"""What a backend is created from: its row, its layers, the cache, the device and the limits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.linear import LinearLayer
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.device import FAMILY


@dataclass(frozen=True, kw_only=True, eq=False)
class BackendConfig:
    """Everything that a plan needs and that does not change between passes.

    arch ("sm90", "gfx942"), multiprocessors and shared_memory (bytes per block) are properties of
    `device`. On a GPU, properties that are not passed are queried here, once, so that no backend
    queries them again. On other devices they stay unknown: None and 0.
    """

    name: str
    row: Capabilities
    layers: tuple[AttentionLayer, ...]
    page_size: int
    dtype: str
    kv_cache_dtype: str  # what the cache stores, never "auto"; of linear layers the states' dtype
    device: torch.device
    arch: str | None = None
    multiprocessors: int = 0
    shared_memory: int = 0
    max_bs: int = 0  # 0: not known, grow as needed
    max_num_tokens: int = 0
    max_seq_len: int = 0
    topk: int = 0
    num_draft_tokens: int = 0
    deterministic: bool = False
    shared_prefix: bool = False  # read keys that neighbouring requests share once
    linear_layers: tuple[LinearLayer, ...] = ()  # those of a linear backend, which has no others

    def __post_init__(self) -> None:
        if self.device.type == "cuda" and not (self.arch and self.multiprocessors):
            for name, value in properties_of(self.device).items():
                if not getattr(self, name):
                    object.__setattr__(self, name, value)


@functools.cache
def properties_of(device: torch.device) -> Mapping[str, str | int]:
    """Query a GPU's arch, multiprocessors and shared memory, named as in BackendConfig."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.partition(":")[0]
    else:
        arch = f"sm{properties.major}{properties.minor}"
    return {
        "arch": FAMILY.get(arch, arch),
        "multiprocessors": properties.multi_processor_count,
        "shared_memory": getattr(properties, "shared_memory_per_block_optin", 0),  # not on ROCm
    }
