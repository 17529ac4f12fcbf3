"""Other projects' kernels on the same inputs, each called as its own documentation says."""

from __future__ import annotations

from benchmarks.contestant import Contestant
from benchmarks.peers.flash_attention import FA3, FA4
from benchmarks.peers.flash_mla import FLASH_MLA
from benchmarks.peers.flashinfer import FLASHINFER
from benchmarks.peers.pytorch import FLEX, SDPA_CUDNN, SDPA_FLASH

PEERS: tuple[Contestant, ...] = (FA3, FLASH_MLA, *FLASHINFER, FA4, SDPA_CUDNN, SDPA_FLASH, FLEX)
