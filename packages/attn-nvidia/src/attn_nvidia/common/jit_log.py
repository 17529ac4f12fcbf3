"""Log JIT compilation and how long it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger("attn_nvidia")
SILENT_S = 0.5  # a call that took longer did not come out of a cache


@contextmanager
def building(what: str, *, certain: bool = False) -> Iterator[None]:
    """Log `what` around a call that may compile (JIT), as info of the logger "attn_nvidia".

    Only around plans and first calls: entering takes about a microsecond. A call over 0.5 s is
    logged afterwards with its seconds; one that is `certain` to compile is also logged before.
    What the call raises is logged with its seconds too, and passes through.
    """
    if certain:
        LOG.info("building %s …", what)
    start = time.perf_counter()
    done = "failed to build"
    try:
        yield
        done = "built"
    finally:
        took = time.perf_counter() - start
        if certain or took > SILENT_S:
            LOG.info("%s %s in %.1f s", done, what, took)
