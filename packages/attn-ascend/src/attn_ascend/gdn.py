"""triton's row of GDN on an NPU: the gated delta rule by torch-npu's operators, states in bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from attn_core import (
    BackendConfig,
    BatchError,
    ForwardBatch,
    ForwardMode,
    LinearAttentionBackend,
    LinearLayer,
    StateCache,
    UnsupportedError,
    copy_to_out,
    gated,
)
from torch import Tensor

from attn_ascend.library import operator

_DELTA_RULE: Final = ("query", "key", "value", "beta", "scale", "actual_seq_lengths", "g")
CHUNKS: Final = (*_DELTA_RULE, "initial_state")
RECURRENT: Final = (*_DELTA_RULE, "state", "ssm_state_indices", "num_accepted_tokens")
MOST_HEADS: Final = 64  # of values, in prefill


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a pass, and where their states lie.

    reads, writes: int32 [B], their slots. A padded row has one that no row of the pass writes.
    valid: bool [B], False is padding. fresh: bool [B] or None, starts from zeros.
    moved: whether a row may write another slot than it reads.
    order, ones: int32 [B], 0 to B - 1, and 1 each.
    """

    reads: Tensor
    writes: Tensor
    valid: Tensor
    fresh: Tensor | None
    moved: bool
    order: Tensor
    ones: Tensor

    @classmethod
    def of(cls, batch: ForwardBatch) -> Rows:
        """Read the slots of a batch on the device. Of B slots, B - 1 live rows leave one."""
        slots = batch.state_slots
        assert slots is not None
        valid, count = slots >= 0, len(slots)
        writes = slots if batch.state_slots_out is None else batch.state_slots_out
        order = torch.arange(count, dtype=torch.int32, device=slots.device)
        used = torch.zeros(count + 1, dtype=torch.int32, device=slots.device)
        used.index_fill_(0, torch.where(valid & (writes < count), writes, count).long(), 1)
        free = used[:count].argmin() if count else used[0]
        return cls(
            reads=torch.where(valid, slots, free).int(),
            writes=torch.where(valid, writes, free).int(),
            valid=valid,
            fresh=None if batch.state_fresh is None else batch.state_fresh & valid,
            moved=batch.state_slots_out is not None,
            order=order,
            ones=torch.ones_like(order),
        )

    def refill(self, batch: ForwardBatch) -> None:
        """Read the slots of another batch of the same form into the same tensors."""
        new = Rows.of(batch)
        for target, source in (
            (self.reads, new.reads), (self.writes, new.writes), (self.valid, new.valid),
            (self.fresh, new.fresh),
        ):  # fmt: skip
            if target is not None and source is not None:
                target.copy_(source)

    def load(self, pool: Tensor) -> Tensor:
        """Copy the states [B, Hv, V, K] that the rows start from."""
        states = pool.index_select(0, self.reads)
        return states if self.fresh is None else states.masked_fill_(_each(self.fresh), 0)

    def store(self, states: Tensor, pool: Tensor) -> None:
        """Write the states of live rows; padded ones write back what their slot holds."""
        old_states = pool.index_select(0, self.writes)
        pool.index_copy_(0, self.writes.long(), torch.where(_each(self.valid), states, old_states))


@dataclass(frozen=True, eq=False)
class ExtendPlan:
    """The rows of an extend, and those that have tokens.

    nonempty: int64 [N], None where all have. lengths: int32 [N], tokens of each; None without any.
    """

    rows: Rows
    nonempty: Tensor | None
    lengths: Tensor | None


