"""Random passes of linear attention: whatever a row declares, over slots that come and go."""

from __future__ import annotations

import random

from attn_core.cache.state_pool import CHUNK_SIZE
from attn_core.runtime.batch import ForwardMode
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.kinds import Phase
from attn_core.testing.cases import Parents
from attn_core.testing.linear_cases import LinearPass

SLOTS = range(1, 11)  # slot 0 and slot 11 belong to nobody
MOST_TOKENS = 80


def random_passes(row: Capabilities, *, passes: int, seed: int = 1) -> tuple[LinearPass, ...]:
    """Draw passes of mixed modes over 12 slots; the first of a request starts from zeros."""
    rng, in_use, passes_drawn = random.Random(seed), set[int](), list[LinearPass]()
    modes = [ForwardMode.EXTEND, ForwardMode.MIXED] if Phase.PREFILL in row.phases else []
    modes += [ForwardMode.DECODE] * (2 if Phase.DECODE in row.phases else 0)
    modes = [x for x in modes if x is not ForwardMode.MIXED or Phase.DECODE in row.phases]
    modes += [ForwardMode.TARGET_VERIFY] * (2 if row.max_verify_topk else 0)
    for _ in range(passes):
        pass_ = _drawn(row, rng, rng.choice(modes), in_use)
        passes_drawn.append(pass_)
        written = {s for s in (*pass_.writes, *(pass_.checkpoint_slots or ())) if s >= 0}
        if pass_.drafts and pass_.accepted is not None:
            pairs = zip(pass_.writes, pass_.accepted, strict=True)
            written = {s for s, draft in pairs if s >= 0 and draft >= 0}
        elif pass_.drafts:
            written = set()
        in_use |= written
        if rng.random() < 0.2:  # a request ends, and its slot is another's
            in_use -= {rng.choice(SLOTS)}
    return tuple(passes_drawn)


def _drawn(
    row: Capabilities, rng: random.Random, mode: ForwardMode, in_use: set[int]
) -> LinearPass:
    slots = rng.sample(SLOTS, rng.randint(1, 5))
    fresh = tuple(i for i, s in enumerate(slots) if s not in in_use or rng.random() < 0.1)
    free = [s for s in SLOTS if s not in slots]
    out = list(slots)
    if row.separate_write_slots and rng.random() < 0.5:
        for i in range(len(out)):
            if rng.random() < 0.5:
                out[i] = free.pop()
    if rng.random() < 0.3:
        padded = rng.randrange(len(slots))
        slots[padded] = out[padded] = -1
    lens = tuple(rng.choice((0, 1, 3, CHUNK_SIZE, rng.randint(2, MOST_TOKENS))) for _ in slots)
    trees, accepted, checkpoints = None, None, None
    if mode is ForwardMode.DECODE:
        lens = (1,) * len(slots)
    elif mode is ForwardMode.TARGET_VERIFY:
        n = rng.randint(1, 5)
        lens = (n,) * len(slots)
        if row.max_verify_topk >= n and rng.random() < 0.5:
            trees = tuple(_tree(rng, n) for _ in slots)
        accepted = tuple(rng.randrange(-1, n) for _ in slots) if rng.random() < 0.8 else None
    elif mode is ForwardMode.MIXED:
        ones = rng.randint(1, len(slots))
        lens = (1,) * ones + lens[ones:]
    if row.checkpoints and mode in (ForwardMode.EXTEND, ForwardMode.MIXED) and rng.random() < 0.5:
        chunks = sum(-(-n // CHUNK_SIZE) for n in lens)
        checkpoints = tuple(
            free.pop() if free and rng.random() < 0.4 else -1 for _ in range(chunks)
        )
    return LinearPass(
        mode=mode, query_lens=lens, slots=tuple(slots),
        slots_out=tuple(out) if out != slots else None, fresh=fresh, checkpoint_slots=checkpoints,
        trees=trees, accepted=accepted,
    )  # fmt: skip


def _tree(rng: random.Random, drafts: int) -> Parents:
    return tuple(rng.randrange(-1, i) if i else -1 for i in range(drafts))
