"""Route the passes of linear layers to their backends, over one pool of states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from attn_core.cache.state_pool import StatePool
from attn_core.errors import AttnError, BatchError, UnsupportedError, UsageError
from attn_core.runtime.backend import LinearAttentionBackend, Metadata
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.contract_checks import refuse_capture, refuse_drafts
from attn_core.runtime.linear import LinearLayer
from attn_core.runtime.linear_checks import (
    check_linear,
    check_plan_values,
    check_values,
    refuse_linear_layer,
    refuse_linear_output,
    refuse_slots,
    refuse_states,
)
from attn_core.runtime.operands import fillable, readable, refuse_gradients, returned
from attn_core.runtime.routes import distinct
from attn_core.runtime.run_errors import backend_errors, run_error
from attn_core.spec.kinds import Role

_Run = Callable[..., Tensor]
LINEAR_ROLE_OF_MODE: Mapping[ForwardMode, Role] = {
    ForwardMode.EXTEND: "linear_prefill",
    ForwardMode.MIXED: "linear_prefill",
    ForwardMode.DECODE: "linear_decode",
    ForwardMode.TARGET_VERIFY: "linear_verify",
}


class HybridMetadata(NamedTuple):
    """The plan of a pass of a model with linear layers: of its softmax layers, and of these."""

    softmax: Metadata
    linear: tuple[LinearPart, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LinearPart:
    """Requests of a pass that one backend runs: all of them, or a mixed pass's decode rows.

    tokens: where theirs begin and end.
    """

    backend: LinearAttentionBackend
    run: _Run
    batch: ForwardBatch
    metadata: Metadata
    tokens: tuple[int, int]


class LinearRoutes:
    """The backends of a model's linear layers and the pool that they share.

    routes: role → backend; "linear_prefill" and "linear_decode" are required.
    check_values: also check the values of every call, for debugging; it waits for the device. On a
    CPU slots and trees of drafts are always checked.
    Raises UsageError and UnsupportedError for a pool or a layer that a backend cannot run on.
    """

    def __init__(
        self,
        routes: Mapping[Role, LinearAttentionBackend],
        states: StatePool,
        *,
        check_values: bool = False,
    ) -> None:
        for role in ("linear_prefill", "linear_decode"):
            if role not in routes:
                raise UsageError(f"no backend for {role!r} (routes: {sorted(routes)})")
        self.routes, self.states, self.check_values = dict(routes), states, check_values
        self._checked: set[tuple[ForwardMode, int]] = set()  # as the dispatcher's
        for role, backend in self.routes.items():
            for layer in backend.config.linear_layers:
                refuse_linear_layer(backend.config, layer)
                refuse_states(backend.config, layer, states, verifies=role == "linear_verify")

    def backend(self, mode: ForwardMode) -> LinearAttentionBackend:
        """Return the backend of a mode. Raises UnsupportedError if there is none."""
        role = LINEAR_ROLE_OF_MODE.get(mode)
        if role is None:
            raise UnsupportedError(
                f"{mode.value}: linear layers of a draft model do not run, for nothing takes their "
                "states back; draft with a model that has softmax attention alone"
            )
        if role not in self.routes:
            raise UnsupportedError(
                f"no backend for {role}: selected without speculation; select again with "
                "--speculative-eagle-topk"
            )
        return self.routes[role]

    @property
    def captured(self) -> tuple[LinearAttentionBackend, ...]:
        """The backends whose passes are captured in CUDA graphs: of decode and verify."""
        roles: tuple[Role, ...] = ("linear_decode", "linear_verify")
        backends = [self.routes[role] for role in roles if role in self.routes]
        return distinct(x for x in backends if x.config.row.cuda_graph != "never")

    def captured_slots(self, mode: ForwardMode) -> tuple[str, ...]:
        """Return the fields of a batch with slots that a captured pass of a mode reads."""
        if mode not in LINEAR_ROLE_OF_MODE:
            return ()
        separate = self.backend(mode).config.row.separate_write_slots
        return ("state_slots", *["state_slots_out"] * separate, "state_fresh")

    def plan(self, batch: ForwardBatch) -> tuple[LinearPart, ...]:
        """Plan a pass, decode rows in front of a mixed pass on their own; nothing for drafts."""
        if batch.forward_mode not in LINEAR_ROLE_OF_MODE:
            return ()
        self._refuse(batch, values=batch.state_slots is not None and batch.state_slots.is_cpu)
        return tuple(
            self._part(part, first, "init_forward_metadata") for part, first in _split(batch)
        )

    def capture(self, batch: ForwardBatch) -> tuple[LinearPart, ...]:
        """Plan a pass into static buffers. Raises UnsupportedError beyond the row's level."""
        if batch.forward_mode not in LINEAR_ROLE_OF_MODE:
            return ()
        self._refuse(batch)
        refuse_capture(self.backend(batch.forward_mode).config, batch)
        return (self._part(batch, 0, "init_forward_metadata_capture_cuda_graph"),)

    def replay(self, batch: ForwardBatch, parts: tuple[LinearPart, ...]) -> None:
        """Refill the static buffers of a captured pass."""
        for part in parts:
            name = "init_forward_metadata_replay_cuda_graph"
            with backend_errors(part.backend.config, name, batch):
                part.backend.init_forward_metadata_replay_cuda_graph(batch, part.metadata)

    def _refuse(self, batch: ForwardBatch, *, values: bool = False) -> None:
        """values: check them also where no one asked for it. A captured pass may hold dummies."""
        if batch.state_slots is None:
            raise BatchError(
                f"{batch.forward_mode.value} without state_slots: the model has linear layers"
            )
        config = self.backend(batch.forward_mode).config
        refuse_drafts(config, batch)
        refuse_slots(config, batch)
        verifies = batch.forward_mode is ForwardMode.TARGET_VERIFY
        drafts = batch.spec.num_draft_tokens if verifies and batch.spec is not None else 0
        if drafts > self.states.num_drafts:
            raise UsageError(
                f"{drafts} drafts for a pool of {self.states.num_drafts}; create the StatePool "
                f"with num_drafts={drafts}"
            )
        if values or self.check_values:
            check_plan_values(batch, self.states)

    def _part(self, batch: ForwardBatch, first: int, plan: str) -> LinearPart:
        mode = batch.forward_mode
        backend = self.backend(mode)
        run: _Run = backend.extend
        if mode is ForwardMode.DECODE:
            run = backend.decode
        elif mode is ForwardMode.TARGET_VERIFY:
            run = backend.verify
        with backend_errors(backend.config, plan, batch):
            metadata = getattr(backend, plan)(batch)
        return LinearPart(backend, run, batch, metadata, (first, first + batch.num_tokens))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        layer: LinearLayer,
        batch: ForwardBatch,
        parts: tuple[LinearPart, ...],
        out: Tensor | None,
    ) -> Tensor:
        """Run a layer of a planned pass, as HybridDispatcher.forward_linear."""
        if not parts:
            self.backend(batch.forward_mode)  # says why
        check_linear(q, k, v, g, beta, layer, batch, out)
        if out is not None:
            refuse_gradients(out, q)
        if self.check_values:
            check_values(k, g, beta, layer)
        state, dense = self.states.layer(layer.layer_id), fillable(out)
        inputs = [readable(x) for x in (q, k, v, g, beta)]
        if len(parts) > 1 and dense is None:
            dense = q.new_empty(q.shape[0], layer.num_v_heads, layer.head_v_dim)
        result = dense
        for part in parts:
            part_inputs, part_out = inputs, dense
            if len(parts) > 1:
                first, last = part.tokens
                part_inputs = [x[first:last] for x in inputs]
                part_out = None if dense is None else dense[first:last]
            try:
                result = part.run(
                    *part_inputs, layer, state, part.batch, part.metadata, out=part_out
                )
            except AttnError:
                raise
            except Exception as error:  # a plugin's code: keep its error, name its owner
                raise run_error(
                    part.backend.config, part.run.__name__, error, batch, layer
                ) from error
            if (part.batch.forward_mode, layer.layer_id) not in self._checked:
                refuse_linear_output(part.backend.config, result, part_inputs[0], layer, part_out)
                self._checked.add((part.batch.forward_mode, layer.layer_id))
        if len(parts) > 1:
            result = dense
        assert result is not None
        trained = q.requires_grad or k.requires_grad or v.requires_grad
        if out is dense and not (trained or g.requires_grad or beta.requires_grad):
            return result
        return cast(Tensor, returned(result, out, dense, q, k, v, g, beta))

    def commit(self, batch: ForwardBatch, parts: tuple[LinearPart, ...], accepted: Tensor) -> None:
        """Take in accepted drafts, as HybridDispatcher.commit."""
        if batch.forward_mode is not ForwardMode.TARGET_VERIFY:
            raise UsageError(
                f"commit of {batch.forward_mode.value} (only target_verify leaves drafts)"
            )
        size = (batch.batch_size,)
        if accepted.dtype not in (torch.int32, torch.int64) or accepted.shape != size:
            raise BatchError(
                f"accepted is {accepted.dtype} {list(accepted.shape)} (expected int32 or int64 "
                f"{list(size)}: the last accepted draft of each request, -1 = none)"
            )
        accepted = accepted.contiguous()  # a column of the accepted paths, often
        for part in parts:
            with backend_errors(part.backend.config, "commit", batch):
                part.backend.commit(self.states, part.batch, part.metadata, accepted)


