"""What an engine compiles when it starts, so that no request waits for a compiler."""

from __future__ import annotations

import logging

from attn_core.errors import AttnError, BackendRunError
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.warmup import warmup


def compile_ahead(dispatcher: HybridDispatcher, max_bs: int, logger: logging.Logger) -> None:
    """Run every kind of pass once on dummy requests; log how many there were and their seconds.

    Only page 0 of the engine's cache is written. A pass that fails is logged, and the engine starts
    all the same: what was not compiled is compiled when a request needs it.
    max_bs: the most requests of a pass. logger: one whose messages the engine prints.
    Raises BackendRunError where the device can run nothing any more.
    """
    try:
        passes = warmup(dispatcher, max_bs=max_bs)
    except AttnError as error:
        if isinstance(error, BackendRunError) and error.restart:
            raise
        logger.warning("attn_core: a warm-up pass failed, so requests may wait: %s", error)
        return
    seconds = sum(one.seconds for one in passes)
    logger.info("attn_core ran %d kinds of passes ahead, in %.1f s", len(passes), seconds)
