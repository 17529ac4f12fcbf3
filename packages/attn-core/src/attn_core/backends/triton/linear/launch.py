"""Run the kernels of linear attention over plain tensors: one function per operation.

Tokens may be views with any strides between tokens and heads, such as parts of one projection;
the elements of a head are adjacent. A slot of a state is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_core.backends.triton.linear.arguments import (
    Constants,
    Inputs,
    Numbers,
    Records,
    Rows,
    Weights,
    Workspace,
)
from attn_core.backends.triton.linear.decode import commit_drafts, decode_states
from attn_core.backends.triton.linear.gates import BOUNDED, NO_GATE, SOFTPLUS
from attn_core.backends.triton.linear.operands import (
    at_slots_of,
    inputs_of,
    like,
    placed,
    placed_slots,
    rows_of,
    slots_of,
    states_of,
)
from attn_core.backends.triton.linear.tuning import (
    Launch,
    commit_launch,
    decode_launch,
    verify_launch,
)
from attn_core.backends.triton.linear.verify import verify_gdn, verify_kda
from attn_core.errors import UsageError
from attn_core.ops.triton.launcher import Launcher, alike


class PrefillKernels(NamedTuple):
    """The two kernels of prefill, or one alone that does both, in the place of `scan`.

    rows: of V of a program of `scan`. ahead: they run at once. maps: what `scan` copies by if TMA
    does, of inputs, outputs and what is prepared.
    """

    prepare: Launcher | None
    scan: Launcher
    rows: int
    ahead: bool
    maps: Callable[[Inputs, Rows, Workspace], tuple[Any, ...]] | None = None


@dataclass(frozen=True, eq=False)
class LinearArguments:
    """What the kernels are given of a layer in every pass, and the launchers of these kernels.

    arch: "sm90", "gfx942" or another architecture.
    common: the constants of all launches, without those of a pass.
    launchers: with the programs of a request.
    prefills: launchers of prefill's kernels.
    """

    arch: str
    numbers: Numbers
    weights: Weights | None
    common: Constants
    launchers: dict[Hashable, tuple[Launcher, int]] = field(default_factory=dict)
    prefills: dict[Hashable, PrefillKernels] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: Any, arch: str) -> LinearArguments:
        """Return those of a layer. Raises UsageError for head dims that no kernel takes."""
        k_dim, v_dim, gate = layer.head_k_dim, layer.head_v_dim, layer.gate
        if k_dim not in (16, 32, 64, 128, 256) or v_dim % 16:
            raise UsageError(
                f"layer {layer.layer_id}: head_k_dim {k_dim}, head_v_dim {v_dim} (supports K of "
                "16, 32, 64, 128 or 256, and V in multiples of 16)"
            )
        bound = None if gate is None else gate.lower_bound
        kind = NO_GATE if gate is None else SOFTPLUS if bound is None else BOUNDED
        common = Constants(
            HV=layer.num_v_heads,
            GROUP=layer.num_v_heads // layer.num_k_heads,
            K=k_dim,
            V=v_dim,
            PER_CHANNEL=layer.kind == "kda",
            GATE=kind.value,
            NEG_EIGVAL=gate is not None and gate.neg_eigval,
            NORM=layer.qk_norm is not None,
        )
        numbers = Numbers(float(layer.scale), layer.qk_norm or 0.0, bound or 0.0)
        weights = None if gate is None else Weights(gate.A_log, gate.dt_bias)
        return cls(arch, numbers, weights, common)

    def precision(self, dtype: torch.dtype) -> str:
        """Return how products of float32 are computed: some are, for tokens of 16 bits too."""
        if self.arch == "sm75" or not self.arch.startswith("sm"):
            return "ieee"  # AMD's matrix units multiply float32
        return "tf32x3" if dtype == torch.float32 else "tf32"

    def weights_or(self, unread: Tensor) -> Weights:
        """Return the weights of the gate; without one `unread`, any tensor."""
        return self.weights or Weights(unread, unread)

    def at_weights_or(self, unread: int) -> tuple[int, int]:
        """Return where they lie; without a gate `unread`, any address."""
        weights = self.weights
        return (unread, unread) if weights is None else weights.addresses()

    def tiles(self, chosen: Launch) -> int:
        """Return how many tiles the states of a request have."""
        return self.common.HV * self.common.V // chosen.rows


def decode(
    layer: LinearArguments,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    slots_out: Tensor | None = None,
    fresh: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run one token of each request and store its new state.

    q, k [B, Hk, K]; v [B, Hv, V]; g [B, Hv] or [B, Hv, K]; beta [B, Hv].
    state: fp32 or bf16 [slots, Hv, V, K], read at `slots` and written at `slots_out`, by default
    the same: int32 [B]. At -1 a request's row of the output is left alone, or its state not stored.
    fresh: bool [B], requests that start from zeros: their slot is not read.
    Returns out [B, Hv, V] in the dtype of v.
    """
    count, common = slots.shape[0], layer.common
    if out is None:
        out = v.new_empty(v.shape[0], common.HV, common.V)
    if not count:
        return out
    at_q, like_q = placed(q)
    at_k, like_k = placed(k)
    at_v, like_v = placed(v)
    at_g, like_g = placed(g)
    at_beta, like_beta = placed(beta)
    at_out, like_out = placed(out)
    (at_state, slot_stride, _), like_state = placed(state)
    at_places, like_places = at_slots_of(slots, slots_out, fresh)
    key = (
        "decode", fresh is None, like_q, like_k, like_v, like_g, like_beta, like_out, like_state,
        like_places,
    )  # fmt: skip
    entry = layer.launchers.get(key)
    if entry is None:
        chosen = decode_launch(layer.arch, common.V, common.K, state.dtype.itemsize)
        constants = common._replace(FRESH=fresh is not None)
        launcher = Launcher(decode_states, chosen.rows, constants, num_warps=chosen.warps)
        entry = layer.launchers[key] = (launcher, layer.tiles(chosen))
    launcher, tiles = entry

    def arguments() -> tuple[Any, ...]:
        inputs, weights = inputs_of(q, k, v, g, beta), layer.weights_or(q)
        places = slots_of(slots, slots_out, fresh)
        return inputs, weights, layer.numbers, rows_of(out), states_of(state), places

    launcher.launch(
        (count * tiles, 1, 1),
        (
            (at_q, at_k, at_v, at_g, at_beta),
            layer.at_weights_or(at_q[0]),
            layer.numbers,
            at_out,
            (at_state, 0, slot_stride),
            at_places,
        ),
        arguments,
    )
    return out


