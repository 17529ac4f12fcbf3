"""Faults of linear attention: gates and norms."""

from dataclasses import replace

import torch
from linear_backend import LinearReference

LN2 = 0.6931472


class NormEpsOutsideTheRoot(LinearReference):
    def norm(self, x, layer):
        return x / (x.square().sum(-1, keepdim=True).sqrt() + layer.qk_norm)


class NormWithoutEps(LinearReference):
    def norm(self, x, layer):
        return torch.nn.functional.normalize(x, dim=-1)


class NormOfTheMean(LinearReference):
    """RMS norm instead of L2."""

    def norm(self, x, layer):
        return x * (x.square().mean(-1, keepdim=True) + layer.qk_norm).rsqrt()


class NormForgotten(LinearReference):
    def normalised(self, q, k, layer):
        return q.float(), k.float()


class NormOfTheKeysAlone(LinearReference):
    def normalised(self, q, k, layer):
        return q.float(), super().normalised(q, k, layer)[1]


class NormInTheKernelAlways(LinearReference):
    """Keys that are normalised already, to within an eps, are normalised again."""

    def normalised(self, q, k, layer):
        return super().normalised(q, k, replace(layer, qk_norm=layer.qk_norm or 1e-3))


class DecayPerHead(LinearReference):
    """KDA's decay of the first channel is that of all."""

    def decay(self, g, layer):
        return super().decay(g if g.dim() == 1 else g[:, :1].expand_as(g), layer)


class DecayOnTheValues(LinearReference):
    """KDA's decay multiplies rows of the state in place of columns."""

    def decay(self, g, layer):
        found = super().decay(g, layer)
        return found if g.dim() == 1 else found.mT[:, :1]


class DecayInBfloat16(LinearReference):
    def decay(self, g, layer):
        return super().decay(g.bfloat16().float(), layer)


class DecayTakenForItsLog(LinearReference):
    """g is taken for the decay itself."""

    def decay(self, g, layer):
        return super().decay(g.clamp(min=1e-10).log(), layer)


class DecayInBaseTwo(LinearReference):
    def decay(self, g, layer):
        return super().decay(g * LN2, layer)


class SoftplusWithoutThreshold(LinearReference):
    """exp overflows."""

    def softplus(self, x):
        return torch.log(1 + x.exp())


class SoftplusThresholdOf5(LinearReference):
    def softplus(self, x):
        return torch.nn.functional.softplus(x, threshold=5)


class SoftplusByAFastLogarithm(LinearReference):
    """A GPU's lg2.approx is off by up to 2^-22 between 1/2 and 2: no fault beside bf16 alone."""

    def softplus(self, x):
        found = super().softplus(x)
        return torch.where(found < LN2, found + LN2 * 2**-22, found)


class BiasForgotten(LinearReference):
    def log_decay(self, f, layer):
        gate = replace(layer.gate, dt_bias=torch.zeros_like(layer.gate.dt_bias))
        return super().log_decay(f, replace(layer, gate=gate))


class BoundedGateClamped(LinearReference):
    """The bounded gate is taken for a softplus gate with a lowest decay."""

    def log_decay(self, f, layer):
        bound = layer.gate.lower_bound
        plain = replace(layer, gate=replace(layer.gate, lower_bound=None))
        found = super().log_decay(f, plain)
        return found if bound is None else found.clamp(min=bound)


class NegativeEigenvaluesIgnored(LinearReference):
    def strength(self, b, layer):
        return torch.sigmoid(b.float())


class BetaRounded(LinearReference):
    def strength(self, b, layer):
        return super().strength(b, layer).bfloat16().float()


class GateOfTheFirstLayer(LinearReference):
    def prepared(self, q, k, v, g, beta, layer):
        first = self.config.linear_layers[0]
        return super().prepared(q, k, v, g, beta, replace(layer, gate=first.gate))
