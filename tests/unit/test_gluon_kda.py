"""The kernels of KDA's prompts on Hopper, emulated on a CPU: against the recurrence.

tests/device runs them on a GPU. Here products and sums are PyTorch's, and so are roundings.
"""

import math

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
from emulated_gluon import Pointer, Written, launch, load
from linear_reference import draw, make_linear_layer

HEADS, DIM = (1, 2), 128
COMMON = Constants(HEADS[1], HEADS[1] // HEADS[0], DIM, DIM, True, 0, False, False)


def prompt(count, **more):
    """Draw a prompt of bf16 and the state before it."""
    torch.manual_seed(count)
    layer = make_linear_layer(kind="kda", heads=HEADS, dims=(DIM, DIM))
    tokens = draw(layer, count, dtype=torch.bfloat16, **more)
    return tokens, torch.randn(HEADS[1], DIM, DIM)


def rows(x):
    x = x.contiguous()
    return Rows(Pointer(x), x.stride(0), x.stride(1))


def prepared(tokens):
    """Return T and P · T, the decays, and k_in, q_in and k_out of each chunk and head."""
    count = len(tokens.v)
    starts = range(0, count, 64)
    sizes = [min(64, count - at) for at in starts]
    shape = (len(starts), HEADS[1])
    T = torch.full((*shape, 2, 64, 64), math.nan).bfloat16()
    decay = torch.full((*shape, DIM), math.nan)
    wide = torch.full((3, *shape, 64, DIM), math.nan).bfloat16()
    places = [Pointer(torch.tensor(list(x))) for x in (starts, sizes)]
    work = Workspace(*map(Pointer, (T, decay, decay, *wide)), None, None)
    unread = Pointer(torch.zeros(1))
    launch(
        load("hopper.prepare_kda").prepare_kda_hopper, len(starts) * HEADS[1],
        Inputs(*map(rows, tokens.raw)), Weights(unread, unread),
        Numbers(tokens.layer.scale, 0.0, 0.0), Chunks(*places, *[places[0]] * 4), work, COMMON,
    )  # fmt: skip
    return T, decay, wide


def outputs(tokens, S):
    """Return the outputs and the state after them, of what was prepared, by the formulas."""
    T, decay, wide = prepared(tokens)
    T, PT, k_in, q_in, k_out = (x.float() for x in (T[:, :, 0], T[:, :, 1], *wide))
    out = []
    for c, v in enumerate(tokens.v.split(64)):
        x = -k_in[c] @ S.mT
        x[:, : len(v)] += v.transpose(0, 1)
        out.append((q_in[c] @ S.mT + PT[c] @ x)[:, : len(v)].transpose(0, 1))
        S = S * decay[c][:, None] + (T[c] @ x).mT @ k_out[c]
    return torch.cat(out), S


def scanned(tokens, S, form):
    """Return the same by a kernel. form: "alone" has 64 rows of a state a program, or "shared"."""
    T, decay, wide = prepared(tokens)
    count = len(tokens.v)
    table = [Pointer(torch.tensor(x)) for x in ([0, count], [0], [0], [1])]
    indptr, first, order, slot = table
    chunks = Chunks(None, None, indptr, first, order, None)
    work = Workspace(*map(Pointer, (T, decay, decay, *wide)), slot, slot)
    v, state = tokens.v.contiguous(), torch.stack((torch.full_like(S, math.nan), S))
    out = torch.full_like(v, math.nan)
    stored = (rows(out), States(Pointer(state), 0, S.numel()), Slots(slot, slot, slot), slot)
    if form == "shared":
        kernel = load("hopper.scan").scan_hopper
        launch(kernel, HEADS[1], Inputs(*map(rows, tokens.raw)), *stored, chunks, work, 2, COMMON)
    else:
        k_in, q_in, k_out = (x.flatten(0, 2) for x in wide)
        maps = (k_in, q_in, v.flatten(1), Written(out), T.view(-1, 64), k_out)
        kernel = load("hopper.scan_alone").scan_alone
        launch(kernel, HEADS[1] * 2, *maps, *stored, chunks, work, 2, 3, 2, False, COMMON)
    return out, state[1]


def close(got, want, rms=6e-3):
    got, want = got.double(), want.double()
    assert torch.isfinite(got).all()
    assert (got - want).square().mean().sqrt() < rms * want.square().mean().sqrt()


@pytest.mark.parametrize("count", [1, 64, 130])
@pytest.mark.parametrize("decay", [0.05, 1.0, 20.0])
def test_equals_the_recurrence(count, decay):
    tokens, S = prompt(count, decay=decay)
    want, after = tokens.run(S)
    got = outputs(tokens, S)
    close(got[0], want)
    close(got[1], after[-1])


@pytest.mark.parametrize("count", [1, 65, 200])
def test_both_forms_carry_the_state_and_have_the_same_bits(count):
    tokens, S = prompt(count, decay=0.05)
    want, after = tokens.run(S)
    out, state = scanned(tokens, S, "shared")
    close(out, want)
    close(state, after[-1])
    other = scanned(tokens, S, "alone")
    assert torch.equal(other[0], out)
    assert torch.equal(other[1], state)


@pytest.mark.parametrize("forgotten", [128, 64], ids=["all", "half"])
@pytest.mark.parametrize("at", [2, 5, 9, 12, 15, 20])
def test_nothing_is_left_of_a_large_value_after_its_channels_are_forgotten(forgotten, at):
    """exp(-10) of a value that is 3000 times larger than the others is 14 % of these."""
    tokens, S = prompt(40, decay=0.01)
    tokens.v[at - 1] *= 3000
    tokens.k[at - 1, :, forgotten:] = 0
    tokens.g[at, :, :forgotten] = -80
    want, after = tokens.run(S)
    got = outputs(tokens, S)
    close(got[0][at:], want[at:])
    close(got[1], after[-1])
