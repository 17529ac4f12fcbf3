"""Verify: all drafts of a request read its state once, and leave a record each.

With G the sum of the log decays along a draft's path, draft s adds u_s to the state:
u_s = beta · (v - exp(G_s) S·k_s - Σ exp(G_s - G_i) (k_i·k_s) u_i) over its ancestors i.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.linear.decode import find_tile, load_state, store_output
from attn_core.backends.triton.linear.gates import (
    ROWS,
    channels,
    coarse_part,
    head_norm,
    head_ptr,
    head_weights,
    load_gates,
    load_head,
    log_decay,
    over_channels,
    over_k,
    over_rows,
    update_rate,
)
from attn_core.backends.triton.linear.solve import inverse_of_drafts


@triton.jit
def load_drafts(x, first, i, head, d, inside):
    """Return one head of a request's drafts [DRAFTS, D]; zeros beyond them."""
    at = head_ptr(x, head) + (first + i)[:, None] * x.token_stride + d[None, :]
    return tl.load(at, mask=inside[:, None], other=0.0)


@triton.jit
def norms_of_drafts(x, eps, NORM: tl.constexpr):
    """Return what normalises each row of x float32."""
    norm = tl.full([x.shape[0]], 1.0, tl.float32)
    if NORM:
        norm = tl.rsqrt(tl.sum(x * x, 1) + eps)
    return norm


@triton.jit
def along_path(x, sees):
    """Return the sum of x [DRAFTS] over each draft and the drafts that it sees."""
    return x + tl.sum(tl.where(sees, x[None, :], 0.0), 1)


