"""The short convolution is torch's own over each request's inputs, and touches its slots alone."""

import dataclasses

import pytest
import torch
from attn_core import StatePool, UsageError
from attn_core.ops.conv import ConvPlan, conv_commit, conv_decode, conv_extend, conv_verify
from linear_passes import GDN, M, int32, make_batch, speculation

CHANNELS, WIDTH = 6, 4
PARENTS = [-1, 0, 0, 1, 1, 3, 2]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make_pool(*layers, dtype="fp32", width=WIDTH):
    pool = StatePool(
        layers or [GDN],
        num_slots=9,
        num_drafts=8,
        conv_channels=CHANNELS,
        conv_width=width,
        conv_dtype=dtype,
    )
    pool.states.conv.normal_()
    return pool


def weights(width=WIDTH):
    return torch.randn(CHANNELS, width), torch.randn(CHANNELS)


def reference(x, weight, bias, state):
    """Return the outputs of a request, float64, and its inputs from the state on."""
    width = weight.shape[1]
    state = torch.zeros(CHANNELS, width - 1) if state is None else state
    inputs = torch.cat([state.double(), x.double().mT], 1)
    if not len(x):
        return x, inputs
    bias = None if bias is None else bias.double()
    y = torch.nn.functional.conv1d(inputs[None], weight.double()[:, None], bias, groups=CHANNELS)
    return torch.nn.functional.silu(y[0]).mT, inputs


def close(found, wanted):
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("biased", [True, False])
def test_an_extend_is_a_causal_convolution(width, biased):
    pool, (weight, bias) = make_pool(width=width), weights(width)
    bias = bias if biased else None
    lens, reads, writes = [130, 0, 1, 2, 5, 3], (3, 1, 7, -1, 6, 0), (3, 2, 7, -1, 6, 5)
    fresh = torch.tensor([False, False, False, False, True, False])
    saves = int32(8, -1, 4, -1, -1, -1, -1)  # after 64 and all 130 tokens of the first
    pool.states.conv[0, 6] = torch.nan
    before, x = pool.states.conv[0].clone(), torch.randn(sum(lens), CHANNELS)
    batch = make_batch(
        M.EXTEND, lens, reads,
        state_slots_out=int32(*writes), state_fresh=fresh, checkpoint_slots=saves,
    )  # fmt: skip
    for known in (batch, dataclasses.replace(batch, query_lens_host=None)):
        pool.states.conv[0] = before
        out = conv_extend(x, weight, bias, pool.layer(0), ConvPlan(known, pool))
        for i, (part, own) in enumerate(zip(x.split(lens), out.split(lens), strict=True)):
            if reads[i] < 0:
                assert not own.any()
                continue
            y, inputs = reference(part, weight, bias, None if fresh[i] else before[reads[i]])
            close(own, y)
            close(pool.states.conv[0, writes[i]], inputs[:, len(part) :])
            if i == 0:
                close(pool.states.conv[0, 8], inputs[:, 64 : 64 + width - 1])
                close(pool.states.conv[0, 4], inputs[:, 130:])
        assert torch.equal(pool.states.conv[0, [0, 1]], before[[0, 1]])


def test_a_decode_is_a_causal_convolution():
    pool, (weight, bias) = make_pool(), weights()
    pool.states.conv[0, 6] = torch.nan
    before, x = pool.states.conv[0].clone(), torch.randn(4, CHANNELS)
    reads, writes = (3, 6, -1, 2), (3, 6, -1, 8)
    batch = make_batch(
        M.DECODE, [1] * 4, reads,
        state_slots_out=int32(*writes), state_fresh=torch.tensor([False, True, False, False]),
    )  # fmt: skip
    out = conv_decode(x, weight, bias, pool.layer(0), ConvPlan(batch, pool))
    for i in (0, 1, 3):
        y, inputs = reference(x[i : i + 1], weight, bias, None if i == 1 else before[reads[i]])
        close(out[i : i + 1], y)
        close(pool.states.conv[0, writes[i]], inputs[:, 1:])
    kept = [0, 1, 2, 4, 5, 7]
    assert torch.equal(pool.states.conv[0, kept], before[kept])
    assert not out[2].any()


