"""flashinfer.cudnn 0.6.14: attention by cuDNN, in float32."""

from .prefill import cudnn_batch_prefill_with_kv_cache as cudnn_batch_prefill_with_kv_cache
