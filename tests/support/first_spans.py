"""What the parts of a plan begin with, found by a search."""

import torch

FIELDS, FIRST_BLOCK, PAGES, MOST_PAGES = 32, 11, 12, 16


def first_spans(
    indptr, spans, *, parts, turns, min_units, table=None, page=64, block=64, tile_units=0
):
    """Return int32 [parts, 32], see plan_shared; of a part without work three fields count.

    indptr: the units before each span. spans: int32 [spans, 8]. table: the page table int32
    [batch, pages]; None, and where a block has more than 16 pages: no part has a first block.
    """
    indptr, result = indptr.tolist(), torch.zeros(parts, FIELDS, dtype=torch.int32)
    result[:, FIRST_BLOCK] = -1
    units = indptr[-1] * turns
    quota = max(-(-units // parts), min_units)
    for part, fields in enumerate(result):
        number = next((i for i, n in enumerate(indptr[1:]) if n * turns > part * quota), None)
        fields[6:8] = torch.tensor([units, quota])
        if number is None:
            continue
        fields[:6] = spans[number, :6]
        fields[8:11] = torch.tensor([number, *indptr[number : number + 2]])
        request, level, _, _, begin, end = fields[:6].tolist()
        tile = max(-(-end // block) - begin // block, 1) + tile_units
        at = (part * quota - indptr[number] * turns) % (indptr[number + 1] - indptr[number]) % tile
        mine = range(at, min(at + quota, at + units - part * quota, tile))
        keys = [unit - tile_units for unit in mine if unit >= tile_units]
        count = max(block // page, 1)
        if table is None or end == 0 or not keys or count > MOST_PAGES:
            continue
        if level > 0:  # the last one of its window of `quota` blocks, as in the other tiles
            whole = len(keys) == tile - tile_units
            first = (2 * quota - 1) % len(keys) if whole else quota - 1 - keys[0] % quota
            keys[-1] = keys[min(first, len(keys) - 1)]
        fields[FIRST_BLOCK] = first_block = begin // block + keys[-1]
        at = (first_block * block // page + torch.arange(count)).clamp(max=(end - 1) // page)
        fields[PAGES : PAGES + count] = table[request, at]
    return result
