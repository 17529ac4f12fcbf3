"""The dispatcher plans both families of a pass, splits mixed ones and captures the slots."""

import dataclasses

import pytest
import torch
from attn_core import (
    BatchError,
    GraphRunner,
    HybridDispatcher,
    KVPool,
    LayerRequirements,
    Overrides,
    Requirements,
    Speculation,
    UnsupportedError,
    UsageError,
    load_plugins,
    parse_device,
    select,
)
from linear_passes import (
    GDN,
    HV,
    M,
    V,
    close,
    expected,
    inputs,
    int32,
    make_batch,
    make_pool,
    speculation,
)
from linear_serving import DRAFTS, caches, forward, linear, serving
from recording import CONFIG, LAYERS, Recorder, qkv, recorder

pytestmark = pytest.mark.usefixtures("no_printing")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def modes(routes):
    return {role: backend.modes for role, backend in routes.routes.items() if backend.modes}


def test_a_pass_is_planned_for_both_families():
    dispatcher, routes = serving()
    batch = make_batch(M.EXTEND, [70, 3], (1, 2))
    before, tensors = routes.states.states.state[0].clone(), inputs(GDN, 73)
    out, metadata = forward(dispatcher, batch, tensors)
    wanted = expected(tensors, [70, 3], GDN, before[[1, 2]])
    close(out, torch.cat([o for o, _ in wanted]), 1e-5)
    q, k, v = qkv(73)
    layer = dataclasses.replace(LAYERS[0])
    batch = dataclasses.replace(
        batch, views={"full": dataclasses.replace(batch.views["full"], out_cache_loc=None)}
    )
    dispatcher.forward(q, k, v, layer, batch, metadata)
    _, args, _ = dispatcher.backend("prefill").calls[-1]
    assert args[-1] == "softmax.init_forward_metadata", "the plan of its own family"


@pytest.mark.parametrize(
    ("mode", "lens", "found"),
    [
        (M.EXTEND, [1, 5], {"linear_prefill": [(M.EXTEND, 2)]}),
        (M.DECODE, [1, 1], {"linear_decode": [(M.DECODE, 2)]}),
        (
            M.MIXED,
            [1, 1, 1, 5],
            {"linear_decode": [(M.DECODE, 3)], "linear_prefill": [(M.EXTEND, 1)]},
        ),
        (M.MIXED, [1, 5, 1], {"linear_decode": [(M.DECODE, 1)], "linear_prefill": [(M.EXTEND, 2)]}),
        (M.MIXED, [5, 1], {"linear_prefill": [(M.EXTEND, 2)]}),
        (M.MIXED, [1, 1], {"linear_decode": [(M.DECODE, 2)]}),
        (M.TARGET_VERIFY, [3, 3], {"linear_prefill": [(M.TARGET_VERIFY, 2)]}),
    ],
)  # fmt: skip
def test_the_backend_of_each_mode(mode, lens, found):
    dispatcher, routes = serving()
    spec = {"spec": speculation(DRAFTS)} if mode is M.TARGET_VERIFY else {}
    dispatcher.init_forward_metadata(make_batch(mode, lens, range(len(lens)), **spec))
    routes.routes.pop("linear_verify")  # the prefill backend, again
    assert modes(routes) == found


@pytest.mark.parametrize("given", [False, True])
def test_a_mixed_pass_is_a_decode_and_an_extend(given):
    dispatcher, routes = serving()
    lens, slots = [1, 1, 70, 1], (5, 2, 0, 3)
    tensors, before = inputs(GDN, sum(lens)), routes.states.states.state[0].clone()
    batch = make_batch(
        M.MIXED,
        lens,
        slots,
        state_slots_out=int32(5, 1, 0, 4),
        state_fresh=torch.tensor([False, False, True, False]),
    )
    out = torch.full((sum(lens), HV, V), torch.nan) if given else None
    found, _ = forward(dispatcher, batch, tensors, out=out)
    assert out is None or found is out
    starts = [before[5], before[2], None, before[3]]
    wanted = expected(tensors, lens, GDN, starts)
    close(found, torch.cat([o for o, _ in wanted]), 1e-5)
    for slot, (_, states) in zip((5, 1, 0, 4), wanted, strict=True):
        close(routes.states.states.state[0, slot], states[-1], 1e-5)
    [decodes], [extends] = (routes.routes[f"linear_{x}"].batches for x in ("decode", "prefill"))
    assert decodes.cu_seqlens_q.tolist() == [0, 1, 2]
    assert extends.cu_seqlens_q.tolist() == [0, 70, 71]
    assert extends.positions.tolist() == [*range(70), 0]
    assert (decodes.max_q_len, extends.max_q_len) == (1, 70)


