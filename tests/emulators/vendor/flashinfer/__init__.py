"""flashinfer 0.6.14, emulated: its names and signatures, its refusals, float32 numbers on a CPU."""

import contextlib

from .decode import BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper
from .prefill import BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper

with contextlib.suppress(ImportError):
    from .mla import BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper
with contextlib.suppress(ImportError):
    from .prefill import trtllm_fmha_v2_prefill as trtllm_fmha_v2_prefill
with contextlib.suppress(ImportError):
    from .xqa import xqa as xqa

__version__ = "0.6.14"
