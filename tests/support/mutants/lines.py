"""Faults of sparse prompts: which lines are chosen, by whom, and which keys lie on them."""

import torch
from attn_core.ops.vertical_slash import FIRST_KEYS, NO_INDEX, Part
from reference import Reference


class SlashesOneOff(Reference):
    def lists(self, lines, part):
        return super().lists(lines._replace(slash=lines.slash + 1), part)


class VerticalDropped(Reference):
    """The first one that is chosen by its score."""

    def lists(self, lines, part):
        vertical = torch.cat(
            [lines.vertical[:, :FIRST_KEYS], lines.vertical[:, FIRST_KEYS + 1 :]], 1
        )
        return super().lists(lines._replace(vertical=vertical), part)


class FarthestSlashDropped(Reference):
    def lists(self, lines, part):
        return super().lists(lines._replace(slash=lines.slash[:, 1:]), part)


class VerticalsOneOff(Reference):
    def lists(self, lines, part):
        beyond = lines.vertical == NO_INDEX
        vertical = torch.where(beyond, lines.vertical, lines.vertical + 1)
        return super().lists(lines._replace(vertical=vertical), part)


class VerticalsAlone(Reference):
    """Windows hold their first key alone."""

    def lists(self, lines, part):
        lists = super().lists(lines, part)
        return lists._replace(block_count=torch.zeros_like(lists.block_count))


class WindowsAcrossTheBorder(Reference):
    """Lists do not begin anew at the border of two chunks."""

    def parts(self, begin, end, length):
        return (Part(begin, end, 0, end),)


class PreviousChunkWithoutLines(Reference):
    def parts(self, begin, end, length):
        return [
            p for p in super().parts(begin, end, length) if (p.lo, p.hi) != (begin - length, begin)
        ]


class LinesOfTheWholePrompt(Reference):
    """The last queries of the prompt choose for all chunks."""

    def lines(self, q, k, begin, end, size, layer):
        return super().lines(q, k, begin, len(k), size, layer)


class LinesOfTheFirstQueries(Reference):
    def choosing(self, begin, end, last):
        return slice(begin, min(begin + last, end))


class OneQueryFewerChooses(Reference):
    def choosing(self, begin, end, last):
        return super().choosing(begin, end, last - 1)


class LinesBySuccAndInter(Reference):
    """Lines are chosen by the queries that attend, not by those made for it."""

    def choosers(self):
        return [0, 1, 2]


class SparseFromTheThreshold(Reference):
    def is_sparse(self, layer, n, s):
        threshold = layer.dual_chunk and layer.dual_chunk.sparse_threshold
        return threshold is not None and n == s >= threshold


class AlwaysDense(Reference):
    def is_sparse(self, layer, n, s):
        return False
