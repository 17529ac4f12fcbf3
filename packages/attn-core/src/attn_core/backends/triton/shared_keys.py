"""Counts what the requests of a planned pass share. It waits for the device: no pass calls it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from attn_core.backends.triton.portable.arguments import BEGIN, END, INNER, LEVEL, OUTER
from attn_core.backends.triton.schedule import Schedule, SplitKV
from attn_core.backends.triton.shared import spans_of
from attn_core.costs.shared_prefix import token_values
from attn_core.runtime.layer import LayerGroup
from attn_core.runtime.shared_keys import SharedKeys


class Counted(NamedTuple):
    """Tokens of a layer's keys: see SharedKeys. total: those of all requests."""

    grouped: int = 0
    tokens: int = 0
    read: int = 0
    total: int = 0


def shared_keys(
    name: str, layers: Iterable[LayerGroup], schedules: Mapping[LayerGroup, Schedule]
) -> SharedKeys | None:
    """Return what a pass shared; None for a pass without a plan. layers: the group of each."""
    counts = Counter(group for group in layers if group in schedules)
    result = {group: _counted(group, schedules[group]) for group in counts}
    if not result:
        return None
    values = {
        group: n * group.num_kv_heads * token_values(group.head_dim, group.v_head_dim)
        for group, n in counts.items()
    }
    saved = sum(values[group] * (x.tokens - x.read) for group, x in result.items())
    total = sum(values[group] * x.total for group, x in result.items())
    best = max(result.values(), key=lambda x: x.tokens)
    batch = next(iter(schedules.values())).inputs.batch
    assert batch is not None  # chunks of prompts over latents are no requests of it
    counted = (batch.batch_size, best.grouped, best.tokens, best.read)
    return SharedKeys(name, *counted, saved / max(total, 1))


def _counted(group: LayerGroup, schedule: Schedule) -> Counted:
    batch = schedule.inputs.batch
    assert batch is not None
    lengths = batch.views[group.view].seq_lens
    if group.window is not None:  # whatever lies before the first query's window is not read
        queries = batch.cu_seqlens_q.diff()
        lengths = lengths.minimum(group.window + queries - 1)
    total = int(lengths.sum())
    split = schedule.split
    if split is None or split.buffer is None:
        return Counted(total=total)
    return _of_groups(split, batch.batch_size)._replace(total=total)


def _of_groups(split: SplitKV, size: int) -> Counted:
    assert split.buffer is not None
    buffer = split.buffer.cpu()
    spans, units = spans_of(buffer), buffer[0, : 2 * size + 1].diff()
    groups = (spans[:size, OUTER.value], spans[:size, INNER.value])
    tokens = read = grouped = 0
    for span in range(size, 2 * size):
        if units[span] <= 0:  # groups come first, then nothing
            break
        level = int(spans[span, LEVEL.value])
        keys = int(spans[span, END.value] - spans[span, BEGIN.value])
        together = int((groups[level - 1] == span).sum())
        tokens += together * keys
        read += keys
        grouped += together if level == 1 else 0
    return Counted(grouped, tokens, read)
