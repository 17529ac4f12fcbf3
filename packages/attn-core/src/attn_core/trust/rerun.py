"""Choose the row of a backend for a call, create it as the dispatcher would, and run the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import AttnError, BackendRunError, UnsupportedError
from attn_core.plugins.registry import Registry
from attn_core.runtime.batch import DECODE_MODES, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.selection.compatibility import mismatches
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device, probe_device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from attn_core.testing.harness import Bench
from attn_core.testing.runner import torch_device
from attn_core.trust.judge import Answer
from attn_core.trust.reproducer import Reproducer, Setting

DRAFTS = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE, ForwardMode.DRAFT_EXTEND)


def device_of(on: torch.device) -> Device:
    """Return this machine's device of a torch type; its CPU always counts as one."""
    device = probe_device()
    return device if torch_device(device).type == on.type else Device(on.type)


def fitting_row(
    spec: BackendSpec,
    registry: Registry,
    setting: Setting,
    layers: Sequence[AttentionLayer],
    *,
    page_size: int,
    layout: str,
    phases: Sequence[Phase],
    topk: int,
    device: Device,
) -> Capabilities:
    """Return the first row that runs these layers here, in all phases.

    topk: of the drafts that it verifies, 0 = none. Raises UnsupportedError, which says what the
    nearest row lacks.
    """
    drafts = max(1, setting.limits.get("num_draft_tokens", 1))
    needs = Requirements(
        layers=tuple(LayerRequirements.of(layer, setting.kind) for layer in layers),
        dtype=setting.dtype,
        kv_cache_dtype=setting.kv_cache_dtype,
        page_size=page_size,
        speculation=Speculation(topk=topk, num_draft_tokens=drafts) if topk else None,
    )
    libraries = registry.installed_libraries()
    gaps: list[list[str]] = []
    for row in spec.capabilities:
        if row.kind != setting.kind or spec.creator(row) is None:
            continue
        extra_layers = (LayerRequirements(kind="gdn"),) if row.with_linear_layers else ()
        requirements = dataclasses.replace(needs, layers=(*needs.layers, *extra_layers))
        row_mismatches = [
            str(mismatch)
            for phase in phases
            for mismatch in mismatches(
                row, requirements, device, libraries, phase, speculates=topk > 0
            )
        ]
        if layout not in row.layouts:
            row_mismatches.append(f"layout {layout} (supports {', '.join(sorted(row.layouts))})")
        if not row.absorbed:
            row_mismatches.append("a pass over the latent cache (absorbed: not supported)")
        if not row_mismatches:
            return row
        gaps.append(list(dict.fromkeys(row_mismatches)))
    if not gaps:
        raise UnsupportedError(f"{spec.name} has no rows of kind {setting.kind} that can be run")
    nearest: list[str] = min(gaps, key=len)
    raise UnsupportedError(f"{spec.name} cannot run this: {'; '.join(nearest)}")


def bench_for(r: Reproducer, name: str, registry: Registry, device: Device) -> Bench:
    """Return a named backend on a device, by the first row that takes this call.

    Raises UnknownBackendError and UnsupportedError.
    """
    spec, drafts = registry.get(name), r.mode in DRAFTS
    phases = (Phase.DECODE,) if r.mode in DECODE_MODES else (Phase.PREFILL,)
    options = ((Phase.PREFILL,), (Phase.DECODE,)) if drafts else (phases,)
    errors: list[UnsupportedError] = []
    for phases in options:
        try:
            row = fitting_row(
                spec,
                registry,
                r.setting,
                (r.layer, *r.others),
                page_size=r.cache.page_size,
                layout=r.cache.layout,
                phases=phases,
                topk=max(1, r.spec.topk if r.spec else 1) if drafts else 0,
                device=device,
            )
        except UnsupportedError as error:
            errors.append(error)
        else:
            return Bench(
                spec=spec,
                row=row,
                torch_device=torch_device(device),
                arch=device.arch,
                deterministic=r.setting.deterministic,
                shared_prefix=r.setting.shared_prefix,
            )
    raise errors[0]


def rerun(r: Reproducer, bench: Bench) -> Answer:
    """Run the call on a backend, over a copy of its pages; the answer lies on the host.

    Raises an AttnError; what the backend itself raises is a BackendRunError.
    """
    device, limits = bench.torch_device, r.setting.limits
    layer, other_layers = _on(r.layer, device), [_on(x, device) for x in r.others]
    try:
        with torch.no_grad():
            backend = bench.create(
                (layer, *other_layers),
                dtype=r.setting.dtype,
                page_size=r.cache.page_size,
                kv_dtype=r.setting.kv_cache_dtype,
                **{name: limits.get(name, 0) for name in limits},
            )
            batch = r.batch(device)
            metadata = backend.init_forward_metadata(batch)
            output = backend.forward(
                r.q.to(device),
                None if r.k is None else r.k.to(device),
                None if r.v is None else r.v.to(device),
                layer,
                _copied(r.cache, device),
                batch,
                metadata,
                return_lse=r.lse and bench.row.lse,
            )
        out, lse = output if isinstance(output, tuple) else (output, None)
        result = Answer(
            out.cpu(), None if lse is None else lse.cpu(), bench.rounds(r.setting.kv_cache_dtype)
        )
    except AttnError:
        raise
    except Exception as error:  # a plugin's code: whatever it raises is the finding
        message = f"{type(error).__name__}: {error}"
        raise BackendRunError(f"{bench.spec.name} failed: {message}") from error
    if result.out.shape != (len(r.q), r.layer.num_q_heads, r.layer.v_head_dim):
        raise BackendRunError(f"{bench.spec.name} returned {list(result.out.shape)}")
    return result


def _on(layer: AttentionLayer, device: torch.device) -> AttentionLayer:
    if layer.sinks is None:
        return layer
    return dataclasses.replace(layer, sinks=layer.sinks.to(device))


def _copied(cache: LayerCache, device: torch.device) -> LayerCache:
    def moved(x: object) -> object:
        return x.to(device, copy=True) if isinstance(x, Tensor) else x

    blocks = cache.block_scales
    parts = {name: moved(getattr(cache, name)) for name in ("k", "v", "k_scale", "v_scale")}
    if blocks is not None:
        parts["block_scales"] = (moved(blocks[0]), moved(blocks[1]))
    return dataclasses.replace(cache, **parts)  # type: ignore[arg-type]  # names are fields
