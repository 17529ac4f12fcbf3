"""Log JIT compilation and how long it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger("attn_nvidia")
SILENT_S = 0.5  # a call that took longer did not come out of a cache


@contextmanager
def building(label: str, *, always: bool = False) -> Iterator[None]:
    """Log `label` around a call that may compile (JIT), as info of the logger "attn_nvidia".

    Only around plans and first calls: entering takes about a microsecond. A call over 0.5 s is
    logged afterwards with its seconds; one that is `always` to compile is also logged before.
    What the call raises is logged with its seconds too, and passes through.
    """
    if always:
        LOG.info("building %s …", label)
    start = time.perf_counter()
    outcome = "failed to build"
    try:
        yield
        outcome = "built"
    finally:
        took = time.perf_counter() - start
        if always or took > SILENT_S:
            LOG.info("%s %s in %.1f s", outcome, label, took)
