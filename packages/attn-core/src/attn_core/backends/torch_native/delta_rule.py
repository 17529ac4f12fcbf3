"""The gated delta rule of many tokens at once: chunks of a sequence, chains and trees of drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_core.cache.state_pool import CHUNK_SIZE

# Tokens i of a chunk, or drafts of a request, that follow a state S [V, K]. i sees the tokens j of
# mask[i, j], itself among them, and G_i is the sum of g over these. With u as in
# LinearAttentionBackend,
#   u_i = beta_i (v_i - S (k_i e^G_i) - sum over j < i of (k_i · k_j) e^(G_i - G_j) u_j)
#   o_i = scale (S (q_i e^G_i) + sum over j <= i of (q_i · k_j) e^(G_i - G_j) u_j)
# The first is a triangular system, solved in float32 by forward substitution: powers of its matrix
# would grow like binomials where keys are nearly equal. No exponent is above 0, and pairs that do
# not see each other are masked before exp: e^G_i · e^-G_j overflows, and infinity times 0 is NaN.
# A large G is summed in float64, where a device has it: after a token that forgets all before it,
# or many that forget a lot, float32 would lose the small decays of the next ones in G_i - G_j.

BLOCK = 16  # tokens of a block on the diagonal
NOTHING_LEFT = -104.0  # exp of it is 0 in float32, with its smallest numbers too
SMALL_SUM = 64.0  # up to it float32 errs by 4e-6 at most, and costs half of float64
SAFE_EXPONENT = 80.0  # e^80 times any key is finite in float32, and e^-80 is no subnormal


class Chunk(NamedTuple):
    """What a chunk of C tokens needs besides the state, float32, for each value head.

    reads: [2C, K], the keys and then the scaled queries, decayed since the state.
    solve: [C, C], gives u from v - S (k e^G), beta included. weights: [C, C], of u in the output.
    last_keys: [C, K], the keys decayed until the end. decay: [1, 1] or [1, K], of the state.
    """

    reads: Tensor
    solve: Tensor
    weights: Tensor
    last_keys: Tensor
    decay: Tensor

    def of(self, chunks: slice) -> Chunk:
        """Return some chunks, all heads in one dimension, as batched products take them."""
        return Chunk(*(x[chunks].flatten(0, 2) for x in self))

    def attend(self, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return u and o, [N, C, V] each, from seen = reads Sᵀ [N, 2C, V] and v [N, C, V]."""
        c = v.shape[1]
        u = torch.bmm(self.solve, v - seen[:, :c])
        return u, torch.baddbmm(seen[:, c:], self.weights, u)


def dtype_of_sums(device: torch.device) -> torch.dtype:
    """Return what log decays are summed in: other devices may lack float64."""
    return torch.float64 if device.type in ("cpu", "cuda", "meta") else torch.float32


def _summed(g: Tensor) -> Tensor:
    """Return the sums of log decays [..., C, K or 1] over the tokens up to each."""
    total = g.cumsum(-2)
    if g.device.type == "cpu" and bool(total[..., -1, :].amin() > -SMALL_SUM):
        return total
    return g.cumsum(-2, dtype=dtype_of_sums(g.device))


# Value heads are two dimensions below, [Hk, r = Hv / Hk]: those of a key head share its products.
def per_value_head(x: Tensor, num_v_heads: int) -> Tensor:
    """Repeat the heads, dim -2, of keys or queries for the value heads that share them."""
    groups = num_v_heads // x.shape[-2]
    return x if groups == 1 else x.repeat_interleave(groups, -2)


def sequence(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, scale: float) -> Chunk:
    """Prepare chunks of sequences: q, k [N, 64, Hk, K]; g [N, 64, Hv] or [N, 64, Hv, K].

    beta: [N, 64, Hv]. Tokens past a sequence's end are 0 in k, g and beta, and change nothing.
    """
    q, k, total, beta = _by_head(q, k, g, beta)
    total = _summed(total)
    if g.dim() == 4:
        own, read = _blockwise(k, q, total)
        read.tril_()
    else:
        c = k.shape[-2]
        mask = torch.ones(c, c, dtype=torch.bool, device=k.device).tril()
        decay = (total - total.mT).float().masked_fill_(~mask, -torch.inf).exp_()
        own, read = (k @ k.mT) * decay, (q @ k.mT) * decay
    return _chunk(q, k, own, read, total, beta, scale)


