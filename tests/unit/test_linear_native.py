"""Linear attention in plain torch is the recurrence, and touches no slot but its own."""

import dataclasses

import pytest
import torch
from attn_core import LinearLayer, StateCache, StatePool
from attn_core.backends.torch_native.linear import TorchNativeLinear
from attn_core.testing.linear_oracle import delta_rule
from linear_passes import (
    GDN,
    HK,
    HV,
    KDA,
    LAYERS,
    K,
    M,
    V,
    close,
    config,
    expected,
    extend,
    gate,
    inputs,
    int32,
    make_batch,
    make_pool,
    run,
    speculation,
    unit,
)

BACKEND = TorchNativeLinear(config(GDN))
RAGGED = (150, 1, 0, 64, 17)
SLOTS = (3, 1, 7, 0, 5)
KINDS = pytest.mark.parametrize("kind", ["gdn", "kda"])
EXACT = 1e-5  # of a run in float32


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@KINDS
@pytest.mark.parametrize(
    ("changes", "ratio"),
    [({}, EXACT), ({"decay": 20.0}, EXACT), ({"decay": 0.01}, EXACT), ({"hard": True}, EXACT)],
    ids=["mild", "strong", "slow", "hard"],
)
def test_an_extend_is_the_recurrence(kind, changes, ratio):
    layer, pool = LAYERS[kind], make_pool(LAYERS[kind])
    before, tensors = pool.states.state[0].clone(), inputs(LAYERS[kind], sum(RAGGED), **changes)
    out = extend(BACKEND, layer, pool, tensors, RAGGED, SLOTS)
    wanted = expected(tensors, RAGGED, layer, before[list(SLOTS)])
    close(out, torch.cat([o for o, _ in wanted]), ratio)
    for slot, (_, states) in zip(SLOTS, wanted, strict=True):
        if len(states):
            close(pool.states.state[0, slot], states[-1], ratio)
    kept = [2, 4, 6, 7]  # 7 has no tokens
    assert torch.equal(pool.states.state[0, kept], before[kept])


def test_strong_decay_within_a_block_is_not_factored():
    """e^(16 · 20) is no float32: such blocks are summed as they are."""
    tensors, pool = inputs(KDA, 64), make_pool(KDA)
    tensors[3][:] = -20.0
    before = pool.states.state[0].clone()
    out = extend(BACKEND, KDA, pool, tensors, [64], [2])
    [(wanted, _)] = expected(tensors, [64], KDA, before[[2]])
    close(out, wanted, EXACT)


@KINDS
@pytest.mark.parametrize(
    "changes", [{}, {"lower_bound": -5.0}, {"neg_eigval": True}], ids=["softplus", "bounded", "neg"]
)
@pytest.mark.parametrize("mode", [M.EXTEND, M.DECODE])
def test_raw_gates_and_unnormalised_keys(kind, changes, mode):
    layer = dataclasses.replace(LAYERS[kind], qk_norm=1e-6)
    layer = dataclasses.replace(layer, gate=gate(layer, **changes))
    q, k, v, g, beta = inputs(layer, 80)
    tensors = (3 * q, 5 * k, v, g, beta)
    lens, pool = [80] if mode is M.EXTEND else [1] * 80, make_pool(layer, slots=100)
    before = pool.states.state[0].clone()
    slots = torch.randperm(100)[: len(lens)].tolist()
    out, _ = run(BACKEND, make_batch(mode, lens, slots), layer, pool, tensors)
    wanted = expected(tensors, lens, layer, before[slots])
    close(out, torch.cat([o for o, _ in wanted]), EXACT)


@KINDS
def test_a_decode_is_the_recurrence(kind):
    layer, pool = LAYERS[kind], make_pool(LAYERS[kind])
    before, tensors = pool.states.state[0].clone(), inputs(layer, 5)
    out, _ = run(BACKEND, make_batch(M.DECODE, [1] * 5, SLOTS), layer, pool, tensors)
    wanted = expected(tensors, [1] * 5, layer, before[list(SLOTS)])
    close(out, torch.cat([o for o, _ in wanted]), EXACT)
    close(pool.states.state[0, list(SLOTS)], torch.cat([s for _, s in wanted]), EXACT)
    kept = [2, 4, 6]
    assert torch.equal(pool.states.state[0, kept], before[kept])


