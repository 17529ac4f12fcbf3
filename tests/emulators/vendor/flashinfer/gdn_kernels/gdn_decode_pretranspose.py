"""The decode kernel of flashinfer 0.6.14 over states in float32, emulated in float64 on a CPU."""

import torch
from ptx import fast_log

_THRESHOLD = 20.0
_compiled = {}  # the library's key of a compiled kernel → the dtypes that it was compiled for


def run_pretranspose_decode(
    h0_source: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    output: torch.Tensor,
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    scale: float,
    use_qk_l2norm: bool,
    use_pool_indexing: bool = False,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
):
    assert (T, K, V) == (1, 128, 128), "128 threads write one value each"
    assert use_pool_indexing, "states without a pool are not emulated"
    for x in (q, k, v, output):
        assert x.dtype == torch.bfloat16, f"{x.dtype} is loaded into registers of bfloat16"
    tensors = (h0_source, A_log, a, dt_bias, q, k, v, b, output, initial_state_indices)
    assert not any(x.data_ptr() % 16 for x in tensors), "compiled for addresses of 16 bytes"
    assert not h0_source.stride(0) % 4, "states are loaded 16 bytes at a time"
    key = (T, H, HV, K, V, q.dtype, scale, use_qk_l2norm, h0_source.shape[0], h0_source.stride())
    dtypes = (A_log.dtype, a.dtype, dt_bias.dtype, b.dtype)
    compiled = _compiled.setdefault(key, dtypes)
    assert compiled == dtypes, f"compiled for {compiled}, called with {dtypes}"

    reads = initial_state_indices.tolist()
    writes = reads if output_state_indices is None else output_state_indices.tolist()
    writes = [max(slot, 0) for slot in writes]  # 0 takes what has no slot
    live = {write: read for write, read in zip(writes, reads, strict=True) if read >= 0}
    assert len(live) == sum(read >= 0 for read in reads), "two requests write one slot"
    others = [read for write, read in live.items() if live.get(read, read) != read]
    assert not others, f"slots {others} are read by one request and written by another"
    x = a[:, 0].double() + dt_bias.double()
    softplus = torch.where(x <= _THRESHOLD, fast_log((1 + x.exp()).float()), x)
    decay, beta = (-A_log.double().exp() * softplus).exp(), 1 / (1 + (-b[:, 0].double()).exp())
    for i, (read, write) in enumerate(zip(reads, writes, strict=True)):
        if read < 0:
            output[i] = 0
            continue
        query, key, value = (x[i, 0].double() for x in (q, k, v))
        if use_qk_l2norm:
            query, key = (
                x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key)
            )
        query, key = (x.repeat_interleave(HV // H, 0) for x in (query, key))
        state = h0_source[read].double() * decay[i, :, None, None]
        u = beta[i, :, None] * (value - (state @ key[..., None])[..., 0])
        state = state + u[..., None] * key[:, None]
        h0_source[write] = state
        output[i, 0] = scale * (state @ query[..., None])[..., 0]
