"""Triton's kernels of linear attention on a GPU, compiled, at the head dims of models.

Run: `pytest tests/device/test_linear_kernels.py`. The interpreter's tests have the rest.
"""

from dataclasses import replace

import pytest
import torch
from linear_reference import draw, make_linear_layer

if not torch.cuda.is_available():
    pytest.skip("no CUDA or ROCm device", allow_module_level=True)

from attn_core.backends.triton.linear import launch
from attn_core.backends.triton.linear.prefill import plan_prefill, prefill

KERNELS = (  # each runs below
    "prepare_gdn", "prepare_kda", "scan_chunks", "decode_states", "verify_gdn", "verify_kda",
    "commit_drafts", "prepare_gdn_hopper", "prepare_kda_hopper", "scan_hopper",
    "prepare_gdn_ahead", "scan_alone", "fused_gdn_hopper", "normalize_rows",
)  # fmt: skip
DEVICE = torch.device("cuda")
MODEL = {"heads": (2, 4), "dims": (128, 128)}
LAYERS = {
    "gdn": {**MODEL, "gate": "softplus", "norm": 1e-6},
    "gdn-raw": MODEL,
    "gdn-64-by-256": {"heads": (1, 2), "dims": (64, 256), "gate": "softplus", "norm": 1e-6},
    "gdn-256": {"heads": (1, 1), "dims": (256, 128), "gate": "softplus", "norm": 1e-6},
    "kda": {**MODEL, "kind": "kda", "gate": "softplus", "norm": 1e-6},
    "kda-raw": {**MODEL, "kind": "kda"},
    "kda-bounded": {**MODEL, "kind": "kda", "gate": "bounded", "norm": 1e-6},
}
TREE = (-1, 0, 0, 1, 1, 2, 5)


def arch():
    properties = torch.cuda.get_device_properties(DEVICE)
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return f"sm{properties.major}{properties.minor}"


@pytest.fixture(autouse=True)
def on_the_gpu():
    torch.manual_seed(0)
    with DEVICE:
        yield


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def close(got, want, rms):
    got, want = got.double(), want.double()
    assert torch.isfinite(got).all()
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt().clamp_min(1e-9)
    assert error < rms, f"{error:.1e}"


def states_of(layer, slots, dtype=torch.float32):
    """Return states that lie apart, as those of one layer of many do."""
    heads = (layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
    return torch.randn(slots, 2, *heads).to(dtype)[:, 1]


TOKENS = {
    "bf16": (torch.bfloat16, 5e-3),
    "fp16": (torch.float16, 2e-3),
    "fp32": (torch.float32, 1e-4),
}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        *((name, "bf16") for name in LAYERS),
        *((name, x) for name in ("gdn", "kda") for x in ("fp16", "fp32")),
    ],
)
def test_prefill(name, tokens):
    dtype, rms = TOKENS[tokens]
    layer, lens, slots = make_linear_layer(**LAYERS[name]), (200, 1, 0, 64, 70), (4, 1, 3, 0, -1)
    drawn = draw(layer, sum(lens), dtype=dtype)
    state = states_of(layer, 6)
    before, kept = state.clone(), launch.LinearArguments.of(layer, arch())
    plan = plan_prefill(kept, lens, dtype=drawn.q.dtype, device=DEVICE)
    got = prefill(kept, *drawn.raw, state, int32(*slots), plan)
    begin = 0
    for n, slot in zip(lens, slots, strict=True):
        if n and slot >= 0:
            want, after = drawn[begin : begin + n].run(before[slot])
            close(got[begin : begin + n], want, rms)
            close(state[slot], after[-1], rms)
        begin += n
    assert torch.equal(state[[2, 3, 5]], before[[2, 3, 5]])


def test_nothing_is_left_of_a_large_value_after_its_channels_are_forgotten():
    layer = make_linear_layer(kind="kda", **MODEL)
    drawn, state = draw(layer, 40, decay=0.01, dtype=torch.bfloat16), states_of(layer, 1)
    drawn.v[4] *= 3000
    drawn.g[5] = -80
    want, after = drawn.run(state[0])
    kept = launch.LinearArguments.of(layer, arch())
    plan = plan_prefill(kept, (40,), dtype=torch.bfloat16, device=DEVICE)
    close(prefill(kept, *drawn.raw, state, int32(0), plan)[5:], want[5:], 6e-3)
    close(state[0], after[-1], 6e-3)


