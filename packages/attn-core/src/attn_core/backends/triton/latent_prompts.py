"""Prompts over latents as short requests, whose keys are split as those of drafts are.

All heads of a query read the same latents, so that few queries fill a tile. A prompt becomes chunks
of consecutive queries: each is a request that sees the keys as far as its own last query.
"""

from __future__ import annotations

import torch

from attn_core.backends.triton.kernel import Kernel, Pass, Shape
from attn_core.backends.triton.portable.arguments import Requests
from attn_core.backends.triton.schedule import PLANNED_REQUESTS, SplitKV
from attn_core.backends.triton.tuning import decode_launch, power_of_two
from attn_core.cache.layer_cache import TORCH_DTYPES

CHUNK_ROWS = 128  # of a chunk: two tiles, side by side, read each key from memory once
MAX_CHUNK = 16  # queries


def chunk_queries(kernels: tuple[Kernel[SplitKV], ...], shape: Shape, tokens: int) -> int:
    """Return the queries of a chunk, 0 where no kernel is faster with chunks than with tiles.

    They are more where `tokens` would be more chunks than are planned at once.
    """
    group = shape.group
    store_bytes = TORCH_DTYPES[shape.kv_cache_dtype].itemsize
    launch = decode_launch(shape.arch, CHUNK_ROWS, group.head_dim, group.v_head_dim, store_bytes)
    if not group.causal or not any(k.takes_chunks and k.choose(shape, launch) for k in kernels):
        return 0
    queries = max(1, CHUNK_ROWS // group.num_queries_per_kv)
    while queries < MAX_CHUNK and tokens > queries * (PLANNED_REQUESTS // 2):
        queries *= 2
    return queries


def in_chunks(inputs: Pass, queries: int) -> Pass:
    """Return a pass whose requests are chunks of as many `queries` of those of `inputs`.

    Nothing is read on the host: behind the last chunk there are requests without queries.
    """
    cu, seq_lens, page_table = inputs.requests
    counts = (cu.diff() + (queries - 1)) // queries
    ends = counts.cumsum(0)
    most = power_of_two((inputs.tokens + inputs.size * (queries - 1)) // queries)
    chunk = torch.arange(most, device=cu.device)
    own = torch.searchsorted(ends, chunk, right=True).clamp_(max=inputs.size - 1)
    end = cu[1:][own]
    begin = torch.minimum(cu[own] + (chunk - ends[own] + counts[own]).int() * queries, end)
    starts = torch.cat((begin, cu[-1:]))
    lengths = seq_lens[own] - (end - starts[1:])
    requests = Requests(starts, lengths, page_table[own])
    return Pass(requests, inputs.positions, causal=True, batch=inputs.batch)
