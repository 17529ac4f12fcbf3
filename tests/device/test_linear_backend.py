"""triton's class of linear attention on a GPU: every kind of pass, and graphs of decode and verify.

Run: `pytest tests/device/test_linear_backend.py`. The interpreter's tests have the rest.
"""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA or ROCm device", allow_module_level=True)

from attn_core import LinearLayer
from attn_core.backends.triton.linear.backend import TritonLinear
from linear_passes import (
    M,
    close,
    config,
    expected,
    gate,
    inputs,
    int32,
    make_batch,
    make_pool,
    run,
    speculation,
)

DEVICE = torch.device("cuda")
DRAFTS = 4
TREE = (-1, 0, 0, 1)
BF16 = 8e-3
KINDS = pytest.mark.parametrize("kind", ["gdn", "kda"])


@pytest.fixture(autouse=True)
def on_the_gpu():
    torch.manual_seed(0)
    with DEVICE:
        yield


def make_layer(kind, layer_id=0):
    dims = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 128, "head_v_dim": 128}
    layer = LinearLayer(layer_id=layer_id, kind=kind, qk_norm=1e-6, **dims)
    return replace(layer, gate=gate(layer))


def make_backend(*layers):
    return TritonLinear(config(*layers, dtype="bf16", device=DEVICE, num_draft_tokens=DRAFTS))


def drawn(layer, tokens):
    return inputs(layer, tokens, dtype=torch.bfloat16)


@KINDS
def test_extend_with_checkpoints(kind):
    layer, lens = make_layer(kind), [70, 0, 3, 64]
    backend, pool, tensors = make_backend(layer), make_pool(layer, device=DEVICE), drawn(layer, 137)
    states = pool.states.state[0]
    states[4] = torch.nan
    before = states.clone()
    batch = make_batch(
        M.EXTEND,
        lens,
        (2, 1, -1, 4),
        state_slots_out=int32(6, 1, -1, 4),
        state_fresh=torch.tensor([False, False, False, True]),
        checkpoint_slots=int32(5, -1, -1, 7),
    )
    found, _ = run(backend, batch, layer, pool, tensors)
    wanted = expected(tensors, lens, layer, [before[2], before[1], None, None])
    close(found[:70], wanted[0][0], BF16)
    close(found[73:], wanted[3][0], BF16)
    for slot, after in ((6, wanted[0][1][-1]), (5, wanted[0][1][63]), (4, wanted[3][1][-1])):
        close(states[slot], after, BF16)
    assert torch.equal(states[7], states[4])
    kept = [0, 1, 2, 3]
    assert torch.equal(states[kept], before[kept])


@KINDS
@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_verify_and_commit_is_decoding_one_by_one(kind, parents):
    layers = [make_layer(kind, 0), make_layer(kind, 1)]
    backend = make_backend(*layers)
    pool = make_pool(*layers, num_drafts=DRAFTS, device=DEVICE)
    states, lens, accepted = pool.states.state, [DRAFTS] * 3, [3, -1, 0]
    before = states.clone()
    spec = speculation(DRAFTS if parents is None else parents, 3)
    batch = make_batch(M.TARGET_VERIFY, lens, (2, 4, -1), spec=spec)
    wanted = []
    for i, layer in enumerate(layers):
        tensors = drawn(layer, sum(lens))
        found, metadata = run(backend, batch, layer, pool, tensors)
        starts = [before[i, 2], before[i, 4], None]
        wanted.append(expected(tensors, lens, layer, starts, parents))
        close(found[: 2 * DRAFTS], torch.cat([x for x, _ in wanted[i][:2]]), BF16)
    backend.commit(pool, batch, metadata, torch.tensor(accepted))
    for i in range(2):
        # GDN's drafts are products of matrices, whose factors are rounded
        close(states[i, 2], wanted[i][0][1][3], 1e-4 if kind == "kda" else 2e-3)
    kept = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(states[:, kept], before[:, kept])


@KINDS
@pytest.mark.parametrize("mode", [M.DECODE, M.TARGET_VERIFY])
def test_a_graph_reads_the_slots_of_its_replay(kind, mode):
    layer, n = make_layer(kind), 1 if mode is M.DECODE else DRAFTS
    backend = make_backend(layer)
    pool = make_pool(layer, num_drafts=DRAFTS, device=DEVICE)
    states, tensors, lens = pool.states.state[0], drawn(layer, 3 * n), [n] * 3
    spec = {"spec": speculation(n)} if mode is M.TARGET_VERIFY else {}
    fresh = torch.tensor([False] * 3)
    batch = make_batch(mode, lens, (-1, -1, -1), state_fresh=fresh, **spec)
    metadata = backend.init_forward_metadata_capture_cuda_graph(batch)
    step = backend.decode if mode is M.DECODE else backend.verify
    arguments = (*tensors, layer, pool.layer(0), batch, metadata)
    step(*arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(*arguments)
    for slots in ((2, 0, 5), (1, 7, -1)):
        before = states.clone()
        batch.state_slots.copy_(int32(*slots))
        batch.state_fresh[0] = slots[0] == 1
        graph.replay()
        starts = [before[slot] for slot in slots]
        if slots[0] == 1:
            starts[0] = None
        live = sum(x >= 0 for x in slots)
        wanted = expected(tensors, lens, layer, starts)[:live]
        close(found[: live * n], torch.cat([x for x, _ in wanted]), BF16)
        changed = slots[:live] if mode is M.DECODE else ()
        for slot, (_, after) in zip(changed, wanted, strict=bool(changed)):
            close(states[slot], after[-1], 1e-4)
        kept = [x for x in range(8) if x not in changed]
        assert torch.equal(states[kept], before[kept])
