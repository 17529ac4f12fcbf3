"""sgl-flash-mla 1.0.0, emulated on a CPU."""

from flash_mla.flash_mla_interface import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_decoding_metadata,
    get_mla_metadata,
)

__all__ = [
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
]
__version__ = "1.0.0"
