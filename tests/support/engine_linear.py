"""SGLang's linear layers on a CPU: its kernels in torch, and its own backend as the reference.

SGLang's kernels of states and of the short convolution need a GPU. Here they are a recurrence in
float64 and plain sums, behind SGLang's own metadata, pools and passes.
"""

from types import SimpleNamespace

import torch
from engine_passes import server_args
from linear_reference import recurrence
from sglang.kernels.ops.attention.fla import fused_norm_gate
from sglang.kernels.ops.mamba import mamba_state_scatter_triton as scatter
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
from sglang.srt.layers.attention.linear import gdn_backend, kda_backend
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from torch.nn.functional import normalize, silu, softplus
from torch.overrides import TorchFunctionMode

CHUNK = 64


def parents_of(children, siblings):
    """Return the parent of each draft, [n] each, -1 of a root, from SGLang's links."""
    n = len(children)
    parents = [-1] * n
    for i in range(n):
        if children[i] > i:
            parents[children[i]] = i
        if siblings[i] > i:
            parents[siblings[i]] = parents[i]
    return parents


def convolve(window, weight, bias, activation):
    """Return one output of a short convolution over the last inputs, window [C, W]."""
    x = (window.double() * weight.double()).sum(-1)
    x = x if bias is None else x + bias.double()
    return silu(x) if activation else x


def convolution(
    x, weight, bias=None, *, conv_states, has_initial_state, cache_indices, query_start_loc,
    activation="silu", **_
):  # fmt: skip
    """Stand in for causal_conv1d_fn: x [C, T] → the same."""
    out, width = torch.empty_like(x), weight.shape[1]
    for b, slot in enumerate(cache_indices.tolist()):
        first, last = query_start_loc[b : b + 2].tolist()
        if slot < 0 or first == last:
            continue
        old = conv_states[slot] if has_initial_state[b] else torch.zeros_like(conv_states[slot])
        inputs = torch.cat([old.to(x.dtype), x[:, first:last]], 1)
        for t in range(last - first):
            out[:, first + t] = convolve(inputs[:, t : t + width], weight, bias, activation)
        conv_states[slot] = inputs[:, inputs.shape[1] - (width - 1) :]
    return out


def convolution_update(
    x, conv_state, weight, bias=None, activation=None, *, conv_state_indices,
    intermediate_conv_window=None, intermediate_state_indices=None, retrieve_next_token=None,
    retrieve_next_sibling=None, retrieve_parent_token=None, **_,
):  # fmt: skip
    """Stand in for causal_conv1d_update: x [B, C] or drafts [B, C, n] → the same."""
    out = torch.zeros_like(x)
    for b, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:
            continue
        state = conv_state[slot]
        if intermediate_conv_window is None:
            window = torch.cat([state.to(x.dtype), x[b, :, None]], 1)
            out[b] = convolve(window, weight, bias, activation)
            conv_state[slot] = window[:, 1:]
            continue
        n = x.shape[2]
        parents = list(range(-1, n - 1))
        if retrieve_next_token is not None:
            links = retrieve_next_token[b].tolist(), retrieve_next_sibling[b].tolist()
            parents = parents_of(*links)
            retrieve_parent_token[b] = torch.tensor(parents)
        windows = []
        for i, parent in enumerate(parents):
            before = state.to(x.dtype) if parent < 0 else windows[parent]
            window = torch.cat([before, x[b, :, i : i + 1]], 1)
            out[b, :, i] = convolve(window, weight, bias, activation)
            windows.append(window[:, 1:])
            row = int(intermediate_state_indices[b])
            intermediate_conv_window[row, i] = windows[i]
    return out


def track(conv, ssm, indices, mask, targets, batch_size, check_freed_slots=False):
    """Stand in for track_mamba_states_if_needed."""
    for b in range(batch_size):
        if mask[b]:
            for x in (conv, ssm):
                x[targets[b]] = x[indices[b]]


def masked_scatter(dst, src, dst_indices_raw, step_indices_raw):
    """Stand in for SGLang's two kernels that copy what accepted drafts left."""
    for b, (slot, step) in enumerate(
        zip(dst_indices_raw.tolist(), step_indices_raw.tolist(), strict=True)
    ):
        if step >= 0 and slot >= 0:
            dst[:, slot] = src[:, b, step]


