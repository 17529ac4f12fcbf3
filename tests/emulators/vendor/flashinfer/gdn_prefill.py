"""flashinfer.gdn_prefill 0.6.14: GDN layers over ragged new tokens, as on a Hopper."""

from typing import Literal

import torch

from flashinfer.gdn_kernels.delta_rule_dsl.delta_rule_cp_sm90 import cp_delta_rule_dsl_sm90
from flashinfer.gdn_kernels.delta_rule_dsl.delta_rule_sm90 import delta_rule_prefill_dsl_sm90

PROCESSORS = 132


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: Literal["auto"] | bool = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """use_qk_l2norm_in_kernel is accepted, and not read."""
    if checkpoint_every_n_tokens == 0 and (
        state_checkpoints is not None or checkpoint_cu_starts is not None
    ):
        raise ValueError(
            "state_checkpoints and checkpoint_cu_starts must be None "
            "when checkpoint_every_n_tokens == 0"
        )
    assert cu_seqlens is not None, "cu_seqlens is required for varlen mode"
    heads, dim = max(q.shape[1], v.shape[1]), q.shape[2]
    if output is None:
        output = torch.empty((len(q), heads, dim), dtype=q.dtype, device=q.device)
    if output_state is None:
        shape = (len(cu_seqlens) - 1, heads, dim, dim)
        output_state = torch.full(shape, torch.nan, dtype=torch.float32, device=q.device)
    cu_seqlens = cu_seqlens.to(torch.int64)
    scale = scale if scale is not None and scale != 0.0 else dim**-0.5
    if use_cp == "auto" and (len(cu_seqlens) - 1) * heads < PROCESSORS // 2:
        cp_delta_rule_dsl_sm90(
            output, output_state, q, k, v, g, beta, cu_seqlens, scale,
            initial_state=initial_state, max_seqlen=len(q),
        )  # fmt: skip
    else:
        delta_rule_prefill_dsl_sm90(
            output, output_state, q, k, v, initial_state, g, beta, cu_seqlens, scale,
            state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens,
        )  # fmt: skip
    return (output, output_state) if output_final_state else output
