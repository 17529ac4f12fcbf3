"""FlashInfer's own GDN kernels on a Hopper: passes under the contract, and graphs of decode.

Run: `pytest tests/device/test_flashinfer_linear.py`.
"""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("no Hopper", allow_module_level=True)
pytest.importorskip("flashinfer")

from attn_core import StateCache, StatePool
from gdn_cases import GdnCases, make, make_layer
from linear_passes import M, close, expected, inputs, int32, make_batch, make_pool, run


@pytest.fixture(autouse=True)
def on_the_gpu():
    with torch.device("cuda"):
        yield


class TestOnHopper(GdnCases):
    rounded, exact = 1e-2, 1e-4


@pytest.mark.parametrize("requests", [2, 40], ids=["few sequences", "many"])
@pytest.mark.parametrize("heads", [(2, 8), (16, 16), (16, 48)], ids=str)
def test_heads_of_models(requests, heads):
    """Long requests beside short ones; few heads in all are cut along their tokens."""
    layer = make_layer("kernel's gate", heads)
    backend, pool = make(layer, "prefill"), make_pool(layer, slots=requests + 1)
    lens = [2100, *range(requests - 1)]
    states, tensors = pool.states.state[0], inputs(layer, sum(lens), dtype=torch.bfloat16)
    before, batch = states.clone(), make_batch(M.EXTEND, lens, range(1, requests + 1))
    found, _ = run(backend, batch, layer, pool, tensors)
    wanted = expected(tensors, lens, layer, before[1:])
    close(found, torch.cat([out for out, _ in wanted]), 1e-2)
    for slot, n, (_, after) in zip(range(1, requests + 1), lens, wanted, strict=True):
        close(states[slot], after[-1] if n else before[slot].double(), 1e-2)
    assert torch.equal(states[0], before[0])


@pytest.mark.parametrize("kind", ["kernel's gate", "no gate, norm"])
@pytest.mark.parametrize("requests", [1, 3, 64])
def test_a_graph_reads_the_slots_of_its_replay(kind, requests):
    layer = make_layer(kind)
    backend, pool = make(layer), make_pool(layer, slots=2 * requests + 2)
    states, tensors = pool.states.state[0], inputs(layer, requests, dtype=torch.bfloat16)
    lens, none = [1] * requests, [-1] * requests
    slots = {"state_slots_out": int32(*none), "state_fresh": torch.zeros(requests).bool()}
    batch = make_batch(M.DECODE, lens, none, **slots)
    metadata = backend.init_forward_metadata_capture_cuda_graph(batch)
    arguments = (*tensors, layer, pool.layer(0), batch, metadata)
    found = torch.empty_like(tensors[2])
    backend.decode(*arguments, out=found)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.decode(*arguments, out=found)
    for reads in (range(1, requests + 1), [0, *none[1:]]):
        live = sum(x >= 0 for x in reads)
        writes = [x + requests + 1 if x > 0 else x for x in reads]
        states.normal_()
        before = states.clone()
        batch.state_slots.copy_(int32(*reads))
        batch.state_slots_out.copy_(int32(*writes))
        batch.state_fresh[0] = live > 1
        states[writes[0]] = torch.nan if live > 1 else states[writes[0]]
        backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
        graph.replay()
        starts = [before[slot] for slot in reads]
        starts[0] = None if live > 1 else starts[0]
        wanted = expected(tensors, lens, layer, starts)[:live]
        close(found[:live], torch.cat([out for out, _ in wanted]), 1e-2)
        for slot, (_, after) in zip(writes[:live], wanted, strict=True):
            close(states[slot], after[-1], 1e-2 if kind == "no gate, norm" else 1e-4)
        kept = [x for x in range(len(states)) if x not in writes]
        assert torch.equal(states[kept], before[kept])


def test_slots_far_apart():
    """Beyond 2^31 elements of the pool: a slot of 4 heads, 8,200 slots of 2^18 elements apart."""
    layer = make_layer("kernel's gate")
    apart = 1 << 18
    memory = torch.empty(8200 * apart)
    wide = memory.view(1, 8200, -1, 128, 128)[:, :, :4]
    pool = StatePool.of([0], StateCache(state=wide))
    for phase, mode, lens in (("decode", M.DECODE, [1, 1]), ("prefill", M.EXTEND, [5, 3])):
        states, tensors = wide[0], inputs(layer, sum(lens), dtype=torch.bfloat16)
        states[[1, 8199]] = torch.randn(2, 4, 128, 128)
        before = states[[1, 8199]]
        found, _ = run(make(layer, phase), make_batch(mode, lens, (8199, 1)), layer, pool, tensors)
        wanted = expected(tensors, lens, layer, before.flip(0))
        close(found, torch.cat([out for out, _ in wanted]), 1e-2)
        for slot, (_, after) in zip((8199, 1), wanted, strict=True):
            close(states[slot], after[-1], 1e-2)
