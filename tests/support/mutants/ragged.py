"""Faults of attention without a cache."""

import torch
from reference import Reference


class RaggedTopLeft(Reference):
    def last_key(self, query, n, s):
        return query if self.ragged else super().last_key(query, n, s)

    ragged = False

    def forward_ragged(self, *args, **kwargs):
        self.ragged = True
        return super().forward_ragged(*args, **kwargs)


class RaggedAlwaysCausal(Reference):
    def forward_ragged(self, *args, causal, **kwargs):
        return super().forward_ragged(*args, causal=True, **kwargs)


class RaggedKeysByQueries(Reference):
    """The ends of the queries are taken for those of the keys."""

    def forward_ragged(self, q, k, v, layer, cq, ck, max_q, max_k, **kwargs):
        return super().forward_ragged(q, k, v, layer, cq, cq, max_q, max_q, **kwargs)


class RaggedHeadsTakenForAdjacent(Reference):
    """The step from token to token is taken for that of all heads."""

    def forward_ragged(self, q, k, v, *args, **kwargs):
        k, v = (x.as_strided(x.shape, (x.shape[1] * x.stride(1), x.stride(1), 1)) for x in (k, v))
        return super().forward_ragged(q, k, v, *args, **kwargs)


class RaggedValuesContiguousAsKeys(Reference):
    """Where the keys are contiguous the values are taken for it too."""

    def forward_ragged(self, q, k, v, *args, **kwargs):
        if k.is_contiguous():
            v = v.as_strided(v.shape, (v.shape[1] * v.shape[2], v.shape[2], 1))
        return super().forward_ragged(q, k, v, *args, **kwargs)


class RaggedNotWithoutKeys(Reference):
    """Requests without keys are left as they were."""

    def forward_ragged(self, q, k, v, layer, cq, ck, *args, out=None, **kwargs):
        before = None if out is None else out.clone()
        actual = super().forward_ragged(q, k, v, layer, cq, ck, *args, out=out, **kwargs)
        out = actual[0] if isinstance(actual, tuple) else actual
        counts, keys = cq.diff().tolist(), ck.diff().tolist()
        at = 0
        for n, s in zip(counts, keys, strict=True):
            if not s:
                out[at : at + n] = torch.nan if before is None else before[at : at + n]
            at += n
        return actual


class RaggedValuesOfAllRequests(Reference):
    """The values of the whole batch are multiplied, those of other requests by zero."""

    def forward_ragged(self, q, k, v, *args, **kwargs):
        actual = super().forward_ragged(q, k, v, *args, **kwargs)
        out = actual[0] if isinstance(actual, tuple) else actual
        out += (0 * v).sum()
        return actual