def gates(A_log, a, b, dt_bias, heads):
    """Return g [T, Hv] or [T, Hv, K] and beta [T, Hv], float64, of raw ones."""
    per_channel = dt_bias.numel() > heads
    dims = (heads, dt_bias.numel() // heads) if per_channel else (heads,)
    f = a.reshape(-1, *dims).double() + dt_bias.double().view(dims)
    A = A_log.double().view(heads, *[1] * per_channel).exp()
    return -A * softplus(f), b.reshape(-1, heads).double().sigmoid()


class Recurrence:
    """Stand in for SGLang's dispatchers of kernels: GDN's and KDA's."""

    supports_packed_decode = False

    def __init__(self, *_):
        pass

    def _run(self, q, k, v, g, beta, state, parents=None):
        q, k = (normalize(x.double(), dim=-1) for x in (q, k))
        return recurrence(q, k, v, g, beta, state, q.shape[-1] ** -0.5, parents)

    def _requests(self, q, k, v, g, beta, states, indices, starts, parents=None):
        """Yield each request's slot, tokens, outputs and states."""
        for b, slot in enumerate(indices.tolist()):
            first, last = starts[b : b + 2].tolist()
            if slot < 0 or first == last:
                continue
            own = slice(first, last)
            some = (x.reshape(-1, *x.shape[-2:])[own] for x in (q, k, v))
            of = None if parents is None else parents[b].tolist()
            yield b, slot, own, *self._run(*some, g[own], beta[own], states[slot], of)

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices,
               query_start_loc, **_):  # fmt: skip
        g, beta = gates(A_log, a, b, dt_bias, v.shape[-2])
        return self._store(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc)[0]

    def _store(self, q, k, v, g, beta, states, indices, starts):
        out, entering = torch.zeros_like(v), []
        found = self._requests(q, k, v, g, beta, states, indices, starts)
        for _b, slot, own, o, new in found:
            out.view(-1, *v.shape[-2:])[own] = o.to(v.dtype)
            chain = [states[slot].double(), *new]
            entering += chain[:-1:CHUNK]
            states[slot] = new[-1]
        return out, torch.stack(entering)[None] if entering else None

    def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc,
               A_log=None, dt_bias=None, return_intermediate_states=None, **_):  # fmt: skip
        if A_log is not None:  # KDA: a raw g, and beta after its sigmoid
            g, beta = gates(A_log, g, beta.double().logit(), dt_bias, v.shape[-2])
        g, beta = (x.squeeze(0) if x.shape[0] == 1 else x for x in (g, beta))
        out, h = self._store(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc)
        if return_intermediate_states is None:
            return out, None, h
        return (out, h) if return_intermediate_states else out

    def target_verify(self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices,
                      query_start_loc, intermediate_states_buffer, intermediate_state_indices,
                      retrieve_parent_token, **_):  # fmt: skip
        g, beta = gates(A_log, a, b, dt_bias, v.shape[-2])
        out = torch.zeros_like(v)
        found = self._requests(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc,
                               retrieve_parent_token)  # fmt: skip
        for row, _slot, own, o, new in found:
            out.view(-1, *v.shape[-2:])[own] = o.to(v.dtype)
            intermediate_states_buffer[intermediate_state_indices[row], : len(new)] = torch.stack(
                new
            )
        return out


class RightBeta(Recurrence):
    """KDA's, whose model applies the sigmoid of beta before SGLang's kernel does so again."""

    def target_verify(self, A_log, dt_bias, q, k, v, a, b, **rest):
        return super().target_verify(A_log, dt_bias, q, k, v, a, b.double().logit(), **rest)


def gating(A_log, a, b, dt_bias):
    """Stand in for fused_gdn_gating."""
    g, beta = gates(A_log, a, b, dt_bias, a.shape[-1])
    return g[None], beta[None]


def gated_norm(x, g, weight, bias, activation="swish", *, eps=1e-6, **_):
    """Stand in for rms_norm_gated."""
    gate = g.double().sigmoid()
    gate = gate if activation == "sigmoid" else gate * g.double()
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.double() * gate).to(x.dtype)


def stand_ins():
    """Put the stand-ins into SGLang's modules."""
    for module in (gdn_backend, kda_backend):
        module.causal_conv1d_fn = convolution
        module.causal_conv1d_update = convolution_update
    gdn_backend.GDNKernelDispatcher = Recurrence
    kda_backend.KDAKernelDispatcher = RightBeta
    gdn_backend.fused_gdn_gating = gating
    fused_norm_gate.rms_norm_gated = gated_norm
    hybrid.track_mamba_states_if_needed = track
    scatter.fused_mamba_state_scatter_with_mask = masked_scatter
    scatter.fused_conv_window_scatter_with_mask = masked_scatter


class OnTheHost(TorchFunctionMode):
    """SGLang's pool puts what drafts leave on "cuda" whatever its device is."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


HEADS = {"gdn": (2, 4), "kda": (4, 4)}  # key heads, value heads
DIM, WIDTH, LAYERS, ROWS, SLOTS = 16, 4, 2, 9, 24


def module(kind, layer_id):
    """Return SGLang's module of one linear layer, with drawn weights."""
    hk, hv = HEADS[kind]
    channels = (2 * hk + hv) * DIM
    return RadixLinearAttention(
        layer_id=layer_id, num_q_heads=hk, num_k_heads=hk, num_v_heads=hv, head_q_dim=DIM,
        head_k_dim=DIM, head_v_dim=DIM, conv_weights=torch.randn(channels, WIDTH), bias=None,
        activation="silu", A_log=torch.nn.Parameter(torch.randn(hv)),
        dt_bias=torch.nn.Parameter(torch.randn(hv * (DIM if kind == "kda" else 1))),
    )  # fmt: skip


