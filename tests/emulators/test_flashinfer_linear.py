"""FlashInfer's GDN kernels under the contract of linear attention, over its emulated library."""

import dataclasses
import logging

import pytest
import torch

pytest.importorskip("triton")

from attn_core import (
    BatchError,
    LayerRequirements,
    NoBackendError,
    Overrides,
    Requirements,
    StateCache,
    StatePool,
    UnsupportedError,
    create_backend,
    load_plugins,
    parse_device,
    select,
)
from attn_core.backends.torch_native.linear import TorchNativeLinear
from attn_core.runtime.linear import LinearLayer
from attn_core.runtime.linear_routes import LinearRoutes
from attn_nvidia.flashinfer.linear import FlashInferLinear
from linear_passes import (
    M,
    close,
    config,
    expected,
    gate,
    inputs,
    int32,
    make_batch,
    make_pool,
    run,
    speculation,
)
from torch.utils._python_dispatch import TorchDispatchMode

if torch.cuda.is_available():
    pytest.skip("emulated on a CPU; tests/device has the library itself", allow_module_level=True)

REGISTRY = load_plugins()
LIBRARIES = {"flashinfer-python": "0.6.14", "nvidia-cutlass-dsl": "4.6.0", "triton": "3.6.0"}
PLAIN = LinearLayer(layer_id=0, num_k_heads=2, num_v_heads=4, head_k_dim=128, head_v_dim=128)
NORMED = dataclasses.replace(PLAIN, qk_norm=1e-6)
BF16 = 4e-3  # of an output, and of keys that are rounded after their norm
EXACT = 1e-5


def gated(layer, **changes):
    return dataclasses.replace(layer, gate=gate(layer, **changes))


def layers():
    """Return layers of every kind; the decode kernel has the gate and norm of the first."""
    torch.manual_seed(1)
    return {
        "kernel's gate": gated(NORMED),
        "no gate": PLAIN,
        "no gate, norm": NORMED,
        "another norm": gated(dataclasses.replace(PLAIN, qk_norm=1e-3)),
        "no norm": gated(PLAIN),
        "bounded": gated(NORMED, lower_bound=-5.0),
        "beta up to 2": gated(NORMED, neg_eigval=True),
        "16-bit weights": gated(
            NORMED, A_log=torch.rand(4).bfloat16(), dt_bias=torch.randn(4).bfloat16()
        ),
    }


LAYERS = pytest.mark.parametrize("layer", layers().values(), ids=layers())


def in_kernel(layer):
    """Say whether the decode kernel has the gate and the norm of a layer."""
    plain = layer.gate is not None and not (layer.gate.lower_bound or layer.gate.neg_eigval)
    return plain and layer.qk_norm == 1e-6


def make(layer, phase="linear_decode", dtype="bf16", **changes):
    """Return FlashInfer's backend of a phase."""
    [row] = [r for r in REGISTRY.get("flashinfer", "linear").capabilities
             if phase.endswith(next(iter(r.phases)).value)]  # fmt: skip
    settings = config(layer, name="flashinfer", row=row, dtype=dtype, **changes)
    return FlashInferLinear(dataclasses.replace(settings, arch="sm90"))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def check(found, states, tensors, lens, layer, starts, slots, *, ratio=BF16, state=EXACT):
    """Check the outputs and last states of requests; a slot of None is padding."""
    wanted, begin = expected(tensors, lens, layer, starts), 0
    for n, slot, start, (out, after) in zip(lens, slots, starts, wanted, strict=True):
        if slot is not None:
            last = after[-1] if n else torch.zeros(4, 128, 128) if start is None else start
            close(states[slot], last.double(), state)
            if n:
                close(found[begin : begin + n], out, ratio)
        begin += n


def select_linear(**flags):
    needs = Requirements(dtype="bf16", layers=(LayerRequirements(), NORMED.requirements))
    device = parse_device("cuda:sm90")
    return select(needs, device, REGISTRY, LIBRARIES, Overrides(**flags), simulated=True)


def test_both_names_are_of_the_class():
    chosen = select_linear(linear_attn_backend="flashinfer").roles
    for role in ("linear_prefill", "linear_decode"):
        assert chosen[role].backend == "flashinfer"
        backend = create_backend(
            REGISTRY.get("flashinfer", "linear"),
            config(NORMED, row=chosen[role].row, dtype="bf16", arch="sm90"),
            "linear",
        )
        assert isinstance(backend, FlashInferLinear)
    roles = select_linear(linear_attn_decode_backend="cutedsl").roles
    assert (roles["linear_prefill"].backend, roles["linear_decode"].backend) == (
        "triton",
        "cutedsl",
    )
    assert roles["linear_decode"].row == chosen["linear_decode"].row