@pytest.mark.parametrize("why", ["checkpoints", "unknown lengths"])
def test_a_mixed_pass_that_is_not_split(why):
    dispatcher, routes = serving()
    if why == "checkpoints":
        batch = make_batch(M.MIXED, [1, 5], (0, 1), checkpoint_slots=int32(3, -1))
    else:
        batch = dataclasses.replace(make_batch(M.MIXED, [1, 5], (0, 1)), query_lens_host=None)
    forward(dispatcher, batch, inputs(GDN, 6))
    routes.routes.pop("linear_verify")
    assert modes(routes) == {"linear_prefill": [(M.MIXED, 2)]}


@pytest.mark.parametrize("mode", [M.MIXED, M.EXTEND, M.DECODE])
@pytest.mark.parametrize("given", [False, True])
def test_a_pass_without_requests(mode, given):
    """A mixed one once failed: it has neither decode rows nor others."""
    dispatcher, _ = serving()
    batch, empty = make_batch(mode, [], ()), torch.empty(0, HV, V)
    out, _ = forward(dispatcher, batch, inputs(GDN, 0), out=empty if given else None)
    assert out.shape == (0, HV, V)
    assert out is empty or not given


def test_an_idle_pass():
    dispatcher, _ = serving()
    batch = make_batch(M.IDLE, [], ())
    out, metadata = forward(dispatcher, batch, inputs(GDN, 0))
    assert metadata is None
    assert out.shape == (0, HV, V)


def test_drafts_are_verified_and_committed():
    dispatcher, routes = serving()
    lens, tensors = [DRAFTS] * 2, inputs(GDN, 2 * DRAFTS)
    before = routes.states.states.state[0].clone()
    batch = make_batch(M.TARGET_VERIFY, lens, (1, 2), spec=speculation(DRAFTS))
    out, metadata = forward(dispatcher, batch, tensors)
    wanted = expected(tensors, lens, GDN, before[[1, 2]])
    close(out, torch.cat([o for o, _ in wanted]), 1e-5)
    dispatcher.commit(batch, metadata, torch.tensor([1, -1]))
    close(routes.states.states.state[0, 1], wanted[0][1][1], 1e-5)
    assert torch.equal(routes.states.states.state[0, 2:], before[2:])
    with pytest.raises(BatchError, match=r"accepted is torch.float32 \[2\] \(expected int32"):
        dispatcher.commit(batch, metadata, torch.zeros(2))
    with pytest.raises(BatchError, match=r"accepted is torch.int64 \[3\]"):
        dispatcher.commit(batch, metadata, torch.zeros(3).long())
    decode = make_batch(M.DECODE, [1], (1,))
    with pytest.raises(UsageError, match="commit of decode"):
        dispatcher.commit(decode, dispatcher.init_forward_metadata(decode), torch.tensor([0]))


def test_a_drafts_own_linear_layers_are_refused():
    dispatcher, _ = serving()
    batch = make_batch(M.DRAFT_DECODE, [1], (0,))
    metadata = dispatcher.init_forward_metadata(batch)  # its softmax layers may run
    with pytest.raises(UnsupportedError, match="linear layers of a draft model"):
        dispatcher.forward_linear(*inputs(GDN, 1), GDN, batch, metadata)


def test_a_dispatcher_without_states():
    dispatcher = HybridDispatcher(dict.fromkeys(("prefill", "decode"), recorder("x")), caches())
    with pytest.raises(UsageError, match="created without their states"):
        dispatcher.forward_linear(*inputs(GDN, 1), GDN, make_batch(M.DECODE, [1], (0,)), None)


def test_strided_tensors_are_taken():
    dispatcher, routes = serving()
    tensors, before = inputs(GDN, 2), routes.states.states.state[0].clone()
    odd = [torch.stack([x, x], -1)[..., 0] for x in tensors]
    out = torch.zeros(2, V, HV).mT
    found, _ = forward(dispatcher, make_batch(M.DECODE, [1, 1], (0, 1)), odd, out=out)
    assert found is out
    wanted = expected(tensors, [1, 1], GDN, before[[0, 1]])
    close(out, torch.cat([o for o, _ in wanted]), 1e-5)


