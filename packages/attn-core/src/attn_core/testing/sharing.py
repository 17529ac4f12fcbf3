"""The check of shared prefixes: requests begin with the pages of the request before them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

import torch

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.runtime.backend import AttentionBackend, Metadata
from attn_core.runtime.batch import ForwardBatch
from attn_core.testing.answers import Answer, answer, expected
from attn_core.testing.cases import Case
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Inputs, Point, clone_cache, to_device
from attn_core.testing.neighbours import picked, poisoned
from attn_core.testing.oracle import yardstick
from attn_core.testing.passes import attend, compare, create
from attn_core.testing.tolerance import Measure, worst

EVERYTHING = 1 << 30


def shared(bench: Bench, case: Case, point: Point) -> Measure:
    """Requests that share prefixes are right: all, some, in levels, in any order, or none of them.

    What is no longer anybody's page holds NaN. The same plan is filled again for each of these, as
    before a replay of a CUDA graph: their groups differ.
    """
    row, measures = bench.row, []
    batch: ForwardBatch | None = None
    captured: Metadata = None
    for number, tokens in enumerate(patterns(len(case.seq_lens))):
        order = list(range(len(tokens)))
        random.Random(number).shuffle(order)
        rounds = bench.rounds(case.kv_dtype)
        inputs, reference = _drawn(case, point, tokens, row.requires_finite_padding, rounds)
        inputs = to_device(inputs, bench.torch_device)
        if batch is None:
            backend = create(bench, case, inputs, point)
            batch, captured = _captured(backend, inputs)
        dtype, real_tokens = TORCH_DTYPES[point.dtype], inputs.real_tokens
        actual = attend(backend, inputs, return_lse=row.lse)
        measures.append(
            compare(actual, reference, real_tokens, dtype, f"output, shared tokens {tokens}")
        )
        if row.cuda_graph != "never":
            old, new = batch.views["full"], inputs.batch.views["full"]
            old.page_table.copy_(new.page_table)
            backend.init_forward_metadata_replay_cuda_graph(batch, captured)
            second = attend(backend, inputs, batch=batch, metadata=captured)
            measures.append(
                compare(second, reference, real_tokens, dtype, f"planned again, shared {tokens}")
            )
        if number % 2:
            continue
        mixed = picked(inputs, case, point, order)
        out, _ = attend(backend, mixed, cache=clone_cache(inputs.after))
        n = case.drafts or 1
        rows = torch.tensor([r * n + i for r in order for i in range(n)])
        truth, baseline = ((o[rows], lse[rows]) for o, lse in reference)
        measures.append(
            compare((out, None), (truth, baseline), real_tokens, dtype, f"output in order {order}")
        )
    return worst(measures)


def patterns(requests: int) -> Iterator[tuple[int, ...]]:
    """Yield how many tokens each request shares with the one before it."""
    yield (0,) * requests
    yield (0, *[EVERYTHING] * (requests - 1))
    yield (0, *[EVERYTHING, 511] * requests)[:requests]  # in levels
    yield (0, 0, *[511] * (requests - 2))  # the first one is alone


def _captured(backend: AttentionBackend, inputs: Inputs) -> tuple[ForwardBatch, Metadata]:
    """Return a batch of the same lengths with static tensors, and its plan as of a capture."""
    batch = inputs.batch
    views = {
        name: dataclasses.replace(view, page_table=view.page_table.clone())
        for name, view in batch.views.items()
    }
    batch = dataclasses.replace(batch, views=views)
    backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
    return batch, backend.init_forward_metadata_capture_cuda_graph(batch)


@lru_cache(maxsize=64)
def _drawn(
    case: Case,
    point: Point,
    tokens: Sequence[int],
    requires_finite_padding: bool,
    rounds: torch.dtype | None,
) -> tuple[Inputs, Answer]:
    """Return a case whose requests share so many tokens, in whole pages, and its answers."""
    # with a window the pages before it hold poison, but another request may see them
    unwindowed = dataclasses.replace(case, window=None)
    inputs, _ = expected(unwindowed, point, requires_finite_padding, False, rounds)
    layer = dataclasses.replace(inputs.layer, sliding_window=case.window)
    page, old = point.page_size, inputs.batch.views["full"].page_table
    table, keys, values = old.clone(), [*inputs.keys], [*inputs.values]
    contexts = [s - n for s, n in zip(case.seq_lens, case.query_lens, strict=True)]
    for b in range(1, len(tokens)):
        pages = min(tokens[b], contexts[b - 1], contexts[b]) // page
        table[b, :pages] = table[b - 1, :pages]
        for part in (keys, values):
            part[b] = torch.cat([part[b - 1][: pages * page], part[b][pages * page :]])

    def used(rows: torch.Tensor) -> set[int]:
        lists = zip(rows.tolist(), case.seq_lens, strict=False)
        return {x for row, n in lists for x in row[: -(-n // page)]}

    freed = torch.tensor(sorted(used(old) - used(table)), dtype=torch.int64)
    cache = poisoned(inputs.after, freed, point, large=requires_finite_padding)
    view = dataclasses.replace(inputs.batch.views["full"], page_table=table)
    drawn_inputs = dataclasses.replace(
        inputs,
        layer=layer,
        batch=dataclasses.replace(inputs.batch, views={"full": view}),
        keys=tuple(keys),
        values=tuple(values),
        cache=cache,
        after=cache,
    )
    truth = answer(case, drawn_inputs, torch.float64)
    baseline = yardstick(
        partial(answer, case, drawn_inputs, rounds=rounds), TORCH_DTYPES[point.dtype], truth
    )
    return drawn_inputs, (truth, baseline)
