"""Prompts over latents as short requests, whose keys are split as those of drafts are.

All heads of a query read the same latents, so that few queries fill a tile. A prompt becomes chunks
of consecutive queries: each is a request that sees the keys as far as its own last query.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer, a tile or a constant.

from __future__ import annotations

from collections.abc import Hashable

import triton
import triton.language as tl

from attn_core.backends.triton.kernel import Kernel, Pass, Shape
from attn_core.backends.triton.portable.arguments import Requests
from attn_core.backends.triton.schedule import PLANNED_REQUESTS, SplitKV
from attn_core.backends.triton.tuning import decode_launch, power_of_two
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.ops.triton.launcher import Launcher, alike

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


def in_chunks(inputs: Pass, queries: int, pages: int) -> Pass:
    """Return a pass whose requests are chunks of `queries` of those of `inputs`: one small launch.

    pages: of a request at most. Nothing is read on the host: behind the last chunk there are
    requests without queries.
    """
    cu, seq_lens, page_table = inputs.requests
    chunks = power_of_two((inputs.tokens + inputs.size * (queries - 1)) // queries)
    columns = min(pages, page_table.shape[1])
    buffer = cu.new_empty(chunks * (columns + 2) + 1)
    lengths, table = buffer[:chunks], buffer[chunks : chunks * (columns + 1)].view(chunks, columns)
    requests = Requests(buffer[chunks * (columns + 1) :], lengths, table)
    tensors = (cu, seq_lens, page_table, *requests)
    key = (queries, cu.device, *map(alike, tensors))
    launcher = _CUTTERS.get(key)
    if launcher is None:
        launcher = _CUTTERS[key] = Launcher(cut_prompts, queries, 128, num_warps=4)
    launcher.launch((chunks, 1, 1), (*tensors, inputs.size, page_table.stride(0), columns))
    return Pass(requests, inputs.positions, causal=True, batch=inputs.batch)


_CUTTERS: dict[Hashable, Launcher] = {}


@triton.jit(do_not_specialize=["batch", "table_stride", "columns"])
def cut_prompts(
    cu,
    lengths,
    table,
    chunk_cu,
    chunk_lengths,
    chunk_table,
    batch,
    table_stride,
    columns,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one chunk: where its queries end, the keys that they see, and the pages of these."""
    chunk = tl.program_id(0)
    chunks = 0  # of the requests before a block of them
    request = tl.zeros([], tl.int32)
    first = 0
    for low in range(0, batch, BLOCK):
        b = low + tl.arange(0, BLOCK)
        ok = b < batch
        queries = tl.load(cu + b + 1, mask=ok, other=0) - tl.load(cu + b, mask=ok, other=0)
        counts = tl.cdiv(queries, CHUNK)
        earlier = (chunks + tl.cumsum(counts, 0) <= chunk) & (b < batch - 1)
        request += tl.sum(earlier.to(tl.int32), 0)
        first += tl.sum(tl.where(earlier, counts, 0), 0)
        chunks += tl.sum(counts, 0)
    last = tl.load(cu + request + 1)
    start = tl.minimum(tl.load(cu + request) + (chunk - first) * CHUNK, last)
    end = tl.minimum(start + CHUNK, last)
    if chunk == 0:
        tl.store(chunk_cu, start)
    tl.store(chunk_cu + chunk + 1, end)
    tl.store(chunk_lengths + chunk, tl.load(lengths + request) - (last - end))
    row = table + request.to(tl.int64) * table_stride
    chunk_row = chunk_table + chunk.to(tl.int64) * columns
    for low in range(0, columns, BLOCK):
        columns_read = low + tl.arange(0, BLOCK)
        page = tl.load(row + columns_read, mask=columns_read < columns, other=0)
        tl.store(chunk_row + columns_read, page, mask=columns_read < columns)