def verify(
    layer: LinearArguments,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    records: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    *,
    tree_mask: Tensor | None = None,
    slots_out: Tensor | None = None,
    fresh: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run n draft tokens of each request, which leave a record each; no state is changed.

    q, k [B · n, Hk, K], v, g and beta: as of `decode`, the drafts of a request side by side.
    state, slots, fresh: as of `decode`.
    records: u [slots, N, Hv, V], k [slots, N, Hk, K] and g float32 [slots, N, Hv] or
    [slots, N, Hv, K] of at least n drafts. They are written at `slots_out`.
    tree_mask: bool [B, n, n], a draft sees its ancestors and itself; parents come first. None is a
    chain.
    Returns out [B · n, Hv, V] in the dtype of v.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    batch = slots.shape[0]
    if not batch:
        return out
    drafts, common = v.shape[0] // batch, layer.common
    width = max(2 if common.PER_CHANNEL else 16, 1 << (drafts - 1).bit_length())
    at_tokens, like_tokens = zip(*map(placed, (q, k, v, g, beta, out)), strict=True)
    at_states, like_states = zip(*map(placed_slots, (state, *records)), strict=True)
    at_places, like_places = at_slots_of(slots, slots_out, fresh)
    at_mask, like_mask = at_places[0], None
    if tree_mask is not None:
        at_mask, like_mask = tree_mask.data_ptr(), alike(tree_mask)
    key = ("verify", width, fresh is None, like_mask, like_tokens, like_states, like_places)
    entry = layer.launchers.get(key)
    if entry is None:
        tree, starts, per_channel = tree_mask is not None, fresh is not None, common.PER_CHANNEL
        constants = common._replace(FRESH=starts, TREE=tree, PRECISION=layer.precision(v.dtype))
        chosen = verify_launch(layer.arch, common.V, common.K, width, per_channel=per_channel)
        kernel, last = verify_kda if per_channel else verify_gdn, (chosen.rows, width, constants)
        launcher = Launcher(kernel, *last, num_warps=chosen.warps)
        entry = layer.launchers[key] = (launcher, layer.tiles(chosen))
    launcher, tiles = entry

    def arguments() -> tuple[Any, ...]:
        kept = Records(*map(states_of, records))
        bits = slots if tree_mask is None else tree_mask.view(torch.uint8)
        inputs, weights, rows = inputs_of(q, k, v, g, beta), layer.weights_or(q), rows_of(out)
        places = slots_of(slots, slots_out, fresh)
        return inputs, weights, layer.numbers, rows, states_of(state), places, kept, bits, drafts

    launcher.launch(
        (batch * tiles, 1, 1),
        (
            at_tokens[:5], layer.at_weights_or(at_tokens[0][0]), layer.numbers, at_tokens[5],
            at_states[0], at_places, at_states[1:], at_mask, drafts,
        ),
        arguments,
    )  # fmt: skip
    return out


def commit(
    layer: LinearArguments,
    state: Tensor,
    records: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    accepted: Tensor,
    *,
    tree_mask: Tensor | None = None,
    slots_out: Tensor | None = None,
    fresh: Tensor | None = None,
) -> None:
    """Bring the states of all layers up to the last accepted draft, in one launch.

    layer: any of the layers, which are alike. state, records: as of `verify`, with one more
    dimension in front, the layers. slots, slots_out, fresh, tree_mask: those of the verified pass.
    accepted: int32 or int64 [B], the index of a request's last accepted draft; -1 changes nothing.
    """
    batch = slots.shape[0]
    if not batch:
        return
    places, stored = slots_of(slots, slots_out, fresh), states_of(state, layers=True)
    kept = Records(*(states_of(x, layers=True) for x in records))
    mask = slots if tree_mask is None else tree_mask.view(torch.uint8)
    drafts = 0 if tree_mask is None else tree_mask.shape[-1]
    key = (
        *("commit", fresh is None, tree_mask is None),
        *like((stored, *kept)),
        *map(alike, (*places, mask, accepted)),
    )
    entry = layer.launchers.get(key)
    if entry is None:
        tree, starts = tree_mask is not None, fresh is not None
        chosen = commit_launch(layer.arch, layer.common.V, layer.common.K)
        constants = layer.common._replace(FRESH=starts, TREE=tree)
        launcher = Launcher(commit_drafts, chosen.rows, constants, num_warps=chosen.warps)
        entry = layer.launchers[key] = (launcher, layer.tiles(chosen))
    launcher, tiles = entry
    launcher.launch(
        (batch * tiles, state.shape[0], 1),
        (stored, places, kept, accepted, mask, drafts),
    )
