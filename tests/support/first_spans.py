"""The spans that the parts of a plan begin in, found by a search."""

import torch


def first_spans(indptr, spans, *, parts, turns, min_units):
    """Return int32 [parts, 16], see plan_shared; of a part without work only the last two count.

    indptr: the units before each span. spans: int32 [spans, 8].
    """
    indptr, result = indptr.tolist(), torch.zeros(parts, 16, dtype=torch.int32)
    units = indptr[-1] * turns
    quota = max(-(-units // parts), min_units)
    for part, fields in enumerate(result):
        number = next((i for i, n in enumerate(indptr[1:]) if n * turns > part * quota), None)
        if number is not None:
            fields[:6] = spans[number, :6]
            fields[6:9] = torch.tensor([*indptr[number : number + 2], number])
        fields[9:11] = torch.tensor([quota, units])
    return result