@KINDS
def test_a_prompt_is_its_tokens_one_by_one(kind):
    layer, tensors = LAYERS[kind], inputs(LAYERS[kind], 70)
    pool = make_pool(layer)
    pool.copy_slots(torch.tensor([1]), torch.tensor([2]))
    whole = extend(BACKEND, layer, pool, tensors, [70], [1])
    batch = make_batch(M.DECODE, [1], [2])
    steps = [
        run(BACKEND, batch, layer, pool, [x[i : i + 1] for x in tensors])[0] for i in range(70)
    ]
    close(torch.cat(steps), whole.double(), EXACT)
    close(pool.states.state[0, 2], pool.states.state[0, 1].double(), EXACT)


@KINDS
@pytest.mark.parametrize(("cut", "same"), [(64, True), (128, True), (129, False)])
def test_a_prompt_in_two_passes(kind, cut, same):
    """At whole chunks the numbers are the same bits."""
    layer, tensors, pool = LAYERS[kind], inputs(LAYERS[kind], 257), make_pool(LAYERS[kind])
    pool.copy_slots(torch.tensor([1]), torch.tensor([2]))
    whole = extend(BACKEND, layer, pool, tensors, [257], [1])
    parts = [
        extend(BACKEND, layer, pool, part, [len(part[0])], [2])
        for part in ([x[:cut] for x in tensors], [x[cut:] for x in tensors])
    ]
    if same:
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(pool.states.state[0, 2], pool.states.state[0, 1])
    else:
        close(torch.cat(parts), whole.double(), EXACT)


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
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_and_activations_of_16_bits(kind, dtype):
    layer, pool = LAYERS[kind], make_pool(LAYERS[kind], dtype=dtype, num_drafts=2)
    tensors, before = inputs(layer, 70, dtype=torch.bfloat16), pool.states.state[0].clone()
    out = extend(BACKEND, layer, pool, tensors, [70], [2])
    [(wanted, states)] = expected(tensors, [70], layer, before[[2]])
    assert out.dtype == torch.bfloat16
    close(out, wanted, 5e-3)
    close(pool.states.state[0, 2], states[-1], EXACT if dtype == "fp32" else 5e-3)
    stored, one = pool.states.state[0, 2].clone(), [x[:1] for x in tensors]
    out, _ = run(BACKEND, make_batch(M.DECODE, [1], [2]), layer, pool, one)
    [(wanted, states)] = expected(one, [1], layer, [stored])
    close(out, wanted, 5e-3)
    close(pool.states.state[0, 2], states[-1], EXACT if dtype == "fp32" else 5e-3)


PARENTS = [-1, 0, 0, 1, 1, 2, 3]


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


def test_strided_inputs_and_an_output_that_is_given():
    packed = torch.randn(70, HK * K * 2 + HV * V + 3)
    q, k, v = packed[:, : 2 * HK * K + HV * V].split([HK * K, HK * K, HV * V], 1)
    q, k, v = q.unflatten(1, (HK, K)), k.unflatten(1, (HK, K)), v.unflatten(1, (HV, V))
    layer = dataclasses.replace(GDN, qk_norm=1e-6)
    g, beta = -torch.rand(70, 2 * HV)[:, ::2], torch.rand(70, HV + 1)[:, 1:]
    pool, out = make_pool(layer), torch.full((70, HV, V), torch.nan)
    start = pool.states.state[0, 2].clone()
    batch = make_batch(M.EXTEND, [70], [2])
    found, _ = run(BACKEND, batch, layer, pool, (q, k, v, g, beta), out=out)
    assert found is out
    wanted, _ = delta_rule(q, k, v, g, beta, layer, start)
    close(out, wanted, EXACT)


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


def test_a_pass_without_requests():
    pool = make_pool(GDN)
    out = extend(BACKEND, GDN, pool, inputs(GDN, 0), [], [])
    assert out.shape == (0, HV, V)


def test_lengths_that_only_the_device_knows():
    pool, tensors = make_pool(GDN), inputs(GDN, 73)
    again = make_pool(GDN)
    again.states.state.copy_(pool.states.state)
    batch = make_batch(M.EXTEND, [70, 3], [1, 2])
    want, _ = run(BACKEND, batch, GDN, pool, tensors)
    blind = dataclasses.replace(batch, query_lens_host=None)
    found, _ = run(BACKEND, blind, GDN, again, tensors)
    assert torch.equal(found, want)