@triton.jit(do_not_specialize=["drafts"])
def verify_gdn(
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

    Grid: (B · HV · V / BV). DRAFTS: a power of two, no less than `drafts` and 16. mask: uint8
    [B, drafts, drafts] of a TREE, where a draft sees its ancestors and itself; none comes before
    its parent. A chain is the tree in which each draft sees those before it.

    The drafts are a small chunk of a prompt: (I + L) u = beta · (v - exp(G) S·k) is solved for all
    of them at once, with L_si = beta_s (k_s·k_i) exp(G_s - G_i). Factors of products are rounded to
    11 bits where tokens have 16: more than a prompt's, which are rounded to the tokens' dtype.
    """
    b, hv, first = find_tile(BV, C)
    slot = tl.load(slots.read + b).to(tl.int64)
    if slot < 0:
        return
    record = tl.load(slots.write + b).to(tl.int64)
    token = b * drafts
    i = tl.arange(0, DRAFTS)
    inside = i < drafts
    d = tl.arange(0, C.K)
    row = first + tl.arange(0, BV)
    S = load_state(states, slots, b, slot, (hv * C.V + row)[:, None] * C.K + d[None, :], C)
    k = load_drafts(inputs.k, token, i, hv // C.GROUP, d, inside)
    q = load_drafts(inputs.q, token, i, hv // C.GROUP, d, inside)
    v = load_drafts(inputs.v, token, i, hv, row, inside).to(tl.float32)
    a_log, bias = head_weights(weights, hv, 0, C)
    g_at = head_ptr(inputs.g, hv) + (token + i) * inputs.g.token_stride
    g = log_decay(tl.load(g_at, mask=inside, other=0.0), a_log, bias, numbers.lower_bound, C)
    g = tl.where(inside, g, 0.0)
    b_at = head_ptr(inputs.beta, hv) + (token + i) * inputs.beta.token_stride
    beta = update_rate(tl.load(b_at, mask=inside, other=0.0), C)
    beta = tl.where(inside, beta, 0.0)

    sees = i[:, None] > i[None, :]
    if C.TREE:
        m_at = mask + (token + i)[:, None] * drafts + i[None, :]
        sees = sees & (tl.load(m_at, mask=sees & inside[:, None], other=0) != 0)
    if k.dtype == tl.float32:
        coarse = coarse_part(g)
        G = along_path(coarse, sees)
        rest = along_path(g - coarse, sees)
        between = (G[:, None] - G[None, :]) + (rest[:, None] - rest[None, :])
        G += rest
    else:
        G = along_path(g, sees)
        between = G[:, None] - G[None, :]
    decay = tl.where(sees, between, -float("inf"))
    own = i[:, None] == i[None, :]
    decay = tl.exp(tl.where(own, 0.0, decay))
    grown = tl.exp(G)
    wide_k = k.to(tl.float32)
    wide_q = q.to(tl.float32)
    k_norm = norms_of_drafts(wide_k, numbers.eps, C.NORM)
    q_norm = norms_of_drafts(wide_q, numbers.eps, C.NORM)
    decay *= k_norm[None, :]
    kk = tl.dot(k, tl.trans(k), input_precision=C.PRECISION) * decay
    P = tl.dot(q, tl.trans(k), input_precision=C.PRECISION) * decay * q_norm[:, None]
    L = tl.where(own, 0.0, kk * (beta * k_norm)[:, None])
    T = inverse_of_drafts(L, k.dtype, C)
    from_k = tl.dot(S, tl.trans(wide_k), input_precision=C.PRECISION)
    from_q = tl.dot(S, tl.trans(wide_q), input_precision=C.PRECISION)
    X = beta[None, :] * (tl.trans(v) - from_k * (grown * k_norm)[None, :])
    U = tl.dot(X, tl.trans(T), input_precision=C.PRECISION)
    o = tl.dot(U, tl.trans(P), input_precision=C.PRECISION)
    o += from_q * (grown * q_norm)[None, :]
    at = head_ptr(out, hv) + (token + i)[None, :] * out.token_stride + row[:, None]
    tl.store(at, (o * numbers.scale).to(out.ptr.dtype.element_ty), mask=inside[None, :])
    if record >= 0:
        u_at = records.u.ptr + record * records.u.slot_stride
        u_at += (i * C.HV + hv)[None, :] * C.V + row[:, None]
        tl.store(u_at, U.to(records.u.ptr.dtype.element_ty), mask=inside[None, :])
        if first == 0:
            decay_at = records.g.ptr + record * records.g.slot_stride
            tl.store(decay_at + i * C.HV + hv, g, mask=inside)
            if hv % C.GROUP == 0:
                k_at = records.k.ptr + record * records.k.slot_stride
                k_at += (i * (C.HV // C.GROUP) + hv // C.GROUP)[:, None] * C.K + d[None, :]
                key = (wide_k * k_norm[:, None]).to(records.k.ptr.dtype.element_ty)
                tl.store(k_at, key, mask=inside[:, None])


@triton.jit(do_not_specialize=["drafts"])
def verify_kda(
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
    """Do what verify_gdn does with a decay per key channel, one draft after another.

    exp(G_s - G_i) of each channel is no product of two factors that cannot overflow.
    """
    b, hv, first = find_tile(BV, C)
    slot = tl.load(slots.read + b).to(tl.int64)
    if slot < 0:
        return
    record = tl.load(slots.write + b).to(tl.int64)
    EXACT: tl.constexpr = inputs.k.ptr.dtype.element_ty == tl.float32
    d = channels(C.K, states.ptr.dtype.element_ty)
    i = tl.arange(0, DRAFTS)
    row = first + tl.arange(0, BV)
    S = load_state(states, slots, b, slot, over_channels((hv * C.V + row) * C.K) + over_rows(d), C)
    # of the drafts before: u times the norm of its key, the key as it came, and G
    U = tl.zeros([BV, DRAFTS], tl.float32)
    keys = tl.zeros_like(over_channels(i) + over_rows(d)).to(tl.float32)
    sums = keys
    rests = keys  # of tokens of float32: see coarse_part
    for s in tl.range(drafts, num_stages=2):  # loads the next draft ahead
        token = b * drafts + s
        k = load_head(inputs.k, token, hv // C.GROUP, d, numbers.eps, False)
        q = load_head(inputs.q, token, hv // C.GROUP, d, numbers.eps, False)
        k_norm = head_norm(k, numbers.eps, C.NORM)
        v = tl.load(head_ptr(inputs.v, hv) + token * inputs.v.token_stride + row)
        g, beta = load_gates(inputs, weights, numbers, token, hv, d, C)
        sees = i < s
        if C.TREE:
            sees = tl.load(mask + token * drafts + i, mask=sees, other=0) != 0
        parent = tl.max(tl.where(sees, i, -1), 0)
        coarse = coarse_part(g) if EXACT else g
        G = coarse + tl.sum(tl.where(over_channels(i == parent), sums, 0.0), ROWS)
        between = over_rows(G) - sums
        sums = tl.where(over_channels(i == s), over_rows(G), sums)
        if EXACT:
            R = g - coarse + tl.sum(tl.where(over_channels(i == parent), rests, 0.0), ROWS)
            between += over_rows(R) - rests
            rests = tl.where(over_channels(i == s), over_rows(R), rests)
            G += R
        decay = tl.exp(tl.where(over_channels(sees), between, -float("inf")))
        grown = tl.exp(G)
        from_k = over_k(S * over_rows(k * grown))
        from_q = over_k(S * over_rows(q * grown))
        # drafts that this one does not see may hold NaN, and 0 times NaN is NaN
        seen_keys = tl.where(over_channels(sees), keys * decay, 0.0)
        seen_U = tl.where(sees[None, :], U, 0.0)
        kk = over_k(seen_keys * over_rows(k))
        kq = over_k(seen_keys * over_rows(q))
        from_k += tl.sum(seen_U * kk[None, :], 1)
        from_q += tl.sum(seen_U * kq[None, :], 1)
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
                tl.store(g_at + (s * C.HV + hv) * C.K + d, g)
                if hv % C.GROUP == 0:
                    k_at = records.k.ptr + record * records.k.slot_stride
                    k_at += (s * (C.HV // C.GROUP) + hv // C.GROUP) * C.K
                    tl.store(k_at + d, (k * k_norm).to(records.k.ptr.dtype.element_ty))
