"""What an attention kernel is to the scheduler and the backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from attn_core.backends.triton.masks import mask_mode
from attn_core.backends.triton.portable.arguments import Outputs, Queries, Requests
from attn_core.backends.triton.tuning import Launch
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.new_tensor import new_tensor
from attn_core.ops.triton.launcher import Arguments, Grid, Launcher, alike, numbered
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer, LayerGroup

PartT = TypeVar("PartT", bound="Part")


class Shape(NamedTuple):
    """What decides which kernels run a pass of a group of layers.

    page_size: 0 for plain K and V. mask: see masks.py. longest: an upper bound of the keys of a
    request. tiles: an upper bound of the tiles of TILE_ROWS rows of all requests and KV heads.
    """

    arch: str
    processors: int
    group: LayerGroup
    dtype: str
    kv_cache_dtype: str
    page_size: int
    mask: int
    longest: int
    tiles: int


class Pass:
    """What all layers of a group read in a pass: its requests, and the drafts that it verifies.

    requests: cu_seqlens_q int32 [size + 1], seq_lens int32 [size], page_table int32 [size,
    columns]. In a ragged call there is no table, the cache is one page of all tokens, and seq_lens
    is its cu_seqlens. tree: its mask uint8 [size, n, n] if there is one. mask: see masks.py.
    tokens: of all requests. batch: where they come from. key: of what Triton specialises of these.
    """

    __slots__ = (
        "batch", "drafts", "key", "mask", "positions", "requests", "size", "tokens", "tree",
    )  # fmt: skip

    def __init__(
        self,
        requests: Requests,
        positions: Tensor,
        *,
        causal: bool,
        drafts: SpecInfo | None = None,
        batch: ForwardBatch | None = None,
    ) -> None:
        tree = None if drafts is None else drafts.tree_mask
        self.batch = batch
        self.requests = requests
        self.size = requests.cu_seqlens_q.shape[0] - 1
        self.positions = positions
        self.tokens = positions.shape[0]
        self.tree = None if tree is None else tree.contiguous().view(torch.uint8)
        self.drafts = 0 if drafts is None else drafts.num_draft_tokens
        self.mask = mask_mode(drafts, causal=causal)
        tensors = (*requests, positions, *(() if self.tree is None else (self.tree,)))
        self.key = numbered((self.mask, self.table_stride >> 31, self.paged, *map(alike, tensors)))

    @classmethod
    def of(cls, group: LayerGroup, batch: ForwardBatch) -> Pass:
        """Return what layers of a group read of a batch."""
        view = batch.views[group.view]
        drafts = batch.spec if batch.forward_mode is ForwardMode.TARGET_VERIFY else None
        requests = Requests(batch.cu_seqlens_q, view.seq_lens, view.page_table)
        return cls(requests, batch.positions, causal=group.causal, drafts=drafts, batch=batch)

    @property
    def paged(self) -> bool:
        """Whether keys lie in pages."""
        return self.batch is not None

    @property
    def table_stride(self) -> int:
        """Elements from one row of the page table to the next; 0 without one."""
        return 0 if self.batch is None else int(self.requests.page_table.stride(0))


class Call:
    """One layer's attention: q [T, Hq, D] over a cache into out [T, Hq, Dv], lse float32 [T, Hq].

    out: a new tensor if it is None.
    key: of what Triton specialises of these.
    queries, outputs: what kernels are given of them, by their addresses.
    rows: further arguments of the kernel that attends, which follow those of its pass.
    """

    __slots__ = ("cache", "inputs", "key", "layer", "lse", "out", "outputs", "q", "queries")
    rows: tuple[Any, ...] = ()

    def __init__(
        self,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        inputs: Pass,
        out: Tensor | None,
        lse: Tensor,
    ) -> None:
        of_q = q.stride()
        # the three queries of dual chunk attention are heads here
        if len(of_q) > 3 or of_q[2] != 1:
            q = q.flatten(1, -2) if q.stride(-1) == 1 else q.contiguous().flatten(1, -2)
            of_q = q.stride()
        at_q = q.data_ptr()
        if out is None:
            heads, dim = layer.num_q_heads, layer.v_head_dim
            out = new_tensor(q, (inputs.tokens, heads, dim), (heads * dim, dim, 1), q.dtype)
            at_out, token, head = out.data_ptr(), heads * dim, dim
            self.key: Hashable = (of_q, alike(q, at_q), alike(out, at_out))
        else:
            at_out, of_out = out.data_ptr(), out.stride()
            token, head, _ = of_out
            self.key = (of_q, alike(q, at_q), of_out, alike(out, at_out))
        self.q = q
        self.layer = layer
        self.cache = cache
        self.inputs = inputs
        self.out = out
        self.lse = lse
        self.queries: Any = (at_q, of_q[0], of_q[1])
        self.outputs = (at_out, lse.data_ptr(), token, head)

    def query_tensors(self) -> Any:
        """Return `queries` with a tensor: only a first launch takes it."""
        of_q = self.q.stride()
        return Queries(self.q, of_q[0], of_q[1])

    def output_tensors(self) -> tuple[Outputs]:
        """Return `outputs` with tensors, as the only argument."""
        of_out = self.out.stride()
        return (Outputs(self.out, self.lse, of_out[0], of_out[1]),)

    def tensors(self) -> tuple[Any, Outputs]:
        """Return both with tensors."""
        return self.query_tensors(), *self.output_tensors()

    def with_row_tensors(self, values: tuple[Any, ...]) -> Iterable[Any]:
        """Return the arguments of a pass and then `rows` with tensors."""
        return values

    def dense(self) -> Call:
        """Return the same call with a contiguous copy of its queries."""
        q = self.q.clone(memory_format=torch.contiguous_format)
        return Call(q, self.layer, self.cache, self.inputs, self.out, self.lse)


class PassLaunch(NamedTuple):
    """How all layers of a group launch one kernel in a pass.

    arguments: what follows those of a call. merge: the grid and arguments of merge_splits, None if
    it is not launched.
    """

    grid: Grid
    arguments: Arguments
    merge: tuple[Grid, Arguments] | None = None


class Launchers(NamedTuple):
    """The launchers of one layer and cache for calls with one key.

    merge: of merge_splits, if it is launched. change: makes of a call the one that is launched,
    where its queries have to be copied.
    """

    attend: Launcher
    merge: Launcher | None = None
    change: Callable[[Call], Call] | None = None


@dataclass(kw_only=True, eq=False)  # not frozen: one is made in each pass, and that is faster
class Part(ABC):
    """A part of a schedule: what its kernels share in a pass.

    choices: its kernels, the best one first; the last one takes every cache.
    inputs: what its launches read. pass_key: of what Triton specialises of these and of the part,
    and of constants. launches: what was computed already of its kernels.
    """

    choices: tuple[Choice[Any], ...]
    inputs: Pass | None = field(default=None, init=False)
    pass_key: int = field(default=-1, init=False)
    launches: dict[Any, PassLaunch] = field(default_factory=dict, init=False)

    @property
    @abstractmethod
    def key(self) -> int:
        """Equal for parts whose launches have equal constants and arguments that are alike."""

    def read(self, inputs: Pass) -> None:
        """Launch over these inputs from now on."""
        self.inputs = inputs
        self.pass_key = numbered((self.key, inputs.key))
        self.launches.clear()


class Kernel(ABC, Generic[PartT]):
    """An attention kernel for one part of a schedule.

    takes_order: whether it takes requests in the order that `order_requests` finds.
    takes_chunks: whether prompts over latents are chunks of queries for it, see latent_prompts.py.
    takes_first_spans: whether it reads those of plan_shared.
    """

    takes_order: ClassVar[bool] = False
    takes_chunks: ClassVar[bool] = False
    takes_first_spans: ClassVar[bool] = False

    @abstractmethod
    def choose(self, shape: Shape, launch: Launch | None) -> Launch | None:
        """Return its launch parameters; None where it cannot run such a shape.

        launch: that of the part, which all kernels of split-KV share.
        """

    @abstractmethod
    def bind(self, layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype) -> Any | None:
        """Return what it keeps of a layer and its cache; None where it cannot read them.

        dtype: of the queries.
        """

    @abstractmethod
    def pass_launch(self, call: Call, launch: Launch, part: PartT) -> PassLaunch:
        """Return how the layers of this call's group launch it in this pass."""

    @abstractmethod
    def make_launchers(self, call: Call, bound: Any, launch: Launch, part: PartT) -> Launchers:
        """Return launchers for calls with this key."""


class NewTokensKernel(Kernel[Any]):
    """A kernel of tiles over a pass's own K and V, which the cache holds too."""

    @abstractmethod
    def call(
        self, q: Tensor, k: Tensor, v: Tensor | None, layer: AttentionLayer, cache: LayerCache,
        inputs: Pass, out: Tensor | None, lse: Tensor, launch: Launch,
    ) -> Call | None:  # fmt: skip
        """Return a call over K and V [T, Hkv, D]; None where it cannot read them."""


@dataclass(frozen=True, eq=False)
class Choice(Generic[PartT]):
    """A kernel that fits the shape of a pass, with its launch parameters."""

    kernel: Kernel[PartT]
    launch: Launch
