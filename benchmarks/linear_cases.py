"""Cases of linear attention: shapes, inputs, and the recurrence in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

EPS = 1e-6
_SPARE = 3  # slots of a pool that no request has


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """One shape. tokens: of each request; drafts of "verify" and "commit". heads: Hk, Hv."""

    op: Literal["prefill", "decode", "verify", "commit"]
    batch: int
    tokens: int = 1
    kind: Literal["gdn", "kda"] = "gdn"
    heads: tuple[int, int] = (16, 32)
    dims: tuple[int, int] = (128, 128)
    state: Literal["fp32", "bf16"] = "fp32"
    tree: bool = False

    @property
    def name(self) -> str:
        """Say kind, operation, shape, heads and the dtype of the states."""
        tree = " tree" if self.tree else ""
        shape = f"{self.batch}x{self.tokens}{tree} heads {self.heads[0]}/{self.heads[1]}"
        return f"{self.kind} {self.op} {shape} {self.state}"

    @property
    def bytes(self) -> int:
        """What has to be read and written: tokens once, and states once each way."""
        (hk, hv), (k, v) = self.heads, self.dims
        number = 4 if self.state == "fp32" else 2
        state = self.batch * hv * v * k * number
        record = 4 * (hv * v + hk * k + hv * (k if self.kind == "kda" else 1))
        records = self.batch * self.tokens * record
        if self.op == "commit":
            return 2 * state + records
        gates = hv * (k + 1 if self.kind == "kda" else 2)
        tokens = self.batch * self.tokens * 2 * (2 * hk * k + 2 * hv * v + gates)
        return tokens + (state + records if self.op == "verify" else 2 * state)

    @property
    def flops(self) -> int:
        """Of the chunked form, of chunks of 64 tokens; of single tokens no flops count."""
        if self.op != "prefill":
            return 0
        k, v = self.dims
        chunks = self.batch * -(-self.tokens // 64) * self.heads[1]
        return chunks * 2 * 64 * (2 * 64 * k + 3 * k * v + 2 * 64 * v)


def _decodes() -> list[LinearCase]:
    cases = [
        LinearCase(op="decode", batch=b, state=s)
        for s in ("fp32", "bf16")
        for b in (1, 16, 64, 256)
    ]
    return [*cases, LinearCase(op="decode", batch=64, heads=(4, 8))]


def _drafts() -> list[LinearCase]:
    cases = [
        LinearCase(op=op, batch=b, tokens=n, tree=tree)
        for op in ("verify", "commit")
        for n in (4, 8)
        for b in (16, 64)
        for tree in (False, True)
    ]
    return [*cases, LinearCase(op="verify", batch=64, tokens=4, state="bf16")]


PROMPTS = ((1, 8192), (16, 1024), (4, 4096), (1, 32768))
CASES: tuple[LinearCase, ...] = (
    *(LinearCase(op="prefill", batch=b, tokens=n) for b, n in PROMPTS),
    *_decodes(),
    *_drafts(),
    *(LinearCase(op="prefill", batch=b, tokens=n, heads=(4, 8)) for b, n in PROMPTS[:2]),
    *(LinearCase(op="prefill", batch=b, tokens=n, kind="kda", heads=(32, 32))
      for b, n in PROMPTS[:2]),
    LinearCase(op="decode", batch=64, kind="kda", heads=(32, 32)),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LinearInputs:
    """Drawn tensors of a case; what some contestants need besides is derived once, untimed.

    q, k, v: parts of one projection, bf16. f, b: raw gates, bf16. pool: the states, a slot each.
    """

    case: LinearCase
    layer: SimpleNamespace
    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    b: Tensor
    pool: Tensor
    slots: Tensor

    @property
    def packed(self) -> Tensor:
        """The projection [T, 2 Hk K + Hv V] that q, k and v are parts of."""
        (hk, hv), (k, v) = self.case.heads, self.case.dims
        return self.q.as_strided((self.q.shape[0], 2 * hk * k + hv * v), (self.q.stride(0), 1))

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Of each token the one that it follows, -1 is the state: a binary tree, or a chain."""
        return tuple(
            (t - 1) // 2 if self.case.tree and t else t - 1 for t in range(self.case.tokens)
        )

    @cached_property
    def mask(self) -> Tensor | None:
        """bool [B, n, n] of a tree: a draft sees its ancestors and itself."""
        if not self.case.tree:
            return None
        mask = torch.eye(self.case.tokens, dtype=torch.bool)
        for t, parent in enumerate(self.parents):
            if parent >= 0:
                mask[t] |= mask[parent]
        return mask.repeat(self.case.batch, 1, 1).to(self.q.device)

    @cached_property
    def accepted(self) -> Tensor:
        """int64 [B]: the last accepted draft of each request."""
        return torch.full((self.case.batch,), self.case.tokens - 1, device=self.q.device)

    @cached_property
    def g(self) -> Tensor:
        """The log decay, float32."""
        weights = self.layer.gate
        a: Tensor = weights.A_log.exp()
        a = a[:, None] if self.case.kind == "kda" else a
        return -a * softplus(self.f.float() + weights.dt_bias)

    @cached_property
    def beta(self) -> Tensor:
        """beta, float32."""
        return torch.sigmoid(self.b.float())

    @cached_property
    def unit(self) -> tuple[Tensor, Tensor]:
        """q and k normalised, bf16, contiguous."""
        return tuple(  # type: ignore[return-value]
            (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + EPS)).to(x.dtype)
            for x in (self.q, self.k)
        )

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int64 [B + 1]."""
        return torch.arange(self.case.batch + 1, device=self.q.device) * self.case.tokens

    @cached_property
    def reference(self) -> tuple[Tensor, Tensor]:
        """The outputs [T, Hv, V] and the last states [B, Hv, V, K] in float64, token by token."""
        case = self.case
        group = case.heads[1] // case.heads[0]
        S = self.pool[self.slots.long()].double()
        states: list[Tensor] = []
        out = self.v.new_empty(case.batch, case.tokens, *self.v.shape[1:], dtype=torch.float64)

        def rows(x: Tensor, t: int) -> Tensor:
            return x.reshape(case.batch, case.tokens, *x.shape[1:])[:, t].double()

        for t, parent in enumerate(self.parents):
            q, k = (rows(x, t) for x in (self.q, self.k))
            q, k = (
                (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)).repeat_interleave(
                    group, 1
                )
                for x in (q, k)
            )
            decay = rows(self.g, t).exp()
            decay = decay[:, :, None, :] if case.kind == "kda" else decay[:, :, None, None]
            before = states[parent] if case.tree and parent >= 0 else S
            S = before * decay
            u = (rows(self.v, t) - (S @ k[..., None])[..., 0]) * rows(self.beta, t)[..., None]
            S = S + u[..., :, None] * k[..., None, :]
            out[:, t] = (S @ q[..., None])[..., 0] * self.layer.scale
            if case.tree:
                states.append(S)
        return out.flatten(0, 1), S


def build(case: LinearCase, device: torch.device) -> LinearInputs:
    """Draw the inputs of a case, the same ones each time."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    (hk, hv), (k_dim, v_dim) = case.heads, case.dims
    total, channels = case.batch * case.tokens, (k_dim,) if case.kind == "kda" else ()
    sizes = [hk * k_dim, hk * k_dim, hv * v_dim]
    packed = randn(total, sum(sizes)).bfloat16()
    q, k, v = torch.split(packed, sizes, 1)
    gate = SimpleNamespace(
        A_log=torch.rand(hv, generator=generator, device=device) * 2.7,
        dt_bias=randn(hv, *channels) - 3.0,
        lower_bound=None,
        neg_eigval=False,
    )
    layer = SimpleNamespace(
        layer_id=0, num_k_heads=hk, num_v_heads=hv, head_k_dim=k_dim, head_v_dim=v_dim,
        kind=case.kind, scale=k_dim**-0.5, qk_norm=EPS, gate=gate,
    )  # fmt: skip
    slots = torch.randperm(case.batch + _SPARE, generator=generator, device=device)
    store = torch.float32 if case.state == "fp32" else torch.bfloat16
    pool = normalize(randn(case.batch + _SPARE, hv, v_dim, k_dim), dim=-1).to(store)
    return LinearInputs(
        case, layer, q.view(total, hk, k_dim), k.view(total, hk, k_dim),
        v.view(total, hv, v_dim), randn(total, hv, *channels).bfloat16(),
        randn(total, hv).bfloat16(), pool, slots[: case.batch].int(),
    )  # fmt: skip
