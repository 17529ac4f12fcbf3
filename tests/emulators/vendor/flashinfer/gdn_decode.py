"""flashinfer.gdn_decode 0.6.14: GDN layers, one token per request; of pools in float32 alone."""

import torch

from flashinfer.gdn_kernels.gdn_decode_pretranspose import run_pretranspose_decode

TILE_V = 8


def gated_delta_rule_decode_pretranspose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    B, T, H, K = q.shape
    _, _, HV, V = v.shape
    assert state is None
    assert initial_state is not None, "states without a pool are not emulated"
    assert initial_state.dtype == torch.float32, "in bfloat16 slot 0 takes what has no slot"
    assert initial_state.shape[1:] == (HV, V, K)
    assert initial_state.stride(-1) == 1
    for indices in (initial_state_indices, output_state_indices):
        assert indices is None or indices.shape == (B,)
        assert indices is None or indices.dtype in (torch.int32, torch.int64)
    assert T == 1, f"Decode only supports T=1, got T={T}"
    assert K >= 128, f"K must be at least 128, got K={K}"
    assert V >= 128, f"V must be at least 128, got V={V}"
    assert V % TILE_V == 0
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert A_log.dtype == torch.float32, f"A_log must be float32, got {A_log.dtype}"
    target_dtype = q.dtype if output is None else output.dtype
    if output is None:
        output = torch.zeros((B, T, HV, V), dtype=torch.bfloat16, device=q.device)
    run_pretranspose_decode(
        initial_state, A_log, a, dt_bias, q, k, v, b, output, B, T, H, HV, K, V,
        K**-0.5 if scale is None else scale, use_qk_l2norm, use_pool_indexing=True,
        initial_state_indices=initial_state_indices, output_state_indices=output_state_indices,
    )  # fmt: skip
    return output.to(target_dtype), initial_state
