"""What the kernels of sparse MLA read in a pass, and how they are launched again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from attn_core.backends.triton.backend import Schedules
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.forms import Fits
from attn_core.ops.triton.launcher import (
    Arguments,
    Pointers,
    alike,
    moved,
    numbered,
    pointers,
)
from attn_core.runtime.batch import CacheView, ForwardBatch

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
        keep_launches: bool = True,
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
        self.keeps = keep_launches

    def keep(self, key: Hashable, launches: Any, nbytes: int) -> None:
        """Keep what layers share, unless its scratch is large."""
        if self.keeps and nbytes <= MOST_KEPT:
            self.kept[key] = launches


@dataclass(frozen=True, kw_only=True, eq=False)
class SparsePlan:
    """The plan of a dense pass, None of others, and the request of each token, int32 [T].

    FP8 latents have no dense pass: there every slot is selected.
    unread_lse: float32 [T, heads], filled where nobody asks for the LSE.
    captured: in a graph, where lengths change from replay to replay.
    views: what the layers of each view share, made when the first one runs.
    """

    dense: Schedules | None
    requests: Tensor
    unread_lse: Tensor
    captured: bool = False
    views: dict[str, View] = field(default_factory=dict)


class View:
    """What the layers of one view share in a pass.

    every: the slots of all keys, for layers without a selection; not in a graph.
    """

    __slots__ = ("batch", "every", "inputs")

    def __init__(self, batch: ForwardBatch, inputs: SparsePass) -> None:
        self.batch = batch
        self.inputs = inputs
        self.every: Tensor | None = None


def stored(cache: LayerCache) -> int:
    """Return a number that is equal for as many pages whose latents are stored alike."""
    x: tuple[Pointers, int] | None = cache.launchers.get("stored")
    if x is None or moved(x[0]):
        k = cache.k
        form = (k.shape, k.stride(), alike(k), cache.latent_dim)
        x = cache.launchers["stored"] = (pointers(k), numbered(("stored", *form)))
    return x[1]
