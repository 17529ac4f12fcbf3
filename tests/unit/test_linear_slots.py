"""Which slots linear attention in plain torch reads and writes: fresh, padded, saved, verified."""

import dataclasses

import pytest
import torch
from attn_core import LinearLayer, StateCache, StatePool
from attn_core.backends.torch_native.linear import TorchNativeLinear
from attn_core.testing.linear_oracle import delta_rule
from linear_passes import (
    FLAWED_TREE,
    FLAWS,
    GDN,
    LAYERS,
    M,
    check_flaw,
    close,
    config,
    expected,
    extend,
    inputs,
    int32,
    make_batch,
    make_pool,
    run,
    speculation,
    unit,
)

BACKEND = TorchNativeLinear(config(GDN))
KINDS = pytest.mark.parametrize("kind", ["gdn", "kda"])
EXACT = 1e-5  # of a run in float32
PARENTS = [-1, 0, 0, 1, 1, 2, 3]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@KINDS
@pytest.mark.parametrize("mode", [M.EXTEND, M.DECODE])
def test_slots_to_read_and_to_write_and_fresh_requests(kind, mode):
    """What a fresh request's slot holds does not matter, and two may read one slot."""
    layer, pool = LAYERS[kind], make_pool(LAYERS[kind])
    lens = [70, 3, 5] if mode is M.EXTEND else [1, 1, 1]
    tensors = inputs(layer, sum(lens))
    pool.states.state[0, 4] = torch.nan
    before = pool.states.state[0].clone()
    batch = make_batch(
        mode,
        lens,
        (2, 4, 2),
        state_slots_out=int32(6, 4, 0),
        state_fresh=torch.tensor([False, True, False]),
    )
    out, _ = run(BACKEND, batch, layer, pool, tensors)
    wanted = expected(tensors, lens, layer, [before[2], None, before[2]])
    close(out, torch.cat([o for o, _ in wanted]), EXACT)
    for slot, (_, states) in zip((6, 4, 0), wanted, strict=True):
        close(pool.states.state[0, slot], states[-1], EXACT)
    assert torch.equal(pool.states.state[0, [1, 2, 3, 5, 7]], before[[1, 2, 3, 5, 7]])


def test_a_request_without_tokens_moves_its_state():
    pool = make_pool(GDN)
    pool.states.state[0, 5] = torch.nan
    before = pool.states.state[0].clone()
    fresh = torch.tensor([False, True, False])
    extend(
        BACKEND, GDN, pool, inputs(GDN, 3), [0, 0, 3], [1, 5, 2],
        state_slots_out=int32(6, 5, 2), state_fresh=fresh,
    )  # fmt: skip
    assert torch.equal(pool.states.state[0, 6], before[1])
    assert not pool.states.state[0, 5].any()


@pytest.mark.parametrize("mode", [M.EXTEND, M.DECODE, M.TARGET_VERIFY])
def test_padding_is_not_touched(mode):
    pool = make_pool(GDN, num_drafts=2)
    before, lens = pool.states.map(torch.clone), [2 if mode is not M.DECODE else 1] * 3
    tensors = inputs(GDN, sum(lens))
    for x in tensors:
        x[lens[0] : 2 * lens[0]] = torch.nan  # of the padded request
    states = {"spec": speculation(2)} if mode is M.TARGET_VERIFY else {}
    batch = make_batch(mode, lens, (-1, -1, -1), **states)
    _, metadata = run(BACKEND, batch, GDN, pool, tensors)
    if states:
        BACKEND.commit(pool, batch, metadata, torch.tensor([1, 0, 1]))
    for name in ("state", "u", "k", "g"):
        assert torch.equal(getattr(pool.states, name), getattr(before, name))
    batch = make_batch(mode, lens, (3, -1, 1), **states)
    out, _ = run(BACKEND, batch, GDN, pool, tensors)
    valid = torch.cat([out[: lens[0]], out[2 * lens[0] :]])
    assert valid.isfinite().all()


@KINDS
def test_a_checkpoint_is_the_state_of_a_shorter_prompt(kind):
    layer, tensors, pool = (
        LAYERS[kind],
        inputs(LAYERS[kind], 130 + 64 + 200),
        make_pool(LAYERS[kind], slots=20),
    )
    lens = [130, 64, 200]  # 3, 1 and 4 chunks
    start = pool.states.state[0].clone()
    slots = int32(-1, 10, -1, 11, 12, -1, -1, 13)
    extend(BACKEND, layer, pool, tensors, lens, (0, 1, 2), checkpoint_slots=slots)
    found = pool.states.state[0].clone()
    first = 0
    of_requests = ({128: 10}, {64: 11}, {64: 12, 200: 13})  # length → slot
    for request, (tokens, saved) in enumerate(zip(lens, of_requests, strict=True)):
        for length, slot in saved.items():
            pool.states.state[0].copy_(start)
            prefix = [x[first : first + length] for x in tensors]
            extend(BACKEND, layer, pool, prefix, [length], [request])
            assert torch.equal(found[slot], pool.states.state[0, request])
        first += tokens
    assert torch.equal(found[14:], start[14:])


