"""What the kernels of sparse MLA read in a pass, and how they are launched again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from attn_core.ops.forms import Fits
from attn_core.ops.triton.launcher import Arguments, alike, numbered
from attn_core.runtime.batch import CacheView

MOST_KEPT = 1 << 26  # bytes of scratch of a selection, or of attention, that a pass keeps


class SparsePass:
    """What all layers of a view read in a pass.

    requests: int32 [T], the request of each token. queries: the most that a request has.
    launchers: what is kept for kernels that read no cache; those of a backend serve all its passes.
    All its tensors are on one device.
    arguments: the page table, the stride of its rows, seq_lens, cu_seqlens_q and requests.
    key: of what Triton specialises of these. longest: an upper bound of the keys of a request.
    kept: what layers with inputs of one form share, scratch included: they run one after another.
    last: the last of these for a kind of call, and what says whether inputs have that form.
    keeps: False in a graph, where layers and graphs share one pool of memory.
    """

    __slots__ = ("arguments", "keeps", "kept", "key", "last", "launchers", "longest", "queries")

    def __init__(
        self,
        view: CacheView,
        cu_seqlens_q: Tensor,
        requests: Tensor,
        *,
        queries: int,
        launchers: dict[Any, Any] | None = None,
        keeps: bool = True,
    ) -> None:
        table, stride = view.page_table, view.page_table.stride(0)
        tensors = (view.seq_lens, cu_seqlens_q, requests)
        self.arguments = Arguments(table, stride, *tensors)
        self.key = numbered(("sparse", stride >> 31, *map(alike, (table, *tensors))))
        self.longest = view.max_seq_len
        self.queries = queries
        self.launchers: dict[Any, Any] = {} if launchers is None else launchers
        self.kept: dict[Any, Any] = {}
        self.last: dict[Hashable, tuple[Fits, Any]] = {}
        self.keeps = keeps

    def keep(self, key: Hashable, launches: Any, nbytes: int) -> None:
        """Keep what layers share, unless its scratch is large."""
        if self.keeps and nbytes <= MOST_KEPT:
            self.kept[key] = launches
