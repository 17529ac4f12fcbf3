"""Run the passes of a case of linear attention, and compare each with the float64 recurrence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.state_pool import CHUNK_SIZE
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.linear_routes import LinearPart, LinearRoutes
from attn_core.spec.kinds import Role
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import to_device
from attn_core.testing.linear_cases import LinearCase, LinearPass, LinearPoint
from attn_core.testing.linear_inputs import draw, make_batch, make_layers
from attn_core.testing.linear_oracle import delta_rule
from attn_core.testing.linear_states import PoolMemory, make_memory, poison_records
from attn_core.testing.linear_yardstick import Answer, yardstick
from attn_core.testing.oracle import tree_mask
from attn_core.testing.tolerance import Measure, within_budget, worst

Right = tuple[Answer, Answer]  # truth, yardstick


def run_linear_case(bench: Bench, case: LinearCase, point: LinearPoint) -> Measure:
    """Run the passes of a case, each from the states that the one before has left."""
    engine = LinearEngine(bench, case, point)
    return worst([engine.step(pass_) for pass_ in case.passes])


class LinearEngine:
    """A backend's layers over a pool whose memory is NaN, but for states that a pass reads.

    outputs: of each layer in the last pass.
    Raises what creating the backend raises.
    """

    def __init__(self, bench: Bench, case: LinearCase, point: LinearPoint) -> None:
        self.case, self.point, self.device = case, point, bench.torch_device
        self.rng = torch.Generator().manual_seed(1)
        self.layers = make_layers(case, self.rng)  # on the host, for the oracle
        self.on_device = tuple(to_device(x, self.device) for x in self.layers)
        self.memory = make_memory(case, self.layers, point, self.rng, self.device)
        backend = bench.create_linear(
            self.on_device,
            dtype=point.dtype,
            state_dtype=point.state_dtype,
            max_bs=max(len(p.query_lens) for p in case.passes),
            max_num_tokens=max(sum(p.query_lens) for p in case.passes),
            topk=max(p.topk for p in case.passes),
            num_draft_tokens=case.drafts,
        )
        roles: list[Role] = ["linear_prefill", "linear_decode"]
        if case.drafts:
            roles.append("linear_verify")
        self.routes = LinearRoutes(dict.fromkeys(roles, backend), self.memory.pool)
        self.outputs: list[Tensor] = []
        self.padding = 1e4 if bench.row.requires_finite_padding else torch.nan

    def step(self, pass_: LinearPass) -> Measure:
        """Run a pass on new inputs, commit what it says, and compare."""
        tensors, old_memory = self.draw(pass_), self.memory.copy()
        batch = make_batch(pass_, self.device)
        parts = self.routes.plan(batch)
        self.outputs = [self.attend(i, x, batch, parts) for i, x in enumerate(tensors)]
        return self.check(pass_, tensors, self.outputs, old_memory, batch, parts)

    def draw(self, pass_: LinearPass) -> list[list[Tensor]]:
        """Draw the inputs of every layer, on the host."""
        settings = (self.point.dtype, self.rng, self.padding)
        return [draw(self.case, pass_, x, *settings) for x in self.layers]

    def attend(
        self, i: int, tensors: list[Tensor], batch: ForwardBatch, parts: tuple[LinearPart, ...]
    ) -> Tensor:
        """Run a layer of a pass; every other layer is given a tensor full of NaN to fill."""
        layer = self.on_device[i]
        inputs, out = to_device(tuple(tensors), self.device), None
        if i % 2 == 0:
            out = inputs[2].new_full(inputs[2].shape, torch.nan)
        q, k, v, g, beta = inputs
        return self.routes.forward(q, k, v, g, beta, layer, batch, parts, out)

    def check(
        self,
        pass_: LinearPass,
        tensors: Sequence[Sequence[Tensor]],
        outs: Sequence[Tensor],
        old_memory: PoolMemory,
        batch: ForwardBatch,
        parts: tuple[LinearPart, ...],
    ) -> Measure:
        """Compare outputs and memory after a pass with what is right for the states before it.

        A verify pass must leave the states alone; then it is committed, with NaN in whatever was
        not accepted.
        """
        name, reference = pass_.mode.value, self.answers(pass_, tensors, old_memory)
        measures = [Measure(), *self._outputs(pass_, outs, reference)]
        slots = [s for s in pass_.writes if s >= 0]
        if not pass_.drafts:
            saved = [s for s in pass_.checkpoint_slots or () if s >= 0]
            self.memory.require_kept(old_memory, name, states=[*slots, *saved])
            return worst([*measures, *self._states(pass_, reference)])
        self.memory.require_kept(old_memory, name, states=(), records=slots)
        if pass_.accepted is not None:
            self._reject(pass_)
            old_memory = self.memory.copy()
            accepted = torch.tensor(pass_.accepted, dtype=torch.int32, device=self.device)
            self.routes.commit(batch, parts, accepted)
            pairs = zip(pass_.writes, pass_.accepted, strict=True)
            committed = [s for s, draft in pairs if s >= 0 and draft >= 0]
            self.memory.require_kept(old_memory, "commit", states=committed, records=slots)
            measures += self._states(pass_, reference)
        for slot in slots:  # no later pass has anything to do with these drafts
            poison_records(self.memory.pool, slot, range(self.memory.pool.num_drafts))
        return worst(measures)

    def _reject(self, pass_: LinearPass) -> None:
        """Write NaN into the records of the drafts that are not accepted."""
        assert pass_.accepted is not None
        chain = tuple(range(-1, pass_.drafts - 1))
        for r, (slot, draft) in enumerate(zip(pass_.writes, pass_.accepted, strict=True)):
            visible = tree_mask(pass_.parents(r) or chain)
            path = visible[draft].tolist() if draft >= 0 else [False] * pass_.drafts
            if slot >= 0:
                rejected = [i for i, on_path in enumerate(path) if not on_path]
                poison_records(self.memory.pool, slot, rejected)

    def answers(
        self, pass_: LinearPass, tensors: Sequence[Sequence[Tensor]], old_memory: PoolMemory
    ) -> list[list[Right | None]]:
        """Return what is right per layer and request, None for padding."""
        dtype, results = TORCH_DTYPES[self.point.dtype], []
        for i, layer in enumerate(self.layers):
            states, first = old_memory.pool.states.state[i], 0
            per_request: list[Right | None] = []
            for r, n in enumerate(pass_.query_lens):
                q, k, v, g, beta = inputs = [x[first : first + n] for x in tensors[i]]
                first += n
                if pass_.slots[r] < 0:
                    per_request.append(None)
                    continue
                start = states[pass_.slots[r]].cpu()
                start = torch.zeros_like(start) if r in pass_.fresh else start
                parents = pass_.parents(r)
                out, states_after = delta_rule(q, k, v, g, beta, layer, start, parents)
                tokens = {t for t, _ in _stored(pass_, r)}
                truth = out, {t: states_after[t] if n else start.double() for t in tokens}
                per_request.append((truth, yardstick(inputs, layer, start, dtype, parents, truth)))
            results.append(per_request)
        return results

    def _outputs(
        self, pass_: LinearPass, outs: Sequence[Tensor], reference: Sequence[Sequence[Right | None]]
    ) -> list[Measure]:
        """Compare the outputs of each layer, but for those of padding."""
        dtype, measures = TORCH_DTYPES[self.point.dtype], []
        for layer, out, layer_answers in zip(self.layers, outs, reference, strict=True):
            pairs = zip(torch.split(out, [*pass_.query_lens]), layer_answers, strict=True)
            present = [(x, *answer) for x, answer in pairs if answer is not None]
            if present:
                actual = torch.cat([x for x, _, _ in present])
                truth, baseline = (torch.cat([x[i][0] for x in present]) for i in (1, 2))
                name = f"{pass_.mode.value}, layer {layer.layer_id}: output"
                measures.append(within_budget(name, actual, truth, baseline, dtype))
        return measures

    def _states(
        self, pass_: LinearPass, reference: Sequence[Sequence[Right | None]]
    ) -> list[Measure]:
        """Compare the states that the requests of a layer have written, and the checkpoints."""
        store, measures = TORCH_DTYPES[self.point.state_dtype], []
        for i, layer in enumerate(self.layers):
            places, truths, baselines = list[int](), list[Tensor](), list[Tensor]()
            for r, answer in enumerate(reference[i]):
                if answer is not None:
                    (_, states), (_, near_after) = answer
                    for token, slot in _stored(pass_, r):
                        places.append(slot)
                        truths.append(states[token])
                        baselines.append(near_after[token])
            if places:
                name = f"{pass_.mode.value}, layer {layer.layer_id}: states in slots {places}"
                actual = self.memory.pool.states.state[i, places]
                truth, baseline = torch.stack(truths), torch.stack(baselines)
                measures.append(within_budget(name, actual, truth, baseline, store))
        return measures


def _stored(pass_: LinearPass, request: int) -> list[tuple[int, int]]:
    """List the (token, slot) after which a request's state is stored; -1 is before its tokens."""
    n, slot = pass_.query_lens[request], pass_.writes[request]
    if pass_.drafts:
        accepted = -1 if pass_.accepted is None else pass_.accepted[request]
        return [(accepted, slot)] if accepted >= 0 else []
    stored = [(n - 1, slot)]
    if pass_.checkpoint_slots is not None:
        chunks = [-(-m // CHUNK_SIZE) for m in pass_.query_lens[: request + 1]]
        slots = pass_.checkpoint_slots[sum(chunks[:-1]) : sum(chunks)]
        stored += [(min((c + 1) * CHUNK_SIZE, n) - 1, s) for c, s in enumerate(slots)]
    return [(token, slot) for token, slot in stored if slot >= 0]
