"""triton's class of linear attention through the dispatcher, in Triton's interpreter."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from attn_core import (
    BatchError,
    GraphRunner,
    HybridDispatcher,
    LayerRequirements,
    Requirements,
    UnsupportedError,
    UsageError,
    create_backend,
    load_plugins,
    parse_device,
    select,
)
from attn_core.backends.triton.linear.backend import TritonLinear
from linear_passes import (
    FLAWED_TREE,
    FLAWS,
    GDN,
    M,
    check_flaw,
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
from linear_serving import DRAFTS, caches, forward, linear, serving
from recording import CONFIG, LAYERS, Recorder

if torch.cuda.is_available():
    pytest.skip("the interpreter's tests; tests/device has those of a GPU", allow_module_level=True)

EXACT = 5e-5  # of a run in float32, whose gates are summed over a chunk
TREE = (-1, 0, 0)
KINDS = pytest.mark.parametrize("kind", ["gdn", "kda"])


class OnHopper(TritonLinear):
    """As it runs on a Hopper."""

    def __init__(self, settings):
        super().__init__(dataclasses.replace(settings, arch="sm90"))


def make_layer(kind, **changes):
    """Return a layer with raw gates and keys."""
    layer = dataclasses.replace(GDN, kind=kind, head_v_dim=32, qk_norm=1e-6, **changes)
    mild = gate(layer, A_log=-torch.rand(layer.num_v_heads))
    return dataclasses.replace(layer, gate=mild)


@pytest.mark.parametrize("parents", [None, FLAWED_TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("name", "flaw"), FLAWS)
def test_a_draft_that_is_not_finite_reaches_those_that_see_it_alone(parents, name, flaw):
    """In GDN, whose drafts are multiplied as one matrix, it may reach others of its request."""
    torch.manual_seed(0)
    layer = make_layer("kda")
    check_flaw(TritonLinear(config(layer, num_draft_tokens=7)), layer, name, flaw, parents, EXACT)


def served(layer, **changes):
    """Return a dispatcher and the states [slots, Hv, V, K] of its layer."""
    dispatcher, routes = serving(layer=layer, backend=OnHopper, **changes)
    return dispatcher, routes.states.states.state[0]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def check(found, states, tensors, lens, layer, starts, slots):
    """Check the outputs and last states of requests; a slot of None is padding."""
    wanted, begin = expected(tensors, lens, layer, starts), 0
    for n, slot, (out, after) in zip(lens, slots, wanted, strict=True):
        if slot is not None and n:
            close(found[begin : begin + n], out, EXACT)
            close(states[slot], after[-1], EXACT)
        begin += n


@KINDS
@pytest.mark.parametrize("device", ["cuda:sm80", "cuda:sm90", "rocm:gfx942"])
def test_the_rows_of_gpus_name_the_class(kind, device):
    layer, device, registry = make_layer(kind), parse_device(device), load_plugins()
    needs = Requirements(layers=(LayerRequirements(), layer.requirements))
    role = select(needs, device, registry, {"triton": None}).roles["linear_decode"]
    assert role.backend == "triton"
    settings = config(layer, row=role.row, arch=device.arch)
    backend = create_backend(registry.get("triton", "linear"), settings, "linear")
    assert isinstance(backend, TritonLinear)


@KINDS
def test_decode(kind):
    """A fresh slot holds NaN; one request writes elsewhere; one is padding."""
    layer = make_layer(kind)
    dispatcher, states = served(layer)
    states[4] = torch.nan
    before, tensors = states.clone(), inputs(layer, 4)
    batch = make_batch(
        M.DECODE,
        [1] * 4,
        (2, 4, -1, 0),
        state_slots_out=int32(6, 4, -1, 0),
        state_fresh=torch.tensor([False, True, False, False]),
    )
    found, _ = forward(dispatcher, batch, tensors, layer)
    starts = [before[2], None, None, before[0]]
    check(found, states, tensors, [1] * 4, layer, starts, (6, 4, None, 0))
    kept = [1, 2, 3, 5, 7]
    assert torch.equal(states[kept], before[kept])


@KINDS
@pytest.mark.parametrize("mode", [M.EXTEND, M.MIXED])
@pytest.mark.parametrize("known", [True, False], ids=["host", "device"])
def test_extend(kind, mode, known):
    """Ragged requests, one of them empty and one padding; lengths on the host or not."""
    layer, lens = make_layer(kind), [1, 70, 0, 3, 64]
    dispatcher, states = served(layer)
    states[4] = torch.nan
    before, tensors = states.clone(), inputs(layer, sum(lens))
    batch = make_batch(
        mode,
        lens,
        (2, 4, 1, -1, 0),
        state_slots_out=int32(6, 4, 5, -1, 0),
        state_fresh=torch.tensor([False, True, False, False, False]),
    )
    if not known:
        batch = dataclasses.replace(batch, query_lens_host=None)
    found, _ = forward(dispatcher, batch, tensors, layer)
    starts = [before[2], None, before[1], None, before[0]]
    check(found, states, tensors, lens, layer, starts, (6, 4, 5, None, 0))
    assert torch.equal(states[5], before[1]), "a request without tokens stores what it has read"
    kept = [1, 2, 3, 7]
    assert torch.equal(states[kept], before[kept])


@KINDS
def test_checkpoints(kind):
    layer, lens = make_layer(kind), [70, 3, 64]
    dispatcher, states = served(layer)
    before, tensors = states.clone(), inputs(layer, sum(lens))
    batch = make_batch(M.EXTEND, lens, (0, 1, 2), checkpoint_slots=int32(5, -1, -1, 7))
    found, _ = forward(dispatcher, batch, tensors, layer)
    check(found, states, tensors, lens, layer, before[:3], (0, 1, 2))
    close(states[5], expected(tensors, lens, layer, before[:3])[0][1][63], EXACT)
    assert torch.equal(states[7], states[2])
    kept = [3, 4, 6]
    assert torch.equal(states[kept], before[kept])


@KINDS
@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_verify_and_commit_is_decoding_one_by_one(kind, parents):
    """Of two layers with their own gates; a request is fresh, one is padding, one accepts none."""
    layers = [make_layer(kind), dataclasses.replace(make_layer(kind), layer_id=1)]
    pool = make_pool(*layers, num_drafts=DRAFTS + 1)
    backend = OnHopper(config(*layers, num_draft_tokens=DRAFTS))
    states, lens, accepted = pool.states.state, [DRAFTS] * 4, [2, 1, -1, 0]
    states[:, 4] = torch.nan
    before = states.clone()
    batch = make_batch(
        M.TARGET_VERIFY,
        lens,
        (2, 4, 1, -1),
        spec=speculation(DRAFTS if parents is None else parents, 4),
        state_slots_out=int32(6, 4, 1, -1),
        state_fresh=torch.tensor([False, True, False, False]),
    )
    wanted = []
    for i, layer in enumerate(layers):
        tensors, starts = inputs(layer, sum(lens)), [before[i, 2], None, before[i, 1], None]
        found, metadata = run(backend, batch, layer, pool, tensors)
        wanted.append(expected(tensors, lens, layer, starts, parents))
        for b in range(3):
            close(found[b * DRAFTS : (b + 1) * DRAFTS], wanted[i][b][0], EXACT)
    assert torch.equal(states.nan_to_num(), before.nan_to_num()), "verify changes no state"
    backend.commit(pool, batch, metadata, torch.tensor(accepted))
    for i in range(2):
        for b, slot in ((0, 6), (1, 4)):
            close(states[i, slot], wanted[i][b][1][accepted[b]], EXACT)
    kept = [0, 1, 2, 3, 5, 7]
    assert torch.equal(states[:, kept], before[:, kept])


def test_a_commit_through_the_dispatcher():
    layer = make_layer("gdn")
    dispatcher, states = served(layer)
    before, tensors = states.clone(), inputs(layer, 2 * DRAFTS)
    batch = make_batch(M.TARGET_VERIFY, [DRAFTS] * 2, (1, 3), spec=speculation(DRAFTS))
    _, metadata = forward(dispatcher, batch, tensors, layer)
    dispatcher.commit(batch, metadata, torch.tensor([1, -1]))
    [(_, after), _] = expected(tensors, [DRAFTS] * 2, layer, before[[1, 3]])
    close(states[1], after[1], EXACT)
    assert torch.equal(states[[0, 2, 3, 4]], before[[0, 2, 3, 4]])


def test_accepted_drafts_may_be_a_column_of_their_paths():
    """Numbers between those of the requests are no request's."""
    layer = make_layer("gdn")
    dispatcher, states = served(layer)
    before, tensors = states.clone(), inputs(layer, 2 * DRAFTS)
    batch = make_batch(M.TARGET_VERIFY, [DRAFTS] * 2, (1, 3), spec=speculation(DRAFTS))
    _, metadata = forward(dispatcher, batch, tensors, layer)
    paths = torch.tensor([[0, 1], [-1, 0]])
    dispatcher.commit(batch, metadata, paths[:, 1])
    one, other = expected(tensors, [DRAFTS] * 2, layer, before[[1, 3]])
    close(states[1], one[1][1], EXACT)
    close(states[3], other[1][0], EXACT)


