"""Faults of what a query sees: windows, causality, the tree of drafts."""

from dataclasses import replace

import torch
from reference import Reference


class WindowOneTooWide(Reference):
    def in_window(self, key, query, window):
        return key >= query - window


class WindowOneTooNarrow(Reference):
    def in_window(self, key, query, window):
        return key > query - window + 1


class WindowIgnored(Reference):
    def in_window(self, key, query, window):
        return key >= 0


class WindowByDraftIndex(Reference):
    """The position of a draft is its index, not its depth."""

    def depth(self, tree):
        return torch.arange(tree.shape[0], device=tree.device)


class WindowFromChunkStart(Reference):
    """Windows count from the first new token of the pass."""

    def position(self, position, rows):
        return position - int(rows.queries > 1)


class WindowOfAllQueriesButOneIgnored(Reference):
    """A block of many queries needs no window, unless it is narrower than the block less one."""

    def attend(self, q, k, v, layer, rows):
        if layer.sliding_window == rows.queries - 1 >= 64:
            layer = replace(layer, sliding_window=None)
        return super().attend(q, k, v, layer, rows)


class WindowIgnoredInAGraph(Reference):
    graph = False

    def init_cuda_graph_state(self, *args):
        self.graph = True
        super().init_cuda_graph_state(*args)

    def in_window(self, key, query, window):
        return key > query - (1 << 30 if self.graph else window)


class BehindTheWindowReadAndMasked(Reference):
    """Keys behind the window weigh nothing, but their values are read: 0 · NaN."""

    def without_what_is_behind(self, values, rows, layer):
        return values


class BehindTheWindowReadAtPageOne(Reference):
    """Single tokens are gathered by a path of their own, from the first one of the request."""

    def without_what_is_behind(self, values, rows, layer):
        if self.config.page_size == 1:
            return values
        return super().without_what_is_behind(values, rows, layer)


class CausalTopLeft(Reference):
    def last_key(self, query, n, s):
        return query


class CausalWithoutItself(Reference):
    def last_key(self, query, n, s):
        return (query + s - n - 1).clamp(min=0)


class CausalIgnored(Reference):
    def last_key(self, query, n, s):
        return query * 0 + s


class PrefixIgnored(Reference):
    def visible(self, layer, rows, n, s, device):
        seen = super().visible(layer, rows, n, s, device)
        if n > 1 and layer.is_causal and not layer.is_cross:
            seen[:, : s - n] = False
        return seen


class TreeIgnored(Reference):
    def seen_drafts(self, tree, prefix):
        return super().seen_drafts(torch.ones_like(tree).tril(), prefix)


class TreeTransposed(Reference):
    def seen_drafts(self, tree, prefix):
        return super().seen_drafts(tree.T, prefix)


class TreeOnThePrefix(Reference):
    """The mask is laid on the first keys instead of the last."""

    def seen_drafts(self, tree, prefix):
        n = tree.shape[0]
        seen = tree.new_ones(n, prefix + n).tril(prefix)
        seen[:, :n] = tree
        return seen


class TreeOfAnotherRequest(Reference):
    def tree(self, mask, b):
        return mask[b - 1]


class TreeBelowTheDiagonal(Reference):
    """A draft sees no draft that is named after it."""

    def seen_drafts(self, tree, prefix):
        return super().seen_drafts(tree.tril(), prefix)


class DepthFromTheFirstDraft(Reference):
    """The first draft is taken for a root."""

    def depth(self, tree):
        depth = super().depth(tree)
        return depth - depth[0]


class DraftsUpTo64(Reference):
    def tree(self, mask, b):
        mask = mask[b].clone()
        mask[:, 64:] = False
        return mask