def _split(batch: ForwardBatch) -> Iterable[tuple[ForwardBatch, int]]:
    """Yield the batches that a pass is run as, and the first token of each.

    The requests of one token at the start of a mixed pass are decoded. Without requests or lengths
    on the host, and with checkpoints, which decode does not write, the pass is run as one extend.
    """
    lens = batch.query_lens_host
    mixed = batch.forward_mode is ForwardMode.MIXED
    if not mixed or not lens or batch.checkpoint_slots is not None:
        return [(batch, 0)]
    decodes = next((i for i, n in enumerate(lens) if n != 1), len(lens))
    cuts = ((ForwardMode.DECODE, 0, decodes), (ForwardMode.EXTEND, decodes, len(lens)))
    return [
        (_requests(batch, lens, mode, first, last), first)
        for mode, first, last in cuts
        if last > first
    ]


def _requests(
    batch: ForwardBatch, lens: tuple[int, ...], mode: ForwardMode, first: int, last: int
) -> ForwardBatch:
    """Return the requests first … last of a batch whose first `first` requests have one token."""

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[first:last]

    tokens = sum(lens[first:last])
    return replace(
        batch,
        forward_mode=mode,
        cu_seqlens_q=batch.cu_seqlens_q[first : last + 1] - first,
        positions=batch.positions[first : first + tokens],
        max_q_len=max(lens[first:last]),
        views={},
        state_slots=cut(batch.state_slots),
        state_slots_out=cut(batch.state_slots_out),
        state_fresh=cut(batch.state_fresh),
        query_lens_host=lens[first:last],
    )
