"""A compiled model attends through the dispatcher, each layer one operator of its graph."""

import gc
import shutil

import pytest
import recording
import torch
from attn_core.cache.pool import KVPool
from attn_core.errors import BatchError, UsageError
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.torch_ops import CompiledAttention, attention, write_kv
from attn_core.selection.result import Overrides
from attn_core.selection.solver import select
from attn_core.spec.device import Device
from attn_core.spec.requirements import LayerRequirements, Requirements
from recording import DV, HKV, HQ, LAYERS, TABLE, D, M, qkv, recorder

LAYER = LAYERS[0]


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch.compiler.reset()


def make():
    layer = LayerRequirements(
        kind="mha", num_q_heads=HQ, num_kv_heads=HKV, head_dim=D, v_head_dim=DV
    )
    needs = Requirements(layers=(layer,), dtype="fp32", page_size=4)
    registry, named = load_plugins(), Overrides(attention_backend="torch_native")
    chosen = select(needs, Device("cpu"), registry, {}, named)
    pool = KVPool([LAYER], num_pages=5, page_size=4, kv_cache_dtype="fp32")
    dispatcher = HybridDispatcher.from_selection(chosen, registry, [LAYER], pool)
    return CompiledAttention(dispatcher, [LAYER])


def batch(mode, new, lens):
    return ForwardBatch.build(mode, query_lens=new, seq_lens=lens, page_table=TABLE, page_size=4)


PASSES = [(M.EXTEND, [5, 2], [5, 2]), (M.DECODE, [1, 1], [6, 3]), (M.DECODE, [1, 1], [7, 4])]


def passes(attend, model):
    """Run a prefill and two decodes; return their outputs and what the cache holds then."""
    outs = []
    for mode, new, lens in PASSES:
        with attend.planned(batch(mode, new, lens)):
            outs.append(model(*qkv(sum(new))))
    cache = attend.dispatcher.caches.layer(0)
    return [*outs, cache.k.clone(), cache.v.clone()]


INDUCTOR = pytest.param(
    "inductor",
    marks=pytest.mark.skipif(
        shutil.which("g++") is None, reason="inductor needs a C++ compiler (g++) on a CPU"
    ),
)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_a_compiled_layer_gives_what_it_gives_uncompiled(backend):
    def model_of(attend):
        return lambda q, k, v: attend(q * 2, k + 1, v, LAYER) + 1

    eager = make()
    want = passes(eager, model_of(eager))
    attend = make()
    model = torch.compile(model_of(attend), backend=backend, fullgraph=True, dynamic=True)
    got = passes(attend, model)
    assert want[-1].any()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_one_graph_serves_all_passes():
    graphs = []

    def kept(graph, inputs):
        graphs.append(graph)
        return graph.forward

    attend = make()
    model = torch.compile(
        lambda q, k, v: attend(q, k, v, LAYER), backend=kept, fullgraph=True, dynamic=True
    )
    passes(attend, model)
    [graph] = graphs
    targets = [str(node.target) for node in graph.graph.nodes]
    assert targets.count("attn_core.attention") == 1
    assert targets.count("attn_core.write_kv") == 1
    assert targets.index("attn_core.write_kv") < targets.index("attn_core.attention")


def test_the_operator_keeps_torch_s_rules():
    attend = make()
    q, k, v = qkv(7)
    out = torch.empty(7, HQ, DV)
    with attend.planned(batch(*PASSES[0])):
        torch.library.opcheck(attention, (out, q, k, v, attend._number, 0))
        torch.library.opcheck(write_kv, (k, v, attend._number, 0))


def test_the_write_is_done_once_and_before_attention():
    attend = make()
    q, k, v = qkv(7)
    out = torch.empty(7, HQ, DV)
    with attend.planned(batch(*PASSES[0])):
        write_kv(k, v, attend._number, 0)
        cache = attend.dispatcher.caches.layer(0)
        held = cache.k.clone()
        assert held.any()
        attention(out, q, k + 1, v, attend._number, 0)
        assert torch.equal(cache.k, held), "the new K/V were written already"


def test_a_row_that_writes_itself_is_left_to_it():
    fused = recorder("fused", fused_kv_write=True)
    dispatcher, *_ = recording.make(prefill=fused)
    attend = CompiledAttention(dispatcher, LAYERS)
    q, k, v = qkv(4)
    with attend.planned(recording.batch(M.EXTEND)):
        attend(q, k, v, LAYER)
    assert not dispatcher.caches.layer(0).k.any()
    _, (*_, planned, _), _ = fused.calls[-1]
    assert planned.views["full"].out_cache_loc is not None, "where it writes to"


def test_errors_come_through():
    attend = make()
    q, k, v = qkv(7)
    with pytest.raises(UsageError, match=r"no pass is planned; run the model `with"):
        attend(q, k, v, LAYER)
    with attend.planned(batch(*PASSES[0])), pytest.raises(BatchError, match=r"k is \[6, "):
        attend(q, k[:6], v[:6], LAYER)
    number = attend._number
    del attend
    gc.collect()
    with pytest.raises(UsageError, match="a pool that is gone"):
        attention(torch.empty(7, HQ, DV), q, k, v, number, 0)
