"""What `attn tune` measures where no model is named: layers of common models."""

from collections import Counter
from dataclasses import replace

import pytest
from attn_core.cli.measurement import unnamed
from attn_core.costs.workload import Workload
from attn_core.errors import UsageError
from attn_core.measure.usual import LAYER, POINTS, USUAL, usual_jobs
from attn_core.plugins.dependencies import alternatives
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.result import Overrides
from attn_core.spec.device import parse_device
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation

HERE = parse_device("h100", "13.0")
NAMES = ("fa3", "flashinfer", "flashmla", "triton")


def listed(registry, **options):
    libraries = {w.name: None for group in registry.requires() for w in alternatives(group)}
    overrides = Overrides(allow=NAMES)
    return usual_jobs(HERE, registry, libraries, overrides, Workload(), **options)


def test_every_usual_layer_is_measured_in_turns_and_none_too_often():
    todo = listed(load_plugins())
    assert len({(job.form, job.size) for job in todo}) == len(todo)
    kinds = Counter((j.form, j.size.phase, j.size.drafts, j.size.tree) for j in todo)
    assert max(kinds.values()) == POINTS
    layers = {(x.kind, x.num_q_heads, x.head_dim) for needs in USUAL for x in needs.layers}
    assert {(f.kind, f.q_heads, f.head_dim) for f, *_ in kinds} == layers
    assert {(drafts, tree) for _, _, drafts, tree in kinds} == {(0, False), (4, False), (8, True)}
    assert {form.store for form, *_ in kinds} == {"bf16", "fp8_e4m3"}
    early = {(j.form.kind, j.form.q_heads) for j in todo[: 2 * len(USUAL)]}
    assert early == {(kind, heads) for kind, heads, _ in layers}
    assert {c.spec.name for j in todo for c in j.candidates} == set(NAMES)


def test_without_a_grid_the_workloads_passes_are_left():
    quick = listed(load_plugins(), grid=False)
    assert {job.size.kv_tokens for job in quick if job.size.phase == "prefill"} == {
        1024, 4096, 16384,
    }  # fmt: skip


def test_where_nothing_runs_that_is_said():
    with pytest.raises(UsageError, match="no backend here takes a usual layer"):
        listed(Registry(backends={}))


def test_what_is_named_is_measured_alone():
    plain = Requirements(layers=(LAYER,), assumptions=("none",))
    assert unnamed(plain)
    for named in (
        {"layers": (LayerRequirements(num_q_heads=8, num_kv_heads=8, head_dim=64),)},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"page_size": 16},
        {"speculation": Speculation()},
        {"dtype": "fp16"},
    ):
        assert not unnamed(replace(plain, **named))
