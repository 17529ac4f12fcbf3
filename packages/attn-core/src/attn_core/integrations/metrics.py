"""Export which backend ran which pass to the Prometheus client of an engine, where it has one.

Engines serve the metrics of several processes from one: the client then shares numbers through
files, which it does for its own counters and not for collectors. Its counters take longer than a
pass should wait, so a thread adds up once a second what was counted meanwhile.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.trace import Counted, PassKind, Trace, kind_of

NAME = "attn_core_passes"  # the client adds "_total"
LABELS = ("layers", *PassKind._fields)
SECONDS = 1.0


def export(dispatcher: HybridDispatcher, layers: str) -> bool:
    """Add the passes of a dispatcher to a Prometheus counter, every second from now on.

    layers: which ones it serves, a label of the counter. Says whether a client is installed.
    """
    counter = _counter()
    if counter is None:
        return False
    run = Sender(dispatcher.trace, counter, layers).run
    threading.Thread(target=run, name="attn_core metrics", daemon=True).start()
    return True


class Sender:
    """Sends what a trace counted since the last time; it ends with the trace."""

    def __init__(self, trace: Trace, counter: Any, layers: str) -> None:
        self._trace, self._counter, self._layers = weakref.ref(trace), counter, layers
        self._sent: dict[Counted, int] = {}

    def send(self) -> bool:
        """Send; say whether the trace is still there."""
        trace = self._trace()
        for key, n in () if trace is None else tuple(trace.counts.items()):
            new = n - self._sent.get(key, 0)
            if new:
                self._counter.labels(self._layers, *map(str, kind_of(key))).inc(new)
                self._sent[key] = n
        return trace is not None

    def run(self) -> None:
        """Send until the trace ends."""
        event = threading.Event()
        while self.send():
            event.wait(SECONDS)


@functools.cache
def _counter() -> Any:
    """Return the counter of this process, None without a client; registered at its first use."""
    try:
        from prometheus_client import Counter
    except ImportError:
        return None
    return Counter(NAME, "Passes of attention, by the backend that ran them and by size.", LABELS)
