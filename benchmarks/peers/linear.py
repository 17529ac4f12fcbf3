"""Kernels of linear attention on the same inputs: ours, and each library's own call.

A contestant prepares a call that returns the outputs and, where it stores any, a function that
returns the last states [B, Hv, V, K]. What a library wants precomputed (log decays, normalised
keys, gathered states) is given to it untimed, but for "flashinfer-whole".
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import rms_norm, softplus

from benchmarks.linear_cases import LinearCase, LinearInputs

Call = Callable[[], Tensor]
States = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class LinearContestant:
    """One way to compute a case. takes: the cases that it can do."""

    name: str
    distribution: str
    modules: tuple[str, ...]
    takes: Callable[[LinearCase], bool]
    prepare: Callable[[LinearInputs, Any], tuple[Call, States | None]]

    def load(self) -> Any:
        """Import the first of its modules that there is. Raises ImportError.

        SGLang replaces a function of Triton that FLA calls in kernels, and Triton compiles no other
        there: Triton gets its own back, whichever library was imported first.
        """
        own = triton.next_power_of_2
        try:
            for module in self.modules:
                try:
                    return importlib.import_module(module)
                except ModuleNotFoundError as error:
                    last = error
            raise last
        finally:
            triton.next_power_of_2 = own

    def available(self) -> bool:
        """Say whether its package can be found; nothing is imported."""
        return importlib.util.find_spec(self.modules[0].partition(".")[0]) is not None


def arch_of(device: torch.device) -> str:
    """Return "sm90" or "gfx942"; of a CPU, where kernels are interpreted, "sm90"."""
    if device.type != "cuda":
        return "sm90"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm{properties.major}{properties.minor}"


def _ours(x: LinearInputs, launch: Any) -> tuple[Call, States | None]:
    """Gates and norms are computed in the kernels, from strided parts of one projection."""
    from attn_core.backends.triton.linear import prefill

    case, device = x.case, x.q.device
    layer = launch.LinearArguments.of(x.layer, arch_of(device))
    pool = x.pool.clone()
    tokens = (x.q, x.k, x.v, x.f, x.b)
    out = torch.empty(x.v.shape, dtype=x.v.dtype, device=device)

    def states() -> Tensor:
        return pool[x.slots.long()]

    if case.op == "prefill":
        lens = [case.tokens] * case.batch
        plan = prefill.plan_prefill(layer, lens, dtype=x.v.dtype, device=device)
        return lambda: prefill.prefill(layer, *tokens, pool, x.slots, plan, out=out), states
    if case.op == "decode":
        return lambda: launch.decode(layer, *tokens, pool, x.slots, out=out), states
    hk, hv, (k, v), n = *case.heads, case.dims, case.tokens
    dims = ((hv, v), (hk, k), (hv, k) if case.kind == "kda" else (hv,))
    records = tuple(torch.zeros(1, pool.shape[0], n, *d, device=device) for d in dims)
    own = tuple(r[0] for r in records)

    def verify() -> Tensor:
        launch.verify(layer, *tokens, pool, own, x.slots, tree_mask=x.mask, out=out)
        return out

    if case.op == "verify":
        return verify, None
    verify()
    slots, mask = x.slots, x.mask

    def commit() -> Tensor:
        launch.commit(layer, pool[None], records, slots, x.accepted, tree_mask=mask)
        return out

    return commit, states


def _fla(x: LinearInputs, module: Any) -> tuple[Call, States | None]:
    """fla-core: no pool; the states of a pass are gathered before and never written back."""
    case, start = x.case, x.pool[x.slots.long()].float()
    names = {"gdn": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")}
    names["kda"] = ("chunk_kda", "fused_recurrent_kda")
    decode = case.op == "decode"
    function = getattr(module, names[case.kind][decode])
    tokens = [y.contiguous().unsqueeze(1 if decode else 0) for y in (x.q, x.k, x.v)]
    gates = {
        "g": x.g.unsqueeze(1 if decode else 0),
        "beta": x.beta.unsqueeze(1 if decode else 0),
    }
    more = {} if decode else {"cu_seqlens": x.cu_seqlens, "cu_seqlens_cpu": x.cu_seqlens.cpu()}
    kept: list[Tensor] = []

    def call() -> Tensor:
        out, state = function(
            *tokens, **gates, scale=x.layer.scale, initial_state=start, output_final_state=True,
            use_qk_l2norm_in_kernel=True, state_v_first=True, **more,
        )  # fmt: skip
        kept[:] = [state]
        return out  # type: ignore[no-any-return]

    return call, lambda: kept[0]


def _flashinfer_prefill(x: LinearInputs, module: Any) -> tuple[Call, States | None]:
    """FlashInfer: linear decays, normalised q and k, no pool."""
    q, k = x.unit
    start, alpha, v = x.pool[x.slots.long()].float(), x.g.exp(), x.v.contiguous()
    kept: list[Tensor] = []

    def call() -> Tensor:
        out, state = module.chunk_gated_delta_rule(
            q, k, v, g=alpha, beta=x.beta, scale=x.layer.scale, initial_state=start,
            output_final_state=True, cu_seqlens=x.cu_seqlens,
        )  # fmt: skip
        kept[:] = [state]
        return out  # type: ignore[no-any-return]

    return call, lambda: kept[0]


def _flashinfer_whole(x: LinearInputs, module: Any) -> tuple[Call, States | None]:
    """FlashInfer and, timed too, what our kernels do besides: norms, gates, states of a pool."""
    layer, pool, slots = x.layer, x.pool.clone(), x.slots.long()
    gate, dim = layer.gate, layer.head_k_dim
    unit = torch.full((dim,), dim**-0.5, dtype=x.q.dtype, device=x.q.device)

    def call() -> Tensor:
        # x / sqrt(Σx² + eps) = x / sqrt(mean(x²) + eps / K) · K ** -0.5
        q, k = (rms_norm(y, (dim,), unit, layer.qk_norm / dim).contiguous() for y in (x.q, x.k))
        g = -gate.A_log.exp() * softplus(x.f.float() + gate.dt_bias)
        out, state = module.chunk_gated_delta_rule(
            q, k, x.v.contiguous(), g=g.exp(), beta=torch.sigmoid(x.b.float()), scale=layer.scale,
            initial_state=pool[slots], output_final_state=True, cu_seqlens=x.cu_seqlens,
        )  # fmt: skip
        pool[slots] = state
        return out  # type: ignore[no-any-return]

    return call, lambda: pool[slots]


def _flashinfer_decode(x: LinearInputs, module: Any) -> tuple[Call, States | None]:
    """FlashInfer: gates and norms in the kernel, states of a pool."""
    weights, pool, slots = x.layer.gate, x.pool.clone(), x.slots
    q, k, v, a, b = (y.contiguous().unsqueeze(1) for y in (x.q, x.k, x.v, x.f, x.b))

    def call() -> Tensor:
        out, _ = module.gated_delta_rule_decode_pretranspose(
            q, k, v, None, weights.A_log, a, weights.dt_bias, b, scale=x.layer.scale,
            initial_state=pool, initial_state_indices=slots,
        )  # fmt: skip
        return out  # type: ignore[no-any-return]

    return call, lambda: pool[slots.long()]


def _flashinfer_verify(x: LinearInputs, module: Any) -> tuple[Call, States | None]:
    """FlashInfer: a chain, which leaves one state a draft."""
    case, weights, pool = x.case, x.layer.gate, x.pool.clone()
    rows = (case.batch, case.tokens)
    q, k, v, a, b = (y.contiguous().view(*rows, *y.shape[1:]) for y in (x.q, x.k, x.v, x.f, x.b))
    buffer = pool.new_zeros(*rows, *pool.shape[1:])

    def call() -> Tensor:
        out, _ = module.gated_delta_rule_mtp(
            q, k, v, pool, x.slots, weights.A_log, a, weights.dt_bias, b, scale=x.layer.scale,
            intermediate_states_buffer=buffer, disable_state_update=True,
        )  # fmt: skip
        return out  # type: ignore[no-any-return]

    return call, None


def _sglang_chunk(x: LinearInputs, module: Any) -> tuple[Call, States | None]:
    """SGLang's own copy of FLA's kernels, over a pool."""
    pool, is_kda = x.pool.clone(), x.case.kind == "kda"
    q, k, v, g, beta = (y.contiguous()[None] for y in (x.q, x.k, x.v, x.g, x.beta))
    function = module.chunk_kda if is_kda else module.chunk_gated_delta_rule
    more = {} if is_kda else {"head_first": False}

    def call() -> Tensor:
        got = function(
            q=q, k=k, v=v, g=g, beta=beta, scale=x.layer.scale, initial_state=pool,
            initial_state_indices=x.slots, cu_seqlens=x.cu_seqlens,
            use_qk_l2norm_in_kernel=True, **more,
        )  # fmt: skip
        return got if is_kda else got[0]  # type: ignore[no-any-return]

    return call, lambda: pool[x.slots.long()]


def _sglang_recurrent(x: LinearInputs, module: Any) -> tuple[Call, States | None]:
    """SGLang: decode in place, or drafts that leave one state each."""
    case, weights, pool = x.case, x.layer.gate, x.pool.clone()
    q, k, v, a, b = (y.contiguous()[None] for y in (x.q, x.k, x.v, x.f, x.b))
    if case.kind == "kda":
        a = a.flatten(2)
    verify: dict[str, Any] = {}
    if case.op == "verify":
        order = torch.arange(case.batch, device=pool.device, dtype=torch.int32)
        shape = (case.batch, case.tokens, *pool.shape[1:])
        verify = {"intermediate_states_buffer": pool.new_zeros(shape, dtype=torch.float32)}
        verify |= {"disable_state_update": True, "cache_steps": case.tokens}
        verify |= {"intermediate_state_indices": order}
        if case.tree:
            parents = torch.tensor([x.parents] * case.batch, dtype=torch.int64)
            verify["retrieve_parent_token"] = parents.to(pool.device)

    def call() -> Tensor:
        return module.fused_sigmoid_gating_delta_rule_update(  # type: ignore[no-any-return]
            A_log=weights.A_log, a=a, dt_bias=weights.dt_bias.flatten(), softplus_beta=1.0,
            softplus_threshold=20.0, q=q, k=k, v=v, b=b, initial_state_source=pool,
            initial_state_indices=x.slots, scale=x.layer.scale, use_qk_l2norm_in_kernel=True,
            cu_seqlens=x.cu_seqlens.int(), is_kda=case.kind == "kda", **verify,
        )  # fmt: skip

    return call, None if verify else lambda: pool[x.slots.long()]


def _torch_commit(x: LinearInputs, _: Any) -> tuple[Call, States | None]:
    """One gather and scatter of the accepted of one state a draft, as engines commit them."""
    case, pool = x.case, x.pool.clone()
    states = torch.zeros(case.batch, case.tokens, *pool.shape[1:], device=pool.device)
    states = states.to(pool.dtype)
    last, slots = x.reference[1].to(pool.dtype), x.slots.long()
    rows = torch.arange(case.batch, device=pool.device)
    states[rows, x.accepted] = last

    def call() -> Tensor:
        pool[slots] = states[rows, x.accepted]
        return pool

    return call, lambda: pool[slots]


_SGLANG = ("sglang.srt.layers.attention.fla", "sglang.kernels.ops.attention.fla")


def _sglang(module: str) -> tuple[str, ...]:
    return tuple(f"{folder}.{module}" for folder in _SGLANG)


def _is(*ops: str, kinds: tuple[str, ...] = ("gdn",), **more: Any) -> Callable[[LinearCase], bool]:
    return lambda c: (
        c.op in ops and c.kind in kinds and all(getattr(c, n) in x for n, x in more.items())
    )


_BOTH, _FP32 = ("gdn", "kda"), ("fp32",)
OURS = LinearContestant(
    name="ours", distribution="attn-core", modules=("attn_core.backends.triton.linear.launch",),
    takes=lambda case: True, prepare=_ours,
)  # fmt: skip
LINEAR_PEERS: tuple[LinearContestant, ...] = tuple(
    LinearContestant(
        name=name, distribution=distribution, modules=modules, takes=takes, prepare=prepare
    )
    for name, distribution, modules, takes, prepare in (
        ("flashinfer-prefill", "flashinfer-python", ("flashinfer.gdn_prefill",),
         _is("prefill", state=_FP32), _flashinfer_prefill),
        ("flashinfer-whole", "flashinfer-python", ("flashinfer.gdn_prefill",),
         _is("prefill", state=_FP32), _flashinfer_whole),
        ("flashinfer-decode", "flashinfer-python", ("flashinfer.gdn_decode",),
         _is("decode"), _flashinfer_decode),
        ("flashinfer-mtp", "flashinfer-python", ("flashinfer.gdn_decode",),
         _is("verify", tree=(False,), state=_FP32), _flashinfer_verify),
        ("fla", "fla-core", ("fla.ops.gated_delta_rule",),
         _is("prefill", "decode", state=_FP32), _fla),
        ("fla-kda", "fla-core", ("fla.ops.kda",),
         _is("prefill", "decode", kinds=("kda",), state=_FP32), _fla),
        ("sglang-chunk", "sglang", _sglang("chunk"), _is("prefill"), _sglang_chunk),
        ("sglang-chunk-kda", "sglang", _sglang("kda"),
         _is("prefill", kinds=("kda",)), _sglang_chunk),
        ("sglang-recurrent", "sglang", _sglang("fused_sigmoid_gating_recurrent"),
         _is("decode", "verify", kinds=_BOTH), _sglang_recurrent),
        ("copied-states", "torch", ("torch",), _is("commit"), _torch_commit),
    )
)  # fmt: skip
