"""Other projects' kernels on the same inputs, each called as its own documentation says."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.contestant import Contestant
from benchmarks.peers.flash_attention import FA3, FA4
from benchmarks.peers.flash_mla import FLASH_MLA
from benchmarks.peers.flashinfer import FLASHINFER
from benchmarks.peers.pytorch import FLEX, SDPA_CUDNN, SDPA_FLASH

# The likely best first: where the time of a case runs out, the last ones are left out.
PEERS: tuple[Contestant, ...] = (FA3, FLASH_MLA, *FLASHINFER, FA4, SDPA_CUDNN, SDPA_FLASH, FLEX)
# The grid compares with those that are best almost everywhere in it.
GRID_PEERS: Mapping[str, tuple[str, ...]] = {
    "decode": ("fa3", "flashinfer-decode"),
    "verify": ("fa3", "flashinfer-fa2"),
    "prefill": ("fa3", "flashinfer-fa3"),
}