def test_it_is_chosen_by_name_alone():
    assert select_linear().backend("linear_prefill") == "triton"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"dtype": "fp16"}, r"dtype fp16 \(supports bf16\)"),
        ({"k": 64}, r"head_dim 64 \(supports 128\)"),
        ({"lacks": "triton"}, r"triton not installed \(needs triton>=3.4\)"),
        ({"lacks": "nvidia-cutlass-dsl"}, r"nvidia-cutlass-dsl not installed"),
        ({"device": "cuda:sm80"}, r"device cuda:sm80 \(supports cuda:sm90"),
        ({"kind": "kda"}, r"kind kda \(supports gdn\)"),
    ],
)
@pytest.mark.parametrize("name", ["flashinfer", "cutedsl"])
def test_the_selection_says_what_decode_lacks(name, flags, why):
    dim = flags.get("k", 128)
    layer = dataclasses.replace(
        PLAIN, head_k_dim=dim, head_v_dim=dim, scale=None, kind=flags.get("kind", "gdn")
    )
    needs = Requirements(
        dtype=flags.get("dtype", "bf16"), layers=(LayerRequirements(), layer.requirements)
    )
    libraries = {n: v for n, v in LIBRARIES.items() if n != flags.get("lacks")}
    device = parse_device(flags.get("device", "cuda:sm90"))
    named = Overrides(linear_attn_decode_backend=name)
    with pytest.raises(NoBackendError, match=why):
        select(needs, device, REGISTRY, libraries, named, simulated=True)


@LAYERS
def test_decode(layer):
    """A fresh slot holds NaN; one request writes elsewhere; one is padding; slot 0 is not its."""
    backend, pool = make(layer), make_pool(layer)
    states, tensors = pool.states.state[0], inputs(layer, 4, dtype=torch.bfloat16)
    states[4] = torch.nan
    before = states.clone()
    fresh = torch.tensor([False, True, False, False])
    slots = {"state_slots_out": int32(6, 4, -1, 1), "state_fresh": fresh}
    batch = make_batch(M.DECODE, [1] * 4, (2, 4, -1, 1), **slots)
    found, _ = run(backend, batch, layer, pool, tensors)
    starts = [before[2], None, None, before[1]]
    rounded = not in_kernel(layer) and layer.qk_norm is not None
    state = BF16 if rounded else EXACT
    check(found, states, tensors, [1] * 4, layer, starts, (6, 4, None, 1), state=state)
    kept = [0, 2, 3, 5, 7]
    assert torch.equal(states[kept], before[kept])


@pytest.mark.parametrize("g", [0.0, -1e-6, -0.3, -19.9, -20.1, -100.0, -torch.inf])
@pytest.mark.parametrize("beta", [0.0, 1e-6, 0.5, 1.0, 2.0])
def test_decode_of_any_decay_and_beta(g, beta):
    backend, pool = make(PLAIN), make_pool(PLAIN)
    states, (q, k, v, *_) = pool.states.state[0], inputs(PLAIN, 2, dtype=torch.bfloat16)
    before, tensors = states.clone(), (q, k, v, torch.full((2, 4), g), torch.full((2, 4), beta))
    batch = make_batch(M.DECODE, [1, 1], (2, 5))
    found, _ = run(backend, batch, PLAIN, pool, tensors)
    wanted = expected(tensors, [1, 1], PLAIN, [before[2], before[5]])
    close_to = {"rtol": EXACT, "atol": 1e-6}
    for request, (slot, (out, after)) in enumerate(zip((2, 5), wanted, strict=True)):
        torch.testing.assert_close(states[slot].double(), after[-1], **close_to)
        torch.testing.assert_close(found[request].double(), out[0], rtol=BF16, atol=1e-6)


@LAYERS
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_extend(layer, dtype):
    """Requests of 0 and 1 token, across a tile, padding, fresh over NaN, another slot to write."""
    backend, pool = make(layer, "linear_prefill", dtype), make_pool(layer)
    states, lens = pool.states.state[0], [70, 0, 1, 3, 0, 64]
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    tensors = inputs(layer, sum(lens), dtype=kind)
    states[[4, 5]] = torch.nan
    before = states.clone()
    fresh = torch.tensor([False, False, False, False, True, True])
    batch = make_batch(
        M.EXTEND,
        lens,
        (2, 1, 0, -1, 5, 4),
        state_slots_out=int32(6, 3, 0, -1, 5, 4),
        state_fresh=fresh,
    )
    found, _ = run(backend, batch, layer, pool, tensors)
    starts = [before[2], before[1], before[0], None, None, None]
    check(found, states, tensors, lens, layer, starts, (6, 3, 0, None, 5, 4), state=BF16)
    kept = [1, 2, 7]
    assert torch.equal(states[kept], before[kept])


