"""Decode and commit: few tokens of each request, which read every state once.

A state is [V, K] per head, and its rows do not depend on each other: a program has a tile of rows.
Time is spent on reading and writing states. They bear no hints of eviction, which made an H200
slower.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.linear.gates import (
    channels,
    gates_of,
    head_ptr,
    load_raw_gates,
    load_raw_head,
    normalised,
    over_channels,
    over_k,
    over_rows,
)


@triton.jit
def find_tile(BV: tl.constexpr, C: tl.constexpr):
    """Return a program's request as int64, its value head and its first row of a state."""
    tiles: tl.constexpr = C.V // BV
    head = tl.program_id(0) // tiles
    return (head // C.HV).to(tl.int64), head % C.HV, tl.program_id(0) % tiles * BV


@triton.jit
def load_state(states, slots, b, slot, at, C: tl.constexpr):
    """Return a tile of a state as float32; zeros, and nothing is read, of a fresh request."""
    source = states.ptr + slot * states.slot_stride + at
    if C.FRESH:
        known = tl.load(slots.fresh + b) == 0
        S = tl.load(source, mask=known, other=0.0)
    else:
        S = tl.load(source)
    return S.to(tl.float32)


@triton.jit
def store_state(states, slot, at, S):
    """Write a tile of a state, unless the slot is -1."""
    if slot >= 0:
        target = states.ptr + slot * states.slot_stride + at
        tl.store(target, S.to(states.ptr.dtype.element_ty))


@triton.jit
def store_output(out, token, hv, row, o, numbers):
    """Write a tile's part of the output of a token."""
    at = head_ptr(out, hv) + token * out.token_stride + row
    tl.store(at, (o * numbers.scale).to(out.ptr.dtype.element_ty))


@triton.jit
def decode_states(
    inputs, weights, numbers, out, states, slots, BV: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Update BV rows of one head's state, S ← S · decay + u kᵀ, and write their outputs.

    Grid: (B · HV · V / BV). u = beta · (v - S · k) of the decayed S; the output is scale · S · q of
    the new one. Neither product waits for the other: S_new · q = S · q + u · (k·q).
    """
    b, hv, first = find_tile(BV, C)
    d = channels(C.K, states.ptr.dtype.element_ty)
    row = first + tl.arange(0, BV)
    at = over_channels((hv * C.V + row) * C.K) + over_rows(d)
    slot = tl.load(slots.read + b).to(tl.int64)  # one wait for this and for all of the token
    target = tl.load(slots.write + b).to(tl.int64)
    k = load_raw_head(inputs.k, b, hv // C.GROUP, d)
    q = load_raw_head(inputs.q, b, hv // C.GROUP, d)
    v = tl.load(head_ptr(inputs.v, hv) + b * inputs.v.token_stride + row)
    raw = load_raw_gates(inputs, weights, b, hv, d, C)
    if slot < 0:
        return
    S = load_state(states, slots, b, slot, at, C)
    k = normalised(k, numbers.eps, C.NORM)
    q = normalised(q, numbers.eps, C.NORM)
    g, beta = gates_of(raw, numbers, C)
    decay = tl.exp(g)
    if C.PER_CHANNEL:
        S *= over_rows(decay)
    else:
        S *= decay
    u = (v.to(tl.float32) - over_k(S * over_rows(k))) * beta
    o = over_k(S * over_rows(q)) + u * tl.sum(tl.sum(k * q, 1), 0)
    S += over_channels(u) * over_rows(k)
    store_output(out, b, hv, row, o, numbers)
    store_state(states, target, at, S)


@triton.jit(do_not_specialize=["drafts"])
def commit_drafts(
    states,
    slots,
    records,
    accepted,
    mask,
    drafts,
    BV: tl.constexpr,
    C: tl.constexpr,
):
    """Bring states up to the last accepted draft, which `accepted` names; -1 changes nothing.

    Grid: (B · HV · V / BV, layers). accepted: int32 or int64 [B]. mask: as of verify_drafts. The
    drafts on the path are applied one after another, as decode would have.
    """
    b, hv, first = find_tile(BV, C)
    layer = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots.read + b).to(tl.int64)
    record = tl.load(slots.write + b).to(tl.int64)
    last = tl.load(accepted + b).to(tl.int32)
    if (slot < 0) | (record < 0) | (last < 0):
        return
    d = channels(C.K, states.ptr.dtype.element_ty)
    row = first + tl.arange(0, BV)
    at = over_channels((hv * C.V + row) * C.K) + over_rows(d) + layer * states.layer_stride
    S = load_state(states, slots, b, slot, at, C)
    u_at = records.u.ptr + layer * records.u.layer_stride + record * records.u.slot_stride
    k_at = records.k.ptr + layer * records.k.layer_stride + record * records.k.slot_stride
    g_at = records.g.ptr + layer * records.g.layer_stride + record * records.g.slot_stride
    for s in range(last + 1):
        k = tl.load(k_at + (s * (C.HV // C.GROUP) + hv // C.GROUP) * C.K + d).to(tl.float32)
        u = tl.load(u_at + (s * C.HV + hv) * C.V + row).to(tl.float32)
        if C.PER_CHANNEL:
            g = tl.load(g_at + (s * C.HV + hv) * C.K + d)
        else:
            g = tl.load(g_at + s * C.HV + hv)
        if C.TREE:
            on = tl.load(mask + (b * drafts + last) * drafts + s) != 0
            k = tl.where(on, k, 0.0)  # a rejected draft may be NaN
            u = tl.where(on, u, 0.0)
            g = tl.where(on, g, 0.0)
        if C.PER_CHANNEL:
            S *= over_rows(tl.exp(g))
        else:
            S *= tl.exp(g)
        S += over_channels(u) * over_rows(k)
    store_state(states, record, at, S)