@KINDS
@pytest.mark.parametrize("parents", [None, PARENTS], ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_verified_and_committed_pass_is_its_tokens_one_by_one(kind, parents, dtype):
    """verify changes no state; commit takes the accepted path and nothing else, in all layers."""
    layers = [dataclasses.replace(LAYERS[kind], layer_id=i) for i in (4, 9)]
    n, slots, writes, accepted = 7, (3, 1, 6, 5), (3, 2, 6, 5), (6, 4, -1, 0)
    pool = make_pool(*layers, num_drafts=n + 1, dtype=dtype)
    pool.states.state[:, 5] = torch.nan
    before = pool.states.state.clone()
    batch = make_batch(
        M.TARGET_VERIFY,
        [n] * 4,
        slots,
        spec=speculation(parents or n, 4),
        state_slots_out=int32(*writes),
        state_fresh=torch.tensor([False, False, False, True]),
    )
    metadata, wanted = BACKEND.init_forward_metadata(batch), []
    for i, layer in enumerate(layers):
        tensors = inputs(layer, 4 * n)
        out = BACKEND.verify(*tensors, layer, pool.layer(layer.layer_id), batch, metadata)
        starts = [before[i, s] for s in slots[:3]] + [None]
        wanted.append(expected(tensors, [n] * 4, layer, starts, parents))
        close(out, torch.cat([o for o, _ in wanted[-1]]), EXACT)
    assert torch.equal(pool.states.state.nan_to_num(7), before.nan_to_num(7))
    BACKEND.commit(pool, batch, metadata, int32(*accepted))
    for i, of_requests in enumerate(wanted):
        for draft, slot, (_, states) in zip(accepted, writes, of_requests, strict=True):
            if draft >= 0:
                ratio = EXACT if dtype == "fp32" else 5e-3
                close(pool.states.state[i, slot], states[draft], ratio)
    kept = [0, 1, 4, 6, 7]  # 1 was only read, 6 accepted nothing
    assert torch.equal(pool.states.state[:, kept], before[:, kept])


@KINDS
@pytest.mark.parametrize("parents", [None, FLAWED_TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("name", "flaw"), FLAWS)
def test_a_draft_that_is_not_finite_reaches_those_that_see_it_alone(kind, parents, name, flaw):
    check_flaw(BACKEND, LAYERS[kind], name, flaw, parents, EXACT)


def test_what_is_rejected_is_not_readable():
    """Not even a record that is not finite reaches the state."""
    pool, n = make_pool(GDN, num_drafts=3), 3
    batch = make_batch(M.TARGET_VERIFY, [n], [1], spec=speculation(n))
    tensors, before = inputs(GDN, n), pool.states.state[0].clone()
    _, metadata = run(BACKEND, batch, GDN, pool, tensors)
    for records in pool.states.records:
        records[0, 1, 2] = torch.nan
    BACKEND.commit(pool, batch, metadata, torch.tensor([1]))
    [(_, states)] = expected(tensors, [n], GDN, before[[1]])
    close(pool.states.state[0, 1], states[1], EXACT)


def test_slots_beyond_the_first_4096_of_an_engines_pages():
    """Slots at strides of an engine's own, and as many as an int32 offset could not reach."""
    small = LinearLayer(layer_id=0, num_k_heads=1, num_v_heads=1, head_k_dim=2, head_v_dim=3)
    memory = torch.zeros(6000, 2, 9)
    state = memory[..., :6].view(6000, 2, 1, 3, 2).transpose(0, 1)
    pool = StatePool.of([7, 0], StateCache(state=state))
    tensors = (
        unit(1, 1, 2),
        unit(1, 1, 2),
        torch.randn(1, 1, 3),
        -torch.rand(1, 1),
        torch.ones(1, 1),
    )
    out, _ = run(BACKEND, make_batch(M.DECODE, [1], [5999]), small, pool, tensors)
    wanted, states = delta_rule(*tensors, small)
    close(out, wanted, EXACT)
    close(memory[5999, 1, :6].view(1, 3, 2), states[0], EXACT)
    assert memory.count_nonzero() == 6
