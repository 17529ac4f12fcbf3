"""triton's row of GDN on an NPU, on emulated torch-npu: the suite, and what would fail."""

import dataclasses
import functools
import importlib
import math

import pytest
import torch
from attn_ascend import gdn
from attn_core import (
    BatchError,
    LayerRequirements,
    LinearLayer,
    LinearRoutes,
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
from attn_core.testing import LinearSuite
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from linear_passes import (
    M,
    close,
    config,
    expected,
    gate,
    inputs,
    make_batch,
    make_pool,
    run,
    speculation,
)
from mla_passes import counted
from no_waiting import NoWaiting

NPU = {"torch-npu": "2.13.0", "attn-ascend": "0.1.0"}
CPU = torch.device("cpu")
LAYER = LinearLayer(layer_id=0, num_k_heads=2, num_v_heads=4, head_k_dim=128, head_v_dim=128)
ROUNDED = 1e-2  # of outputs and states in bf16, over the RMS of what is right


@pytest.mark.long  # heads of 128/128, a token after the other
class TestAscendGDN(LinearSuite):
    name = "triton"
    device = "npu:910b"
    on = "cpu"
    libraries = NPU
    passes = 30


@pytest.mark.long
class TestA3(TestAscendGDN):
    device = "npu:910c"
    passes = 12
    reduced = True


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of the operators: of chunks and of single tokens."""
    leaf = importlib.import_module("npu_leaf")
    names = ("npu_chunk_gated_delta_rule", "npu_recurrent_gated_delta_rule")
    return [counted(monkeypatch, leaf, name) for name in names]


def spec():
    return load_plugins().get("triton", "linear")


def make(layer=LAYER):
    """Return the backend of a layer, for bf16."""
    [row] = [r for r in spec().capabilities if r.device == "npu"]
    settings = config(
        layer, name="triton", row=row, dtype="bf16", kv_cache_dtype="bf16", arch="910b"
    )
    return create_backend(spec(), settings, "linear")


def pool_of(layer=LAYER, **changes):
    return make_pool(layer, dtype="bf16", **changes)


def bf16(layer, tokens):
    return inputs(layer, tokens, dtype=torch.bfloat16)


SOME = (
    *("prefill-fresh", "prefill-padding", "prefill-nothing", "prefill-slots-out", "mixed-bf16"),
    *("decode-bf16", "decode-fresh", "decode-padding", "decode-slots-out", "pages-decode"),
    *("gate-bounded-decode", "gate-neg-eigval-prefill", "near-equal-keys-prefill", "graph-decode"),
)


@pytest.mark.parametrize("wanted", SOME)
def test_some_checks_of_the_suite(wanted):
    run_check(first(wanted), spec(), CPU, arch="910b")


# selection


def select_linear(device="npu:910b", libraries=NPU, layer=LAYER, **flags):
    needs = Requirements(dtype="bf16", layers=(LayerRequirements(), layer.requirements))
    place = parse_device(device)
    return select(needs, place, load_plugins(), libraries, Overrides(**flags), simulated=True)


def test_an_npu_takes_it_for_both_phases():
    chosen = select_linear(linear_attn_backend="triton")
    for role in ("linear_prefill", "linear_decode"):
        assert chosen.backend(role) == "triton"
        assert chosen.roles[role].row.create == "attn_ascend.gdn:AscendGDN"
    assert select_linear().backend("linear_decode") == "triton"


@pytest.mark.parametrize(
    ("changes", "lacks", "why"),
    [
        ({"head_k_dim": 64, "head_v_dim": 64, "scale": None}, None, r"head_dim 64 \(supports 128"),
        ({"kind": "kda"}, None, r"device npu:910b \(supports cpu, cuda"),
        ({}, "torch-npu", "torch-npu not installed"),
        ({}, "attn-ascend", "attn-ascend not installed"),
    ],
)
def test_the_selection_says_what_the_row_lacks(changes, lacks, why):
    layer = dataclasses.replace(LAYER, **changes)
    libraries = {n: v for n, v in NPU.items() if n != lacks}
    with pytest.raises(NoBackendError, match=why):
        select_linear(layer=layer, libraries=libraries, linear_attn_backend="triton")


def test_kda_runs_in_torch_on_an_npu():
    layer = dataclasses.replace(LAYER, kind="kda")
    assert select_linear(layer=layer).backend("linear_decode") == "torch_native"


# refusals


def test_what_the_operators_do_not_have_is_refused():
    backend = make()
    with pytest.raises(UnsupportedError, match="does not verify drafts on an NPU"):
        backend.init_forward_metadata(make_batch(M.TARGET_VERIFY, [2], (2,), spec=speculation(2)))
    with pytest.raises(UnsupportedError, match=r"states in fp32: .* supports bf16; create the"):
        LinearRoutes(dict.fromkeys(("linear_prefill", "linear_decode"), backend), make_pool(LAYER))
    wide = dataclasses.replace(LAYER, num_k_heads=32, num_v_heads=96)
    with pytest.raises(UnsupportedError, match=r"96 value heads .* takes 64\); split the heads"):
        make(wide)


@pytest.mark.parametrize("mode", [M.DECODE, M.EXTEND])
def test_tokens_of_another_dtype_are_refused(mode):
    q, k, v, g, beta = bf16(LAYER, 1)
    with pytest.raises(BatchError, match=r"v torch.float16 \(expected torch.bfloat16"):
        run(make(), make_batch(mode, [1], (2,)), LAYER, pool_of(), (q, k, v.half(), g, beta))


@pytest.mark.parametrize("mode", [M.DECODE, M.EXTEND])
def test_more_rows_than_slots_are_refused(mode):
    batch = make_batch(mode, [1] * 3, (1, -1, -1))
    with pytest.raises(BatchError, match="3 rows over 2 state slots: a padded row needs a slot"):
        run(make(), batch, LAYER, pool_of(slots=2), bf16(LAYER, 3))


# what the suite does not tell apart


def answer(tensors, lens, layer, starts):
    """Return per request the outputs and the last state."""
    return [(out, after[-1]) for out, after in expected(tensors, lens, layer, starts)]


def test_padded_rows_take_a_slot_that_no_other_row_writes(calls):
    pool = pool_of(slots=3)  # as many as rows: one is left
    states, tensors = pool.states.state[0], bf16(LAYER, 3)
    tensors[2][1] = torch.nan
    before = states.clone()
    result, _ = run(make(), make_batch(M.DECODE, [1] * 3, (0, -1, 2)), LAYER, pool, tensors)
    tensors[2][1] = 0
    right = answer(tensors, [1] * 3, LAYER, [before[0], None, before[2]])
    for row, slot in ((0, 0), (2, 2)):
        close(result[row : row + 1], right[row][0], ROUNDED)
        close(states[slot], right[row][1], ROUNDED)
    assert torch.equal(states[1], before[1])
    assert calls[1][0][0][3].data_ptr() == states.data_ptr()  # in place


@pytest.mark.parametrize("count", [1, 4])
def test_a_pass_of_padding_alone_changes_nothing(count):
    for mode in (M.DECODE, M.EXTEND):
        pool = pool_of(slots=4)
        before = pool.states.state.clone()
        run(make(), make_batch(mode, [1] * count, (-1,) * count), LAYER, pool, bf16(LAYER, count))
        assert torch.equal(pool.states.state, before)


@pytest.mark.parametrize("mode", [M.EXTEND, M.DECODE])
@pytest.mark.parametrize("preallocated", [True, False])
def test_a_pass_without_requests(mode, preallocated):
    """The operators take no empty tensors."""
    pool, batch = pool_of(slots=4), make_batch(mode, [], [])
    before, tensors = pool.states.state.clone(), bf16(LAYER, 0)
    out = torch.empty_like(tensors[2]) if preallocated else None
    result, _ = run(make(), batch, LAYER, pool, tensors, out=out)
    assert result.shape == (0, 4, 128)
    assert out is None or result is out
    assert torch.equal(pool.states.state, before)


def test_states_that_are_not_dense_are_gathered(calls):
    wide = torch.randn(1, 8, 2, 4, 128, 128).bfloat16()
    pool = StatePool.of([0], StateCache(state=wide[:, :, 0]))
    before, tensors = wide.clone(), bf16(LAYER, 2)
    result, _ = run(make(), make_batch(M.DECODE, [1, 1], (5, 2)), LAYER, pool, tensors)
    right = answer(tensors, [1, 1], LAYER, [before[0, 5, 0], before[0, 2, 0]])
    close(result, torch.cat([out for out, _ in right]), ROUNDED)
    for (_, state), slot in zip(right, (5, 2), strict=True):
        close(wide[0, slot, 0], state, ROUNDED)
    assert torch.equal(wide[:, :, 1], before[:, :, 1])
    assert calls[1][0][0][3].shape[0] == 2


@pytest.mark.parametrize("g", [0.0, -1e-6, -0.3, -20.0, -torch.inf])
@pytest.mark.parametrize("beta", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("mode", [M.DECODE, M.EXTEND])
def test_any_decay_and_beta(mode, g, beta):
    pool, (q, k, v, *_) = pool_of(), bf16(LAYER, 2)
    before = pool.states.state[0].clone()
    tensors = (q, k, v, torch.full((2, 4), g), torch.full((2, 4), beta))
    result, _ = run(make(), make_batch(mode, [1, 1], (2, 5)), LAYER, pool, tensors)
    for row, (out, state) in enumerate(answer(tensors, [1, 1], LAYER, [before[2], before[5]])):
        close(result[row : row + 1], out, ROUNDED)
        close(pool.states.state[0, (2, 5)[row]], state, ROUNDED)


@pytest.mark.parametrize("mode", [M.DECODE, M.EXTEND])
def test_a_pass_with_host_lengths_does_not_wait(mode):
    layer = dataclasses.replace(LAYER, qk_norm=1e-6)
    layer = dataclasses.replace(layer, gate=gate(layer))
    backend, pool = make(layer), pool_of(layer)
    fresh = torch.tensor([False, True, False])
    batch = make_batch(mode, [1, 1, 1], (1, 2, -1), state_fresh=fresh)
    tensors = bf16(layer, 3)
    with NoWaiting():
        run(backend, batch, layer, pool, tensors)


# mistakes


@functools.cache
def planned():
    result = plan(spec(), parse_device("npu:910b"), NPU, passes=10)
    return [p for p in result if p.row]


def first(wanted):
    """Return the first check whose name begins so."""
    return next(p for p in planned() if p.check.id.startswith(wanted))


@functools.cache
def right(wanted):
    """Run a check of the wrapper as it is, once."""
    run_check(first(wanted), spec(), CPU, arch="910b")


def _operand(change, only="initial_state state"):
    """Change the arguments of every call of an operator; only: those that have one of these."""

    def mistake(monkeypatch):
        real = gdn.operator

        def operator(name, parameters):
            call = real(name, parameters)
            chosen = set(only.split()) & set(parameters)
            return lambda **kwargs: call(**(kwargs | change(kwargs) if chosen else kwargs))

        monkeypatch.setattr(gdn, "operator", operator)

    return mistake


def _transposed_states(monkeypatch):
    real, store = gdn.Rows.load, gdn.Rows.store
    monkeypatch.setattr(gdn.Rows, "load", lambda self, pool: real(self, pool).mT.contiguous())
    monkeypatch.setattr(
        gdn.Rows, "store", lambda self, states, pool: store(self, states.mT.contiguous(), pool)
    )


def _states_of_padding_are_written(monkeypatch):
    def store(self, states, pool):
        pool.index_copy_(0, self.writes.long(), states)

    monkeypatch.setattr(gdn.Rows, "store", store)


def _padding_is_slot_0(monkeypatch):
    real = gdn.Rows.of.__func__

    def of(cls, batch):
        rows = real(cls, batch)
        slots = batch.state_slots.clamp(min=0)
        return dataclasses.replace(
            rows, reads=slots, writes=slots, valid=torch.ones_like(rows.valid)
        )

    monkeypatch.setattr(gdn.Rows, "of", classmethod(of))


def _fresh_rows_keep_their_states(monkeypatch):
    monkeypatch.setattr(gdn.Rows, "load", lambda self, pool: pool.index_select(0, self.reads))


def _not_refilled(monkeypatch):
    monkeypatch.setattr(gdn.Rows, "refill", lambda self, batch: None)


DECODE, PREFILL = "decode-bf16", "scale-prefill"
MISTAKES = {
    "transposed states": (_transposed_states, (PREFILL, "decode-fresh")),
    "the decay itself": (_operand(lambda x: {"g": x["g"].exp()}), (PREFILL, DECODE)),
    "no decay": (_operand(lambda x: {"g": None}), (PREFILL, DECODE)),
    "decay to base 2": (_operand(lambda x: {"g": x["g"] / math.log(2)}), (PREFILL, DECODE)),
    "no scale": (_operand(lambda x: {"scale": 1.0}), (PREFILL, DECODE)),
    "beta of other rows": (_operand(lambda x: {"beta": x["beta"].roll(1, 0)}), (PREFILL, DECODE)),
    "sums of the lengths": (
        _operand(
            lambda x: {"actual_seq_lengths": x["actual_seq_lengths"].cumsum(0, dtype=torch.int32)}
        ),
        (PREFILL, DECODE),
    ),
    "lengths of other rows": (
        _operand(lambda x: {"actual_seq_lengths": x["actual_seq_lengths"].roll(1)}), (PREFILL,)
    ),
    "slots of other rows": (
        _operand(lambda x: {"ssm_state_indices": x["ssm_state_indices"].roll(1)}, "state"),
        (DECODE,),
    ),
    "states of other rows": (
        _operand(lambda x: {"initial_state": x["initial_state"].roll(1, 0)}, "initial_state"),
        (PREFILL,),
    ),
    "padding in slot 0": (_padding_is_slot_0, ("decode-padding",)),
    "fresh rows": (_fresh_rows_keep_their_states, ("decode-fresh",)),
    "slots of the capture": (_not_refilled, ("graph-decode",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_wrapper_is_seen(name, monkeypatch):
    mistake, wanted = MISTAKES[name]
    for check in wanted:
        right(check)
    mistake(monkeypatch)
    for check in wanted:
        with pytest.raises((CheckFailed, RuntimeError)):
            run_check(first(check), spec(), CPU, arch="910b")


def test_states_of_padding_that_are_written_are_seen(monkeypatch):
    _states_of_padding_are_written(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_pass_of_padding_alone_changes_nothing(1)
