"""Faults of our own kernels: one piece of their source reads otherwise."""

from attn_core.backends.triton.portable import (
    common,
    decode,
    dual_chunk,
    fp4,
    merge,
    partials,
    plan_shared,
)
from attn_core.ops.triton import vertical_slash
from edited import Edited


class KernelCausalOneTooFar(Edited):
    """A query sees the key after its own."""

    kernel = common.attention_mask
    before = "<= keys.prefix + qi[:, None])"
    after = "<= keys.prefix + qi[:, None] + 1)"


class KernelWindowOneTooNarrow(Edited):
    kernel = common.attention_mask
    before = "> keys.prefix + qi[:, None] - keys.window)"
    after = "> keys.prefix + qi[:, None] - keys.window + 1)"


class KernelOneKeyTooMany(Edited):
    """The last key counts twice: it stands in for the one that is not there."""

    kernel = common.attention_mask
    before = "(j < keys.length)"
    after = "(j <= keys.length)"


class KernelTreeTransposed(Edited):
    kernel = common.attention_mask
    before = "tree.mask + qi[:, None] * drafts + draft[None, :]"
    after = "tree.mask + draft[None, :] * drafts + qi[:, None]"


class KernelScaleForgotten(Edited):
    kernel = common.attention_loop
    before = "factor = scales.qk * LOG2E"
    after = "factor = LOG2E"


class KernelSumNotRescaled(Edited):
    """The sum of the blocks before keeps its old maximum."""

    kernel = common.attention_loop
    before = "total = total * shrink + "
    after = "total = total + "


class KernelPageOfTheFirstKey(Edited):
    """A block of keys is read from the page of its first one."""

    kernel = common.attention_loop
    before = "page = tl.load(keys.table + key_rows // C.PAGE)"
    after = "page = tl.load(keys.table + start // C.PAGE + key_rows * 0)"


class KernelOffsetsOf16Bits(Edited):
    kernel = common.attention_loop
    before = "k_at = page * k.page_stride + inner * k.token_stride"
    after = "k_at = (page * k.page_stride + inner * k.token_stride) % 65536"


class KernelCapNotScaledBack(Edited):
    kernel = common.soft_cap
    before = "return cap * "
    after = "return "


class KernelLseInBaseTwo(Edited):
    kernel = common.finalize
    before = "* LN2)"
    after = ")"


class KernelSinkNotInTheSum(Edited):
    kernel = common.finalize
    before = "total = total * shrink + sink_weight"
    after = "total = total * shrink"


class KernelLastPartDropped(Edited):
    kernel = partials.load_partials
    before = "(part < source.count) & row_mask"
    after = "(part < source.count - 1) & row_mask"


class KernelRotationsReversed(Edited):
    kernel = dual_chunk.dual_chunk_loop
    before = "q.ptr + tl.cast(rotation, tl.int64) * rotation_stride"
    after = "q.ptr + tl.cast(2 - rotation, tl.int64) * rotation_stride"


class KernelChunksOfOtherRows(Edited):
    """Rows of two chunks see the keys of both as if they were in each."""

    kernel = common.attention_mask
    before = "(chunk == keys.chunk)"
    after = "(chunk >= 0)"


class KernelChunkBorderInsideABlock(Edited):
    """A block of keys that a border cuts belongs to the chunk that begins in it."""

    kernel = common.attention_mask
    before = "visible & (j >= keys.first)[None, :]"
    after = "visible & (j >= 0)[None, :]"


class KernelSuccOfTwoChunks(Edited):
    kernel = dual_chunk.dual_chunk_loop
    before = "tl.where(rotation == 2, 0, tl.maximum(own_chunk - rotation, 0) * C.CHUNK)"
    after = "tl.where(rotation == 2, 0, tl.maximum(own_chunk - 2 * rotation, 0) * C.CHUNK)"


class KernelIntraMaskedNowhere(Edited):
    """All rows of a tile see what its last one sees of their own chunk."""

    kernel = dual_chunk.dual_chunk_loop
    before = "seen_by_all = tl.minimum(end, prefix + first_query + 1)"
    after = "seen_by_all = end"


class KernelWindowOneKeyEarly(Edited):
    kernel = vertical_slash.list_keys
    before = "window = end - tl.load"
    after = "window = end - 1 - tl.load"


class KernelListMaskedTooLate(Edited):
    """The block before the last two is the last without a mask."""

    kernel = vertical_slash.attend_rows
    before = "tl.maximum(count - 2, 0)"
    after = "tl.maximum(count - 1, 0)"


class KernelLastColumnForgotten(Edited):
    kernel = vertical_slash.attend_rows
    before = "count = tl.load(column_count + list_row)"
    after = "count = tl.maximum(tl.load(column_count + list_row) - 1, 0)"


class KernelSharedOnePageTooFar(Edited):
    """The first pages that differ are taken for equal."""

    kernel = plan_shared._compare
    before = "tl.where(valid & (page != next_page), i, limit)"
    after = "tl.where(valid & (page != next_page), i + 1, limit)"


class KernelSharedByTheRequestsBefore(Edited):
    """The keys of a group are those that a request shares with the ones before it."""

    kernel = plan_shared._join
    before = "tl.minimum(min_before, min_after)"
    after = "min_before"


class KernelSharedOwnKeysSkipped(Edited):
    """A request of a group begins a block after the keys of its groups."""

    kernel = plan_shared._store_requests
    before = "queries, begin, lengths)"
    after = "queries, begin + tl.where(begin > 0, BN, 0), lengths)"


class KernelSharedMaskedAsOwn(Edited):
    """The last keys of a group are masked for its first queries."""

    kernel = decode.decode_splits
    before = "tl.where(level > 0, length, length - queries)"
    after = "length - queries"


class KernelSharedRowsOfTheFirst(Edited):
    """Every member merges the rows of its group's first one."""

    kernel = merge.source_of_group
    before = "row = (query - first_query) * C.GROUP + row"
    after = "row = row"


class KernelSharedLevelsInOnePlace(Edited):
    kernel = decode.whole_rows
    before = "(1 + LEVELS) + level)"
    after = "(1 + LEVELS) + 0 * level)"


class KernelSharedKeysSkippedForTheUnit(Edited):
    """A program that begins within a tile takes units beside the keys for units of keys."""

    kernel = decode.decode_splits
    before = "unit = tl.maximum(unit - tile_units, 0)"
    after = "unit = unit"


class KernelSharedInnerGroupNotMerged(Edited):
    kernel = merge.merge_grouped
    before = "inner_group, query"
    after = "find_group(work_indptr, spans, -1, BM, C), query"


class KernelRowsOfTheFirstBlock(Edited):
    """Every block of a request's rows attends for the rows of the first one."""

    kernel = decode.decode_splits
    before = "row = row_block * BM + tl.arange(0, BM)"
    after = "row = tl.arange(0, BM)"


class KernelFp4ScaleOfTheNeighbour(Edited):
    """Each 16 columns of FP4 take the other scale of their pair."""

    kernel = fp4.load_fp4
    before = "w // 4 % 2 == 0"
    after = "w // 4 % 2 == 1"


class KernelFp4ColumnsSwapped(Edited):
    """The second and the third of each four columns change places."""

    kernel = fp4.load_fp4
    before = "return a.to(like), b.to(like), c.to(like), d.to(like)"
    after = "return a.to(like), c.to(like), b.to(like), d.to(like)"


class KernelFp4WithoutSigns(Edited):
    kernel = fp4.e2m1
    before = "((word & 8) << 12) | "
    after = ""
