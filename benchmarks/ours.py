"""This project's own backends as contestants, through selection and the backend contract."""

from __future__ import annotations

from typing import get_args

import torch
from attn_core.plugins.registry import Registry
from attn_core.runtime.backend import AttentionBackend, BackendConfig, create_backend
from attn_core.runtime.batch import ForwardMode
from attn_core.runtime.contract_checks import refuse_drafts, refuse_layer
from attn_core.runtime.routes import ROLE_OF_MODE
from attn_core.selection.result import NoBackendError, Overrides
from attn_core.selection.solver import select
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.device import Device, parse_device, probe_device
from attn_core.spec.dual_chunk import DualChunk
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from torch import Tensor

from benchmarks.cases import Case, Inputs, Phase
from benchmarks.contestant import Call, Contestant


def our_backend(
    name: str,
    registry: Registry,
    device: torch.device,
    dual_chunk: DualChunk | None = None,
    *,
    shared_prefix: bool = False,
) -> Contestant:
    """Return one of our backends as a contestant. Raises UnknownBackendError.

    dual_chunk: of the layers of all its inputs. shared_prefix: it reads keys that requests share
    once.
    """
    spec = registry.get(name)
    origin, kind = registry.origins["softmax", spec.name], device_kind(device)

    def refuses(case: Case) -> str:
        try:
            row_of(spec.name, case, registry, kind, dual_chunk)
        except NoBackendError as error:
            return str(error)
        return ""

    def prepare(inputs: Inputs) -> Call:
        batch, layer = inputs.batch, inputs.layer
        backend = prepared_backend(
            spec.name, registry, inputs, device, dual_chunk, shared_prefix=shared_prefix
        )
        metadata = backend.init_forward_metadata(batch)

        def call() -> Tensor:
            out = backend.forward(
                inputs.q, inputs.k, inputs.v, layer, inputs.cache, batch, metadata
            )
            assert isinstance(out, Tensor)  # a pair only where the LSE is asked
            return out

        return call

    return Contestant(
        name=spec.name,
        distribution=origin.distribution,
        module=origin.module.partition(":")[0],
        phases=frozenset(get_args(Phase)),
        prepare=prepare,
        refuses=refuses,
    )


def prepared_backend(
    name: str,
    registry: Registry,
    inputs: Inputs,
    device: torch.device,
    dual_chunk: DualChunk | None = None,
    *,
    shared_prefix: bool = False,
) -> AttentionBackend:
    """Return one of our backends, created for the batch of some inputs; see our_backend."""
    case, batch, layer = inputs.case, inputs.batch, inputs.layer
    spec = registry.get(name)
    config = BackendConfig(
        name=spec.name,
        row=row_of(spec.name, case, registry, device_kind(device), dual_chunk),
        layers=(layer,),
        page_size=case.page_size,
        dtype=case.dtype,
        kv_cache_dtype=case.kv_dtype,
        device=device,
        max_bs=case.batch,
        max_num_tokens=case.tokens,
        max_seq_len=case.longest,
        topk=batch.spec.topk if batch.spec else 0,
        num_draft_tokens=batch.spec.num_draft_tokens if batch.spec else 0,
        shared_prefix=shared_prefix,
    )
    refuse_layer(config, layer)
    refuse_drafts(config, batch)
    return create_backend(spec, config)


def device_kind(device: torch.device) -> Device:
    """Return what selection calls the torch device: this machine's, where its type is that."""
    local = probe_device()
    device_type = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    return local if local.type == device_type else parse_device(device_type)


def needs_of(case: Case, dual_chunk: DualChunk | None = None) -> Requirements:
    """Return what a model with this case's layer, cache and drafts needs."""
    verifies = case.mode is ForwardMode.TARGET_VERIFY
    return Requirements(
        layers=(
            LayerRequirements(
                kind=case.kind,
                head_dim=case.head_dim,
                v_head_dim=case.v_head_dim,
                num_q_heads=case.q_heads,
                num_kv_heads=case.kv_heads,
                dual_chunk=dual_chunk,
            ),
        ),
        dtype=case.dtype,
        kv_cache_dtype=case.kv_dtype,
        page_size=case.page_size,
        speculation=Speculation(topk=2 if case.tree else 1, num_draft_tokens=case.queries or 1)
        if verifies
        else None,
    )


def row_of(
    name: str, case: Case, registry: Registry, device: Device, dual_chunk: DualChunk | None = None
) -> Capabilities:
    """Let the selection choose the row, as a server would. Raises NoBackendError."""
    names = Overrides(attention_backend=name)  # of drafts, which both phases may see
    if case.mode is ForwardMode.DECODE:  # some backends do nothing else
        names = Overrides(decode_attention_backend=name)
    elif case.mode is ForwardMode.EXTEND:  # and some rows nothing but this
        names = Overrides(prefill_attention_backend=name)
    libraries = registry.installed_libraries()
    chosen = select(needs_of(case, dual_chunk), device, registry, libraries, names)
    return chosen.roles[ROLE_OF_MODE[case.mode]].row
