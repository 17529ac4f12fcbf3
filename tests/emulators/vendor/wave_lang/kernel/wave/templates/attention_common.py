"""The shape of an attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    head_size_kv: int
    max_seq_len: int | None = None