@pytest.mark.parametrize("mode", [M.DECODE, M.TARGET_VERIFY])
def test_a_captured_pass_reads_the_slots_of_its_replay(mode):
    """A replay takes other requests, fewer of them and other slots; padding has none."""
    layer, n = make_layer("gdn"), 1 if mode is M.DECODE else DRAFTS
    settings = dataclasses.replace(CONFIG, num_draft_tokens=DRAFTS, layers=LAYERS[:1])
    softmax = dict.fromkeys(("prefill", "decode", "verify", "draft"), Recorder(settings))
    routes = linear(layer=layer, backend=OnHopper, cuda_graph="uniform")
    dispatcher = HybridDispatcher(softmax, caches(), routes)
    runner = GraphRunner(dispatcher, batch_sizes=[4], max_seq_len=16)

    def step(batch, metadata, *arguments):
        return dispatcher.forward_linear(*arguments, layer, batch, metadata)

    runner.capture(mode, step, inputs=inputs(layer, n), query_len=n)
    states = routes.states.states.state[0]
    for slots in ((3, 0, 6), (5, 2)):
        lens, some = [n] * len(slots), inputs(layer, n * len(slots))
        spec = {"spec": speculation(n)} if mode is M.TARGET_VERIFY else {}
        fresh, before = torch.tensor([True, False, False][: len(slots)]), states.clone()
        batch = make_batch(mode, lens, slots, state_fresh=fresh, **spec)
        found = runner.replay(batch, *some)
        wanted = expected(some, lens, layer, [None, *before[list(slots[1:])]])
        close(found, torch.cat([o for o, _ in wanted]), EXACT)
        changed = slots if mode is M.DECODE else ()
        for slot, (_, after) in zip(changed, wanted, strict=bool(changed)):
            close(states[slot], after[-1], EXACT)
        kept = [x for x in range(8) if x not in changed]
        assert torch.equal(states[kept], before[kept])


