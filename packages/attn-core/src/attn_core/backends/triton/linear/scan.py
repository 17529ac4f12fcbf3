"""Prefill, second kernel: the states, chunk after chunk."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.linear.gates import head_ptr
from attn_core.backends.triton.linear.prepare import CHUNK, load_rows


@triton.jit
def _halves(x):
    """Return the first 64 columns of x [rows, 128] and the others."""
    x = tl.reshape(x, (x.shape[0], 2, CHUNK))
    return tl.split(tl.permute(x, (0, 2, 1)))


@triton.jit
def scan_chunks(
    inputs,
    out,
    states,
    slots,
    checkpoints,
    chunks,
    work,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    C: tl.constexpr,
):
    """Carry BV rows of one head's state through a request, and write the outputs.

    Grid: (B · HV · V / BV). checkpoints: int32, a slot for the state after each chunk, -1 is none.
    Of a chunk, with S [BV, K] before it and everything else transposed likewise:
    X = Vᵀ - S K_inᵀ, U = X Tᵀ, O = S Q_inᵀ + X (P T)ᵀ, and S ← S · decay + U K_out.
    With one decay per head, K_in, Q_in and K_out are k, q and k, and factors of the tokens stand at
    their products; with one per channel, `prepare` wrote all three.
    """
    tiles: tl.constexpr = C.V // BV
    tile = tl.program_id(0) % tiles
    hv = tl.program_id(0) // tiles % C.HV
    b = tl.load(chunks.order + tl.program_id(0) // (tiles * C.HV))
    slot = tl.load(slots.read + b).to(tl.int64)
    if slot < 0:
        return
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, C.K)
    rows = i[:, None] * C.K + d[None, :]
    # P · T lies below T: both are multiplied at once
    square = tl.arange(0, 2 * CHUNK)[:, None] * CHUNK + i[None, :]
    row = tile * BV + tl.arange(0, BV)
    at = (hv * C.V + row)[:, None] * C.K + d[None, :]
    source = states.ptr + slot * states.slot_stride + at
    if C.FRESH:
        S = tl.load(source, mask=tl.load(slots.fresh + b) == 0, other=0.0).to(tl.float32)
    else:
        S = tl.load(source).to(tl.float32)
    begin = tl.load(chunks.cu_seqlens + b)
    tokens = tl.load(chunks.cu_seqlens + b + 1) - begin
    first = tl.load(chunks.first + b)
    # no address in the loop depends on what the loop loads: else loads are not pipelined
    for j in tl.range(0, tl.cdiv(tokens, CHUNK), num_stages=STAGES):
        start = (begin + j * CHUNK).to(tl.int64)
        inside = j * CHUNK + i < tokens
        v = load_rows(inputs.v, start, i, hv, row, inside)
        chunk = ((first + j) * C.HV + hv).to(tl.int64)
        T = tl.load(work.T + chunk * (2 * CHUNK * CHUNK) + square)
        operand = S.to(v.dtype)
        if C.PER_CHANNEL:
            prepared = chunk * (CHUNK * C.K)
            k = tl.load(work.k_in + prepared + rows)
            q = tl.load(work.q_in + prepared + rows)
            k_out = tl.load(work.k_out + prepared + rows)
            decay = tl.load(work.decay + chunk * C.K + d[None, :])
            X = tl.dot(operand, tl.trans(k), input_precision=C.PRECISION)
            X = tl.trans(v).to(tl.float32) - X
        else:
            k = load_rows(inputs.k, start, i, hv // C.GROUP, d, inside)
            q = load_rows(inputs.q, start, i, hv // C.GROUP, d, inside)
            k_out = k
            factors = work.factors + chunk * (3 * CHUNK) + i
            decay = tl.load(work.decay + chunk)
            X = tl.dot(operand, tl.trans(k), input_precision=C.PRECISION)
            X = tl.trans(v).to(tl.float32) - X * tl.load(factors)[None, :]
        U, own = _halves(tl.dot(X.to(v.dtype), tl.trans(T), input_precision=C.PRECISION))
        if not C.PER_CHANNEL:
            U *= tl.load(factors + 2 * CHUNK)[None, :]
        S = tl.dot(U.to(v.dtype), k_out, S * decay, input_precision=C.PRECISION)
        if C.PER_CHANNEL:
            o = tl.dot(operand, tl.trans(q), own, input_precision=C.PRECISION)
        else:
            o = tl.dot(operand, tl.trans(q), input_precision=C.PRECISION)
            o = o * tl.load(factors + CHUNK)[None, :] + own
        o_at = head_ptr(out, hv) + start * out.token_stride
        o_at += i[:, None] * out.token_stride + row[None, :]
        tl.store(o_at, tl.trans(o).to(out.ptr.dtype.element_ty), mask=inside[:, None])
        if C.CHECKPOINTS:
            kept = tl.load(checkpoints + first + j).to(tl.int64)
            if kept >= 0:
                target = states.ptr + kept * states.slot_stride + at
                tl.store(target, S.to(states.ptr.dtype.element_ty))
    slot = tl.load(slots.write + b).to(tl.int64)
    if slot >= 0:
        target = states.ptr + slot * states.slot_stride + at
        tl.store(target, S.to(states.ptr.dtype.element_ty))