class AscendGDN(LinearAttentionBackend):
    """npu_recurrent_gated_delta_rule in decode, npu_chunk_gated_delta_rule in an extend.

    The documented row is of Triton kernels, which are on no index. The operators take states, keys,
    values and beta in bf16. Decode updates the pool in place, unless a row starts from zeros or
    from another slot, or the pool is not dense: then the states are gathered and written back, as
    in an extend. Drafts are not verified, and a layer of KDA decays by channel, which they lack.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.linear_layers:
            if layer.num_v_heads > MOST_HEADS:
                raise UnsupportedError(
                    f"layer {layer.layer_id}: {layer.num_v_heads} value heads "
                    f"(npu_chunk_gated_delta_rule takes {MOST_HEADS}); split the heads over more "
                    "devices"
                )
        self._extend = operator("npu_chunk_gated_delta_rule", CHUNKS)
        self._decode = operator("npu_recurrent_gated_delta_rule", RECURRENT)

    def init_forward_metadata(self, batch: ForwardBatch) -> Rows | ExtendPlan:
        """Plan a pass; never syncs, but for the lengths of an extend that the host lacks."""
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            raise UnsupportedError(f"{self.config.name} does not verify drafts on an NPU")
        rows = Rows.of(batch)
        if batch.forward_mode is ForwardMode.DECODE:
            return rows
        lens = batch.query_lens_host
        if lens is None:
            lens = tuple(batch.cu_seqlens_q.diff().tolist())
        device = batch.cu_seqlens_q.device
        nonempty = [row for row, n in enumerate(lens) if n]
        if not nonempty:
            return ExtendPlan(rows, None, None)
        lengths = torch.tensor([n for n in lens if n], dtype=torch.int32, device=device)
        all_nonempty = len(nonempty) == len(lens)
        return ExtendPlan(
            rows, None if all_nonempty else torch.tensor(nonempty, device=device), lengths
        )

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch, metadata: Rows) -> None:
        """Refill the slots of a decode."""
        metadata.refill(batch)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: ExtendPlan, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Gather the states, run all requests that have tokens in one call, write the states."""
        rows, pool = metadata.rows, state.state
        self._refuse(q, k, v, layer, rows, pool)
        states, result = rows.load(pool), v
        if metadata.lengths is not None:
            log_decay, beta = gated(layer, g, beta)
            nonempty = metadata.nonempty
            result, last = self._extend(
                query=_normalised(layer, q),
                key=_normalised(layer, k),
                value=v,
                beta=beta.to(v.dtype),
                # it is documented as an output, too
                initial_state=states if nonempty is None else states.index_select(0, nonempty),
                actual_seq_lengths=metadata.lengths,
                scale=layer.scale,
                g=log_decay,
            )
            states = last if nonempty is None else states.index_copy_(0, nonempty, last)
        rows.store(states, pool)
        return copy_to_out(result, out)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: Rows, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Update each state once; padded rows neither decay theirs nor add to it."""
        rows, pool = metadata, state.state
        self._refuse(q, k, v, layer, rows, pool)
        if not len(q):  # the operator takes no empty tensors
            return copy_to_out(v, out)
        log_decay, beta = gated(layer, g, beta)
        padding = ~rows.valid[:, None]
        in_place = pool.is_contiguous() and rows.fresh is None and not rows.moved
        states = pool if in_place else rows.load(pool)
        result = self._decode(
            query=_normalised(layer, q),
            key=_normalised(layer, k).masked_fill(padding[..., None], 0),
            value=v.masked_fill(padding[..., None], 0),
            state=states,
            beta=beta.to(v.dtype).masked_fill_(padding, 0),
            scale=layer.scale,
            actual_seq_lengths=rows.ones,
            ssm_state_indices=rows.writes if in_place else rows.order,
            num_accepted_tokens=rows.ones,
            g=log_decay.masked_fill(padding, 0),
        )
        if not in_place:
            rows.store(states, pool)
        return copy_to_out(result, out)

    def _refuse(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LinearLayer, rows: Rows, pool: Tensor
    ) -> None:
        """Raise BatchError for other dtypes, and for more rows than the pool has slots."""
        if not q.dtype == k.dtype == v.dtype == torch.bfloat16:
            raise BatchError(
                f"layer {layer.layer_id}: q {q.dtype}, k {k.dtype}, v {v.dtype} (expected "
                f"torch.bfloat16, for which {self.config.name} was created)"
            )
        if len(rows.order) > len(pool):
            raise BatchError(
                f"layer {layer.layer_id}: {len(rows.order)} rows over {len(pool)} state slots: a "
                "padded row needs a slot that no other row writes; create a larger StatePool"
            )


def _each(rows: Tensor) -> Tensor:
    """View a flag per row, bool [B], beside states [B, Hv, V, K]."""
    return rows[:, None, None, None]


def _normalised(layer: LinearLayer, x: Tensor) -> Tensor:
    """Return q or k [T, Hk, K] normalised in float32, in its own dtype, if the layer says so."""
    if layer.qk_norm is None:
        return x
    exact = x.float()
    return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + layer.qk_norm)).to(x.dtype)
