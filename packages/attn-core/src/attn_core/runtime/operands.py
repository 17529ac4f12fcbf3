"""The tensors of one call: refused if they do not fit, made contiguous if a kernel needs it."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.errors import BatchError, UnsupportedError
from attn_core.runtime.backend import Output
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.batch_checks import check_starts
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.no_backward import no_backward

# Backends read q, k and v at any strides but the last, which is 1, and fill a contiguous `out`.


def check_pass(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    layer: AttentionLayer,
    batch: ForwardBatch,
    out: Tensor | None,
) -> None:
    """Raise BatchError for tensors that do not match a layer in this pass; None is absent.

    New keys are those of the pass or, in cross attention, those of the encoder. Each needs one slot
    in the layer's view, unless the engine has written them.
    """
    t = batch.num_tokens
    if q is not None:
        _check_queries(q, layer, t, out)
    if k is None:
        if v is None:
            return
        raise BatchError(f"layer {layer.layer_id}: v without k; give both, or None for both")
    view = batch.views.get(layer.view)
    if view is None:
        raise BatchError(
            f"layer {layer.layer_id} needs view {layer.view!r}, the batch has {sorted(batch.views)}"
        )
    if view.out_cache_loc is None:
        return _check_keys(k, v, layer, k.shape[0] if layer.is_cross else t)
    slots = view.out_cache_loc.shape[0]
    if slots != t and not layer.is_cross:
        raise BatchError(
            f"layer {layer.layer_id}: out_cache_loc of view {layer.view!r} has {slots} slots for "
            f"the {t} tokens of this pass"
        )
    _check_keys(k, v, layer, slots)


def check_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: AttentionLayer,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    out: Tensor | None,
) -> None:
    """Raise BatchError for tensors that do not match each other in attention without a cache.

    Raises UnsupportedError for dual chunk attention, whose chunks lie in a cache.
    """
    if layer.dual_chunk is not None:
        raise UnsupportedError(
            f"layer {layer.layer_id}: dual chunk attention without a cache; write K and V to the "
            "cache and run a pass over it"
        )
    tokens = {"q": q.shape[0], "k": k.shape[0]}
    _check_queries(q, layer, tokens["q"], out)
    _check_keys(k, v, layer, tokens["k"])
    size = cu_seqlens_q.shape
    for operand, cu, max_len in (("q", cu_seqlens_q, max_q), ("k", cu_seqlens_k, max_k)):
        if cu.dtype != torch.int32 or cu.dim() != 1 or not cu.is_contiguous():
            raise BatchError(
                f"cu_seqlens_{operand} is {cu.dtype} {list(cu.shape)} of strides {cu.stride()} "
                "(expected contiguous int32 [B + 1])"
            )
        if cu.shape != size or cu.device != q.device:
            raise BatchError(
                f"cu_seqlens_{operand} is {list(cu.shape)} on {cu.device} (expected {list(size)}, "
                f"as cu_seqlens_q, on {q.device})"
            )
        if tokens[operand] > (cu.shape[0] - 1) * max_len:
            raise BatchError(
                f"{tokens[operand]} tokens of {operand} in {cu.shape[0] - 1} requests: more than "
                f"max_{operand} {max_len} each"
            )
        check_starts(f"cu_seqlens_{operand}", cu, tokens[operand])


def _check_queries(q: Tensor, layer: AttentionLayer, tokens: int, out: Tensor | None) -> None:
    if q.shape != (tokens, *layer.query_shape):
        _misfit("q", q, layer, (tokens, *layer.query_shape))
    heads = layer.num_q_heads
    if out is not None and q.requires_grad:
        refuse_gradients(out, q)
    if out is not None and out.shape != (tokens, heads, layer.v_head_dim):
        _misfit("out", out, layer, (tokens, heads, layer.v_head_dim))
    if out is not None and not out.is_floating_point():
        raise BatchError(f"layer {layer.layer_id}: out is {out.dtype} (expected floats, as of q)")


def refuse_gradients(out: Tensor | None, *sources: Tensor) -> None:
    """Raise UnsupportedError for an `out` that autograd would have to follow, as torch does."""
    if out is not None and torch.is_grad_enabled() and any(x.requires_grad for x in sources):
        raise UnsupportedError(
            "`out` and tensors that require gradients; attn-core does inference only: run under "
            "torch.no_grad()"
        )


def _check_keys(k: Tensor, v: Tensor | None, layer: AttentionLayer, tokens: int) -> None:
    heads = layer.num_kv_heads
    if k.shape != (tokens, heads, layer.head_dim):
        _misfit("k", k, layer, (tokens, heads, layer.head_dim))
    if v is not None and v.shape != (tokens, heads, layer.v_head_dim):
        _misfit("v", v, layer, (tokens, heads, layer.v_head_dim))


def _misfit(name: str, x: Tensor, layer: AttentionLayer, expected: tuple[int, ...]) -> None:
    raise BatchError(
        f"layer {layer.layer_id}: {name} is {list(x.shape)} (expected {list(expected)}: tokens of "
        f"this pass,{' intra, succ and inter queries,' * (len(expected) == 4)} heads, head dim)"
    )


def readable(x: Tensor) -> Tensor:
    """Return `x`, or a contiguous copy if its last dimension is strided.

    torch calls a tensor contiguous at any stride of a dimension of size 1, and at all strides if it
    is empty. Kernels refuse those strides, so they are no reason to skip the copy.
    """
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def fillable(out: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return `out` [T, H, D], or a dense tensor to fill in its place.

    dtype: the one that a backend writes, None for any. Some kernels would write their own dtype
    into the memory of another.
    Kernels store 16 bytes at a time. torch also calls a tensor contiguous that begins between two
    such places, or that has any stride in a dimension of size 1, which kernels refuse.
    """
    if out is None:
        return None
    _, heads, dim = out.shape
    dense = out.stride() == (heads * dim, dim, 1) and not out.data_ptr() % 16
    if dense and dtype in (None, out.dtype):
        return out
    return torch.empty_like(out, dtype=dtype, memory_format=torch.contiguous_format)


def returned(result: Output, out: Tensor | None, dense: Tensor | None, *sources: Tensor) -> Output:
    """Return a result, in the strided `out` that `dense` was filled for; the LSE is unchanged.

    A backward pass to the sources raises UnsupportedError.
    """
    if out is not None and out is not dense:
        if isinstance(result, Tensor):
            return out.copy_(result)
        return out.copy_(result[0]), result[1]
    return no_backward(result, *sources) if any(x.requires_grad for x in sources) else result
