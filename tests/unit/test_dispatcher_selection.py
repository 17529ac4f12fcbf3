"""A selection becomes backends: one for each row of each name."""

import dataclasses

import pytest
from attn_core.cache.pool import KVPool
from attn_core.errors import BackendNotImplementedError, UsageError
from attn_core.plugins.registry import Registry
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.selection.result import Choice, Selection
from attn_core.spec.capabilities import BackendSpec
from attn_core.spec.device import Device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import Requirements, Speculation
from recording import LAYERS, ROW

DECODE_ROW = dataclasses.replace(ROW, priority=2, phases={Phase.DECODE})
ENCODE_ROW = dataclasses.replace(ROW, phases={Phase.ENCODE}, encoder=True)


@pytest.fixture
def registry():
    specs = [
        BackendSpec(
            name=name, capabilities=[ROW, DECODE_ROW, ENCODE_ROW], create="recording:Recorder"
        )
        for name in ("a", "b")
    ]
    return Registry(backends={("softmax", s.name): s for s in specs}, origins={}, broken=())


def selection(prefill="a", decode="b", verify=None, multimodal=None, decode_row=DECODE_ROW):
    roles = {"prefill": Choice(prefill, ROW, ""), "decode": Choice(decode, decode_row, "")}
    if verify:
        roles["verify"] = roles["draft"] = roles["prefill" if verify == prefill else "decode"]
    if multimodal:
        roles["encode"] = Choice(multimodal, ENCODE_ROW, "")
    return Selection(
        requirements=Requirements(dtype="fp32", speculation=Speculation(topk=2)),
        roles=roles,
        page_size=4,
        kv_cache_dtype="fp32",
        device=Device("cpu"),
    )


def from_selection(chosen, registry, **more):
    pool = KVPool(LAYERS, num_pages=3, page_size=4, kv_cache_dtype="fp32")
    return HybridDispatcher.from_selection(chosen, registry, LAYERS, pool, **more)


def test_from_a_selection_each_role_gets_its_backend(registry):
    vision = (dataclasses.replace(LAYERS[0], is_causal=False),)
    d = from_selection(
        selection(verify="a", multimodal="a"), registry, vision_layers=vision, max_bs=7
    )
    assert {r: b.config.name for r, b in d.routes.items()} == {
        "prefill": "a",
        "decode": "b",
        "verify": "a",
        "draft": "a",
        "encode": "a",
    }
    assert d.routes["prefill"] is d.routes["verify"] is d.routes["draft"]
    assert d.routes["encode"] is not d.routes["prefill"]
    config = d.routes["decode"].config
    assert (config.row, config.layers) == (DECODE_ROW, LAYERS)
    assert (config.max_bs, config.topk, config.page_size) == (7, 2, 4)
    assert (config.dtype, config.kv_cache_dtype, config.device.type) == ("fp32", "fp32", "cpu")
    assert d.routes["encode"].config.layers == vision


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_was_asked_of_the_selection_reaches_every_backend(registry, deterministic):
    drafts = Speculation(topk=3, num_draft_tokens=6)
    needs = Requirements(deterministic=deterministic, speculation=drafts)
    chosen = dataclasses.replace(selection(verify="a"), requirements=needs)
    configs = [b.config for b in from_selection(chosen, registry).routes.values()]
    assert {c.deterministic for c in configs} == {deterministic}
    assert {(c.topk, c.num_draft_tokens) for c in configs} == {(3, 6)}


def test_roles_with_the_same_row_of_the_same_backend_share_an_instance(registry):
    same = from_selection(selection("a", "a", decode_row=ROW), registry).routes
    assert same["prefill"] is same["decode"]
    assert "verify" not in same
    split = from_selection(selection("a", "a"), registry).routes
    assert split["prefill"] is not split["decode"]


def test_the_pool_must_be_the_selections(registry):
    pool = KVPool(LAYERS, num_pages=3, page_size=8, kv_cache_dtype="fp32")
    with pytest.raises(UsageError, match=r"the pool is \(8, 'fp32', 'NHD'\), the selection \(4,"):
        HybridDispatcher.from_selection(selection(), registry, LAYERS, pool)


def test_a_declared_backend_says_that_it_is_not_built():
    spec = BackendSpec(name="a", capabilities=[ROW])
    declared = Registry(backends={("softmax", "a"): spec}, origins={}, broken=())
    with pytest.raises(BackendNotImplementedError, match="a is declared"):
        from_selection(selection("a", "a", decode_row=ROW), declared)
