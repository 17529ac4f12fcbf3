"""An engine brings its own pool, and writes K and V itself where it wants to."""

import dataclasses

import pytest
import torch
from attn_core.cache.layer_cache import LayerCache
from attn_core.cache.pool import KVPool
from attn_core.errors import BatchError, UnsupportedError, UsageError
from attn_core.ops.kv import write_kv
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import CacheView, ForwardBatch
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.selection.result import Overrides
from attn_core.selection.solver import select
from attn_core.spec.device import Device
from attn_core.spec.requirements import LayerRequirements, Requirements
from recording import DV, HKV, HQ, LAYERS, TABLE, D, M, make, qkv, recorder

FULL = LAYERS[0]


class OneBlock:
    """The pages of all layers in one tensor, K and V of a page side by side."""

    page_size, kv_cache_dtype, layout = 4, "fp32", "NHD"
    device = torch.device("cpu")

    def __init__(self, layers=1, pages=5):
        self.block = torch.full((pages, layers, self.page_size, HKV, D + DV), torch.nan)

    def layer(self, layer_id):
        k, v = self.block[:, layer_id].split([D, DV], -1)
        return LayerCache(k=k, v=v)


def selection():
    layer = LayerRequirements(
        kind="mha", num_q_heads=HQ, num_kv_heads=HKV, head_dim=D, v_head_dim=DV
    )
    needs = Requirements(layers=(layer,), dtype="fp32", page_size=4)
    named = Overrides(attention_backend="torch_native")
    return select(needs, Device("cpu"), load_plugins(), {}, named)


def extend(writes=True):
    """Two requests, of 5 and 4 tokens, all of them new."""
    lens = {"query_lens": [5, 4], "seq_lens": [5, 4]}
    return ForwardBatch.build(M.EXTEND, **lens, page_table=TABLE, page_size=4, writes=writes)


def served(pool, batch, q, k, v):
    dispatcher = HybridDispatcher.from_selection(selection(), load_plugins(), [FULL], pool)
    return dispatcher.forward(q, k, v, FULL, batch, dispatcher.init_forward_metadata(batch))


@pytest.mark.parametrize("writes", [True, False])
def test_an_engine_s_own_pool_gives_what_ours_gives(writes):
    q, k, v = qkv(9)
    ours = KVPool([FULL], num_pages=5, page_size=4, kv_cache_dtype="fp32")
    want = served(ours, extend(), q, k, v)
    pool, slots = OneBlock(), extend().views["full"].out_cache_loc
    if not writes:
        write_kv(pool.layer(0), k, v, slots)
    assert torch.equal(served(pool, extend(writes), q, k, v), want)
    written = pool.block[:, 0].flatten(0, 1)[slots]
    assert torch.equal(written, torch.cat([k, v], -1))


def test_a_pool_that_is_not_the_selection_s_is_refused():
    pool = OneBlock()
    pool.layout = "HND"
    with pytest.raises(UsageError, match=r"the pool is \(4, 'fp32', 'HND'\)"):
        served(pool, extend(), *qkv(9))


@pytest.mark.parametrize(
    ("row", "form", "why"),
    [
        ({}, {"page_size": 8}, r"8 tokens a page in fp32, decoder was created for 4 in fp32"),
        ({}, {"kv_cache_dtype": "bf16"}, r"4 tokens a page in bf16, .* create both alike"),
        ({}, {"layout": "HND"}, r"layout HND, the chosen row of decoder takes NHD"),
        (
            {"layouts": {"NHD", "HND"}, "page_sizes": {1, 2}},
            {"layout": "HND"},
            r"HND of 4 tokens a page, which decoder would split into its own \(1, 2\)",
        ),
    ],
)
def test_a_pool_that_a_backend_was_not_created_for_is_refused_at_once(row, form, why):
    pool, decodes = OneBlock(layers=len(LAYERS)), recorder("decoder", **row)
    routes = {"prefill": recorder("prefiller", **row), "decode": decodes}
    HybridDispatcher(routes, pool)
    for name, value in form.items():
        setattr(pool, name, value)
    routes["prefill"] = decodes
    with pytest.raises(UnsupportedError, match=why):
        HybridDispatcher(routes, pool)


@pytest.mark.parametrize("fused", [False, True])
def test_without_slots_nothing_is_written_and_k_and_v_are_handed_on(fused):
    dispatcher, pre, _ = make(prefill=recorder("prefiller", fused_kv_write=fused))
    q, k, v = qkv(9)
    for kwargs in ((k, v), (None, None)):
        dispatcher.forward(q, *kwargs, FULL, extend(writes=False), None)
        _, args, _ = pre.calls[-1]
        assert args[1] is kwargs[0]
        assert args[2] is kwargs[1]
    assert not dispatcher.caches.layer(0).k.any()


def test_without_slots_new_keys_are_still_those_of_the_pass():
    dispatcher, pre, _ = make()
    q, k, v = qkv(9)
    for bad in ((k[:8], v), (k, v[:8]), (k[..., :4], v)):
        with pytest.raises(BatchError, match=r"(k|v) is .* \(expected \[9, "):
            dispatcher.forward(q, *bad, FULL, extend(writes=False), None)
    assert not pre.calls


def test_an_encoder_s_tokens_are_as_many_as_they_are():
    cross = dataclasses.replace(FULL, view="cross", is_cross=True)
    view = CacheView.build(
        page_table=TABLE, page_size=4, seq_lens=[5, 3], new_lens=[5, 3], writes=False
    )
    batch = ForwardBatch.build(
        M.EXTEND,
        query_lens=[2, 1],
        seq_lens=[2, 1],
        page_table=TABLE,
        page_size=4,
        views={"cross": view},
        writes=False,
    )
    dispatcher, pre, _ = make(prefill=recorder("prefiller", cross_attention=True))
    (q, _, _), (_, k, v) = qkv(3), qkv(8)
    dispatcher.forward(q, k, v, cross, batch, None)
    assert pre.calls[-1][1][1] is k
    with pytest.raises(BatchError, match=r"v is \[7, "):
        dispatcher.forward(q, k, v[:7], cross, batch, None)