@pytest.mark.parametrize("name", ["gdn", "kda"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_large_values_of_fp16_beside_raw_keys_of_any_size(name, size):
    layer = make_linear_layer(**LAYERS[name] | {"norm": 1e-12})
    drawn, state = draw(layer, 70), 3000 * states_of(layer, 2)
    q, k, v = size * drawn.q, size * drawn.k, (3000 * drawn.v).clamp(-9000, 9000)
    tokens = replace(drawn, q=q.half(), k=k.half(), v=v.half())
    want, after = tokens.run(state[1])
    kept = launch.LinearArguments.of(layer, arch())
    plan = plan_prefill(kept, (70,), dtype=torch.float16, device=DEVICE)
    close(prefill(kept, *tokens.raw, state, int32(1), plan), want, 2e-3)
    close(state[1], after[-1], 2e-3)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("decay", [0.01, 3.0, 20.0, 60.0])
def test_hard_keys_and_strong_decay(kind, decay):
    layer = make_linear_layer(kind=kind, **MODEL)
    drawn = draw(layer, 130, hard=decay < 1, decay=decay, dtype=torch.bfloat16)
    state = states_of(layer, 1)
    want, after = drawn.run(state[0])
    kept = launch.LinearArguments.of(layer, arch())
    plan = plan_prefill(kept, (130,), dtype=torch.bfloat16, device=DEVICE)
    close(prefill(kept, *drawn.raw, state, int32(0), plan), want, 1e-2)
    close(state[0], after[-1], 1e-2)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_pass_in_two_and_checkpoints_have_the_same_bits(kind):
    layer = make_linear_layer(kind=kind, **MODEL)
    drawn, state = draw(layer, 200, dtype=torch.bfloat16), states_of(layer, 3)
    parts, kept = state.clone(), launch.LinearArguments.of(layer, arch())

    def run(own, state, **more):
        plan = plan_prefill(kept, (len(own.v),), dtype=torch.bfloat16, device=DEVICE)
        return prefill(kept, *own.raw, state, int32(1), plan, **more)

    whole = run(drawn, state, checkpoints=int32(-1, 2, -1, -1))
    first = run(drawn[:128], parts)
    assert torch.equal(state[2], parts[1])
    rest = run(drawn[128:], parts)
    assert torch.equal(torch.cat((first, rest)), whole)
    assert torch.equal(parts[1], state[1])


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_prompt_has_the_same_bits_alone_and_among_many(kind):
    layer, batch = make_linear_layer(kind=kind, **MODEL), 80
    kept = launch.LinearArguments.of(layer, arch())
    drawn, state = draw(layer, 100 * batch, dtype=torch.bfloat16), states_of(layer, batch)
    alone, own = state.clone(), drawn[700:800]
    plan = plan_prefill(kept, (100,) * batch, dtype=torch.bfloat16, device=DEVICE)
    many = prefill(kept, *drawn.raw, state, torch.arange(batch, dtype=torch.int32), plan)
    plan = plan_prefill(kept, (100,), dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(prefill(kept, *own.raw, alone, int32(7), plan), many[700:800])
    assert torch.equal(alone[7], state[7])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a device is to be full")
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_equal_prompts_that_fill_the_device_have_equal_bits(kind):
    """Programs that share a multiprocessor are slow at other places than one that has it alone."""
    layer = make_linear_layer(kind=kind, **{**MODEL, "heads": (16, 32)})
    kept, batch, n = launch.LinearArguments.of(layer, arch()), 32, 500
    drawn, one = draw(layer, n, dtype=torch.bfloat16), states_of(layer, 1)
    state = one.repeat(batch, 1, 1, 1)
    plan = plan_prefill(kept, (n,), dtype=torch.bfloat16, device=DEVICE)
    want = prefill(kept, *drawn.raw, one, int32(0), plan)
    raw = [x.repeat(batch, *[1] * (x.ndim - 1)) for x in drawn.raw]
    slots = torch.arange(batch, dtype=torch.int32)
    plan = plan_prefill(kept, (n,) * batch, dtype=torch.bfloat16, device=DEVICE)
    for _ in range(4):
        again = state.clone()
        got = prefill(kept, *raw, again, slots, plan).unflatten(0, (batch, n))
        assert torch.equal(got, want.expand_as(got))
        assert torch.equal(again, one.expand_as(again))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_tokens_that_lie_anyhow(kind):
    """Tokens 2 bytes off, with odd strides, have what those of one projection have."""
    layer = make_linear_layer(kind=kind, **MODEL)
    kept = launch.LinearArguments.of(layer, arch())
    drawn, state = draw(layer, 150, dtype=torch.bfloat16), states_of(layer, 1)
    other = state.clone()

    def off(x):
        wide = torch.empty(x.shape[0], x.numel() // x.shape[0] + 3, dtype=x.dtype)[:, 1:-2]
        return wide.unflatten(1, x.shape[1:]).copy_(x)

    plan = plan_prefill(kept, (150,), dtype=torch.bfloat16, device=DEVICE)
    want = prefill(kept, *drawn.raw, state, int32(0), plan)
    got = prefill(kept, *map(off, drawn.raw), other, int32(0), plan)
    close(got, want, 5e-3)
    close(other, state, 5e-3)


@pytest.mark.parametrize("store", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYERS)
def test_decode(name, store):
    layer = make_linear_layer(**LAYERS[name])
    drawn, state = draw(layer, 4, dtype=torch.bfloat16), states_of(layer, 6, store)
    before, slots = state.clone(), (4, -1, 0, 3)
    before[3] = 0
    state[3] = torch.nan  # a fresh request, never read
    kept = launch.LinearArguments.of(layer, arch())
    fresh = torch.tensor([False, False, False, True])
    got = launch.decode(kept, *drawn.raw, state, int32(*slots), fresh=fresh)
    for i, slot in enumerate(slots):
        if slot >= 0:
            want, after = drawn[i : i + 1].run(before[slot])
            close(got[i], want[0], 4e-3)
            close(state[slot], after[0], 4e-3 if store == torch.bfloat16 else 3e-5)
    assert torch.equal(state[[1, 2, 5]], before[[1, 2, 5]])


@pytest.mark.parametrize(
    ("name", "drafts", "tree"),
    [
        *((name, 4, False) for name in LAYERS),
        *((name, n, n == len(TREE)) for name in ("gdn", "kda") for n in (len(TREE), 16)),
    ],
)
def test_verify_and_commit(name, drafts, tree):
    parents = TREE if tree else None
    layer, slots = make_linear_layer(**LAYERS[name]), (3, -1, 1, 0)
    accepted = (drafts - 2, 0, -1, drafts - 1)
    drawn, layers = draw(layer, 4 * drafts, dtype=torch.bfloat16), 3
    state = torch.stack([states_of(layer, 5) for _ in range(layers)])
    hk, hv = layer.num_k_heads, layer.num_v_heads
    g = (hv, layer.head_k_dim) if layer.kind == "kda" else (hv,)
    shapes = ((hv, layer.head_v_dim), (hk, layer.head_k_dim), g)
    records = tuple(torch.full((layers, 5, drafts, *x), torch.nan) for x in shapes)
    before, kept = state.clone(), launch.LinearArguments.of(layer, arch())
    mask = None
    if parents:
        mask = torch.eye(drafts, dtype=torch.bool)
        for i, parent in enumerate(parents):
            mask[i] |= mask[parent] if parent >= 0 else False
        mask = mask.repeat(4, 1, 1)
    for i in range(layers):
        own = tuple(x[i] for x in records)
        got = launch.verify(kept, *drawn.raw, state[i], own, int32(*slots), tree_mask=mask)
        for b, slot in enumerate(slots):
            if slot >= 0:
                at = slice(b * drafts, b * drafts + drafts)
                close(got[at], drawn[at].run(before[i, slot], parents)[0], 4e-3)
    assert torch.equal(state, before)
    launch.commit(kept, state, records, int32(*slots), torch.tensor(accepted), tree_mask=mask)
    rms = 3e-5 if layer.kind == "kda" else 1e-3  # products of matrices round their factors
    for b, slot in enumerate(slots):
        if slot >= 0 and accepted[b] >= 0:
            own = drawn[b * drafts : b * drafts + drafts]
            for i in range(layers):
                close(state[i, slot], own.run(before[i, slot], parents)[1][accepted[b]], rms)
    assert torch.equal(state[:, [1, 2, 4]], before[:, [1, 2, 4]])


def test_slots_beyond_32_bit_offsets():
    layer = make_linear_layer(heads=(16, 32), dims=(128, 128))
    heads = (32, 128, 128)
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("too little memory for the pool")
    far = (1 << 31) // (32 * 128 * 128) + 5  # of 2 bytes each
    state = torch.zeros(far + 1, *heads, dtype=torch.bfloat16)
    start = torch.randn(heads).bfloat16()
    state[far] = start
    kept = launch.LinearArguments.of(layer, arch())
    drawn = draw(layer, 65, dtype=torch.bfloat16)
    want, after = drawn.run(start)
    plan = plan_prefill(kept, (64,), dtype=torch.bfloat16, device=DEVICE)
    first = prefill(kept, *drawn[:64].raw, state, int32(far), plan)
    last = launch.decode(kept, *drawn[64:].raw, state, int32(far))
    close(torch.cat((first, last)), want, 8e-3)
    close(state[far], after[-1], 8e-3)
    assert not state[:far].any()


def test_replays_of_a_captured_graph_are_the_same_kernels():
    """Decode and verify allocate nothing but their output, and read slots on the device."""
    layer = make_linear_layer(**LAYERS["gdn"])
    kept, slots = launch.LinearArguments.of(layer, arch()), int32(2, 0)
    state = states_of(layer, 4).contiguous()
    drawn, out = draw(layer, 2, dtype=torch.bfloat16), torch.empty(2, 4, 128).bfloat16()
    plain = state.clone()
    launch.decode(kept, *drawn.raw, state.clone(), slots, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.decode(kept, *drawn.raw, state, slots, out=out)
    for new in ((2, 0), (1, -1), (3, 2)):
        slots.copy_(int32(*new))
        graph.replay()
        want = launch.decode(kept, *drawn.raw, plain, int32(*new))
        live = [i for i, slot in enumerate(new) if slot >= 0]
        assert torch.equal(out[live], want[live])
        assert torch.equal(state, plain)
