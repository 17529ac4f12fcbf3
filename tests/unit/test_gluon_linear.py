"""Gluon kernels of GDN's prompts, emulated on a CPU: against the recurrence, and form beside form.

tests/device runs them on a GPU. Here products and sums are PyTorch's, and so are roundings.
"""

import itertools
import math
from types import SimpleNamespace

import emulated_gluon
import pytest
import torch
from attn_core.backends.triton.linear.arguments import (
    Chunks,
    Constants,
    Inputs,
    Numbers,
    Rows,
    Slots,
    States,
    Weights,
    Workspace,
)
from emulated_gluon import Pointer, Written, launch, launch_overlapped, load

HK, HV, DIM = 1, 2, 128
NUMBERS = Numbers(DIM**-0.5, 1e-6, 0.0)


def make_prompts(lens, slots):
    """Draw tokens, raw gates and states; a slot of -1 is a request that is left out."""
    torch.manual_seed(sum(lens))
    total = sum(lens)
    q, k = torch.randn(2, total, HK, DIM).bfloat16()
    v, gates = torch.randn(total, HV, DIM).bfloat16(), torch.randn(2, total, HV).bfloat16()
    weights = torch.stack((torch.rand(HV) * 2.7, torch.randn(HV) - 3))
    state = torch.randn(len(lens) + 1, HV, DIM, DIM) * 0.1
    return SimpleNamespace(
        lens=lens, slots=slots, q=q, k=k, v=v, gates=gates, weights=weights, state=state
    )


def by_recurrence(x):
    """Return outputs and states in float64, token by token."""
    q, k = (y.double() * y.double().square().sum(-1, keepdim=True).add(1e-6).rsqrt()
            for y in (x.q, x.k))  # fmt: skip
    a_log, bias = x.weights.double()
    g = -a_log.exp() * torch.nn.functional.softplus(x.gates[0].double() + bias)
    beta, v, state = x.gates[1].double().sigmoid(), x.v.double(), x.state.double()
    out, end = torch.zeros_like(v), 0
    for count, slot in zip(x.lens, x.slots, strict=True):
        begin, end = end, end + count
        for t in range(begin, end) if slot >= 0 else ():
            S = state[slot] * g[t].exp()[:, None, None]
            u = beta[t][:, None] * (v[t] - (S @ k[t].mT)[..., 0])
            state[slot] = S = S + u[..., None] * k[t]
            out[t] = NUMBERS.scale * (S @ q[t].mT)[..., 0]
    return out, state


