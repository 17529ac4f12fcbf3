"""The prefill kernel of flashinfer 0.6.14 for Hopper, emulated in float64 on a CPU.

Updates are rounded to the dtype of q where the kernel does that.
"""

import torch
from ptx import fast_log

_TILE = 64


def delta_rule_prefill_dsl_sm90(
    o: torch.Tensor,
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    init_state: torch.Tensor | None,
    alpha: torch.Tensor | None,
    beta: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
):
    heads, key_heads, dim = v.shape[1], k.shape[1], q.shape[-1]
    if q.shape[1] != key_heads or heads % key_heads:
        raise RuntimeError("can_implement failed")
    if dim != 128:
        raise RuntimeError(f"DSL kernel only supports D=128, got {dim}")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"DSL kernel only supports fp16/bf16 inputs, got {q.dtype}")
    if not q.dtype == k.dtype == v.dtype == o.dtype:
        raise RuntimeError(f"q/k/v/o dtypes must match, got {k.dtype}, {v.dtype}, {o.dtype}")
    for name, x in (("alpha", alpha), ("beta", beta), ("init_state", init_state), ("state", state)):
        if x is not None and x.dtype != torch.float32:
            raise RuntimeError(f"{name} must have dtype torch.float32, got {x.dtype}")
    if cu_seqlens.dtype != torch.int64:
        raise RuntimeError(f"cu_seqlens must have dtype torch.int64, got {cu_seqlens.dtype}")
    named = {"q": q, "k": k, "v": v, "o": o, "state": state, "cu_seqlens": cu_seqlens}
    named |= {"alpha": alpha, "beta": beta, "init_state": init_state}
    for name, x in named.items():
        if x is not None and not x.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous")
        assert x is None or x is cu_seqlens or not x.data_ptr() % 16, f"{name}: 16 bytes"
    assert not checkpoint_every_n_tokens, "checkpoints are not emulated"
    assert len(q), "a tensor map of no tokens"

    def rounded(x):
        return x.to(q.dtype).double()

    log_decay = fast_log(alpha + 1e-10)
    for i, (first, last) in enumerate(cu_seqlens.unfold(0, 2, 1).tolist()):
        if first == last:
            continue  # nothing is written
        s = init_state[i].double()
        for t in range(first, last):
            query, key = (x[t].double().repeat_interleave(heads // key_heads, 0) for x in (q, k))
            s = s * log_decay[t].exp()[:, None, None]
            apart = rounded(v[t].double() - (s @ key[..., None])[..., 0])
            u = rounded(rounded(beta[t, :, None]) * apart)
            s = s + u[..., None] * key[:, None]
            o[t] = scale * (s @ query[..., None])[..., 0]
        state[i] = s
        end = first + -(-(last - first) // _TILE) * _TILE
        if end > last:  # the rest of the last tile is multiplied by 0, and 0 · NaN is NaN
            beyond = sum(0 * x[last:end].double().sum() for x in (k, v))
            state[i] += beyond
            o[end - _TILE : last] += beyond