@pytest.mark.parametrize("parents", [None, PARENTS], ids=["chain", "tree"])
def test_verified_and_committed_drafts_are_their_inputs_one_by_one(parents):
    layers = [dataclasses.replace(GDN, layer_id=i) for i in (2, 5)]
    pool, (weight, bias), n = make_pool(*layers), weights(), 7
    reads, writes, accepted = (3, 1, -1, 6), (3, 2, -1, 6), (5, 1, 3, -1)
    before = pool.states.conv.clone()
    batch = make_batch(
        M.TARGET_VERIFY, [n] * 4, reads,
        spec=speculation(parents or n, 4), state_slots_out=int32(*writes),
    )  # fmt: skip
    plan, xs = ConvPlan(batch, pool), [torch.randn(4 * n, CHANNELS) for _ in layers]
    above = list(range(-1, n - 1)) if parents is None else parents

    def path(draft):
        return [] if draft < 0 else [*path(above[draft]), draft]

    for i, (layer, x) in enumerate(zip(layers, xs, strict=True)):
        out = conv_verify(x, weight, bias, pool.layer(layer.layer_id), plan)
        for request in (0, 1, 3):
            for draft in range(n):
                line = x[request * n :][path(draft)]
                y, _ = reference(line, weight, bias, before[i, reads[request]])
                close(out[request * n + draft], y[-1])
    assert torch.equal(pool.states.conv, before)
    conv_commit(pool, plan, torch.tensor(accepted, dtype=torch.int32))
    for i, x in enumerate(xs):
        for request in (0, 1):
            line = x[request * n :][path(accepted[request])]
            _, inputs = reference(line, weight, bias, before[i, reads[request]])
            close(pool.states.conv[i, writes[request]], inputs[:, -(WIDTH - 1) :])
    kept = [0, 1, 4, 5, 6, 7, 8]
    assert torch.equal(pool.states.conv[:, kept], before[:, kept])


def test_16_bits_are_summed_in_32():
    pool, (weight, bias) = make_pool(dtype="bf16"), weights()
    x = torch.randn(70, CHANNELS).bfloat16()
    start = pool.states.conv[0, 1].clone()
    plan = ConvPlan(make_batch(M.EXTEND, [70], (1,)), pool)
    out = conv_extend(x, weight, bias, pool.layer(0), plan)
    y, inputs = reference(x, weight, bias, start)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), y, rtol=2**-8, atol=1e-5)
    assert torch.equal(pool.states.conv[0, 1].double(), inputs[:, 70:])


@pytest.mark.parametrize("mode", [M.EXTEND, M.DECODE, M.TARGET_VERIFY])
def test_a_layer_does_not_wait(mode):
    """Tensors on "meta" have no values to wait for; the plan was made of some that have."""
    lens = [1] * 3 if mode is M.DECODE else [5] * 3
    batch = make_batch(
        mode, lens, (3, -1, 6),
        state_slots_out=int32(3, -1, 2), state_fresh=torch.tensor([True, False, False]),
        checkpoint_slots=int32(4, -1, -1) if mode is M.EXTEND else None,
        spec=speculation(5) if mode is M.TARGET_VERIFY else None,
    )  # fmt: skip
    pool, (weight, bias) = make_pool(), weights()
    convolve = {M.EXTEND: conv_extend, M.DECODE: conv_decode, M.TARGET_VERIFY: conv_verify}[mode]
    plan, x = ConvPlan(batch, pool), torch.randn(sum(lens), CHANNELS)
    out = convolve(x, weight, bias, pool.layer(0), plan)
    for name, value in vars(plan).items():
        if isinstance(value, torch.Tensor):
            setattr(plan, name, value.to("meta"))
    plan._batch = None  # read once
    no_values = [y.to("meta") for y in (x, weight, bias)]
    pool = StatePool([GDN], num_slots=9, num_drafts=8, conv_channels=CHANNELS, device="meta")
    assert convolve(*no_values, pool.layer(0), plan).shape == out.shape
    if mode is M.TARGET_VERIFY:
        conv_commit(pool, plan, torch.zeros(3, dtype=torch.int32, device="meta"))


def test_a_pool_without_a_convolution_says_what_to_do():
    batch = make_batch(M.DECODE, [1], (0,))
    with pytest.raises(UsageError, match="with conv_channels"):
        ConvPlan(batch, StatePool([GDN], num_slots=2))
    pool, (weight, bias) = StatePool([GDN], num_slots=2, conv_channels=CHANNELS), weights()
    plan = ConvPlan(make_batch(M.TARGET_VERIFY, [1], (0,), spec=speculation(1)), pool)
    with pytest.raises(UsageError, match="with num_drafts"):
        conv_verify(torch.zeros(1, CHANNELS), weight, bias, pool.layer(0), plan)
    with pytest.raises(UsageError, match="without state_slots"):
        ConvPlan(dataclasses.replace(batch, state_slots=None), pool)


@pytest.mark.parametrize(
    ("mode", "lens", "convolve"),
    [
        (M.EXTEND, [5, 3], conv_extend),
        (M.DECODE, [1, 1], conv_decode),
        (M.TARGET_VERIFY, [4, 4], conv_verify),
    ],
)
@pytest.mark.parametrize(("width", "channels"), [(3, CHANNELS), (5, CHANNELS), (WIDTH, 1)])
def test_other_sizes_than_the_pool_s_are_refused(mode, lens, convolve, width, channels):
    """An extend of a narrower weight took the oldest inputs, and left out each token's own."""
    spec = {"spec": speculation(4)} if mode is M.TARGET_VERIFY else {}
    pool, batch = make_pool(), make_batch(mode, lens, (3, 1), **spec)
    x, weight = torch.randn(sum(lens), channels), torch.randn(channels, width)
    with pytest.raises(UsageError, match=rf"{channels}, {width}\], the pool's has 6 .* width 4"):
        convolve(x, weight, None, pool.layer(0), ConvPlan(batch, pool))
