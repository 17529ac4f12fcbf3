"""The public function of vllm-xpu-kernels 0.1.16.2: what it checks, and which call it makes."""

# ruff: noqa: UP045  # annotations and defaults are the library's

from typing import Optional

import torch

from vllm_xpu_kernels import _leaf

FA2_AVAILABLE, FA2_UNAVAILABLE_REASON = True, None
DEFAULT_FA_VERSION = 2
SPEC_DECODE_MAX_QLEN = 16


def flash_attn_varlen_func(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    q_v=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size: Optional[list[int]] = None,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    return_softmax_lse=False,
    out=None,
    scheduler_metadata=None,
    q_descale: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    num_splits: int = 0,
    fa_version: int = DEFAULT_FA_VERSION,
    s_aux: Optional[torch.Tensor] = None,
    num_splits_kv: Optional[int] = None,
    is_mix_batch: Optional[bool] = True,
    host_kv_lens=None,
):
    assert host_kv_lens is None, "not emulated: lengths on the host"
    unused = (alibi_slopes, scheduler_metadata, q_v, q_descale)
    assert all(x is None for x in unused), "not emulated"
    assert not any((dropout_p, deterministic, return_attn_probs, num_splits)), "not emulated"
    assert fa_version == DEFAULT_FA_VERSION, "not support yet"
    assert (cu_seqlens_k is None) != (seqused_k is None), "one of cu_seqlens_k and seqused_k"
    assert (block_table is None) == (seqused_k is None), "a block_table goes with seqused_k"
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        if descale is not None:
            assert descale.dtype == torch.float32, f"{name} must be a float32 … scalar tensor view"
            one = descale.untyped_storage().nbytes() == descale.element_size()
            assert one, f"{name} must be view of single scalar tensor"
    if (k_descale is None) != (v_descale is None):
        raise NotImplementedError("FA2 only supports both KV cache descaled")
    window = (-1, -1) if window_size is None else (window_size[0], window_size[1])
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch = cu_seqlens_q.numel() - 1
    even = batch > 0 and q.shape[0] == batch * max_seqlen_q  # by the rows alone
    spec = block_table is not None and causal and not return_softmax_lse and softcap == 0.0
    if spec and even and 1 < max_seqlen_q <= SPEC_DECODE_MAX_QLEN:
        return _spec_decode(
            q, k, v, out, batch, seqused_k, block_table, max_seqlen_k, k_descale, v_descale,
            softmax_scale, s_aux, window, softcap,
        )  # fmt: skip
    out, lse = _leaf.varlen_fwd(
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        torch.empty_like(cu_seqlens_q) if cu_seqlens_k is None else cu_seqlens_k,
        seqused_k,
        None,
        block_table,
        None,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        None,
        k_descale,
        v_descale,
        softmax_scale,
        s_aux,
        False,
        causal,
        window[0],
        window[1],
        softcap,
        return_softmax_lse,
        None,
        num_splits_kv,
        is_mix_batch,
        None,
        None,
    )
    return (out, lse) if return_softmax_lse else out


def _spec_decode(
    q, k, v, out, batch, seqused_k, block_table, max_seqlen_k, k_descale, v_descale, scale, s_aux,
    window, softcap,
):  # fmt: skip
    """Run the decode kernel on each token of a pass, as on a request of its own."""
    count, total = q.shape[0] // batch, q.shape[0]
    cu_seqlens = torch.arange(total + 1, dtype=torch.int32)
    after = count - 1 - torch.arange(count, dtype=torch.int32)
    lengths = (seqused_k[:, None] - after).clamp_(min=1).flatten().int()
    out, _ = _leaf.varlen_fwd(
        q, k, v, out, cu_seqlens, torch.zeros_like(cu_seqlens), lengths, None,
        block_table.repeat_interleave(count, dim=0), None, 1, max_seqlen_k, 0.0, None, k_descale,
        v_descale, scale, s_aux, False, False, window[0], window[1], softcap, False, None, None,
        False, None, None,
    )  # fmt: skip
    return out