@pytest.mark.parametrize("known", [True, False], ids=["host", "device"])
def test_extend_in_its_own_slots(known):
    layer, lens = gated(NORMED), [5, 66]
    backend, pool = make(layer, "linear_prefill"), make_pool(layer)
    states, tensors = pool.states.state[0], inputs(layer, 71, dtype=torch.bfloat16)
    before, batch = states.clone(), make_batch(M.EXTEND, lens, (3, 0))
    if not known:
        batch = dataclasses.replace(batch, query_lens_host=None)
    found, _ = run(backend, batch, layer, pool, tensors)
    check(found, states, tensors, lens, layer, [before[3], before[0]], (3, 0), state=BF16)


def test_states_in_bf16_are_gathered_into_float32():
    layer, lens = gated(NORMED), [5, 0]
    backend, pool = make(layer, "linear_prefill"), make_pool(layer, dtype="bf16")
    states, tensors = pool.states.state[0], inputs(layer, 5, dtype=torch.bfloat16)
    before = states.clone()
    batch = make_batch(M.EXTEND, lens, (3, 0), state_slots_out=int32(3, 6))
    found, _ = run(backend, batch, layer, pool, tensors)
    check(found, states, tensors, lens, layer, [before[3], before[0]], (3, 6), state=BF16)
    assert torch.equal(states[6], before[0])


@pytest.mark.parametrize("lens", [[0, 0], []], ids=["no tokens", "no requests"])
def test_an_extend_of_nothing(lens):
    backend, pool = make(NORMED, "linear_prefill"), make_pool(NORMED)
    states = pool.states.state[0]
    before, slots = states.clone(), (2, 5)[: len(lens)]
    batch = make_batch(M.EXTEND, lens, slots)
    found, _ = run(backend, batch, NORMED, pool, inputs(NORMED, 0, dtype=torch.bfloat16))
    assert found.shape == (0, 4, 128)
    assert torch.equal(states, before)


def strided(x, offset):
    """Return x as a part of a wider tensor, `offset` elements after its begin."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 24), torch.nan)
    part = wide[..., offset : offset + x.shape[-1]]
    return part.copy_(x)


@LAYERS
@pytest.mark.parametrize("offset", [16, 3])
@pytest.mark.parametrize("mode", [M.DECODE, M.EXTEND])
def test_parts_of_wider_tensors(layer, offset, mode):
    """Also an output that is such a part, and a pool whose slots lie apart."""
    lens = [1, 1, 1] if mode is M.DECODE else [2, 1]
    backend = make(layer, "linear_decode" if mode is M.DECODE else "linear_prefill")
    tensors, results = inputs(layer, 3, dtype=torch.bfloat16), []
    wide = torch.randn(1, 8, 2, 4, 128, 128)
    pools = [StatePool.of([0], StateCache(state=wide[:, :, 1].clone())),
             StatePool.of([0], StateCache(state=wide.clone()[:, :, 1]))]  # fmt: skip
    batch = make_batch(mode, lens, range(1, len(lens) + 1))
    for pool, change in zip(pools, (lambda x: x, lambda x: strided(x, offset)), strict=True):
        out = change(torch.zeros(3, 4, 128, dtype=torch.bfloat16))
        given = [change(x) for x in tensors]
        assert run(backend, batch, layer, pool, given, out=out)[0] is out
        results.append((out, pool.states.state.clone()))
    for plain, part in zip(*results, strict=True):
        assert torch.equal(plain, part)


class NoWaiting(TorchDispatchMode):
    """Refuse what reads a value on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.item)
        assert "nonzero" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "lens"), [(M.DECODE, [1, 1]), (M.EXTEND, [3, 2]), (M.EXTEND, [3, 0])]
)
def test_plans_do_not_wait(mode, lens):
    backend = make(NORMED, "linear_decode" if mode is M.DECODE else "linear_prefill")
    fresh = torch.tensor([False, True])
    batch = make_batch(mode, lens, (1, 2), state_fresh=fresh, state_slots_out=int32(3, 2))
    with NoWaiting():
        backend.init_forward_metadata(batch)


