"""The numbers behind torch-npu's emulated operators of the gated delta rule, and what they refuse.

Sources: the wheel's torch_npu/_op_plugin_docs.py and CANN's pages of aclnnChunkGatedDeltaRule and
aclnnRecurrentGatedDeltaRule. The wheel says of the chunks that a request has up to 8 tokens, and
shows one of 100; CANN has no such limit, so neither has this.
"""

import torch

BF16 = torch.bfloat16


def check(ok, message):
    """Refuse what the operator refuses."""
    if not ok:
        raise RuntimeError(f"EZ9999: {message}")


def _operands(query, key, value, beta, g, state, lengths, scale):
    """Refuse operands that are not documented; return the tokens of each request."""
    check(scale is not None, "scale is required")
    for name, x in (("query", query), ("key", key), ("value", value), ("beta", beta)):
        check(x is not None and x.dtype == BF16, f"{name}: bfloat16")
        check(x.numel() > 0, f"{name}: empty tensors are not supported")
    check(state is not None and state.dtype == BF16 and state.dim() == 4, "state: bfloat16, 4 dims")
    check(state.numel() > 0, "state: empty tensors are not supported")
    tokens, nk, dk = query.shape
    nv, dv = value.shape[1:]
    check(key.shape == query.shape and value.shape[0] == tokens, "query, key and value do not fit")
    check(nv % nk == 0, "Nv is a multiple of Nk")
    check(state.shape[1:] == (nv, dv, dk), "state: (blocks, Nv, Dv, Dk)")
    check(beta.shape == (tokens, nv), "beta: (T, Nv)")
    if g is not None:
        check(g.dtype == torch.float32 and g.shape == (tokens, nv), "g: float32 (T, Nv)")
    check(lengths is not None and lengths.dtype == torch.int32, "actual_seq_lengths: int32 (B,)")
    check(lengths.dim() == 1 and lengths.numel() > 0, "actual_seq_lengths: int32 (B,)")
    found = lengths.tolist()
    assert min(found) > 0, "a request without tokens: not documented"
    check(sum(found) == tokens, "T is the sum of actual_seq_lengths")
    return found


def _rule(query, key, value, beta, g, state, scale):
    """Return the outputs of one request, and the state after each of its tokens, in float32.

    A state is [Nv, Dv, Dk].
    """
    group = value.shape[1] // query.shape[1]
    q, k = (x.float().repeat_interleave(group, 1) for x in (query, key))
    v, beta, s = value.float(), beta.float(), state.float()
    outputs, states = [], []
    for t in range(len(q)):
        s = s if g is None else s * g[t].exp()[:, None, None]
        u = beta[t, :, None] * (v[t] - (s @ k[t, ..., None])[..., 0])
        s = torch.baddbmm(s, u[..., None], k[t, :, None])
        outputs.append((s @ (q[t] * scale)[..., None])[..., 0])
        states.append(s)
    return torch.stack(outputs), states


def npu_chunk_gated_delta_rule(
    query, key, value, *, beta=None, initial_state=None, actual_seq_lengths=None, scale=None, g=None
):
    """Run whole requests. The initial state is documented as an output too: NaN afterwards."""
    lens = _operands(query, key, value, beta, g, initial_state, actual_seq_lengths, scale)
    (_, nk, dk), (_, nv, dv) = query.shape, value.shape
    check(nk <= 64 and nv <= 64, "Nk and Nv up to 64")
    check(dk == dv == 128, "Dk and Dv are 128")
    check(len(initial_state) == len(lens), "initial_state: one for each request")
    out, final, first = torch.empty_like(value), torch.empty_like(initial_state), 0
    for row, n in enumerate(lens):
        part = slice(first, first + n)
        decay = None if g is None else g[part]
        outputs, states = _rule(
            query[part], key[part], value[part], beta[part], decay, initial_state[row], scale
        )
        out[part], final[row] = outputs.to(BF16), states[-1].to(BF16)
        first += n
    initial_state.fill_(torch.nan)
    return out, final


def npu_recurrent_gated_delta_rule(
    query, key, value, state, *, beta=None, scale=None, actual_seq_lengths=None,
    ssm_state_indices=None, num_accepted_tokens=None, g=None, gk=None,
):  # fmt: skip
    """Run a few tokens a request; the state after each goes where the indices say.

    A request starts from the state of its last accepted token. Requests run side by side: a block
    that two of them write is NaN, unless both write the same.
    """
    lens = _operands(query, key, value, beta, g, state, actual_seq_lengths, scale)
    check(gk is None, "gk: not supported in this version")
    check(state.is_contiguous(), "state: non-contiguous tensors are not supported")
    sizes = (*query.shape[1:], *value.shape[1:])
    check(max(sizes) <= 256, "Nk, Nv, Dk and Dv up to 256")
    check(max(lens) <= 8, "up to 8 tokens a request")
    for name, x, count in (
        ("ssm_state_indices", ssm_state_indices, len(query)),
        ("num_accepted_tokens", num_accepted_tokens, len(lens)),
    ):
        check(x is not None and x.dtype == torch.int32 and x.shape == (count,), f"{name}: int32")
    blocks, accepted = ssm_state_indices.tolist(), num_accepted_tokens.tolist()
    assert 0 <= min(blocks) <= max(blocks) < len(state), "reads and writes outside of the state"
    before, written = state.clone(), {}
    out, first = torch.empty_like(value), 0
    for n, taken in zip(lens, accepted, strict=True):
        part = slice(first, first + n)
        start = before[blocks[first + taken - 1]]
        decay = None if g is None else g[part]
        outputs, states = _rule(
            query[part], key[part], value[part], beta[part], decay, start, scale
        )
        out[part] = outputs.to(BF16)
        for block, s in zip(blocks[part], states, strict=True):
            new, other = s.to(BF16), written.get(block)
            same = other is None or torch.equal(new.view(torch.int16), other.view(torch.int16))
            written[block] = new if same else torch.full_like(new, torch.nan)
        first += n
    for block, new in written.items():
        state[block] = new
    return out
