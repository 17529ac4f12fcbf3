"""Gated delta rule (GDN) by FlashInfer: prefill over gathered states, decode over the pool."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple

import torch
from attn_core import (
    TORCH_DTYPES,
    BackendConfig,
    BatchError,
    ForwardBatch,
    ForwardMode,
    LinearAttentionBackend,
    LinearLayer,
    StateCache,
    UnsupportedError,
    contiguous16,
    copy_to_out,
    gated,
)
from torch import Tensor
from torch.nn.functional import rms_norm

from attn_nvidia.common.jit_log import building
from attn_nvidia.common.tensors import aligned
from attn_nvidia.flashinfer.states import clear_states, load_states, move_states, store_states

_EPS: Final = 1e-6  # of the norm in the decode kernel
_CUT_TOKENS: Final = 2048  # of a request, from which it may be cut into parts of 512 side by side


class Requests(NamedTuple):
    """Requests of a pass: the slots that they read and write, int32 [N], and bool [N] or None."""

    reads: Tensor
    writes: Tensor
    fresh: Tensor | None

    @classmethod
    def all(cls, batch: ForwardBatch) -> Requests:
        """Return those of a batch."""
        reads, writes = batch.state_slots, batch.state_slots_out
        assert reads is not None
        return cls(reads, reads if writes is None else writes, batch.state_fresh)

    def for_decode(self) -> Requests:
        """Return them so that fresh ones read the slots that they write, which are then cleared."""
        reads, writes, fresh = self
        if fresh is not None:
            reads = torch.where(fresh, writes, reads)
        return Requests(aligned(reads), aligned(writes), fresh)

    def of(self, rows: Tensor) -> Requests:
        """Return some of them; rows: int64."""
        return Requests(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class ExtendPlan(NamedTuple):
    """The requests of an extend: those with new tokens, and those without.

    cu_seqlens: int64 [N + 1], where the tokens of the former begin.
    use_cp: "auto" lets the library cut few long requests into parts, which takes four launches.
    The kernel writes no state of a sequence without tokens, or zeros.
    """

    cu_seqlens: Tensor
    requests: Requests
    without_tokens: Requests | None
    use_cp: Literal["auto", False]


class Weights(NamedTuple):
    """What is made of a layer once.

    A_log, dt_bias: [Hv], of the gate in the decode kernel: the layer's own, which may be loaded
    again later.
    in_kernel: that kernel has the layer's gate and norm; else they are computed before it.
    unit: [K], K ** -0.5, to which the norm of a vector is brought; None without a norm. It has the
    dtype of q, but float32 for fp16: rounded to 11 bits it is off by 2^-13, which is seen there.
    """

    A_log: Tensor
    dt_bias: Tensor
    in_kernel: bool
    unit: Tensor | None


class FlashInferLinear(LinearAttentionBackend):
    """One kernel a layer in decode; in an extend its states are gathered, and then written back.

    Drafts are not verified: gated_delta_rule_mtp leaves no updates, of which a commit is made. They
    would take another read of every state, which is what a verify costs.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._prefill: Any = _function("gdn_prefill", "chunk_gated_delta_rule")
        self._decode: Any = _function("gdn_decode", "gated_delta_rule_decode_pretranspose")
        self._dtype = TORCH_DTYPES[config.dtype]
        self._built: set[Any] = set()
        self._bound = {x.layer_id: (x, self._bind(x)) for x in config.linear_layers}

    def _bind(self, layer: LinearLayer) -> Weights:
        """Read a layer's weights."""
        gate, heads, dim = layer.gate, layer.num_v_heads, layer.head_k_dim
        unit = None
        if layer.qk_norm is not None:
            dtype = torch.float32 if self._dtype == torch.float16 else self._dtype
            unit = torch.full((dim,), dim**-0.5, dtype=dtype, device=self.config.device)
        if gate is None or gate.lower_bound or gate.neg_eigval or layer.qk_norm != _EPS:
            zeros = torch.zeros(heads, dtype=torch.float32, device=self.config.device)
            return Weights(zeros, zeros, False, unit)
        return Weights(gate.A_log, gate.dt_bias, True, unit)

    def _weights(self, layer: LinearLayer) -> Weights:
        """Return a layer's weights; another layer of the same id takes its place."""
        bound = self._bound.get(layer.layer_id)
        if bound is None or bound[0] is not layer:
            bound = self._bound[layer.layer_id] = layer, self._bind(layer)
        return bound[1]

    def init_forward_metadata(self, batch: ForwardBatch) -> ExtendPlan | Requests:
        """Plan a pass; never syncs, but for the lengths of an extend that the host lacks."""
        requests = Requests.all(batch)
        if batch.forward_mode is ForwardMode.DECODE:
            return requests.for_decode()
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            raise UnsupportedError(
                f"{self.config.name} does not verify drafts: FlashInfer's gated_delta_rule_mtp "
                "returns no updates for a commit; create triton for linear_verify, as select() does"
            )
        lens = batch.query_lens_host
        if lens is None:
            lens = tuple(batch.cu_seqlens_q.diff().tolist())
        use_cp: Literal["auto", False] = "auto" if batch.max_q_len >= _CUT_TOKENS else False
        if all(lens):
            return ExtendPlan(batch.cu_seqlens_q.long(), requests, None, use_cp)
        some = [row for row, n in enumerate(lens) if n]
        none = [row for row, n in enumerate(lens) if not n]
        begins = [0, *accumulate(n for n in lens if n)]
        device = batch.cu_seqlens_q.device
        numbers, pinned = [*some, *none, *begins], device.type == "cuda"
        host = torch.tensor(numbers, device="cpu", pin_memory=pinned)
        table = host.to(device, non_blocking=True)
        rows, others, cu_seqlens = torch.split(table, [len(some), len(none), len(begins)])
        return ExtendPlan(cu_seqlens, requests.of(rows), requests.of(others), use_cp)

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Requests
    ) -> None:
        """Refill what the plan of a decode has made of the batch's tensors."""
        for own, new in zip(metadata, Requests.all(batch).for_decode(), strict=True):
            if own is not None and new is not None and own is not new:
                own.copy_(new)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: ExtendPlan, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Gather the states, run the chunks of all requests in one kernel, write the states."""
        self._refuse_dtypes(q, k, v, layer)
        pool, result = state.state, _output(q, v, out)
        cu_seqlens, requests, without_tokens, use_cp = metadata
        if without_tokens is not None:
            move_states(pool, *without_tokens)
        if len(requests.reads):
            unit, (log_decay, beta) = self._weights(layer).unit, gated(layer, g, beta)
            q, k = (_normalised(layer, unit, x) for x in (q, k))
            _, last = self._run(
                self._prefill, contiguous16(q), contiguous16(k), contiguous16(v),
                g=contiguous16(log_decay.exp()), beta=contiguous16(beta), scale=layer.scale,
                initial_state=load_states(pool, requests.reads, requests.fresh),
                output_final_state=True, cu_seqlens=cu_seqlens, output=result, use_cp=use_cp,
            )  # fmt: skip
            store_states(last, pool, requests.writes)
        return copy_to_out(result, out)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: Requests, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Read and write each state once, in the pool."""
        self._refuse_dtypes(q, k, v, layer)
        weights, result = self._weights(layer), _output(q, v, out)
        pool, (reads, writes, fresh) = state.state, metadata
        dense = pool.data_ptr() % 16 != 0 or pool.stride(0) % 4 != 0  # it loads 16 bytes at a time
        if dense:
            pool, reads = _gathered(pool, metadata)
            writes = reads
        elif fresh is not None:
            clear_states(pool, writes, fresh)
        if not weights.in_kernel:
            q, k, v, g, beta = _before_kernel(layer, weights.unit, q, k, v, g, beta)
        q, k, v, g, beta = (aligned(x).unsqueeze(1) for x in (q, k, v, g, beta))
        A_log, dt_bias = (contiguous16(x.detach().float()) for x in weights[:2])
        self._run(
            self._decode, q, k, v, None, A_log, g, dt_bias, beta,
            scale=layer.scale, output=result.unsqueeze(1), use_qk_l2norm=weights.in_kernel,
            initial_state=pool, initial_state_indices=reads, output_state_indices=writes,
        )  # fmt: skip
        if dense:
            store_states(pool, state.state, metadata.writes)
        return copy_to_out(result, out)

    def _run(self, kernel: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a kernel, and log how long its first call took to compile it."""
        if kernel in self._built:
            return kernel(*arguments, **named)
        with building(f"{self.config.name}, {kernel.__name__}"):
            result = kernel(*arguments, **named)
        self._built.add(kernel)
        return result

    def _refuse_dtypes(self, q: Tensor, k: Tensor, v: Tensor, layer: LinearLayer) -> None:
        if not q.dtype == k.dtype == v.dtype == self._dtype:
            raise BatchError(
                f"layer {layer.layer_id}: q {q.dtype}, k {k.dtype}, v {v.dtype} (expected "
                f"{self._dtype}, for which {self.config.name} was created)"
            )


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"flashinfer.{module}"), name)


def _gathered(pool: Tensor, requests: Requests) -> tuple[Tensor, Tensor]:
    """Return the states of requests as a pool of their own, and their slots in it."""
    states = load_states(pool, requests.reads, requests.fresh)
    rows = torch.arange(len(states), dtype=torch.int32, device=pool.device)
    return states, rows.where(requests.reads >= 0, -1)


def _before_kernel(
    layer: LinearLayer, unit: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return q, k, v, a and b of which the decode kernel, without a norm, makes the same update.

    It computes -softplus(a) as the log decay, from weights of 0, and sigmoid(b) as beta, which is 1
    at most. beta may be 2: beta / 4 beside 2k and 2v is the same update, exactly.
    """
    log_decay, beta = gated(layer, g, beta)
    a = (-torch.expm1(log_decay)).log() - log_decay  # log(exp(x) - 1) of x = -log_decay
    b = torch.logit(beta / 4)
    return _normalised(layer, unit, q), 2 * _normalised(layer, unit, k), 2 * v, a, b


def _normalised(layer: LinearLayer, unit: Tensor | None, x: Tensor) -> Tensor:
    """Return q or k [T, Hk, K] normalised, in its own dtype, if the layer says so.

    One launch in bf16, three in fp16.
    """
    if unit is None or layer.qk_norm is None:
        return x
    # x / sqrt(Σx² + eps) = x / sqrt(mean(x²) + eps / K) · K ** -0.5
    return rms_norm(x.to(unit.dtype), unit.shape, unit, layer.qk_norm / len(unit)).to(x.dtype)


def _output(q: Tensor, v: Tensor, out: Tensor | None) -> Tensor:
    """Return what a kernel can fill with [T, Hv, V], `out` where possible."""
    if out is not None and out.is_contiguous() and not out.data_ptr() % 16:
        return out
    return torch.empty(v.shape, dtype=q.dtype, device=q.device)
