"""What `attn tune` measures without a model: layers of common models; torch-free."""

from __future__ import annotations

import itertools
from dataclasses import replace

from attn_core.costs.shapes import Form, Pass
from attn_core.costs.workload import Workload
from attn_core.errors import UsageError
from attn_core.measure.candidates import Job, jobs
from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.registry import Registry
from attn_core.selection.result import Overrides
from attn_core.spec.device import Device
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation

LAYER = LayerRequirements(num_q_heads=32, num_kv_heads=8, head_dim=128)  # many of 7 to 9 B
# gpt-oss: every second layer has a window
_SINKS = LayerRequirements(num_q_heads=64, num_kv_heads=8, head_dim=64, sinks=True)
_LATENT = LayerRequirements(kind="mla", num_kv_heads=1, head_dim=576, v_head_dim=512)
_CHAIN, _TREE = Speculation(num_draft_tokens=4), Speculation(topk=4, num_draft_tokens=8)
_EIGHT = Requirements(layers=(LAYER,))
_FEW_HEADS = Requirements(layers=(replace(_LATENT, num_q_heads=16),))  # DeepSeek-V2-Lite, V3 on 8
_MANY_HEADS = Requirements(layers=(replace(_LATENT, num_q_heads=128),))  # DeepSeek-V3 on one
USUAL = (
    replace(_EIGHT, speculation=_CHAIN),  # prompts, decode and verification
    _FEW_HEADS,
    replace(_EIGHT, kv_cache_dtype="fp8_e4m3"),
    replace(_EIGHT, speculation=_TREE),
    _MANY_HEADS,
    Requirements(layers=(_SINKS, replace(_SINKS, sliding_window=128))),
    replace(_FEW_HEADS, speculation=_CHAIN),
    Requirements(layers=(LayerRequirements(num_q_heads=28, num_kv_heads=4, head_dim=128),)),
    replace(_MANY_HEADS, speculation=_CHAIN),
    Requirements(layers=(LayerRequirements(num_q_heads=8, num_kv_heads=4, head_dim=256),)),
    Requirements(layers=(LayerRequirements(num_q_heads=16, num_kv_heads=2, head_dim=128),)),
    Requirements(layers=(LayerRequirements(num_q_heads=16, num_kv_heads=16, head_dim=64),)),
)
POINTS = 48  # passes of a form and phase: one profile is to ship, and to be read at every start


def usual_jobs(
    device: Device,
    registry: Registry,
    libraries: Libraries,
    overrides: Overrides,
    workload: Workload,
    *,
    grid: bool = True,
) -> list[Job]:
    """List what is worth measuring for each of USUAL, in turns, the most useful first.

    Raises UsageError where no backend takes any of them.
    """
    series = []
    for needs in USUAL:
        listed = jobs(needs, device, registry, libraries, overrides, workload, grid=grid)
        series.append(list(_thinned(listed)))
    turns = itertools.chain.from_iterable(itertools.zip_longest(*series))
    by_key = {(job.form, job.size): job for job in turns if job is not None}
    if not by_key:
        raise UsageError("nothing to tune: no backend here takes a usual layer; name a model")
    return list(by_key.values())


def _thinned(listed: list[Job]) -> list[Job]:
    """Return the first POINTS passes of each form and kind of pass; any first part is even."""
    count: dict[tuple[Form, Pass], int] = {}
    thinned = []
    for job in listed:
        size = job.size
        kind = (job.form, replace(size, requests=1, kv_tokens=1, longest=1, queries=1))
        count[kind] = count.get(kind, 0) + 1
        if count[kind] <= POINTS:
            thinned.append(job)
    return thinned
