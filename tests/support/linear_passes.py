"""Passes of linear layers: random requests, their batches, and what the recurrence says of them."""

import dataclasses

import torch
from attn_core import (
    BackendConfig,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    Gate,
    LinearLayer,
    SpecInfo,
    StatePool,
)
from attn_core.testing.linear_oracle import delta_rule

M = ForwardMode
HK, HV, K, V = 2, 6, 16, 24  # all different, so that no two can be mistaken
GDN = LinearLayer(layer_id=0, num_k_heads=HK, num_v_heads=HV, head_k_dim=K, head_v_dim=V)
KDA = dataclasses.replace(GDN, kind="kda")
LAYERS = {"gdn": GDN, "kda": KDA}
ROW = Capabilities(
    kind="gdn",
    device="cpu",
    dtypes={"fp32", "bf16"},
    kv_dtypes={"fp32", "bf16"},
    priority=10,
    head_dim_pairs="any",
    max_verify_topk=1 << 30,
    separate_write_slots=True,
    checkpoints=True,
)


def config(*layers, **changes):
    row = dataclasses.replace(ROW, kind=layers[0].kind)
    values = {
        "name": "torch_native",
        "row": row,
        "layers": (),
        "linear_layers": layers,
        "page_size": 1,
        "dtype": "fp32",
        "kv_cache_dtype": "fp32",
        "device": torch.device("cpu"),
    }
    return BackendConfig(**{**values, **changes})


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(shape), dim=-1)


def gate(layer, **changes):
    """Return a gate of random weights for a layer."""
    a_log, bias = torch.rand(layer.num_v_heads) * 2.8, torch.randn(layer.g_dims)
    return Gate(**{"A_log": a_log, "dt_bias": bias, **changes})


def inputs(layer, tokens, *, decay=1.0, hard=False, dtype=torch.float32):
    """Return q, k, v, g, beta; g of a layer without a gate is in [-decay, 0].

    hard: nearly equal keys and beta near 1, for which the triangular system is ill conditioned.
    """
    keys = (layer.num_k_heads, layer.head_k_dim)
    values = (layer.num_v_heads, layer.head_v_dim)
    q, k = unit(tokens, *keys), unit(tokens, *keys)
    if hard:
        k = torch.nn.functional.normalize(unit(1, *keys) + 0.05 * k, dim=-1)
    v, g = torch.randn(tokens, *values), -decay * torch.rand(tokens, *layer.g_dims)
    beta = torch.rand(tokens, values[0])
    beta = beta * 0.05 + 0.95 if hard else beta
    if layer.gate is not None:
        g, beta = torch.randn(g.shape) * 8, torch.randn(beta.shape) * 3
        return tuple(x.to(dtype) for x in (q, k, v, g, beta))
    return q.to(dtype), k.to(dtype), v.to(dtype), g, beta


def make_pool(*layers, slots=8, **changes):
    """Return a pool of random states on the default device."""
    changes.setdefault("device", torch.get_default_device())
    pool = StatePool(layers, num_slots=slots, **changes)
    pool.states.state.normal_()
    return pool


def make_batch(mode, query_lens, slots, **states):
    b = len(query_lens)
    spec = states.pop("spec", None)
    return ForwardBatch.build(
        mode,
        query_lens=query_lens,
        seq_lens=query_lens,
        page_table=torch.zeros(b, max(query_lens, default=0) + 1, dtype=torch.int32),
        page_size=states.pop("page_size", 4),
        spec=spec,
        state_slots=int32(*slots),
        **states,
    )


def run(backend, batch, layer, pool, tensors, **changes):
    """Plan a pass and run one layer of it, by its mode."""
    metadata = backend.init_forward_metadata(batch)
    method = {M.DECODE: backend.decode, M.TARGET_VERIFY: backend.verify}
    step = method.get(batch.forward_mode, backend.extend)
    return step(*tensors, layer, pool.layer(layer.layer_id), batch, metadata, **changes), metadata


def extend(backend, layer, pool, tensors, query_lens, slots, **states):
    return run(backend, make_batch(M.EXTEND, query_lens, slots, **states), layer, pool, tensors)[0]


def expected(tensors, query_lens, layer, states, parents=None):
    """Return each request's outputs and states after each token, from the float64 recurrence."""
    parts = zip(*(x.split(query_lens) for x in tensors), strict=True)
    return [
        delta_rule(*part, layer, state, parents) for part, state in zip(parts, states, strict=True)
    ]


def close(found, wanted, ratio):
    """Check the error against the RMS of what is expected, as fla's tests do."""
    error = (found.double() - wanted).square().mean().sqrt()
    size = wanted.square().mean().sqrt()
    assert error <= ratio * size, f"ratio {float(error / size):.2g} (at most {ratio:g})"


def tree_mask(parents, requests=1):
    """Return bool [B, n, n] of a tree whose drafts come after their parents."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for draft, parent in enumerate(parents):
        if parent >= 0:
            mask[draft] = mask[parent]
        mask[draft, draft] = True
    return mask.repeat(requests, 1, 1)


def speculation(parents, requests=1):
    """Return the SpecInfo of a tree, or of a chain of so many drafts."""
    if isinstance(parents, int):
        return SpecInfo(topk=1, num_draft_tokens=parents)
    mask = tree_mask(parents, requests)
    return SpecInfo(topk=2, num_draft_tokens=len(parents), tree_mask=mask)


FLAWS = (
    ("k", torch.nan),
    ("k", torch.inf),
    ("v", -torch.inf),
    ("g", torch.nan),
    ("beta", torch.nan),
)
FLAWED_TREE = (-1, 0, 0, 1, 1, 2, 3)  # drafts 2 and 5 see draft 2


def check_flaw(backend, layer, name, flaw, parents, exact):
    """Verify and commit drafts beside one with a number that is not finite."""
    pool, n, draft = make_pool(layer, num_drafts=7), 7, 2 if parents else 4
    sees = [2, 5] if parents else [4, 5, 6]
    others = [i for i in range(n) if i not in sees]
    start, tensors = pool.states.state[0, 3].clone(), inputs(layer, n)
    [(wanted, states)] = expected(tensors, [n], layer, [start], parents)
    x = tensors[("q", "k", "v", "g", "beta").index(name)]
    x.view(n, -1)[draft, 0] = flaw
    batch = make_batch(M.TARGET_VERIFY, [n], [3], spec=speculation(parents or n))
    out, metadata = run(backend, batch, layer, pool, tensors)
    close(out[others], wanted[others], exact)
    assert not out[sees, 0, 0].isfinite().any()
    accepted = 6 if parents else 3
    backend.commit(pool, batch, metadata, int32(accepted))
    close(pool.states.state[0, 3], states[accepted], exact)
