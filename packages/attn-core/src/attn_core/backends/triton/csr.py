"""Turn a page table into CSR, into given buffers, in one launch.

For backends whose library wants the pages of a request one after the other; no backend of this
repository does.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attn_core.page_table import PageCsr

_COLUMNS = 1024  # page ids that a program copies at a time
_SHARES = 16  # programs that may share one long row
_REQUESTS = 1024  # lengths that a program adds up at a time


@triton.jit
def _fill(
    table, seq_lens, indptr, indices, last_page_len, batch, room,
    table_row, table_column,
    PAGE: tl.constexpr, REQUESTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Each program adds up the pages of the requests before its own: what another program would
    # have to hand on is a second launch.
    row = tl.program_id(0)
    before = tl.zeros((REQUESTS,), tl.int32)
    for first in range(0, row, REQUESTS):
        other = first + tl.arange(0, REQUESTS)
        length = tl.load(seq_lens + other, mask=other < row, other=0)
        before += (length + PAGE - 1) // PAGE
    start = tl.sum(before)
    length = tl.load(seq_lens + row, mask=row < batch, other=0)
    pages = (length + PAGE - 1) // PAGE
    share = tl.program_id(1)
    if share == 0:
        tl.store(indptr + row, start)
        last = tl.where(pages > 0, length - (pages - 1) * PAGE, 0)
        tl.store(last_page_len + row, last, mask=row < batch)
    # the row after the last one is what no request fills
    count = tl.minimum(tl.where(row < batch, pages, room), room - start)
    table += row.to(tl.int64) * table_row
    for first in range(share * COLUMNS, count, tl.num_programs(1) * COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        here = column < count
        taken = here & (row < batch)
        page = tl.load(table + column.to(tl.int64) * table_column, mask=taken, other=0)
        tl.store(indices + start + column, page, mask=here)


def fill_csr(csr: PageCsr, page_table: Tensor, seq_lens: Tensor, page_size: int) -> None:
    """Fill `csr` with what page_table.to_csr gives for as many indices as it has room for.

    page_table int32 [B, M], seq_lens int32 [B]; csr holds contiguous buffers: indptr int32 [B + 1],
    indices int32 [N], N at least the pages of all requests, last_page_len int32 [B]. Indices past
    them become page 0. Allocates nothing and never syncs, so a CUDA graph can record it.
    """
    batch, width = page_table.shape
    width = max(width, 1)
    _fill[(batch + 1, min(_SHARES, triton.cdiv(width, _COLUMNS)))](
        page_table, seq_lens, csr.indptr, csr.indices, csr.last_page_len, batch,
        csr.indices.shape[0], *page_table.stride(),
        PAGE=page_size,
        REQUESTS=min(_REQUESTS, triton.next_power_of_2(max(batch, 1))),
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(width)),
    )  # fmt: skip
