"""FlashInfer's GDN kernels under the contract: passes for the library itself and its emulation."""

import dataclasses

import pytest
import torch
from attn_core import TORCH_DTYPES, LinearLayer, LinearRoutes, StateCache, StatePool, load_plugins
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
)

PLAIN = LinearLayer(layer_id=0, num_k_heads=2, num_v_heads=4, head_k_dim=128, head_v_dim=128)
NORMED = dataclasses.replace(PLAIN, qk_norm=1e-6)
LAYERS = {  # the decode kernel has the gate and the norm of the first and the last
    "kernel's gate": (NORMED, {}),
    "no gate": (PLAIN, None),
    "no gate, norm": (NORMED, None),
    "another norm": (dataclasses.replace(PLAIN, qk_norm=1e-3), {}),
    "no norm": (PLAIN, {}),
    "bounded": (NORMED, {"lower_bound": -5.0}),
    "beta up to 2": (NORMED, {"neg_eigval": True}),
    "16-bit weights": (NORMED, {}),
}
KINDS = pytest.mark.parametrize("kind", LAYERS)


def make_layer(kind, heads=(2, 4)):
    """Return a layer with the gate of its kind; heads: of keys and of values."""
    layer, changes = LAYERS[kind]
    layer = dataclasses.replace(layer, num_k_heads=heads[0], num_v_heads=heads[1])
    if changes is None:
        return layer
    if kind == "16-bit weights":
        changes = {"A_log": torch.rand(4).bfloat16(), "dt_bias": torch.randn(4).bfloat16()}
    return dataclasses.replace(layer, gate=gate(layer, **changes))


def in_kernel(layer):
    """Say whether the decode kernel has the gate and the norm of a layer."""
    plain = layer.gate is not None and not (layer.gate.lower_bound or layer.gate.neg_eigval)
    return plain and layer.qk_norm == 1e-6


def make(layer, phase="decode", dtype="bf16"):
    """Return FlashInfer's backend of a phase, "prefill" or "decode", on the default device."""
    rows = load_plugins().get("flashinfer", "linear").capabilities
    [row] = [r for r in rows if phase in {p.value for p in r.phases}]
    device = torch.get_default_device()
    settings = config(layer, name="flashinfer", row=row, dtype=dtype, device=device, arch="sm90")
    return FlashInferLinear(settings)


