"""Refuse what a linear layer's backend, pool or inputs do not fit; check values when debugging."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.cache.state_pool import StatePool
from attn_core.errors import BackendError, BatchError, UnsupportedError, UsageError
from attn_core.formatting import listing
from attn_core.runtime.backend import BackendConfig
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.linear import LinearLayer, gated, normalised
from attn_core.selection.compatibility import layer_gaps


def refuse_linear_layer(config: BackendConfig, layer: LinearLayer) -> None:
    """Raise UnsupportedError for a linear layer's kind or shape that the row does not support."""
    gaps = "; ".join(map(str, layer_gaps(config.row, layer.requirements, "linear")))
    if gaps:
        raise UnsupportedError(
            f"layer {layer.layer_id} needs {gaps}, the chosen row of {config.name} does not honour "
            "it; state it in the Requirements, so that select() finds a backend that does"
        )


def refuse_states(
    config: BackendConfig, layer: LinearLayer, pool: StatePool, *, verifies: bool
) -> None:
    """Raise UnsupportedError for states of a dtype that the row lacks, UsageError for a misfit."""
    states, name = pool.layer(layer.layer_id), f"layer {layer.layer_id}"
    if pool.dtype not in config.row.kv_dtypes:
        raise UnsupportedError(
            f"states in {pool.dtype}: the chosen row of {config.name} supports "
            f"{listing(config.row.kv_dtypes)}; create the StatePool with one of these"
        )
    dims = (layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
    if states.state.shape[1:] != dims:
        raise UsageError(
            f"{name}: states {list(states.state.shape)} (expected [slots, {dims[0]}, {dims[1]}, "
            f"{dims[2]}]: value heads, V, K)"
        )
    if not verifies:
        return
    drafts = max(config.num_draft_tokens, 1)
    if states.u is None or states.k is None or states.g is None or pool.num_drafts < drafts:
        raise UsageError(
            f"{name}: a pool for {pool.num_drafts} drafts, {config.name} verifies {drafts}; create "
            f"the StatePool with num_drafts={drafts}"
        )
    record_dims = (states.k.shape[2], tuple(states.g.shape[2:]))
    if record_dims != (layer.num_k_heads, layer.g_dims):
        raise UsageError(
            f"{name}: records of {record_dims[0]} key heads and decays {list(record_dims[1])} "
            f"(expected {layer.num_k_heads} and {list(layer.g_dims)})"
        )


def refuse_slots(config: BackendConfig, batch: ForwardBatch) -> None:
    """Raise UnsupportedError for slots of a pass that the row cannot write."""
    row = config.row
    if batch.state_slots_out is not None and not row.separate_write_slots:
        raise UnsupportedError(
            f"state_slots_out: the chosen row of {config.name} writes a state where it has read "
            "it; copy the slots first (StatePool.copy_slots), or name another backend"
        )
    if batch.checkpoint_slots is not None and not row.checkpoints:
        raise UnsupportedError(
            f"checkpoint_slots: the chosen row of {config.name} writes no checkpoints; extend up "
            "to each checkpoint in a pass of its own, or name another backend"
        )


def check_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    layer: LinearLayer,
    batch: ForwardBatch,
    out: Tensor | None,
) -> None:
    """Raise BatchError for tensors that do not match a linear layer in this pass."""
    t, hk, hv = batch.num_tokens, layer.num_k_heads, layer.num_v_heads
    keys, values = (t, hk, layer.head_k_dim), (t, hv, layer.head_v_dim)
    if (
        q.shape == keys
        and k.shape == keys
        and v.shape == values
        and g.shape == (t, *layer.g_dims)
        and beta.shape == (t, hv)
        and (out is None or out.shape == values)
        and (layer.gate is not None or g.dtype == beta.dtype == torch.float32)
    ):
        return
    expected = {"q": keys, "k": keys, "v": values, "g": (t, *layer.g_dims), "beta": (t, hv)}
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if out is not None:
        expected["out"], tensors["out"] = values, out
    for name, x in tensors.items():
        if x.shape != expected[name]:
            raise BatchError(
                f"layer {layer.layer_id}: {name} is {list(x.shape)} (expected "
                f"{list(expected[name])}: tokens of this pass, heads, dims)"
            )
    raise BatchError(
        f"layer {layer.layer_id}: g {g.dtype}, beta {beta.dtype} (expected torch.float32, log "
        "decay and beta after the sigmoid, as the layer has no gate)"
    )