def drafts(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, mask: Tensor, scale: float) -> Chunk:
    """Prepare n drafts per request, as `sequence`; mask: bool [B, n, n] or [1, n, n].

    A draft comes after its parent.
    """
    q, k, total, beta = _by_head(q, k, g, beta)
    mask = mask[:, None, None]
    sums = dtype_of_sums(g.device)
    total = mask.to(sums) @ total.to(sums)
    apart = total[..., :, None, :] - total[..., None, :, :]  # [B, Hk, r, n, n, K or 1]
    apart = apart.float().masked_fill_(~mask[..., None], -torch.inf).exp_() * k[..., None, :, :]
    own, read = ((apart @ x[..., None]).squeeze(-1) for x in (k, q))
    return _chunk(q, k, own, read, total, beta, scale)


def _by_head(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q and k [N, Hk, 1, C, K], g [N, Hk, r, C, K or 1] and beta [N, Hk, r, C]."""
    q, k = (x.transpose(1, 2).contiguous()[:, :, None] for x in (q, k))
    g = g if g.dim() == 4 else g[..., None]
    g, beta = (torch.unflatten(x.transpose(1, 2), 1, (q.shape[1], -1)) for x in (g, beta))
    return q, k, g.contiguous(), beta.contiguous()


def _chunk(
    q: Tensor, k: Tensor, own: Tensor, weights: Tensor, total: Tensor, beta: Tensor, scale: float
) -> Chunk:
    c, heads = k.shape[-2], total.shape[:-2]
    inverse = _inverse(own.mul_(beta[..., None]).tril_(-1))
    last = total[..., -1:, :]
    decayed = total.float().exp()
    reads = k.new_empty(*heads, 2 * c, k.shape[-1])
    torch.mul(k, decayed, out=reads[..., :c, :])
    torch.mul(q, decayed * scale, out=reads[..., c:, :])
    return Chunk(
        reads=reads,
        solve=inverse * beta[..., None, :],
        weights=weights.mul_(scale),
        last_keys=k * (last - total).float().exp(),
        decay=last.float().exp(),
    )


def _inverse(lower: Tensor) -> Tensor:
    """Invert I + lower, of strictly lower triangles [..., C, C]; C is 64, or any small number.

    Blocks of 16 by forward substitution, then pairs of blocks as one. torch's own solver takes one
    triangle after the other.
    """
    c = lower.shape[-1]
    size = BLOCK if c == CHUNK_SIZE else c
    blocks = _diagonal(lower, size).neg()
    for i in range(1, size):
        blocks[..., i, :i] += (blocks[..., i : i + 1, :i] @ blocks[..., :i, :i]).squeeze(-2)
    inverse = torch.zeros_like(lower)
    one = torch.eye(size, dtype=lower.dtype, device=lower.device)
    _diagonal(inverse, size).copy_(blocks.add_(one))
    while size < c:
        left, pairs = _diagonal(lower, 2 * size), _diagonal(inverse, 2 * size)
        first, second = slice(size), slice(size, None)
        pairs[..., second, first] = -(
            pairs[..., second, second] @ (left[..., second, first] @ pairs[..., first, first])
        )
        size *= 2
    return inverse


def _diagonal(x: Tensor, size: int) -> Tensor:
    """View the blocks [..., blocks, size, size] on the diagonal of x [..., C, C]."""
    grid = torch.unflatten(torch.unflatten(x, -1, (-1, size)), -3, (-1, size))
    return grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _blockwise(keys: Tensor, queries: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over K of a_i k_j e^(G_i - G_j), anything for j > i: a is k, then q.

    Rows of 16 tokens are factored at their first token: e^(G_i - G_first) · e^(G_first - G_j). For
    earlier j, no exponent is above 0. Within the 16 tokens the second is, and where it could
    overflow, they are summed as they are.
    """
    c = keys.shape[-2]
    own, read = (keys.new_zeros(*total.shape[:-2], c, c) for _ in range(2))
    lower = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=keys.device).tril()[..., None]
    for first in range(0, c, BLOCK):
        rows = slice(first, first + BLOCK)
        base, g = total[..., first : first + 1, :], total[..., rows, :]
        factored = bool((base - g[..., -1:, :]).max() < SAFE_EXPONENT)
        decayed = (g - base).float().exp_()
        columns = slice(rows.stop if factored else first)
        right = (base - total[..., columns, :]).float().exp_().mul_(keys[..., columns, :]).mT
        own[..., rows, columns] = (keys[..., rows, :] * decayed) @ right
        read[..., rows, columns] = (queries[..., rows, :] * decayed) @ right
        if not factored:
            apart = (g[..., :, None, :] - g[..., None, :, :]).float()
            apart = apart.masked_fill_(~lower, -torch.inf).exp_().mul_(keys[..., None, rows, :])
            own[..., rows, rows] = (apart @ keys[..., rows, :, None]).squeeze(-1)
            read[..., rows, rows] = (apart @ queries[..., rows, :, None]).squeeze(-1)
    return own, read
