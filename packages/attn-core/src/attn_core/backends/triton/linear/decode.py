"""Decode and verify: few tokens of each request, which read every state once.

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
    ROWS,
    channels,
    head_norm,
    load_gates,
    load_head,
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
    at = out.ptr + token * out.token_stride + hv * out.head_stride + row
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
    slot = tl.load(slots.read + b).to(tl.int64)
    if slot < 0:
        return
    d = channels(C.K)
    row = first + tl.arange(0, BV)
    at = over_channels((hv * C.V + row) * C.K) + over_rows(d)
    S = load_state(states, slots, b, slot, at, C)
    k = load_head(inputs.k, b, hv // C.GROUP, d, numbers.eps, C.NORM)
    q = load_head(inputs.q, b, hv // C.GROUP, d, numbers.eps, C.NORM)
    v = tl.load(inputs.v.ptr + b * inputs.v.token_stride + hv * inputs.v.head_stride + row)
    g, beta = load_gates(inputs, weights, numbers, b, hv, d, C)
    decay = tl.exp(g)
    if C.PER_CHANNEL:
        S *= over_rows(decay)
    else:
        S *= decay
    u = (v.to(tl.float32) - over_k(S * over_rows(k))) * beta
    o = over_k(S * over_rows(q)) + u * tl.sum(tl.sum(k * q, 1), 0)
    S += over_channels(u) * over_rows(k)
    store_output(out, b, hv, row, o, numbers)
    store_state(states, tl.load(slots.write + b).to(tl.int64), at, S)


@triton.jit(do_not_specialize=["drafts"])
def verify_drafts(
    inputs,
    weights,
    numbers,
    out,
    states,
    slots,
    records,
    mask,
    drafts,
    BV: tl.constexpr,
    DRAFTS: tl.constexpr,
    C: tl.constexpr,
):
    """Write the outputs of a request's drafts and their records, and leave its state as it is.

    Grid: (B · HV · V / BV). DRAFTS: a power of two, no less than `drafts`. mask: uint8
    [B, drafts, drafts] of a TREE, where a draft sees its ancestors and itself; none comes before
    its parent. A chain is the tree in which each draft sees those before it.

    With G the sum of the log decays along a draft's path, draft s adds u_s to the state:
    u_s = beta · (v - exp(G_s) S·k_s - Σ exp(G_s - G_i) (k_i·k_s) u_i) over its ancestors i.
    """
    b, hv, first = find_tile(BV, C)
    slot = tl.load(slots.read + b).to(tl.int64)
    if slot < 0:
        return
    record = tl.load(slots.write + b).to(tl.int64)
    d = channels(C.K)
    i = tl.arange(0, DRAFTS)
    row = first + tl.arange(0, BV)
    S = load_state(states, slots, b, slot, over_channels((hv * C.V + row) * C.K) + over_rows(d), C)
    # of the drafts before: u times the norm of its key, the key as it came, and G
    U = tl.zeros([BV, DRAFTS], tl.float32)
    keys = tl.zeros_like(over_channels(i) + over_rows(d)).to(tl.float32)
    sums = keys if C.PER_CHANNEL else tl.zeros([DRAFTS], tl.float32)
    for s in tl.range(drafts, num_stages=2):  # loads the next draft ahead
        token = b * drafts + s
        k = load_head(inputs.k, token, hv // C.GROUP, d, numbers.eps, False)
        q = load_head(inputs.q, token, hv // C.GROUP, d, numbers.eps, False)
        k_norm = head_norm(k, numbers.eps, C.NORM)
        v = tl.load(inputs.v.ptr + token * inputs.v.token_stride + hv * inputs.v.head_stride + row)
        g, beta = load_gates(inputs, weights, numbers, token, hv, d, C)
        sees = i < s
        if C.TREE:
            sees = tl.load(mask + token * drafts + i, mask=sees, other=0) != 0
        parent = tl.max(tl.where(sees, i, -1), 0)
        if C.PER_CHANNEL:
            G = g + tl.sum(tl.where(over_channels(i == parent), sums, 0.0), ROWS)
            decay = tl.exp(tl.where(over_channels(sees), over_rows(G) - sums, -float("inf")))
            sums = tl.where(over_channels(i == s), over_rows(G), sums)
            grown = tl.exp(G)
            from_k = over_k(S * over_rows(k * grown))
            from_q = over_k(S * over_rows(q * grown))
            kk = over_k(keys * decay * over_rows(k))
            kq = over_k(keys * decay * over_rows(q))
        else:
            G = g + tl.sum(tl.where(i == parent, sums, 0.0), 0)
            decay = tl.exp(tl.where(sees, G - sums, -float("inf")))
            sums = tl.where(i == s, G, sums)
            grown = tl.exp(G)
            from_k = over_k(S * over_rows(k)) * grown
            from_q = over_k(S * over_rows(q)) * grown
            kk = over_k(keys * over_rows(k)) * decay
            kq = over_k(keys * over_rows(q)) * decay
        from_k += tl.sum(U * kk[None, :], 1)
        from_q += tl.sum(U * kq[None, :], 1)
        u = beta * (v.to(tl.float32) - k_norm * from_k)
        o = from_q + u * (k_norm * tl.sum(tl.sum(k * q, 1), 0))
        o *= head_norm(q, numbers.eps, C.NORM)
        U = tl.where((i == s)[None, :], (u * k_norm)[:, None], U)
        keys = tl.where(over_channels(i == s), over_rows(k), keys)
        store_output(out, token, hv, row, o, numbers)
        if record >= 0:
            u_at = records.u.ptr + record * records.u.slot_stride
            tl.store(u_at + (s * C.HV + hv) * C.V + row, u.to(records.u.ptr.dtype.element_ty))
            if first == 0:
                g_at = records.g.ptr + record * records.g.slot_stride
                if C.PER_CHANNEL:
                    tl.store(g_at + (s * C.HV + hv) * C.K + d, g)
                else:
                    tl.store(g_at + s * C.HV + hv, g)
                if hv % C.GROUP == 0:
                    k_at = records.k.ptr + record * records.k.slot_stride
                    k_at += (s * (C.HV // C.GROUP) + hv // C.GROUP) * C.K
                    tl.store(k_at + d, (k * k_norm).to(records.k.ptr.dtype.element_ty))


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
    d = channels(C.K)
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
