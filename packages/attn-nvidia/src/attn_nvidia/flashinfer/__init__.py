"""flashinfer: FlashInfer's kernels, the tuned backend of every CUDA architecture from sm80."""

from __future__ import annotations

import importlib

from attn_core import AttentionBackend, BackendConfig, Phase

_CLASSES = {
    "mla": "attn_nvidia.flashinfer.mla:FlashInferMLA",
    "vision": "attn_nvidia.flashinfer.vision:Cudnn",
    "mha": "attn_nvidia.flashinfer.mha:FlashInfer",
}


def create(config: BackendConfig) -> AttentionBackend:
    """Create what serves config.row: latent attention, a vision tower, or standard attention."""
    row = config.row
    which = "vision" if row.phases == {Phase.ENCODE} else row.kind
    module, _, name = _CLASSES[which].partition(":")
    backend: AttentionBackend = getattr(importlib.import_module(module), name)(config)
    return backend
