"""GDN prompts in one kernel that prepares chunks and carries states, on a Hopper.

Run: `pytest tests/device/test_linear_fused.py`. Outputs and states have the bits of a pass of two
kernels, which test_linear_kernels.py compares with the recurrence.
"""

from dataclasses import replace

import pytest
import torch
from linear_reference import draw, make_linear_layer

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper", allow_module_level=True)

from attn_core.backends.triton.linear.launch import LinearArguments
from attn_core.backends.triton.linear.prefill import plan_prefill, prefill

DEVICE = torch.device("cuda")
LENS, SLOTS = (200, 1, 0, 1000, 64, 70, 63, 65), (4, 1, 3, 0, -1, 6, 7, 5)


@pytest.fixture(autouse=True)
def on_the_gpu():
    torch.manual_seed(0)
    with DEVICE:
        yield


class Prompts:
    """A layer, drawn prompts, and a plan of one kernel."""

    def __init__(self, lens=LENS, slots=SLOTS, heads=(2, 4), dtype=torch.bfloat16, **more):
        gate = {"gate": "softplus", "norm": 1e-6} | more
        layer = make_linear_layer(heads=heads, dims=(128, 128), **gate)
        self.kept = LinearArguments.of(layer, "sm90")
        self.tokens = draw(layer, sum(lens), dtype=dtype).raw
        self.state = torch.randn(max(9, len(lens)), heads[1], 128, 128)
        self.slots = torch.tensor(slots, dtype=torch.int32)
        plan = plan_prefill(self.kept, lens, dtype=dtype, device=DEVICE)
        self.plan = replace(plan, fused=True, ahead=False)

    def run(self, plan=None, state=None, tokens=None, out=None, **more):
        """Return outputs and states; rows without a slot are zeros, unless `out` has others."""
        state = self.state.clone() if state is None else state
        q, k, v, g, beta = tokens or self.tokens
        out = torch.zeros_like(v) if out is None else out
        plan = plan or self.plan
        prefill(self.kept, q, k, v, g, beta, state, self.slots, plan, out=out, **more)
        return out, state

    def by_two(self, **more):
        """Return the same of a pass of two kernels."""
        return self.run(replace(self.plan, fused=False), **more)

    def by_one(self, **more):
        """Return the result of one kernel, and check that it was one."""
        before = len(self.kept.prefills)
        got = self.run(**more)
        kernels = [*self.kept.prefills.values()][before:]
        assert all(x.prepare is None for x in kernels)
        return got


def same(got, want):
    return torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("more", [{}, {"gate": None}, {"norm": None}, {"neg_eigval": True}])
def test_ragged_requests(dtype, more):
    x = Prompts(dtype=dtype, **more)
    want = x.by_two()
    for _ in range(4):
        assert same(x.by_one(), want)


def test_fresh_requests_other_slots_and_checkpoints():
    x = Prompts()
    fresh = torch.tensor([True, False, False, False, True, False, True, False])
    kept = torch.full((x.plan.num_chunks,), -1, dtype=torch.int32)
    kept[2], kept[10] = 8, 2
    out = torch.tensor([4, -1, 3, 0, 1, 6, 7, 5], dtype=torch.int32)
    more = {"fresh": fresh, "checkpoints": kept, "slots_out": out}
    assert same(x.by_one(**more), x.by_two(**more))


@pytest.mark.parametrize("n", [1, 7, 63, 64, 65, 127, 130])
def test_what_lies_behind_a_request_is_never_read(n):
    """The tokens of the next request are NaN."""
    x = Prompts((n, 64), (2, -1))
    tokens = [t.clone() for t in x.tokens]
    for t in tokens:
        t[n:] = torch.nan
    out, state = x.by_one(tokens=tokens)
    want, after = x.by_two()
    assert torch.equal(out[:n], want[:n])
    assert torch.equal(state, after)


def test_parts_of_one_projection_and_tensors_of_their_own():
    x = Prompts()
    q, k, v, *gates = x.tokens
    packed = torch.cat([t.flatten(1) for t in (v, q, k)], 1)
    parts = packed.split([t.shape[1] * 128 for t in (v, q, k)], 1)
    v_part, q_part, k_part = (p.unflatten(1, (-1, 128)) for p in parts)
    want = x.by_two()
    assert same(x.by_one(tokens=[q_part, k_part, v_part, *gates]), want)
    assert same(x.by_one(tokens=[t.contiguous() for t in (q, k, v)] + gates), want)


def test_heads_that_do_not_lie_side_by_side_take_two_kernels():
    x = Prompts()
    q, k, v, *gates = x.tokens
    wide = torch.zeros(*k.shape[:2], 256, dtype=k.dtype)[..., :128].copy_(k)
    assert same(x.run(tokens=[q, wide, v, *gates]), x.by_two())
    assert next(iter(x.kept.prefills.values())).prepare is not None


def test_outputs_that_tma_cannot_write_take_two_kernels():
    x = Prompts()
    v = x.tokens[2]
    out = torch.zeros(*v.shape[:2], 256, dtype=v.dtype)[..., :128]
    assert same(x.run(out=out), x.by_two())
    assert next(iter(x.kept.prefills.values())).prepare is not None


def test_outputs_beside_others_are_left_alone():
    """Rows of another tensor: TMA writes whole chunks, and no column or row beside them."""
    x = Prompts()
    v = x.tokens[2]
    wide = torch.full((len(v), v.shape[1] + 2, 128), 7.0, dtype=v.dtype)
    out = wide[:, 1:-1].zero_()
    assert same(x.by_one(out=out), x.by_two())
    assert (wide[:, [0, -1]] == 7).all()


def test_equal_prompts_that_fill_the_device():
    """Four waves of programs: what a program leaves in shared memory is of no use to the next."""
    x = Prompts((500,) * 16, [*range(16)], (16, 32))
    first = [t[:500].repeat(16, *[1] * (t.ndim - 1)) for t in x.tokens]
    state = x.state[:1].repeat(16, 1, 1, 1)
    want, after = x.by_two(tokens=first, state=state.clone())
    for _ in range(5):
        out, last = x.by_one(tokens=first, state=state.clone())
        assert torch.equal(out[:500], want[:500])
        assert torch.equal(out.unflatten(0, (16, 500)), out[:500].expand(16, -1, -1, -1))
        assert torch.equal(last, after[:1].expand_as(last))


def test_replays_of_a_captured_graph():
    x = Prompts((300,) * 5, (4, 3, 2, 1, 0), (16, 32))
    want, state = x.by_one(), x.state.clone()
    assert same(want, x.by_two())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = x.run(state=state)
    for _ in range(5):
        out.zero_()
        state.copy_(x.state)
        graph.replay()
        assert torch.equal(out, want[0])
        assert torch.equal(state, want[1])
