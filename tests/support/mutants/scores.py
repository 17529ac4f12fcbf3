"""Faults of scores: their scale, cap, heads and precision."""

import torch
from reference import Reference


class ScaleOnePercentOff(Reference):
    def scale(self, layer):
        return layer.scale * 1.01


class ScaleOfHeadDim(Reference):
    """The layer's own scale is ignored."""

    def scale(self, layer):
        return layer.head_dim**-0.5


class CapIgnored(Reference):
    def cap(self, scores, cap):
        return scores


class CapAfterTheMask(Reference):
    def cap_and_mask(self, scores, seen, cap):
        return self.cap(self.mask(scores, seen), cap)


class CapNotScaledBack(Reference):
    def cap(self, scores, cap):
        return scores if cap is None else torch.tanh(scores / cap)


class GqaInterleaved(Reference):
    """Query head h reads KV head h % Hkv instead of h // group."""

    def kv_head(self, k, layer):
        return k.repeat(1, layer.num_q_heads // layer.num_kv_heads, 1)


class RopePartDropped(Reference):
    def score(self, q, k):
        return super().score(q[..., :512], k[..., :512])


class QueriesMaskedAsTheFirst16(Reference):
    """The scores are computed 16 queries at a time, and each slice is masked as the first one."""

    def cap_and_mask(self, scores, seen, cap):
        return super().cap_and_mask(scores, seen[torch.arange(len(seen)) % 16], cap)


class NoMaxSubtracted(Reference):
    def softmax(self, scores, v):
        p = scores.exp()
        total = p.sum(-1)
        out = torch.einsum("hns,shd->nhd", p, v) / total.T.clamp(min=1e-30)[..., None]
        return out, total.log().T


class ScoresInBfloat16(Reference):
    def score(self, q, k):
        return super().score(q.bfloat16(), k.bfloat16()).float()


class NotDeterministic(Reference):
    def score(self, q, k):
        return super().score(q + torch.randn_like(q) * 1e-4, k)