@pytest.mark.parametrize("name", [None, "triton"])
def test_a_selection_on_a_cpu_runs_linear_layers(name):
    """From the requirements to a decode: both names run torch's class there."""
    needs = Requirements(
        layers=(
            LayerRequirements(head_dim=8, v_head_dim=4, num_q_heads=4, num_kv_heads=2),
            GDN.requirements,
        ),
        dtype="fp32",
        speculation=Speculation(num_draft_tokens=DRAFTS),
    )
    registry = load_plugins()
    overrides = Overrides(linear_attn_backend=name)
    chosen = select(needs, parse_device("cpu:avx2"), registry, {}, overrides)
    pool = KVPool(
        LAYERS, num_pages=5, page_size=chosen.page_size, kv_cache_dtype=chosen.kv_cache_dtype
    )
    states = make_pool(GDN, num_drafts=DRAFTS)
    dispatcher = HybridDispatcher.from_selection(
        chosen, registry, LAYERS, pool, linear_layers=[GDN], states=states, max_bs=4
    )
    routes = dispatcher.linear.routes
    assert {r: b.config.name for r, b in routes.items()} == {
        "linear_prefill": name or "torch_native",
        "linear_decode": name or "torch_native",
        "linear_verify": "torch_native",
    }
    assert routes["linear_prefill"] is routes["linear_decode"]
    found = routes["linear_decode"].config
    assert (found.linear_layers, found.layers, found.max_bs) == ((GDN,), (), 4)
    assert (found.kv_cache_dtype, found.num_draft_tokens) == ("fp32", DRAFTS)
    before, tensors = states.states.state[0].clone(), inputs(GDN, 1)
    batch = make_batch(M.DECODE, [1], (3,), page_size=chosen.page_size)
    out, _ = forward(dispatcher, batch, tensors)
    [(wanted, _)] = expected(tensors, [1], GDN, before[[3]])
    close(out, wanted, 1e-5)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("mode", [M.DECODE, M.TARGET_VERIFY])
def test_a_captured_pass_reads_the_slots_of_its_replay(mode, separate):
    """A replay takes other requests, fewer of them and other slots; padding has none."""
    settings = dataclasses.replace(CONFIG, num_draft_tokens=DRAFTS, layers=LAYERS[:1])
    softmax = dict.fromkeys(("prefill", "decode", "verify", "draft"), Recorder(settings))
    row = {"cuda_graph": "uniform", "separate_write_slots": separate}
    routes = linear(**row)
    dispatcher = HybridDispatcher(softmax, caches(), routes)
    runner = GraphRunner(dispatcher, batch_sizes=[2, 4], max_seq_len=16)
    n = 1 if mode is M.DECODE else DRAFTS
    tensors = inputs(GDN, 3 * n)

    def step(batch, metadata, *arguments):
        return dispatcher.forward_linear(*arguments, GDN, batch, metadata)

    runner.capture(mode, step, inputs=tensors, query_len=n)
    for slots in ((3, 0, 6), (5, 2)):
        lens, some = [n] * len(slots), [x[: n * len(slots)] for x in tensors]
        extra = {"state_fresh": torch.tensor([True, False, False][: len(slots)])}
        if separate:
            extra["state_slots_out"] = int32(*[x + 1 for x in slots])
        spec = {"spec": speculation(n)} if mode is M.TARGET_VERIFY else {}
        batch = make_batch(mode, lens, slots, **extra, **spec)
        before = routes.states.states.state[0].clone()
        found = runner.replay(batch, *some)
        starts = [None, *before[list(slots[1:])]]
        wanted = expected(some, lens, GDN, starts)
        close(found, torch.cat([o for o, _ in wanted]), 1e-5)
        if mode is M.DECODE:
            changed = [x + separate for x in slots]
            for slot, (_, states) in zip(changed, wanted, strict=True):
                close(routes.states.states.state[0, slot], states[-1], 1e-5)
            kept = [x for x in range(8) if x not in changed]
            assert torch.equal(routes.states.states.state[0, kept], before[kept])
    slotless = dataclasses.replace(batch, state_slots=None, state_slots_out=None, state_fresh=None)
    with pytest.raises(UnsupportedError, match="the batch has no state_slots"):
        runner.replay(slotless, *some)
    if not separate:
        out = dataclasses.replace(batch, state_slots_out=batch.state_slots)
        with pytest.raises(UnsupportedError, match="state_slots_out are not captured"):
            runner.replay(out, *some)


def test_a_replay_with_checkpoints_is_refused():
    """Else the slots would keep what they held, as the state after a prefix."""
    settings = dataclasses.replace(CONFIG, layers=LAYERS[:1])
    softmax = dict.fromkeys(("prefill", "decode"), Recorder(settings))
    dispatcher = HybridDispatcher(softmax, caches(), linear(cuda_graph="uniform"))
    runner = GraphRunner(dispatcher, batch_sizes=[1], max_seq_len=16, max_query_len=2)
    runner.capture(M.EXTEND, lambda batch, metadata: None, query_len=2)
    batch = make_batch(M.EXTEND, [2], (3,))
    assert runner.fits(batch)
    saved = dataclasses.replace(batch, checkpoint_slots=int32(6))
    assert not runner.fits(saved)
    with pytest.raises(UnsupportedError, match="checkpoint_slots are not captured: a captured pa"):
        runner.replay(saved)


def test_a_linear_row_without_graphs_is_not_captured():
    dispatcher, _ = serving()
    runner = GraphRunner(dispatcher, batch_sizes=[1], max_seq_len=16)
    with pytest.raises(UnsupportedError, match="row of decoder has 'never'"):
        runner.capture(M.DECODE, lambda batch, metadata: None)
