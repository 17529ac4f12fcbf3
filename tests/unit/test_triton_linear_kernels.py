"""Triton's kernels of linear attention against the recurrence in float64."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from attn_core.backends.triton.linear import gates, launch
from attn_core.backends.triton.linear import verify as kernels
from attn_core.backends.triton.linear.prefill import plan_prefill, prefill
from attn_core.backends.triton.linear.solve import inverse_of_drafts
from attn_core.backends.triton.linear.tuning import fuses
from attn_core.errors import UsageError
from attn_core.runtime import warmup_linear
from linear_reference import Tokens, draw, make_linear_layer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cuda":
    pytest.skip("the interpreter's tests; tests/device has those of a GPU", allow_module_level=True)

LAYERS = {
    "gdn": {},
    "gdn-gate": {"gate": "softplus", "norm": 1e-6, "dims": (32, 64)},
    "gdn-neg": {"gate": "softplus", "norm": 1e-6, "neg_eigval": True, "heads": (2, 2)},
    "kda": {"kind": "kda", "dims": (64, 32)},
    "kda-gate": {"kind": "kda", "gate": "softplus", "norm": 1e-6, "heads": (2, 2)},
    "kda-bounded": {"kind": "kda", "gate": "bounded", "norm": 1e-6},
}
TREE = (-1, 0, 0, 1, 1, 2, 5)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@triton.jit
def invert(x, N: tl.constexpr, C: tl.constexpr):
    i = tl.arange(0, N)
    at = x + i[:, None] * N + i[None, :]
    tl.store(at, inverse_of_drafts(tl.load(at), tl.float32, C))


@pytest.mark.parametrize("n", [16, 128, 512])
def test_the_inverse_of_any_number_of_drafts(n):
    lower = torch.randn(n, n).div(n**0.5).tril(-1)
    got = lower.clone()
    invert[(1,)](got, n, SimpleNamespace(PRECISION="ieee"))
    right = torch.linalg.inv(torch.eye(n).double() + lower.double())
    torch.testing.assert_close(got.double(), right, atol=1e-4, rtol=1e-4)


def close(got, want, *, rms=1e-5):
    """Say whether tensors agree by the ratio of their root mean squares."""
    got, want = got.double(), want.double()
    assert torch.isfinite(got).all()
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt().clamp_min(1e-9)
    assert error < rms, f"{error:.1e}"


def heads_apart(x):
    """Return x [T, 3, …] with its heads 2^30 numbers apart, in memory that nobody touches."""
    wide = torch.empty(2**31 + x[:, 0].numel(), dtype=x.dtype)
    inner = x[0, 0].numel()
    last = (1,) * (x.dim() - 2)
    return wide.as_strided(x.shape, (inner, 2**30, *last)).copy_(x)


def states_of(layer, slots, dtype=torch.float32):
    """Return a pool's states whose slots lie apart."""
    heads = (layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
    return torch.randn(slots, 2, *heads).to(dtype)[:, 0]


def tree_mask(parents):
    """Return bool [n, n]: a draft sees its ancestors and itself."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] = mask[parent]
        mask[i, i] = True
    return mask


@pytest.fixture(params=[0, 1], ids=["rows-first", "rows-second"])
def both_tiles(request, monkeypatch):
    """Take the tiles of either Triton: before 3.7 and since."""
    for module in (gates, kernels):
        monkeypatch.setattr(module, "ROWS", type(gates.ROWS)(request.param))


class TestDecode:
    @pytest.mark.usefixtures("both_tiles")
    @pytest.mark.parametrize("name", LAYERS)
    def test_one_token(self, name):
        layer = make_linear_layer(**LAYERS[name])
        tokens, state = draw(layer, 4), states_of(layer, 6)
        before = state.clone()
        slots = [4, -1, 0, 3]
        kept = launch.LinearArguments.of(layer, "sm90")
        got = launch.decode(kept, *tokens.raw, state, int32(*slots))
        for i, slot in enumerate(slots):
            if slot >= 0:
                want, after = tokens[i : i + 1].run(before[slot])
                close(got[i], want[0])
                close(state[slot], after[0])
        assert torch.equal(state[[1, 2, 5]], before[[1, 2, 5]])

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    def test_heads_that_lie_far_apart(self, kind):
        layer = make_linear_layer(kind=kind, heads=(3, 3))
        tokens, state = draw(layer, 2), states_of(layer, 2)
        near, far = state.clone(), [heads_apart(x) for x in tokens.raw]
        kept, slots = launch.LinearArguments.of(layer, "sm90"), int32(1, 0)
        want = launch.decode(kept, *tokens.raw, near, slots)
        assert torch.equal(launch.decode(kept, *far, state, slots), want)
        assert torch.equal(state, near)

    def test_slots_to_write_and_fresh_requests(self):
        layer = make_linear_layer()
        tokens, state = draw(layer, 3), states_of(layer, 5)
        state[1] = torch.nan  # never read
        before = state.clone()
        kept, out = launch.LinearArguments.of(layer, "sm90"), torch.zeros(3, 2, 32)
        got = launch.decode(
            kept,
            *tokens.raw,
            state,
            int32(2, 1, 0),
            slots_out=int32(3, 4, -1),
            fresh=torch.tensor([False, True, False]),
            out=out,
        )
        assert got is out
        zeros = torch.zeros_like(before[0])
        for i, (start, slot) in enumerate([(before[2], 3), (zeros, 4), (before[0], None)]):
            want, after = tokens[i : i + 1].run(start)
            close(got[i], want[0])
            if slot is not None:
                close(state[slot], after[0])
        assert torch.equal(state[[0, 2]], before[[0, 2]])

    def test_states_of_bf16_round_to_nearest(self):
        layer = make_linear_layer()
        tokens, state = draw(layer, 1, dtype=torch.bfloat16), states_of(layer, 2, torch.bfloat16)
        before = state.clone()
        got = launch.decode(launch.LinearArguments.of(layer, "sm90"), *tokens.raw, state, int32(1))
        want, after = tokens.run(before[1])
        close(got, want, rms=4e-3)
        assert ((state[1].double() - after[0]).abs() <= after[0].abs() * 2**-8 + 1e-5).all()
        assert torch.equal(state[0], before[0])


def records_of(layer, slots, drafts, layers=1):
    """Return records of all layers [layers, slots, drafts, …]."""
    hk, hv = layer.num_k_heads, layer.num_v_heads
    g = (hv, layer.head_k_dim) if layer.kind == "kda" else (hv,)
    shapes = ((hv, layer.head_v_dim), (hk, layer.head_k_dim), g)
    return tuple(torch.full((layers, slots, drafts, *x), torch.nan) for x in shapes)


class TestVerify:
    @pytest.mark.usefixtures("both_tiles")
    @pytest.mark.parametrize("name", LAYERS)
    @pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
    def test_verify_and_commit_is_decoding_one_by_one(self, name, parents):
        layer, drafts = make_linear_layer(**LAYERS[name]), len(TREE) if parents else 3
        slots, accepted = [3, -1, 1, 0], [drafts - 2, 0, -1, drafts - 1]
        tokens = draw(layer, len(slots) * drafts)
        state = torch.stack([states_of(layer, 5), states_of(layer, 5)])  # of two layers
        before, records = state.clone(), records_of(layer, 5, drafts + 1, layers=2)
        kept = launch.LinearArguments.of(layer, "sm90")
        mask = None if parents is None else tree_mask(parents).repeat(len(slots), 1, 1)
        spots = int32(*slots)
        for i in range(2):
            got = launch.verify(
                kept, *tokens.raw, state[i], tuple(x[i] for x in records), spots, tree_mask=mask
            )
            for b, slot in enumerate(slots):
                if slot >= 0:
                    own = slice(b * drafts, b * drafts + drafts)
                    close(got[own], tokens[own].run(before[i, slot], parents)[0])
        assert torch.equal(state, before), "verify leaves states as they are"
        assert all(x[:, [2, 4]].isnan().all() for x in records), "only its slots' records"
        launch.commit(kept, state, records, spots, torch.tensor(accepted), tree_mask=mask)
        for b, slot in enumerate(slots):
            if slot >= 0 and accepted[b] >= 0:
                own = slice(b * drafts, b * drafts + drafts)
                for i in range(2):
                    close(state[i, slot], tokens[own].run(before[i, slot], parents)[1][accepted[b]])
        assert torch.equal(state[:, [1, 2, 4]], before[:, [1, 2, 4]])

    def test_slots_to_write_and_fresh_requests(self):
        layer, drafts = make_linear_layer(), 2
        tokens, state = draw(layer, 2 * drafts), states_of(layer, 5)[None]
        state[0, 1] = torch.nan
        before, records = state.clone(), records_of(layer, 5, drafts)
        kept, places = launch.LinearArguments.of(layer, "sm90"), {}
        places["slots_out"], places["fresh"] = int32(3, 4), torch.tensor([False, True])
        layer_records = tuple(x[0] for x in records)
        got = launch.verify(kept, *tokens.raw, state[0], layer_records, int32(2, 1), **places)
        launch.commit(kept, state, records, int32(2, 1), torch.tensor([1, 0]), **places)
        zeros = torch.zeros_like(before[0, 0])
        for b, (start, slot, last) in enumerate([(before[0, 2], 3, 1), (zeros, 4, 0)]):
            want, after = tokens[b * drafts : b * drafts + drafts].run(start)
            close(got[b * drafts : b * drafts + drafts], want)
            close(state[0, slot], after[last])
        assert torch.equal(state[0, [0, 2]], before[0, [0, 2]])

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    @pytest.mark.parametrize("parents", [None, (-1, *range(14), 13)], ids=["chain", "tree"])
    def test_drafts_of_float32_remember_what_follows_a_lot_of_forgetting(self, kind, parents):
        layer = make_linear_layer(kind=kind, heads=(1, 1))
        tokens, state = draw(layer, 16), states_of(layer, 1)[None]
        tokens.g[:12] = -100.0 / 3
        want, after = tokens.run(state[0, 0], parents)
        kept, records = launch.LinearArguments.of(layer, "sm90"), records_of(layer, 1, 16)
        mask = None if parents is None else tree_mask(parents)[None]
        first = tuple(x[0] for x in records)
        got = launch.verify(kept, *tokens.raw, state[0], first, int32(0), tree_mask=mask)
        close(got[12:], want[12:], rms=1e-6)
        launch.commit(kept, state, records, int32(0), torch.tensor([15]), tree_mask=mask)
        close(state[0, 0], after[15], rms=1e-6)


def run_prefill(layer, tokens, lens, state, slots, **places):
    """Return the outputs of one pass."""
    kept = launch.LinearArguments.of(layer, "sm90")
    plan = plan_prefill(kept, lens, dtype=tokens.q.dtype, device=DEVICE)
    return prefill(kept, *tokens.raw, state, int32(*slots), plan, **places)


class TestPrefill:
    @pytest.mark.parametrize("name", LAYERS)
    @pytest.mark.parametrize("hard", [False, True], ids=["random", "hard"])
    def test_ragged_requests(self, name, hard):
        layer, lens, slots = make_linear_layer(**LAYERS[name]), (70, 1, 0, 64, 5), (4, 1, 3, 0, -1)
        tokens, state = draw(layer, sum(lens), hard=hard), states_of(layer, 6)
        before = state.clone()
        got = run_prefill(layer, tokens, lens, state, slots)
        begin = 0
        for n, slot in zip(lens, slots, strict=True):
            if n and slot >= 0:
                want, after = tokens[begin : begin + n].run(before[slot])
                close(got[begin : begin + n], want, rms=2e-4 if hard else 2e-5)
                close(state[slot], after[-1], rms=2e-4 if hard else 2e-5)
            begin += n
        assert torch.equal(state[[2, 3, 5]], before[[2, 3, 5]])

    @pytest.mark.parametrize("name", ["gdn-gate", "kda"])
    def test_bf16_at_head_dims_of_128(self, name):
        heads = {"heads": (1, 1), "dims": (128, 128)}
        layer = make_linear_layer(**LAYERS[name] | heads)
        tokens, state = draw(layer, 100, dtype=torch.bfloat16), states_of(layer, 2)
        want, after = tokens.run(state[1])
        got = run_prefill(layer, tokens, (100,), state, (1,))
        close(got, want, rms=5e-3)
        close(state[1], after[-1], rms=5e-3)

    @pytest.mark.parametrize("name", ["gdn-gate", "kda-gate"])
    @pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
    def test_large_values_of_fp16_beside_raw_keys_of_any_size(self, name, size):
        """What normalises small keys is large, and a product of fp16 is infinite above 65504."""
        layer = make_linear_layer(**LAYERS[name] | {"norm": 1e-12, "heads": (1, 2)})
        drawn, state = draw(layer, 70), 3000 * states_of(layer, 2)
        q, k, v = size * drawn.q, size * drawn.k, (3000 * drawn.v).clamp(-9000, 9000)
        tokens = replace(drawn, q=q.half(), k=k.half(), v=v.half())
        want, after = tokens.run(state[1])
        got = run_prefill(layer, tokens, (70,), state, (1,))
        close(got, want, rms=2e-3)
        close(state[1], after[-1], rms=2e-3)

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    @pytest.mark.parametrize("decay", [3.0, 20.0, 60.0])
    def test_strong_decay(self, kind, decay):
        """No exponential overflows, and none is 0 · inf."""
        layer = make_linear_layer(kind=kind, heads=(1, 1))
        tokens, state = draw(layer, 70, decay=decay), states_of(layer, 1)
        want, after = tokens.run(state[0])
        close(run_prefill(layer, tokens, (70,), state, (0,)), want)
        close(state[0], after[-1])

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    @pytest.mark.parametrize("forgets", [-torch.inf, -1e6])
    def test_a_token_that_forgets_all_before_it(self, kind, forgets):
        """Differences of infinities are NaN, and beside a large sum the other decays are lost."""
        layer = make_linear_layer(kind=kind, heads=(1, 1))
        tokens, state = draw(layer, 70), states_of(layer, 1)
        tokens.g[[0, 20, 37, 66]] = forgets
        want, after = tokens.run(state[0])
        close(run_prefill(layer, tokens, (70,), state, (0,)), want, rms=3e-6)
        close(state[0], after[-1], rms=3e-6)

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    def test_tokens_of_float32_remember_what_follows_a_lot_of_forgetting(self, kind):
        """Their log decays are small differences of large sums."""
        layer = make_linear_layer(kind=kind, heads=(1, 1))
        tokens, state = draw(layer, 130), states_of(layer, 1)
        tokens.g[:40] = -100.0 / 3
        tokens.g[64:120] = -100.0 / 7
        want, after = tokens.run(state[0])
        got = run_prefill(layer, tokens, (130,), state, (0,))
        close(got[40:64], want[40:64], rms=1e-6)
        close(got[120:], want[120:], rms=1e-6)
        close(state[0], after[-1], rms=1e-6)

    @pytest.mark.parametrize("forgotten", [32, 16], ids=["all", "half"])
    @pytest.mark.parametrize("at", [5, 9, 20])
    def test_nothing_is_left_of_a_large_value_after_its_channels_are_forgotten(self, forgotten, at):
        """exp(-10) of a value that is 3000 times larger than the others is 14 % of these."""
        layer = make_linear_layer(kind="kda", heads=(1, 1))
        tokens, state = draw(layer, 40, decay=0.01, dtype=torch.bfloat16), states_of(layer, 1)
        tokens.v[at - 1] *= 3000
        tokens.k[at - 1, :, forgotten:] = 0
        tokens.g[at, :, :forgotten] = -80
        want, after = tokens.run(state[0])
        close(run_prefill(layer, tokens, (40,), state, (0,))[at:], want[at:], rms=6e-3)
        close(state[0], after[-1], rms=6e-3)

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    def test_heads_that_lie_far_apart(self, kind):
        """32 bits do not count from the first head to the third; nothing between is touched."""
        layer = make_linear_layer(kind=kind, heads=(3, 3))
        tokens, state = draw(layer, 3), states_of(layer, 2)
        near, far = state.clone(), [heads_apart(x) for x in tokens.raw]
        want = run_prefill(layer, tokens, (3,), near, (1,))
        moved = Tokens(*far, layer)
        assert torch.equal(run_prefill(layer, moved, (3,), state, (1,)), want)
        assert torch.equal(state, near)

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    def test_a_pass_in_two_at_a_chunk_has_the_same_bits(self, kind):
        layer = make_linear_layer(kind=kind)
        tokens, state = draw(layer, 130), states_of(layer, 2)
        parts = state.clone()
        whole = run_prefill(layer, tokens, (130,), state, (1,))
        first = run_prefill(layer, tokens[:64], (64,), parts, (1,))
        rest = run_prefill(layer, tokens[64:], (66,), parts, (1,))
        assert torch.equal(torch.cat((first, rest)), whole)
        assert torch.equal(parts, state)

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    def test_a_request_is_the_same_in_any_batch(self, kind):
        layer = make_linear_layer(kind=kind)
        tokens, state = draw(layer, 75), states_of(layer, 3)
        alone = state.clone()
        batch = run_prefill(layer, tokens, (5, 70), state, (1, 2))
        assert torch.equal(run_prefill(layer, tokens[5:], (70,), alone, (2,)), batch[5:])
        assert torch.equal(alone[2], state[2])

    def test_checkpoints_are_the_states_of_shorter_passes(self):
        layer, lens = make_linear_layer(), (70, 1, 0, 128)
        tokens, state = draw(layer, sum(lens)), states_of(layer, 9)
        before, prefixes = state.clone(), state.clone()
        kept = int32(4, 5, -1, 6, 7)  # 70 has two chunks, 1 one, 0 none, 128 two
        run_prefill(layer, tokens, lens, state, (0, 1, 2, 3), checkpoints=kept)
        for begin, n, slot, at in ((0, 64, 0, 4), (0, 70, 0, 5), (71, 64, 3, 6), (71, 128, 3, 7)):
            prefixes.copy_(before)
            run_prefill(layer, tokens[begin : begin + n], (n,), prefixes, (slot,))
            assert torch.equal(state[at], prefixes[slot])
        assert torch.equal(state[[2, 8]], before[[2, 8]])

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    def test_slots_to_write_and_fresh_requests(self, kind):
        layer, lens = make_linear_layer(kind=kind), (3, 2, 0, 0, 1)
        tokens, state = draw(layer, sum(lens)), states_of(layer, 8)
        state[1] = torch.nan
        before = state.clone()
        got = run_prefill(
            *(layer, tokens, lens, state, (0, 1, 2, 1, 2)),
            slots_out=int32(3, 4, 5, 6, -1),
            fresh=torch.tensor([False, True, False, True, False]),
        )
        zeros = torch.zeros_like(before[0])
        for begin, n, start, slot in ((0, 3, before[0], 3), (3, 2, zeros, 4)):
            want, after = tokens[begin : begin + n].run(start)
            close(got[begin : begin + n], want)
            close(state[slot], after[-1])
        assert torch.equal(state[5], before[2]), "a request without tokens keeps its state"
        assert torch.equal(state[6], zeros)
        assert torch.equal(state[[0, 2, 7]], before[[0, 2, 7]])


def test_head_dims_that_no_kernel_takes():
    with pytest.raises(UsageError, match="supports K of 16, 32, 64, 128 or 256"):
        launch.LinearArguments.of(make_linear_layer(dims=(96, 96)), "sm90")


@pytest.mark.parametrize(
    ("lens", "heads", "fused"),
    [
        ((8192,), 32, False),
        ((8192,), 8, False),
        ((32768,), 32, False),
        ((1024,) * 16, 32, True),
        ((4096,) * 4, 32, True),
        ((1024,) * 16, 8, True),
        ((32768,) + (64,) * 31, 32, False),
        ((64,) * 3, 32, False),
        ((64,) * 4, 32, True),
        ((), 32, False),
        ((0, 0), 32, False),
    ],
)
def test_one_kernel_where_the_longest_request_does_not_last_longer_than_the_rest(
    lens, heads, fused
):
    chunks = [-(-n // 64) for n in lens]
    sizes = (sum(chunks) * heads, max(chunks, default=0), 132)
    assert fuses("sm90", *sizes) == fused
    assert not fuses("sm100", *sizes)


@pytest.mark.parametrize("heads", [8, 16, 32, 48, 64])
def test_a_warmup_has_prompts_for_each_way_to_scan(heads):
    """On an H200: with and without a multiprocessor for each tile, and by one kernel."""
    found = set()
    for n in sorted({*warmup_linear._BATCHES, 64}):
        lens = (*warmup_linear._PROMPTS, *(1,) * (n - 2))
        chunks = [-(-x // 64) for x in lens]
        one = fuses("sm90", sum(chunks) * heads, max(chunks), 132)
        found.add("one" if one else "alone" if n * heads * 2 <= 132 else "shared")
    assert found == {"alone", "shared", "one"} - ({"alone"} if heads > 33 else set())


def test_a_plan_is_made_on_the_host_whatever_the_default_device_is():
    kept = launch.LinearArguments.of(make_linear_layer(), "sm90")
    with torch.device("meta"):
        plan = plan_prefill(kept, (70, 0, 3), dtype=torch.float32, device=DEVICE)
    assert plan.chunks.start[:3].tolist() == [0, 64, 70]
    assert plan.chunks.count[:3].tolist() == [64, 6, 3]
    assert plan.chunks.cu_seqlens[:4].tolist() == [0, 70, 70, 73]
    assert plan.chunks.first[:3].tolist() == [0, 2, 2]
    assert plan.chunks.order[:3].tolist() == [0, 2, 1]
