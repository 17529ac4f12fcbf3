"""The classes that a third party subclasses: softmax and linear attention backends."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from attn_core.errors import AttnError, BackendError, BackendNotImplementedError, UnsupportedError
from attn_core.runtime.backend_config import BackendConfig as BackendConfig
from attn_core.runtime.batch import DECODE_MODES, ForwardBatch
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.linear import LinearLayer
from attn_core.runtime.shared_keys import SharedKeys
from attn_core.spec.capabilities import BackendSpec

if TYPE_CHECKING:
    from attn_core.cache.layer_cache import LayerCache
    from attn_core.cache.state_pool import StateCache, StatePool

Metadata = Any  # the backend's own value, handed back to it
Output = Tensor | tuple[Tensor, Tensor]  # out [T, Hq, Dv], or (out, lse float32 [T, Hq])


class Backend(ABC):
    """What softmax and linear attention backends share: a plan for each pass, CUDA graphs."""

    def __init__(self, config: BackendConfig) -> None:
        self.config = config

    @abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> Metadata:
        """Plan one forward pass; called once, before its first layer."""

    # CUDA graphs, as far as cuda_graph says; right for kernels that read the batch's own tensors.
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create the static buffers that this backend derives from a batch; called once."""
        return

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> Metadata:
        """Plan like init_forward_metadata, into the static buffers."""
        return self.init_forward_metadata(batch)

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Metadata
    ) -> None:
        """Refill the static buffers before a replay. This is on the critical path.

        batch: the captured batch, whose tensors were overwritten in place; the graph reads them.
        """
        return


class AttentionBackend(Backend):
    """Softmax attention over a paged cache, created once from a BackendConfig.

    A subclass implements init_forward_metadata, and either `forward` or both forward_extend and
    forward_decode. It implements forward_ragged and the graph functions if its row declares them.

    Shapes: q [T, Hq, D]; k, v [T, Hkv, D or Dv], already written to the cache; output [T, Hq, Dv];
    LSE natural log, float32 [T, Hq], sinks included. Absorbed MLA: q [T, H, 576], k [T, 1, 576],
    v None. Sparse MLA: topk_indices int32 [T, K], a query's token slots, each once, then -1; None =
    all. Dual chunk attention: q [T, 3 or 5, Hq, D], the queries that AttentionLayer names, and k
    rotated to its place in its chunk. `out`, if passed, is filled and returned; it has q's dtype,
    or any with `casts_output`. A row that has fused_kv_write writes k and v into the view's slots;
    without slots, the engine has written them.
    """

    casts_output: ClassVar[bool] = False  # whether it rounds once, to the dtype of any `out`

    def index_topk(
        self, q_index: Tensor, weights: Tensor, layer: AttentionLayer, cache: LayerCache,
        batch: ForwardBatch, metadata: Metadata,
    ) -> Tensor:  # fmt: skip
        """Choose the keys that each query of sparse MLA attends to.

        q_index [T, Hi, Di]; weights float32 [T, Hi], with every scale. A key's score is the sum of
        weights · relu(q_index · key) over heads, in float32; relu(NaN) is 0, NaN the best. Returns
        int32 [T, K]: slots by position, the K = layer.index_topk best, first of equals; then -1.
        """
        raise UnsupportedError(f"{self.config.name} has no indexer of sparse MLA")

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer,
        cache: LayerCache, batch: ForwardBatch, metadata: Metadata, *,
        out: Tensor | None = None, return_lse: bool = False, topk_indices: Tensor | None = None,
    ) -> Output:  # fmt: skip
        """Attend over the cache; called once per layer.

        A backend overrides this method, or both forward_extend and forward_decode.
        """
        decodes = batch.forward_mode in DECODE_MODES
        run = self.forward_decode if decodes else self.forward_extend
        return run(
            q, k, v, layer, cache, batch, metadata,
            out=out, return_lse=return_lse, topk_indices=topk_indices,
        )  # fmt: skip

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer,
        cache: LayerCache, batch: ForwardBatch, metadata: Metadata, *,
        out: Tensor | None = None, return_lse: bool = False, topk_indices: Tensor | None = None,
    ) -> Output:  # fmt: skip
        """Attend in prefill, mixed, target verify and draft extend."""
        return self.forward(
            q, k, v, layer, cache, batch, metadata,
            out=out, return_lse=return_lse, topk_indices=topk_indices,
        )  # fmt: skip

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer,
        cache: LayerCache, batch: ForwardBatch, metadata: Metadata, *,
        out: Tensor | None = None, return_lse: bool = False, topk_indices: Tensor | None = None,
    ) -> Output:  # fmt: skip
        """Attend in decode and draft decode, one token per request."""
        return self.forward(
            q, k, v, layer, cache, batch, metadata,
            out=out, return_lse=return_lse, topk_indices=topk_indices,
        )  # fmt: skip

    def forward_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer,
        cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int, *,
        causal: bool, out: Tensor | None = None, return_lse: bool = False,
    ) -> Output:  # fmt: skip
        """Attend without a cache: vision towers, encoders, MLA prefill (192/128), prefix chunks.

        q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv]; cu_seqlens int32 [B + 1]. Causal order is
        aligned bottom-right: the last query sees the last key.
        """
        raise UnsupportedError(f"{self.config.name} has no ragged attention")

    def shared_keys(self, metadata: Metadata) -> SharedKeys | None:
        """Return what the requests of a planned pass read together; None: each reads all its keys.

        It may wait for the device, so that no pass calls it.
        """
        return None

    def linear_class(self) -> type[torch.nn.Linear] | None:
        """Return a subclass of nn.Linear that is faster for few rows here; None: torch's own is.

        It has the parameters of nn.Linear and computes the same, up to rounding. `attn generate`
        gives it to the plain linear layers of a model.
        """
        return None

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the KV length of padded rows."""
        return 1


class LinearAttentionBackend(Backend):
    """Gated linear attention (GDN, KDA) over a pool of states. Created once from a BackendConfig.

    The state S [V, K] of a value head h, with key head h // (Hv / Hk), takes in a token so:
    S = S·exp(g); u = beta·(v - S·k); S = S + u kᵀ; out = scale · S·q.

    q, k [T, Hk, K]; v [T, Hv, V]; output [T, Hv, V], in q's dtype; `out`, if passed, is filled and
    returned. g and beta as LinearLayer says. Their last dimension is dense, the others have any
    strides. A request reads its state at batch.state_slots, unless it is fresh, and writes it at
    batch.state_slots_out. A slot of -1 is padding: nothing is read or written for it, and its
    output is unspecified.
    """

    @abstractmethod
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: Metadata, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Take in ragged new tokens, store each request's final state and the checkpoints.

        A request without tokens stores the state that it has read.
        """

    @abstractmethod
    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: Metadata, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Take in one token per request and store the new state."""

    def verify(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: Metadata, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run a chain or tree of drafts per request without changing any state.

        Writes the drafts' records at batch.state_slots_out. A draft comes after its parent.
        """
        raise UnsupportedError(f"{self.config.name} does not verify drafts")

    def commit(
        self, pool: StatePool, batch: ForwardBatch, metadata: Metadata, accepted: Tensor
    ) -> None:
        """Take in the accepted drafts of a verified pass, in all layers, from their records.

        accepted: int32 or int64 [B], the last accepted draft; the drafts that it sees are accepted
        too. A request of -1 accepts nothing, and none of its slots is written. A pass is committed
        once, before its requests run again. After a replay, `metadata` is a new plan of its batch.
        """
        raise UnsupportedError(f"{self.config.name} does not verify drafts")


