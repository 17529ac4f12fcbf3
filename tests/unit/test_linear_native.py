"""Linear attention in plain torch is the recurrence."""

import dataclasses

import pytest
import torch
from attn_core.backends.torch_native.linear import TorchNativeLinear
from attn_core.runtime.batch import SpecInfo
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
    make_batch,
    make_pool,
    run,
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


@KINDS
@pytest.mark.parametrize("forgets", [-torch.inf, -1e30, -1e6])
def test_a_token_that_forgets_all_before_it(kind, forgets):
    """Differences of infinities are NaN, and beside a large sum the other decays are lost."""
    layer, pool = LAYERS[kind], make_pool(LAYERS[kind])
    before, tensors = pool.states.state[0].clone(), inputs(LAYERS[kind], sum(RAGGED))
    tensors[3][[0, 20, 37, 150, 200]] = forgets
    out = extend(BACKEND, layer, pool, tensors, RAGGED, SLOTS)
    wanted = expected(tensors, RAGGED, layer, before[list(SLOTS)])
    close(out, torch.cat([o for o, _ in wanted]), EXACT)
    close(pool.states.state[0, 3], wanted[0][1][-1], EXACT)


@KINDS
def test_the_last_token_remembers_what_follows_a_lot_of_forgetting(kind):
    """Their log decays are small differences of large sums."""
    layer, pool = LAYERS[kind], make_pool(LAYERS[kind])
    before, tensors = pool.states.state[0].clone(), inputs(LAYERS[kind], sum(RAGGED))
    tensors[3][:40] = -100.0
    out = extend(BACKEND, layer, pool, tensors, RAGGED, SLOTS)
    wanted = expected(tensors, RAGGED, layer, before[list(SLOTS)])
    close(out[40:64], wanted[0][0][40:64], EXACT)
    close(out, torch.cat([o for o, _ in wanted]), EXACT)


@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_an_output_that_is_v_itself(mode):
    """Of padding it is cleared, which must not reach values that are still to be read."""
    layer = dataclasses.replace(LAYERS["gdn"], num_k_heads=HV)
    lengths = (0, 70, 3, 5, 0, 1) if mode == "extend" else (1,) * 6
    slots = (5, 3, -1, 1, 7, -1)
    tensors = inputs(layer, sum(lengths))
    pools = [make_pool(layer) for _ in range(2)]
    pools[1].states.state.copy_(pools[0].states.state)
    want, _ = run(BACKEND, make_batch(M(mode), lengths, slots), layer, pools[0], tensors)
    values = tensors[2].clone()
    given = (*tensors[:2], values, *tensors[3:])
    got, _ = run(BACKEND, make_batch(M(mode), lengths, slots), layer, pools[1], given, out=values)
    assert got is values
    assert torch.equal(got, want)
    assert torch.equal(pools[0].states.state, pools[1].states.state)


@KINDS
def test_drafts_that_forget_all_before_them(kind):
    layer, pool = LAYERS[kind], make_pool(LAYERS[kind], num_drafts=4)
    before, tensors = pool.states.state[0].clone(), inputs(LAYERS[kind], 4)
    tensors[3][1:3] = -torch.inf
    spec = SpecInfo(topk=1, num_draft_tokens=4)
    batch = make_batch(M.TARGET_VERIFY, (4,), (2,), spec=spec)
    out, plan = run(BACKEND, batch, layer, pool, tensors)
    [(wanted, states)] = expected(tensors, (4,), layer, before[[2]])
    close(out, wanted, EXACT)
    BACKEND.commit(pool, batch, plan, torch.tensor([3]))
    close(pool.states.state[0, 2], states[-1], EXACT)


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
    close(pool.states.state[0, slots], torch.stack([x[-1] for _, x in wanted]), EXACT)


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
