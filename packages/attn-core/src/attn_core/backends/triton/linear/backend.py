"""triton for linear attention: our kernels of GDN and KDA under the contract."""

from __future__ import annotations

from torch import Tensor

from attn_core.backends.triton.linear import launch
from attn_core.backends.triton.linear.launch import LinearArguments
from attn_core.backends.triton.linear.prefill import PrefillPlan, plan_prefill, prefill
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.state_pool import StateCache, StatePool
from attn_core.errors import BatchError, UnsupportedError
from attn_core.runtime.backend import BackendConfig, LinearAttentionBackend, Metadata
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.linear import LinearLayer

EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED)


class TritonLinear(LinearAttentionBackend):
    """Two launches a layer in an extend, one in decode and verify, and one commit of all layers.

    Only an extend has a plan. Decode, verify and commit find their slots on the device. A request's
    result does not depend on its batch.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._bound = {layer.layer_id: self._bind(layer) for layer in config.linear_layers}
        self._dtype = TORCH_DTYPES[config.dtype]

    def _bind(self, layer: LinearLayer) -> tuple[LinearLayer, LinearArguments]:
        return layer, LinearArguments.of(layer, self.config.arch or "")

    def _arguments(self, layer: LinearLayer) -> LinearArguments:
        """Return what the kernels are given of a layer; another one of the same id is bound."""
        bound = self._bound.get(layer.layer_id)
        if bound is None or bound[0] is not layer:
            bound = self._bound[layer.layer_id] = self._bind(layer)
        return bound[1]

    def _any_arguments(self) -> LinearArguments:
        """Return those of one layer: the layers of a pool are alike."""
        return next(iter(self._bound.values()))[1]

    def init_forward_metadata(self, batch: ForwardBatch) -> PrefillPlan | None:
        """Cut the requests of an extend into chunks; waits for lengths that the host lacks."""
        if batch.forward_mode not in EXTENDS:
            return None
        lens = batch.query_lens_host
        if lens is None:
            lens = tuple(batch.cu_seqlens_q.diff().tolist())
        device = batch.cu_seqlens_q.device
        return plan_prefill(self._any_arguments(), lens, dtype=self._dtype, device=device)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        """Plan nothing. Raises UnsupportedError for an extend, whose plan is made on the host."""
        if batch.forward_mode in EXTENDS:
            raise UnsupportedError(
                f"{batch.forward_mode.value} in a CUDA graph: {self.config.name} captures decode "
                "and target_verify of linear layers; run the pass eagerly"
            )

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: Metadata, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Prepare all chunks side by side, then carry the states through them."""
        assert batch.state_slots is not None
        if not q.dtype == k.dtype == v.dtype == self._dtype:
            raise BatchError(
                f"layer {layer.layer_id}: q {q.dtype}, k {k.dtype}, v {v.dtype} (expected "
                f"{self._dtype}, for which {self.config.name} was created)"
            )
        return prefill(
            self._arguments(layer), q, k, v, g, beta, state.state, batch.state_slots, metadata,
            slots_out=batch.state_slots_out, fresh=batch.state_fresh,
            checkpoints=batch.checkpoint_slots, out=out,
        )  # fmt: skip

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: Metadata, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Read and write each state once."""
        assert batch.state_slots is not None
        return launch.decode(
            self._arguments(layer), q, k, v, g, beta, state.state, batch.state_slots,
            slots_out=batch.state_slots_out, fresh=batch.state_fresh, out=_output(q, layer, out),
        )  # fmt: skip

    def verify(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: Metadata, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Read each state once for all drafts of its request."""
        assert batch.state_slots is not None
        return launch.verify(
            self._arguments(layer), q, k, v, g, beta, state.state, state.records,
            batch.state_slots, tree_mask=_tree_mask(batch), slots_out=batch.state_slots_out,
            fresh=batch.state_fresh, out=_output(q, layer, out),
        )  # fmt: skip

    def commit(
        self, pool: StatePool, batch: ForwardBatch, metadata: Metadata, accepted: Tensor
    ) -> None:
        """Read and write the states of all layers once, in one launch."""
        assert batch.state_slots is not None
        launch.commit(
            self._any_arguments(), pool.states.state, pool.states.records, batch.state_slots,
            accepted, tree_mask=_tree_mask(batch), slots_out=batch.state_slots_out,
            fresh=batch.state_fresh,
        )  # fmt: skip


def _output(q: Tensor, layer: LinearLayer, out: Tensor | None) -> Tensor:
    """Return `out` or a new tensor [T, Hv, V] in the dtype of q."""
    return q.new_empty(q.shape[0], layer.num_v_heads, layer.head_v_dim) if out is None else out


def _tree_mask(batch: ForwardBatch) -> Tensor | None:
    return None if batch.spec is None else batch.spec.tree_mask
