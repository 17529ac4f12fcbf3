"""AMD's AITER 0.1.7.post2.dev18 for the CPU: signatures and refusals, in float32."""

from . import mla as mla
from .ops.attention import paged_attention_ragged as paged_attention_ragged
from .ops.mha import flash_attn_varlen_func as flash_attn_varlen_func
from .ops.mha import mha_batch_prefill_func as mha_batch_prefill_func