def test_a_replay_reads_the_slots_of_its_batch():
    layer = gated(NORMED)
    backend, pool = make(layer), make_pool(layer)
    states, tensors = pool.states.state[0], inputs(layer, 2, dtype=torch.bfloat16)
    slots = {"state_slots_out": int32(-1, -1), "state_fresh": torch.tensor([False, False])}
    batch = make_batch(M.DECODE, [1, 1], (-1, -1), **slots)
    metadata = backend.init_forward_metadata_capture_cuda_graph(batch)
    before = states.clone()
    batch.state_slots.copy_(int32(2, 7))
    batch.state_slots_out.copy_(int32(5, 1))
    batch.state_fresh[1] = True
    backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
    found = backend.decode(*tensors, layer, pool.layer(0), batch, metadata)
    check(found, states, tensors, [1, 1], layer, [before[2], None], (5, 1))
    kept = [0, 2, 3, 4, 6, 7]
    assert torch.equal(states[kept], before[kept])


def test_what_the_rows_do_not_have_is_refused():
    prefill, decode = make(NORMED, "linear_prefill"), make(NORMED)
    routes = {"linear_prefill": prefill, "linear_decode": decode}
    with pytest.raises(UnsupportedError, match=r"states in bf16: .* supports fp32; create the"):
        LinearRoutes(routes, make_pool(NORMED, dtype="bf16"))
    LinearRoutes(routes | {"linear_decode": TorchNativeLinear(config(NORMED))},
                 make_pool(NORMED, dtype="bf16"))  # fmt: skip
    narrow = dataclasses.replace(NORMED, head_v_dim=64)
    with pytest.raises(UnsupportedError, match=r"head_dim 128/64 \(supports 128\)"):
        LinearRoutes(dict.fromkeys(routes, make(narrow)), make_pool(narrow))
    checkpoint = make_batch(M.EXTEND, [3], (2,), checkpoint_slots=int32(4))
    with pytest.raises(UnsupportedError, match="writes no checkpoints; extend up to each"):
        LinearRoutes(routes, make_pool(NORMED)).plan(checkpoint)
    drafts = make_batch(M.TARGET_VERIFY, [2], (2,), spec=speculation(2))
    with pytest.raises(UnsupportedError, match="no backend for linear_verify"):
        LinearRoutes(routes, make_pool(NORMED)).plan(drafts)
    with pytest.raises(UnsupportedError, match="flashinfer does not verify drafts"):
        prefill.init_forward_metadata(drafts)


@pytest.mark.parametrize("mode", [M.DECODE, M.EXTEND])
def test_tokens_of_another_dtype_are_refused(mode):
    backend = make(NORMED, "linear_decode" if mode is M.DECODE else "linear_prefill")
    q, k, v, g, beta = inputs(NORMED, 1, dtype=torch.bfloat16)
    batch, pool, other = make_batch(mode, [1], (2,)), make_pool(NORMED), v.half()
    with pytest.raises(BatchError, match=r"v torch.float16 \(expected torch.bfloat16, for which"):
        run(backend, batch, NORMED, pool, (q, k, other, g, beta))


def test_a_mixed_pass_decodes_its_first_requests():
    layer = gated(NORMED)
    routes = {"linear_prefill": make(layer, "linear_prefill"), "linear_decode": make(layer)}
    pool, lens = make_pool(layer), [1, 1, 5]
    states, tensors = pool.states.state[0], inputs(layer, 7, dtype=torch.bfloat16)
    before, batch = states.clone(), make_batch(M.MIXED, lens, (2, 0, 6))
    served = LinearRoutes(routes, pool)
    found = served.forward(*tensors, layer, batch, served.plan(batch), None)
    starts = [before[2], before[0], before[6]]
    check(found, states, tensors, lens, layer, starts, (2, 0, 6), state=BF16)


def test_a_request_is_not_as_finite_as_its_neighbour():
    """Why the row wants finite numbers beside a request; nothing of it gets into other slots."""
    layer = gated(NORMED)
    backend, pool = make(layer, "linear_prefill"), make_pool(layer)
    assert backend.config.row.requires_finite_padding
    tensors = inputs(layer, 6, dtype=torch.bfloat16)
    tensors[2][3:] = torch.nan
    batch = make_batch(M.EXTEND, [3, 3], (2, -1))
    run(backend, batch, layer, pool, tensors)
    assert pool.states.state[0, 2].isnan().any()
    assert not pool.states.state[0, [0, 1, 3, 4, 5, 6, 7]].isnan().any()


def test_a_first_call_is_logged(caplog, monkeypatch):
    monkeypatch.setattr("attn_nvidia.common.jit_log.SILENT_S", 0)
    backend, pool, tensors = make(PLAIN), make_pool(PLAIN), inputs(PLAIN, 1, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO, "attn_nvidia"):
        for _ in range(2):
            run(backend, make_batch(M.DECODE, [1], (2,)), PLAIN, pool, tensors)
    [record] = caplog.records
    assert "built flashinfer, gated_delta_rule_decode_pretranspose" in record.getMessage()