def test_an_extend_is_not_captured():
    backend = OnHopper(config(make_layer("gdn")))
    with pytest.raises(UnsupportedError, match="extend in a CUDA graph"):
        backend.init_forward_metadata_capture_cuda_graph(make_batch(M.EXTEND, [2, 2], (0, 1)))


@pytest.mark.parametrize("mode", [M.EXTEND, M.DECODE, M.TARGET_VERIFY])
def test_16_bits_and_an_output_that_is_given(mode):
    layer = make_layer("kda")
    backend = OnHopper(config(layer, dtype="bf16", num_draft_tokens=DRAFTS))
    n = {M.EXTEND: 70, M.DECODE: 1, M.TARGET_VERIFY: DRAFTS}[mode]
    pool, tensors = make_pool(layer, num_drafts=DRAFTS), inputs(layer, n, dtype=torch.bfloat16)
    before, out = pool.states.state[0].clone(), torch.empty_like(tensors[2])
    spec = {"spec": speculation(n)} if mode is M.TARGET_VERIFY else {}
    batch = make_batch(mode, [n], (1,), **spec)
    found, _ = run(backend, batch, layer, pool, tensors, out=out)
    assert found is out
    [(wanted, _)] = expected(tensors, [n], layer, before[[1]])
    close(out, wanted, 8e-3)