def refuse_linear_output(
    config: BackendConfig, result: object, q: Tensor, layer: LinearLayer, out: Tensor | None
) -> None:
    """Raise BackendError if an output is not [T, Hv, V] in the dtype of q, or `out` itself."""
    shape = (q.shape[0], layer.num_v_heads, layer.head_v_dim)
    dtype = q.dtype if out is None else out.dtype
    fits = isinstance(result, Tensor) and result.shape == shape and result.dtype == dtype
    if not fits or (out is not None and result is not out):
        returned = type(result).__name__
        if isinstance(result, Tensor):
            returned = "a new tensor" if fits else f"{list(result.shape)} {result.dtype}"
        expected = "the one given as `out`, filled" if fits else f"{list(shape)} {dtype}"
        raise BackendError(
            f"{config.name} returned {returned} for layer {layer.layer_id} (expected {expected}): "
            "its backend breaks the contract, tell its author"
        )


def check_plan_values(batch: ForwardBatch, pool: StatePool) -> None:
    """Raise BatchError for slots that collide or do not exist, and for a draft before its parent.

    It waits for the device.
    """
    assert batch.state_slots is not None
    reads = batch.state_slots.tolist()
    writes = reads if batch.state_slots_out is None else batch.state_slots_out.tolist()
    checkpoints = [] if batch.checkpoint_slots is None else batch.checkpoint_slots.tolist()
    out_of_range = [x for x in (*reads, *writes, *checkpoints) if not -1 <= x < pool.num_slots]
    if out_of_range:
        raise BatchError(f"state slot {out_of_range[0]} (expected -1 to {pool.num_slots - 1})")
    if any((r < 0) != (w < 0) for r, w in zip(reads, writes, strict=True)):
        raise BatchError(f"state_slots {reads}, state_slots_out {writes}: -1 in one of them alone")
    written = [x for x in (*writes, *checkpoints) if x >= 0]
    if len(set(written)) < len(written):
        raise BatchError(f"state slots {sorted(written)} are written: one of them more than once")
    writer = {x: request for request, x in enumerate(writes) if x >= 0}
    conflicts = [
        x
        for request, x in enumerate(reads)
        if x >= 0 and (x in checkpoints or writer.get(x, request) != request)
    ]
    if conflicts:
        raise BatchError(f"state slot {conflicts[0]} is read by one request and written by another")
    mask = None if batch.spec is None else batch.spec.tree_mask
    if mask is not None and not bool((mask == mask.tril()).all() & mask.diagonal(0, 1, 2).all()):
        raise BatchError(
            "tree_mask: a draft that does not see itself, or sees a later one; linear layers need "
            "each draft after its parent"
        )


def check_values(k: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer) -> None:
    """Raise BatchError for a decay above 1, and for keys whose update grows the state.

    I - beta·k·kᵀ grows it where beta·|k|² is above 2. It waits for the device.
    """
    name = f"layer {layer.layer_id}"
    decay, strength = gated(layer, g, beta)
    if decay.numel() and not float(decay.max()) <= 0:
        raise BatchError(
            f"{name}: g up to {float(decay.max()):g} (expected the natural log of a decay, at most "
            "0; not the decay itself)"
        )
    norms = normalised(layer, k).square().sum(-1)
    norms = norms.repeat_interleave(layer.num_v_heads // layer.num_k_heads, 1)
    largest = float((norms * strength).max()) if norms.numel() else 0.0
    if not largest <= 2.02:  # 1 % for the rounding of 16-bit keys
        raise BatchError(
            f"{name}: beta·|k|² up to {largest:g} (expected 2 at most): the state would grow "
            "without limit; normalise the keys, or set qk_norm"
        )
