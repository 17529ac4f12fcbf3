"""Faults of the log-sum-exp, sinks, and the merge of parts."""

import math
from dataclasses import replace

import torch
from attn_core.ops.merge import merge_states
from in_parts import InParts
from reference import Reference


class LseBaseTwo(Reference):
    def natural(self, lse):
        return lse / math.log(2)


class LseWithoutSink(Reference):
    def with_sinks(self, out, lse, layer):
        return super().with_sinks(out, lse, layer)[0], lse


class LseRounded(Reference):
    def natural(self, lse):
        return lse.to(torch.bfloat16).float()


class LseOfNothingIsZero(Reference):
    def natural(self, lse):
        return lse.masked_fill(lse == -torch.inf, 0.0)


class LseHeadsFirst(Reference):
    """The LSE is [Hq, T] in memory, and called [T, Hq]."""

    def forward(self, *args, **kwargs):
        actual = super().forward(*args, **kwargs)
        return (
            (actual[0], actual[1].T.reshape(actual[1].shape))
            if isinstance(actual, tuple)
            else actual
        )


class SinksIgnored(Reference):
    def with_sinks(self, out, lse, layer):
        return out, lse


class SinksAddedToTheOutput(Reference):
    def with_sinks(self, out, lse, layer):
        scaled, total = super().with_sinks(out, lse, layer)
        if layer.sinks is None:
            return scaled, total
        return scaled + (layer.sinks - total).exp()[..., None], total


class SinksOfOtherHeads(Reference):
    def with_sinks(self, out, lse, layer):
        sinks = None if layer.sinks is None else layer.sinks.flip(0)
        return super().with_sinks(out, lse, replace(layer, sinks=sinks))


class SinkLostWithoutKeys(Reference):
    def attend(self, q, k, v, layer, rows):
        if not len(k):
            layer = replace(layer, sinks=None)
        return super().attend(q, k, v, layer, rows)


class HalvesAveraged(Reference):
    """Two splits of the keys are merged without their weights."""

    def softmax(self, scores, v):
        s = scores.shape[-1]
        if s < 64:
            return super().softmax(scores, v)
        parts = [
            super(HalvesAveraged, self).softmax(scores[..., a], v[a])
            for a in (slice(0, s // 2), slice(s // 2, s))
        ]
        return (parts[0][0] + parts[1][0]) / 2, torch.logaddexp(parts[0][1], parts[1][1])


class MergedWithoutMax(Reference):
    """Two splits of the keys are merged by exp(LSE) as it is."""

    def softmax(self, scores, v):
        half = scores.shape[-1] // 2
        if not half:
            return super().softmax(scores, v)
        parts = [
            super(MergedWithoutMax, self).softmax(scores[..., a], v[a])
            for a in (slice(0, half), slice(half, None))
        ]
        (a, b), (x, y) = ([o.nan_to_num(0.0) for o, _ in parts], [lse.exp() for _, lse in parts])
        out = (a * x[..., None] + b * y[..., None]) / (x + y).clamp(min=1e-30)[..., None]
        return out, (x + y).log()


class LastOfManyPartsDropped(InParts):
    def kept(self, cuts):
        return cuts[:32]


class EmptyPartsWeighOne(InParts):
    """A part in which a query sees no key is merged with an LSE of 0."""

    def merged(self, outs, lses):
        empty = lses == -torch.inf
        return merge_states(outs.masked_fill(empty[..., None], 0.0), lses.masked_fill(empty, 0.0))


class EmptyPartsMultiplied(InParts):
    """What is in an empty part's output is multiplied by a weight of zero: 0 · NaN."""

    def merged(self, outs, lses):
        total = lses.logsumexp(0)
        return (outs * (lses - total).exp()[..., None]).sum(0), total


class SinkInEveryPartOf512(InParts):
    part = 512

    def attend(self, q, k, v, layer, rows):
        more = (-(-k.shape[0] // self.part) or 1) - 1
        if layer.sinks is not None:
            layer = replace(layer, sinks=layer.sinks + math.log1p(more))
        return super().attend(q, k, v, layer, rows)


class PartsByTheLongest(InParts):
    """How the keys of a request are cut depends on the longest of its neighbours."""

    def rows(self, batch, view):
        result = super().rows(batch, view)
        self.part = max(1, max(r.length for r in result) // 3)
        return result