def emulate(x, form):
    """Return outputs, NaN where none was written, and states."""

    def rows(y):
        return Rows(Pointer(y), y.stride(0), y.stride(1))

    def table(numbers):
        return Pointer(torch.tensor(list(numbers)))

    out, state = torch.full_like(x.v, math.nan), x.state.clone()
    counts = [-(-n // 64) for n in x.lens]
    begins = [0, *itertools.accumulate(x.lens)]
    pieces = [(b + at, min(64, n - at)) for b, n in zip(begins, x.lens, strict=False)
              for at in range(0, n, 64)]  # fmt: skip
    turn = sorted((i, b) for b, n in enumerate(counts) for i in range(n))
    firsts = [0, *itertools.accumulate(counts)][:-1]
    chunks = Chunks(
        table(start for start, _ in pieces), table(count for _, count in pieces), table(begins),
        table(firsts), table(sorted(range(len(counts)), key=lambda b: -counts[b])),
        table(firsts[b] + i for i, b in turn),
    )  # fmt: skip
    constants = Constants(HV, HV // HK, DIM, DIM, False, 1, False, True)
    inputs = Inputs(*map(rows, (x.q, x.k, x.v, *x.gates)))
    weights, places = Weights(*map(Pointer, x.weights)), Slots(*[table(x.slots)] * 3)
    stored = (rows(out), States(Pointer(state), 0, HV * DIM * DIM), places, places.read, chunks)
    if form == "fused":
        maps = [*(y.flatten(1) for y in (x.k, x.q, x.v)), Written(out)]
        kernel = load("hopper.fused_gdn").fused_gdn_hopper
        launch(kernel, len(x.lens) * HV, *maps, inputs, weights, NUMBERS, *stored, constants)
        return out, state
    T = torch.full((len(pieces), HV, 2, 64, 64), math.nan).bfloat16()
    factors, decay = torch.full((len(pieces), HV, 3, 64), math.nan), torch.empty(len(pieces), HV)
    ready, taken = torch.zeros(len(pieces), HV, 2).int(), torch.zeros(1).int()
    work = Workspace(
        *map(Pointer, (T, factors, decay)), *[None] * 3, Pointer(ready), Pointer(taken)
    )
    prepared, scans = (inputs, weights, NUMBERS, chunks, work), len(x.lens) * HV * 2
    squares = T.view(-1, 64)
    maps = [*(y.flatten(1) for y in (x.k, x.q, x.v)), Written(out), squares, squares]

    def scan_alone():
        kernel, ahead = load("hopper.scan_alone").scan_alone, form == "ahead"
        launch(kernel, scans, *maps, *stored, work, 3, 3, 2, ahead, constants)

    if form == "ahead":
        # scans take all processors, so that the first program prepares all chunks
        kernel, sizes = load("hopper.ahead").prepare_gdn_ahead, (len(pieces), scans, scans)
        launch_overlapped(lambda: launch(kernel, 9, *prepared, *sizes, 2, constants), scan_alone)
        assert not ready.any()
        assert not taken.any()
        return out, state
    launch(load("hopper.prepare_gdn").prepare_gdn_hopper, len(pieces) * HV, *prepared, constants)
    if form == "shared":
        kernel = load("hopper.scan").scan_hopper
        launch(kernel, len(x.lens) * HV, inputs, *stored, work, 3, constants)
    else:
        scan_alone()
    return out, state


def error(got, want):
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


@pytest.mark.parametrize(
    ("lens", "slots"),
    [((1,), (0,)), ((130, 64), (1, 0)), ((0, 65, 200, 7), (2, -1, 0, 3)), ((577, 0), (0, 1))],
)
def test_all_forms_follow_the_recurrence_and_have_the_same_bits(lens, slots):
    x = make_prompts(lens, slots)
    want, after = by_recurrence(x)
    read = torch.tensor(slots).repeat_interleave(torch.tensor(lens)) >= 0
    first, state = emulate(x, "fused")
    assert error(first[read], want[read]) < 5e-3
    assert error(state, after) < 5e-3
    assert first[~read].isnan().all()
    for form in ("shared", "alone", "ahead"):
        out, other = emulate(x, form)
        assert torch.equal(out[read], first[read])
        assert torch.equal(other, state)


@pytest.mark.parametrize("form", ["fused", "alone", "ahead"])
@pytest.mark.parametrize("count", [1, 63, 65, 130])
def test_the_tokens_of_another_request_are_never_read(form, count):
    x = make_prompts((count, 64), (1, -1))
    want, after = emulate(x, form)
    for y in (x.q, x.k, x.v, x.gates[0], x.gates[1]):
        y[count:] = math.nan
    out, state = emulate(x, form)
    assert torch.equal(out[:count], want[:count])
    assert torch.equal(state, after)


def test_a_wait_for_ever_is_seen(monkeypatch):
    monkeypatch.setattr(emulated_gluon, "PATIENCE_S", 0.05)
    bar = SimpleNamespace()
    emulated_gluon.init(bar, 2)
    emulated_gluon.arrive(bar)
    with pytest.raises(TimeoutError):
        emulated_gluon.wait(bar, 0)
    emulated_gluon.arrive(bar)
    emulated_gluon.wait(bar, 0)


def test_one_kernel_takes_tokens_and_outputs_whose_heads_lie_side_by_side():
    from attn_core.backends.triton.linear.hopper.launch import fused
    from attn_core.backends.triton.linear.operands import inputs_of, rows_of

    constants = Constants(HV, HV // HK, DIM, DIM, False, 1, False, True)
    x = make_prompts((64,), (0,))
    inputs = inputs_of(x.q, x.k, x.v, *x.gates)
    wide = torch.empty(64, HV, 2 * DIM).bfloat16()
    assert fused(constants, inputs, rows_of(torch.empty_like(x.v))) is not None
    assert fused(constants, inputs, rows_of(wide[..., :DIM])) is None
    moved = wide.flatten(1)[:, 4 : HV * DIM + 4].unflatten(1, (HV, DIM))  # by 8 bytes
    assert fused(constants, inputs, rows_of(moved)) is None
    assert fused(constants, inputs_of(x.q, x.k, wide[..., :DIM], *x.gates), rows_of(x.v)) is None


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_tma_copies_for_a_scan_of_64_rows_only_what_lies_side_by_side(kind):
    """Else threads copy for 128 rows, and where there are only 64, Triton's kernel scans."""
    from attn_core.backends.triton.linear.hopper.launch import scan
    from attn_core.backends.triton.linear.operands import inputs_of, rows_of

    x, kda = make_prompts((64,), (0,)), kind == "kda"
    constants = Constants(HV, HV // HK, DIM, DIM, kda, 1, False, True)
    narrow = constants._replace(V=64)
    wide, half = torch.empty(64, HV, 2 * DIM).bfloat16(), torch.empty(64, HV, 64).bfloat16()

    def rows(v, k=x.k, out=None, of=constants, **more):
        found = scan(of, inputs_of(x.q, k, v, *x.gates), rows_of(v if out is None else out), **more)
        return found and found[1]

    assert rows(x.v, alone=True) == 64
    assert rows(x.v, alone=False) == 128
    assert rows(half, of=narrow, alone=False) == 64
    assert rows(x.v, out=wide[..., :DIM], alone=True) == 128
    assert rows(half, out=wide[..., :64], of=narrow, alone=True) is None
    keys = torch.empty(64, HK + 1, 2 * DIM).bfloat16()[..., :DIM]
    assert rows(x.v, k=keys, alone=True) == (64 if kda else 128)  # KDA's keys are prepared


def test_chunks_are_prepared_ahead_where_half_of_the_device_is_free_and_prompts_are_long():
    from attn_core.backends.triton.linear.tuning import prepares_ahead

    assert prepares_ahead("sm90", 64, 16, 132)
    assert prepares_ahead("sm90", 16, 128, 132)
    assert not prepares_ahead("sm90", 67, 16, 132)
    assert not prepares_ahead("sm90", 64, 15, 132)
    assert not prepares_ahead("sm90", 0, 16, 132)
    assert not prepares_ahead("sm100", 64, 16, 132)
