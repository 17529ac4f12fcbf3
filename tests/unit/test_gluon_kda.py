"""What prepares KDA's prompts on Hopper, emulated on a CPU: against the recurrence.

tests/device runs it on a GPU. Here products and sums are PyTorch's, and so are roundings.
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
    Weights,
    Workspace,
)
from emulated_gluon import Pointer, launch, load
from linear_reference import draw, make_linear_layer

HEADS, DIM = (1, 2), 128


def prompt(count, **more):
    """Draw a prompt of bf16 and the state before it."""
    torch.manual_seed(count)
    layer = make_linear_layer(kind="kda", heads=HEADS, dims=(DIM, DIM))
    tokens = draw(layer, count, dtype=torch.bfloat16, **more)
    return tokens, torch.randn(HEADS[1], DIM, DIM)


def prepared(tokens):
    """Return T, P · T, the decay, k_in, q_in and k_out of each chunk and head, and its tokens."""

    def rows(x):
        x = x.contiguous()
        return Rows(Pointer(x), x.stride(0), x.stride(1))

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
        Numbers(tokens.layer.scale, 0.0, 0.0), Chunks(*places, *[places[0]] * 4), work,
        Constants(HEADS[1], HEADS[1] // HEADS[0], DIM, DIM, True, 0, False, False),
    )  # fmt: skip
    return (x.float() for x in (T[:, :, 0], T[:, :, 1], decay, *wide)), sizes


def outputs(tokens, S):
    """Return the outputs and the state after them, of what was prepared."""
    (T, PT, decay, k_in, q_in, k_out), sizes = prepared(tokens)
    out = []
    for c, size in enumerate(sizes):
        v = torch.zeros(HEADS[1], 64, DIM)
        v[:, :size] = tokens.v[64 * c : 64 * c + size].transpose(0, 1)
        x = v - k_in[c] @ S.mT
        out.append((q_in[c] @ S.mT + PT[c] @ x)[:, :size].transpose(0, 1))
        S = S * decay[c][:, None] + (T[c] @ x).mT @ k_out[c]
    return torch.cat(out), S


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
