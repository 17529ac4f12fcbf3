"""Faults: each class is a right backend with one mistake of a kind that is seen in kernels.

The right ones are reference.py, in_parts.py, wrapped.py, sparse_reference.py, linear_backend.py
and, of our own kernels, edited.py.
"""

import os

from mutants import (
    batches,
    cache,
    chunks,
    linear,
    linear_drafts,
    linear_gates,
    linear_slots,
    lines,
    lse,
    masks,
    ragged,
    scores,
    sparse,
    wrappers,
    writes,
)


def planted(*themes):
    """List the classes that the modules define."""
    return tuple(
        x
        for theme in themes
        for x in vars(theme).values()
        if isinstance(x, type) and x.__module__ == theme.__name__
    )


WRITERS = planted(writes)  # a kernel that writes new keys and values itself
WRAPPERS = planted(wrappers)
SPARSE = planted(sparse)
LINEAR = planted(linear, linear_gates, linear_slots, linear_drafts)
KERNELS = ()
if os.environ.get("TRITON_INTERPRET") == "1":  # there the source of a kernel can be edited
    from mutants import kernels

    KERNELS = planted(kernels)
MUTANTS = (
    *planted(masks, scores, lse, cache, batches, ragged, chunks, lines),
    *WRITERS,
    *WRAPPERS,
    *SPARSE,
    *LINEAR,
    *KERNELS,
)
