"""GDN prompts whose chunks are prepared while others are scanned, on a Hopper.

Run: `pytest tests/device/test_linear_ahead.py`. Each result has the bits of a pass that prepares
all chunks first, which test_linear_kernels.py compares with the recurrence.
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
LENS, SLOTS = (200, 1, 0, 4096, 64, 70, 900), (4, 1, 3, 0, -1, 6, 7)


@pytest.fixture(autouse=True)
def on_the_gpu():
    torch.manual_seed(0)
    with DEVICE:
        yield


class Prompts:
    """A layer, drawn prompts, and a plan that prepares chunks ahead."""

    def __init__(self, lens=LENS, slots=SLOTS, heads=(2, 4), dtype=torch.bfloat16):
        layer = make_linear_layer(heads=heads, dims=(128, 128), gate="softplus", norm=1e-6)
        self.kept = LinearArguments.of(layer, "sm90")
        self.tokens = draw(layer, sum(lens), dtype=dtype).raw
        self.state = torch.randn(9, heads[1], 128, 128)
        self.slots = torch.tensor(slots, dtype=torch.int32)
        self.plan = plan_prefill(self.kept, lens, dtype=dtype, device=DEVICE)
        assert self.plan.ahead

    def run(self, plan=None, state=None, **more):
        """Return outputs and states; rows without a slot are zeros."""
        state = self.state.clone() if state is None else state
        out = torch.zeros_like(self.tokens[2])
        prefill(self.kept, *self.tokens, state, self.slots, plan or self.plan, out=out, **more)
        return out, state

    def at_first(self, **more):
        """Return the same of a pass that prepares all chunks first."""
        return self.run(replace(self.plan, ahead=False), **more)


def same(got, want):
    return all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_that_share_a_plan(dtype):
    """Each leaves the workspace as the next one wants to find it, also of rows without a slot."""
    x = Prompts(dtype=dtype)
    want = x.at_first()
    for _ in range(5):
        assert same(x.run(), want)
    assert not x.plan.work.taken.any()


def test_fresh_requests_other_slots_and_checkpoints():
    x = Prompts()
    fresh = torch.tensor([True, False, False, False, True, False, True])
    kept = torch.full((x.plan.num_chunks,), -1, dtype=torch.int32)
    kept[2], kept[10] = 8, 2
    out = torch.tensor([4, -1, 3, 5, 2, 6, 7], dtype=torch.int32)
    more = {"fresh": fresh, "checkpoints": kept, "slots_out": out}
    assert same(x.run(**more), x.at_first(**more))


@pytest.mark.parametrize(("scans", "processors"), [(0, 1), (0, 132), (132, 132), (1000, 2000)])
def test_any_number_of_programs(scans, processors):
    """None leaves its place, all but one do, or there are far more than the device has room for."""
    x = Prompts()
    for _ in range(2):
        assert same(x.run(replace(x.plan, scans=scans, processors=processors)), x.at_first())


def test_replays_of_a_captured_graph():
    x = Prompts(lens=(1000,), slots=(2,), heads=(16, 32))
    want, state = x.at_first(), x.state.clone()
    x.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = x.run(state=state)
    for _ in range(5):
        out.zero_()
        state.copy_(x.state)
        graph.replay()
        assert same((out, state), want)


def test_two_streams_and_a_busy_device():
    """Two callers whose scans fill the device, beside one that keeps it busy: all end."""
    callers = [Prompts((4096,), (0,), (16, 32)) for _ in range(2)]
    wanted = [x.at_first() for x in callers]
    factor = torch.randn(4096, 4096)
    for x in callers:
        x.run()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        with torch.cuda.stream(streams[2]):
            torch.mm(factor, factor)
        for x, stream in zip(callers, streams, strict=False):
            with torch.cuda.stream(stream):
                results.append(x.run())
    torch.cuda.synchronize()
    for i, got in enumerate(results):
        assert same(got, wanted[i % 2])
