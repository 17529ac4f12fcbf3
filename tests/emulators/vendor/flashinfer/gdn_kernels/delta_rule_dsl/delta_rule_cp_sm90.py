"""The prefill kernels of flashinfer 0.6.14 for few sequences on a Hopper, emulated on a CPU."""

import torch

from .delta_rule_sm90 import delta_rule_prefill_dsl_sm90

CP_CHUNK_LEN_GRANULARITY = 512


def cp_delta_rule_dsl_sm90(
    o: torch.Tensor,
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    *,
    initial_state: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    cp_chunk_len: int | None = None,
    cp_chunk_len_granularity: int = CP_CHUNK_LEN_GRANULARITY,
):
    assert max_seqlen == len(q)
    if len(cu_seqlens) != 2:
        state.zero_()  # what a sequence without tokens keeps
    delta_rule_prefill_dsl_sm90(o, state, q, k, v, initial_state, alpha, beta, cu_seqlens, scale)