@overload
def create_backend(
    spec: BackendSpec, config: BackendConfig, family: Literal["softmax"] = ...
) -> AttentionBackend: ...
@overload
def create_backend(
    spec: BackendSpec, config: BackendConfig, family: Literal["linear"]
) -> LinearAttentionBackend: ...
def create_backend(
    spec: BackendSpec, config: BackendConfig, family: str = "softmax"
) -> AttentionBackend | LinearAttentionBackend:
    """Import the class that runs `config.row` and create it.

    Raises BackendNotImplementedError for a row that is only declared. Raises BackendError, with the
    cause, if the import or the constructor fails, or if the class does not implement the contract.
    """
    create = spec.creator(config.row)
    if create is None:
        raise BackendNotImplementedError(
            f"{spec.name} is declared, so it can be selected for another machine and explained, "
            "but it is not implemented in 0.1; `attn backends` lists those that are"
        )
    module, _, attribute = create.partition(":")
    base = AttentionBackend if family == "softmax" else LinearAttentionBackend
    try:
        backend = getattr(_imported(module), attribute)(config)
    except AttnError:
        raise
    except Exception as error:  # a plugin's code: keep its error, name its owner
        raise BackendError(
            f"{spec.name} ({create}) cannot be created: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(backend, base):
        raise BackendError(f"{spec.name}: {create} is no {base.__name__}")
    if isinstance(backend, AttentionBackend) and not _attends(type(backend)):
        raise BackendError(
            f"{spec.name}: {create} has neither `forward` nor both of forward_extend and "
            "forward_decode; write one of the two"
        )
    return backend


def _attends(backend: type[AttentionBackend]) -> bool:
    """Say whether a class attends itself: the base's three methods only call each other."""

    def overrides(name: str) -> bool:
        return getattr(backend, name) is not getattr(AttentionBackend, name)

    return overrides("forward") or (overrides("forward_extend") and overrides("forward_decode"))


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except SystemExit as error:  # in a constructor it may be that of a signal's handler
        raise ImportError(f"SystemExit: {error}") from error