def strided(x, offset):
    """Return x as a part of a wider tensor, `offset` elements after its begin."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 24), torch.nan)
    part = wide[..., offset : offset + x.shape[-1]]
    return part.copy_(x)


class GdnCases:
    """Passes on torch's default device.

    rounded: the error of outputs in 16 bits, and of what is multiplied in 16 bits, over the RMS of
    what is right. exact: that of states that are computed in float32.
    """

    rounded: float
    exact: float

    @pytest.fixture(autouse=True)
    def seeded(self):
        torch.manual_seed(0)

    def check(self, found, states, tensors, lens, layer, starts, slots, ratio):
        """Check the outputs and last states of requests; a slot of None is padding."""
        wanted, begin = expected(tensors, lens, layer, starts), 0
        for n, slot, start, (out, after) in zip(lens, slots, starts, wanted, strict=True):
            if slot is not None:
                last = after[-1] if n else torch.zeros(4, 128, 128) if start is None else start
                close(states[slot], last.double(), ratio)
                if n:
                    close(found[begin : begin + n], out, self.rounded)
            begin += n

    @KINDS
    def test_decode(self, kind):
        """A fresh slot holds NaN, one request writes elsewhere, one is padding."""
        layer = make_layer(kind)
        backend, pool = make(layer), make_pool(layer)
        states, tensors = pool.states.state[0], inputs(layer, 4, dtype=torch.bfloat16)
        states[4] = torch.nan
        before = states.clone()
        fresh = torch.tensor([False, True, False, False])
        slots = {"state_slots_out": int32(6, 4, -1, 1), "state_fresh": fresh}
        batch = make_batch(M.DECODE, [1] * 4, (2, 4, -1, 1), **slots)
        result, _ = run(backend, batch, layer, pool, tensors)
        starts = [before[2], None, None, before[1]]
        rounded = not in_kernel(layer) and layer.qk_norm is not None
        ratio = self.rounded if rounded else self.exact
        self.check(result, states, tensors, [1] * 4, layer, starts, (6, 4, None, 1), ratio)
        kept = [0, 2, 3, 5, 7]
        assert torch.equal(states[kept], before[kept])

    @pytest.mark.parametrize("g", [0.0, -1e-6, -0.3, -19.9, -20.1, -100.0, -torch.inf])
    @pytest.mark.parametrize("beta", [0.0, 1e-6, 0.5, 1.0, 2.0])
    def test_decode_of_any_decay_and_beta(self, g, beta):
        backend, pool = make(PLAIN), make_pool(PLAIN)
        states, (q, k, v, *_) = pool.states.state[0], inputs(PLAIN, 2, dtype=torch.bfloat16)
        before, tensors = states.clone(), (q, k, v, torch.full((2, 4), g), torch.full((2, 4), beta))
        batch = make_batch(M.DECODE, [1, 1], (2, 5))
        result, _ = run(backend, batch, PLAIN, pool, tensors)
        wanted = expected(tensors, [1, 1], PLAIN, [before[2], before[5]])
        for row, (slot, (out, after)) in enumerate(zip((2, 5), wanted, strict=True)):
            pairs = (states[slot], after[-1], self.exact), (result[row], out[0], self.rounded)
            for value, right, ratio in pairs:
                torch.testing.assert_close(value.double(), right, rtol=ratio, atol=self.exact)

    @KINDS
    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    def test_extend(self, kind, dtype):
        """Requests of 0, 1 and 70 tokens, padding, fresh ones, other slots to write."""
        layer = make_layer(kind)
        backend, pool = make(layer, "prefill", dtype), make_pool(layer)
        states, lens = pool.states.state[0], [70, 0, 1, 3, 0, 64]
        tensors = inputs(layer, sum(lens), dtype=TORCH_DTYPES[dtype])
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
        result, _ = run(backend, batch, layer, pool, tensors)
        starts = [before[2], before[1], before[0], None, None, None]
        self.check(
            result, states, tensors, lens, layer, starts, (6, 3, 0, None, 5, 4), self.rounded
        )
        kept = [1, 2, 7]
        assert torch.equal(states[kept], before[kept])

    def test_a_norm_in_fp16_is_rounded_once(self):
        """A state that was zeros holds k after a token of v = 1 and beta = 1."""
        layer = make_layer("no gate, norm")
        backend, pool = make(layer, "prefill", "fp16"), make_pool(layer)
        q, k, v, g, beta = inputs(layer, 1, dtype=torch.float16)
        k = 3 * k  # between the numbers of fp16 once it is normalised
        tensors = (q, k, torch.ones_like(v), torch.zeros_like(g), torch.ones_like(beta))
        batch = make_batch(M.EXTEND, [1], (2,), state_fresh=torch.tensor([True]))
        run(backend, batch, layer, pool, tensors)
        exact = k[0].double()
        exact = exact / (exact.square().sum(-1, keepdim=True) + layer.qk_norm).sqrt()
        result = pool.states.state[0, 2, ::2]  # two value heads have one key head
        nearest = exact.half().float()[:, None].expand_as(result)
        assert (result == nearest).float().mean() > 0.99

    @pytest.mark.parametrize("known", [True, False], ids=["host", "device"])
    def test_extend_in_its_own_slots(self, known):
        layer, lens = make_layer("kernel's gate"), [5, 66]
        backend, pool = make(layer, "prefill"), make_pool(layer)
        states, tensors = pool.states.state[0], inputs(layer, 71, dtype=torch.bfloat16)
        before, batch = states.clone(), make_batch(M.EXTEND, lens, (3, 0))
        if not known:
            batch = dataclasses.replace(batch, query_lens_host=None)
        result, _ = run(backend, batch, layer, pool, tensors)
        self.check(
            result, states, tensors, lens, layer, [before[3], before[0]], (3, 0), self.rounded
        )

    def test_states_in_bf16_are_gathered_into_float32(self):
        layer, lens = make_layer("kernel's gate"), [5, 0]
        backend, pool = make(layer, "prefill"), make_pool(layer, dtype="bf16")
        states, tensors = pool.states.state[0], inputs(layer, 5, dtype=torch.bfloat16)
        before = states.clone()
        batch = make_batch(M.EXTEND, lens, (3, 0), state_slots_out=int32(3, 6))
        result, _ = run(backend, batch, layer, pool, tensors)
        self.check(
            result, states, tensors, lens, layer, [before[3], before[0]], (3, 6), self.rounded
        )
        assert torch.equal(states[6], before[0])

    @pytest.mark.parametrize("lens", [[0, 0], []], ids=["no tokens", "no requests"])
    def test_an_extend_of_nothing(self, lens):
        backend, pool = make(NORMED, "prefill"), make_pool(NORMED)
        states = pool.states.state[0]
        before, slots = states.clone(), (2, 5)[: len(lens)]
        batch = make_batch(M.EXTEND, lens, slots)
        result, _ = run(backend, batch, NORMED, pool, inputs(NORMED, 0, dtype=torch.bfloat16))
        assert result.shape == (0, 4, 128)
        assert torch.equal(states, before)

    @KINDS
    @pytest.mark.parametrize("offset", [16, 3])
    @pytest.mark.parametrize("mode", [M.DECODE, M.EXTEND])
    def test_parts_of_wider_tensors(self, kind, offset, mode):
        """Also an output that is such a part, and a pool whose slots lie apart."""
        layer = make_layer(kind)
        lens = [1, 1, 1] if mode is M.DECODE else [2, 1]
        backend = make(layer, "decode" if mode is M.DECODE else "prefill")
        tensors, results = inputs(layer, 3, dtype=torch.bfloat16), []
        wide = torch.randn(1, 8, 2, 4, 128, 128)
        pools = [StatePool.of([0], StateCache(state=wide[:, :, 1].clone())),
                 StatePool.of([0], StateCache(state=wide.clone()[:, :, 1]))]  # fmt: skip
        batch = make_batch(mode, lens, range(1, len(lens) + 1))
        for pool, change in zip(pools, (lambda x: x, lambda x: strided(x, offset)), strict=True):
            out = change(torch.zeros(3, 4, 128, dtype=torch.bfloat16))
            kwargs = [change(x) for x in tensors]
            assert run(backend, batch, layer, pool, kwargs, out=out)[0] is out
            results.append((out, pool.states.state.clone()))
        for plain, part in zip(*results, strict=True):
            assert torch.equal(plain, part)

    def test_decode_of_a_pool_at_any_address(self):
        """The kernel loads 16 bytes at a time: such states are gathered, and then written back."""
        layer = make_layer("kernel's gate")
        memory = torch.randn(8 * (4 * 128 * 128 + 1) + 2)
        states = memory[2:].view(1, 8, -1)[:, :, :-1].view(1, 8, 4, 128, 128)
        tensors, results = inputs(layer, 3, dtype=torch.bfloat16), []
        fresh = torch.tensor([False, True, False])
        slots = {"state_slots_out": int32(6, 4, -1), "state_fresh": fresh}
        batch = make_batch(M.DECODE, [1] * 3, (2, 4, -1), **slots)
        for own in (states.clone(), states):
            own[:, 4] = torch.nan
            pool = StatePool.of([0], StateCache(state=own))
            result, _ = run(make(layer), batch, layer, pool, tensors)
            results.append((result[:2], own))
        for plain, other in zip(*results, strict=True):
            assert torch.equal(plain, other)

    @pytest.mark.parametrize("fresh", [False, True])
    def test_slots_that_begin_anywhere(self, fresh):
        """They too are taken by kernels that were compiled for addresses of 16 bytes."""
        layer = make_layer("kernel's gate")
        backend, pool = make(layer), make_pool(layer)
        states, tensors = pool.states.state[0], inputs(layer, 2, dtype=torch.bfloat16)
        before, none = states.clone(), torch.zeros(2, dtype=torch.bool)
        batch = make_batch(M.DECODE, [1, 1], (0, 0), state_fresh=none if fresh else None)
        wide = {"state_slots": int32(9, 2, 4)[1:], "state_slots_out": int32(9, 6, 5)[1:]}
        batch = dataclasses.replace(batch, **wide)
        metadata = backend.init_forward_metadata(batch)
        for slots in ((2, 4), (7, 1)):
            batch.state_slots.copy_(int32(*slots))
            backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
            result = backend.decode(*tensors, layer, pool.layer(0), batch, metadata)
            starts = [before[slot] for slot in slots]
            self.check(result, states, tensors, [1, 1], layer, starts, (6, 5), self.exact)

    def test_a_replay_reads_the_slots_of_its_batch(self):
        layer = make_layer("kernel's gate")
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
        result = backend.decode(*tensors, layer, pool.layer(0), batch, metadata)
        self.check(result, states, tensors, [1, 1], layer, [before[2], None], (5, 1), self.exact)
        kept = [0, 2, 3, 4, 6, 7]
        assert torch.equal(states[kept], before[kept])

    def test_a_mixed_pass_decodes_its_first_requests(self):
        layer = make_layer("kernel's gate")
        routes = {"linear_prefill": make(layer, "prefill"), "linear_decode": make(layer)}
        pool, lens = make_pool(layer), [1, 1, 5]
        states, tensors = pool.states.state[0], inputs(layer, 7, dtype=torch.bfloat16)
        before, batch = states.clone(), make_batch(M.MIXED, lens, (2, 0, 6))
        served = LinearRoutes(routes, pool)
        result = served.forward(*tensors, layer, batch, served.plan(batch), None)
        starts = [before[2], before[0], before[6]]
        self.check(result, states, tensors, lens, layer, starts, (2, 0, 6), self.rounded)
