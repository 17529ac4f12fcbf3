"""Create a backend, plan one pass, check its first output."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attn_core.measure.candidates import Candidate
from attn_core.measure.inputs import Inputs
from attn_core.measure.spent import Spent
from attn_core.runtime.backend import BackendConfig, Metadata, create_backend
from attn_core.runtime.contract_checks import refuse_drafts, refuse_layer


class Prepared(NamedTuple):
    """A pass of a backend: its attention over one layer, and its plan."""

    call: Callable[[], Tensor]
    plan: Callable[[], object]


def checked(candidate: Candidate, inputs: Inputs, arch: str | None, spent: Spent) -> Prepared:
    """Prepare a pass, call it once and return it. Raises CheckFailed where it is wrong."""
    name, device = candidate.spec.name, inputs.pool.device
    prepared = prepare(candidate, inputs, arch, spent)

    def first() -> Tensor:
        inputs.poison()
        out = prepared.call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return out

    out = spent.settled(name, "first call", first)
    with spent.on(name, "check"):
        inputs.check(out, rounds=candidate.rounds(inputs.form))
    return prepared


def prepare(candidate: Candidate, inputs: Inputs, arch: str | None, spent: Spent) -> Prepared:
    """Create a backend, plan the pass, and return both calls. Raises what the backend raises."""
    form, size, batch, layer = inputs.form, inputs.size, inputs.batch, inputs.layer
    config = BackendConfig(
        name=candidate.spec.name,
        row=candidate.row,
        layers=(layer,),
        page_size=inputs.pool.page_size,
        dtype=form.dtype,
        kv_cache_dtype=form.store,
        device=inputs.pool.device,
        arch=arch,
        max_bs=size.requests,
        max_num_tokens=size.queries,
        max_seq_len=size.longest,
        topk=batch.spec.topk if batch.spec else 0,
        num_draft_tokens=size.drafts,
        deterministic=form.deterministic,
    )
    refuse_layer(config, layer)
    refuse_drafts(config, batch)
    spec = candidate.spec
    backend = spent.settled(spec.name, "create", lambda: create_backend(spec, config))

    def plan() -> Metadata:
        return backend.init_forward_metadata(batch)

    metadata = spent.settled(spec.name, "plan", plan)

    def call() -> Tensor:
        out = backend.forward(inputs.q, inputs.k, inputs.v, layer, inputs.cache, batch, metadata)
        return out if isinstance(out, Tensor) else out[0]

    return Prepared(call, plan)