@KINDS
def test_a_request_has_the_same_bits_in_any_batch(kind):
    layer = make_layer(kind)
    backend = OnHopper(config(layer, num_draft_tokens=DRAFTS))
    for mode, lens in ((M.EXTEND, [3, 70]), (M.DECODE, [1, 1]), (M.TARGET_VERIFY, [DRAFTS] * 2)):
        pool, tensors = make_pool(layer, num_drafts=DRAFTS), inputs(layer, sum(lens))
        pool.copy_slots(torch.tensor([1]), torch.tensor([2]))
        spec = {"spec": speculation(DRAFTS)} if mode is M.TARGET_VERIFY else {}
        both, _ = run(backend, make_batch(mode, lens, (0, 1), **spec), layer, pool, tensors)
        own = [x[lens[0] :] for x in tensors]
        alone, _ = run(backend, make_batch(mode, lens[1:], (2,), **spec), layer, pool, own)
        assert torch.equal(alone, both[lens[0] :])
        assert torch.equal(pool.states.state[0, 1], pool.states.state[0, 2])


@pytest.mark.parametrize("mode", [M.EXTEND, M.DECODE, M.TARGET_VERIFY])
def test_a_pass_without_requests(mode):
    layer = make_layer("gdn")
    backend, pool = OnHopper(config(layer)), make_pool(layer, num_drafts=DRAFTS)
    spec = {"spec": speculation(DRAFTS)} if mode is M.TARGET_VERIFY else {}
    batch = make_batch(mode, [], (), **spec)
    out, metadata = run(backend, batch, layer, pool, inputs(layer, 0))
    assert out.shape == (0, layer.num_v_heads, layer.head_v_dim)
    if spec:
        backend.commit(pool, batch, metadata, torch.empty(0, dtype=torch.int64))


def test_another_layer_of_the_same_id_has_its_own_gate():
    first, second = make_layer("gdn"), make_layer("gdn")
    backend, pool = OnHopper(config(first)), make_pool(first)
    for layer in (first, second, first):
        before, tensors = pool.states.state[0].clone(), inputs(layer, 1)
        out, _ = run(backend, make_batch(M.DECODE, [1], (3,)), layer, pool, tensors)
        [(wanted, _)] = expected(tensors, [1], layer, before[[3]])
        close(out, wanted, EXACT)


def test_what_the_kernels_do_not_take_is_refused():
    for dims in ({"head_k_dim": 48}, {"head_v_dim": 24}):
        with pytest.raises(UsageError, match="supports K of 16, 32, 64, 128 or 256, and V in mult"):
            OnHopper(config(dataclasses.replace(GDN, **{"head_v_dim": 32, **dims})))
    layer = make_layer("gdn")
    backend, pool = OnHopper(config(layer)), make_pool(layer)
    tensors = inputs(layer, 3, dtype=torch.bfloat16)
    with pytest.raises(BatchError, match=r"q torch.bfloat16.*expected torch.float32, for which"):
        run(backend, make_batch(M.EXTEND, [3], (1,)), layer, pool, tensors)