def pool(kind, drafts=0, topk=1):
    """Return SGLang's pool of requests and states, filled with drawn numbers."""
    hk, hv = HEADS[kind]
    if kind == "gdn":
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=hv * DIM, n_groups=hk, num_heads=hv, head_dim=DIM,
            state_size=DIM, conv_kernel=WIDTH,
        )  # fmt: skip
    else:
        shape = KimiLinearStateShape.create(
            tp_world_size=1, num_heads=hv, head_dim=DIM, num_k_heads=hk, head_k_dim=DIM,
            conv_kernel_size=WIDTH,
        )  # fmt: skip
    kinds = {"gdn": Mamba2CacheParams, "kda": KimiLinearCacheParams}
    dtype = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    ids = [2 * i for i in range(LAYERS)]  # every other layer is linear
    params = kinds[kind](shape=shape, layers=ids, dtype=dtype)
    with OnTheHost():
        requests = HybridReqToTokenPool(
            size=ROWS - 1, mamba_size=SLOTS, mamba_spec_state_size=ROWS - 1, max_context_len=512,
            device="cpu", enable_memory_saver=False, cache_params=params, mamba_layer_ids=ids,
            enable_mamba_extra_buffer=False, speculative_num_draft_tokens=drafts or None,
            speculative_eagle_topk=topk, enable_overlap_schedule=False,
        )  # fmt: skip
    cache = requests.mamba_pool.mamba_cache
    cache.temporal.normal_()
    cache.conv[0].normal_()
    requests.req_index_to_mamba_index_mapping[1:] = torch.randperm(SLOTS - 8)[: ROWS - 1].int() + 1
    return requests


def runner(modules, requests, **args):
    """Return what the adapter and SGLang's own backend read of a ModelRunner."""
    values = {
        "enable_unified_memory": False,
        "enable_mamba_extra_buffer": lambda: False,
        "linear_attn_backend": "attn_core",
        **args,
    }
    return SimpleNamespace(
        server_args=server_args(**values),
        device="cpu",
        dtype=torch.float32,
        is_draft_worker=False,
        model_config=SimpleNamespace(hf_config=SimpleNamespace()),
        req_to_token_pool=requests,
        token_to_kv_pool=None,
        model=torch.nn.ModuleList(modules),
    )


def a_pass(mode, rows, prefix, new, *, keeps=None, tree=None, padding=0):
    """Return SGLang's ForwardBatch of one pass.

    keeps: request → the slot of its state for the prefix cache. tree: (children, siblings) of the
    drafts. padding: requests at the end that are none.
    """
    size, tokens = len(rows), sum(new)
    verify, extend = mode.is_target_verify(), mode.is_extend() and not mode.is_target_verify()
    starts = torch.tensor([0, *new]).cumsum(0)[:-1].int()
    keeps = None if keeps is None else [keeps.get(i, -1) for i in range(size)]
    lengths = [p + n for p, n in zip(prefix, new, strict=True)]
    spec = SimpleNamespace(draft_token_num=max(new, default=0))
    if verify:
        spec.retrieve_next_token, spec.retrieve_next_sibling = tree or (None, None)
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=size,
        _original_batch_size=size - padding if padding else None,
        num_padding=padding,
        req_pool_indices=torch.tensor(rows, dtype=torch.int64),
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.zeros(tokens, dtype=torch.int64),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        extend_start_loc=starts if extend else None,
        extend_seq_lens=torch.tensor(new, dtype=torch.int32) if extend else None,
        extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32) if extend else None,
        extend_seq_lens_cpu=list(new) if extend else None,
        mamba_track_indices=None if keeps is None else torch.tensor(keeps),
        mamba_track_mask=None if keeps is None else torch.tensor(keeps) >= 0,
        mamba_track_seqlens=None if keeps is None else torch.tensor(lengths),
        spec_info=spec,
    )


def inputs(kind, mode, tokens):
    """Return drawn mixed_qkv, a and b as SGLang's models hand them over."""
    hk, hv = HEADS[kind]
    x, b = torch.randn(tokens, (2 * hk + hv) * DIM), torch.randn(tokens, hv)
    if kind == "gdn":
        return x, torch.randn(tokens, hv), b
    f = torch.randn(tokens, hv * DIM)
    if mode.is_decode():
        return x, f, b[None]
    return x, f.unflatten(-1, (hv, DIM))[None], b.sigmoid()[None]


def run(backend, batch, modules, inputs):
    """Run all layers of a planned pass; inputs: of each. Returns the outputs, stacked."""
    call = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
    outs = []
    for layer, (x, a, b) in zip(modules, inputs, strict=True):
        out = call(layer=layer, forward_batch=batch, mixed_qkv=x, a=a, b=b, q=None, k=None, v=None)
        outs.append(out.reshape(x.shape[0], layer.num_v_heads, DIM).clone())
    return torch.stack(outs)
