"""Faults of linear attention: the recurrence."""

from dataclasses import replace
from unittest import mock

import torch
from attn_core.backends.torch_native import delta_rule
from attn_core.cache.state_pool import CHUNK_SIZE
from linear_backend import ChunkReference, LinearReference


class DecayAfterTheRead(LinearReference):
    """The update is computed from the state before its decay."""

    def step(self, s, q, k, v, decay, beta, scale):
        u = beta[:, None] * (v - self.read(s, k))
        s = s * decay + u[..., None] * k[:, None]
        return s, self.read(s, q) * scale, u


class OutputOfTheOldState(LinearReference):
    def step(self, s, q, k, v, decay, beta, scale):
        new, _, u = super().step(s, q, k, v, decay, beta, scale)
        return new, self.read(s * decay, q) * scale, u


class BetaForgotten(LinearReference):
    def step(self, s, q, k, v, decay, beta, scale):
        return super().step(s, q, k, v, decay, torch.ones_like(beta), scale)


class BetaOnTheValueAlone(LinearReference):
    def step(self, s, q, k, v, decay, beta, scale):
        return super().step(s, q, k, v * beta[:, None], decay, torch.ones_like(beta), scale)


class LinearScaleForgotten(LinearReference):
    def scale(self, layer):
        return 1.0


class LinearScaleOfTheKeys(LinearReference):
    """The scale is the default one, whatever the layer says."""

    def scale(self, layer):
        return layer.head_k_dim**-0.5


class StateRoundedAtEveryToken(LinearReference):
    def step(self, s, q, k, v, decay, beta, scale):
        s, o, u = super().step(s, q, k, v, decay, beta, scale)
        return s.bfloat16().float(), o, u


class KMajorStates(LinearReference):
    """A state is stored and read as [K, V]."""

    def start(self, states, x):
        s = super().start(states, x)
        return s.reshape(s.shape[0], s.shape[2], s.shape[1]).mT

    def store(self, states, slot, s):
        super().store(states, slot, s.mT.reshape(s.shape))


class KeyHeadsInTurn(LinearReference):
    """Value head h has key head h % Hk."""

    def per_value_head(self, x, hv):
        return x.repeat(1, hv // x.shape[1], 1)


class DecaysFactored(ChunkReference):
    """e^G_i · e^-G_j over 16 tokens, which overflows where decay is strong."""

    def extend(self, *args, **kwargs):
        with mock.patch.object(delta_rule, "SAFE_EXPONENT", float("inf")):
            return super().extend(*args, **kwargs)


class InverseBySeries(ChunkReference):
    """(I + L)^-1 by products of powers of L, which cancel where keys are nearly equal."""

    def extend(self, *args, **kwargs):
        with mock.patch.object(delta_rule, "_inverse", self.series):
            return super().extend(*args, **kwargs)

    @staticmethod
    def series(lower):
        eye = torch.eye(lower.shape[-1])
        power, found = -lower, eye - lower
        for _ in range(5):
            power = power @ power
            found = found @ (eye + power)
        return found


class TokensPastTheEndDecay(ChunkReference):
    """The gate of a chunk's missing tokens is not masked: a bias alone is a decay."""

    def extend(self, q, k, v, g, beta, layer, state, batch, metadata, *, out=None):
        whole = [replace(x, tokens=-(-x.tokens // CHUNK_SIZE) * CHUNK_SIZE) for x in metadata]
        more = CHUNK_SIZE

        def longer(x):
            return torch.cat([x, x.new_zeros(more, *x.shape[1:])])

        found = super().extend(
            *map(longer, (q, k, v, g, beta)), layer, state, batch, whole[-1:], out=None
        )
        right = super().extend(q, k, v, g, beta, layer, state, batch, metadata[:-1], out=out)
        for x in metadata[-1:]:
            right[x.first : x.first + x.tokens] = found[x.first : x.first + x.tokens]
        return right
