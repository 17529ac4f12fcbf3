"""Requirements from a model's config.json, read as data without torch or transformers."""

from attn_core.model_config.dual_chunk import read_vertical_slash
from attn_core.model_config.requirements import (
    context_length,
    is_encoder_decoder,
    requirements_from_config,
)
from attn_core.model_config.source import read_config

__all__ = [
    "context_length",
    "is_encoder_decoder",
    "read_config",
    "read_vertical_slash",
    "requirements_from_config",
]
