"""The passes of EAGLE's draft model with SGLang's own pools and classes, against dense softmax."""

from types import SimpleNamespace

import pytest
import torch
from attn_core import AttnError, NoBackendError, UnsupportedError
from attn_core.integrations import sglang as integration
from attn_core.integrations.sglang import draft_trees, drafts, server
from attn_core.integrations.sglang.backend import AttnCoreBackend
from attn_core.integrations.sglang.draft_trees import DraftTreeBackend, decode_backend
from attn_core.integrations.sglang.drafts import DraftDecodeBackend
from attn_core.integrations.sglang.page_tables import Branches, fill_branches
from attn_core.integrations.sglang.tree_tables import branch_masks, fill_trees
from draft_passes import Drafts, draft_error
from engine_passes import (
    Pass,
    attention,
    error,
    mha_pool,
    mla_pool,
    runner,
    swa_pool,
)
from sglang.kernels.ops.speculative.cache_locs import generate_draft_decode_kv_indices
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative.draft_utils import DraftBackendFactory

N = 5  # drafts of a request
CASES = [(1, 1), (1, 16), (4, 1), (4, 16)]  # topk, page
ROWS, TREES = DraftDecodeBackend, DraftTreeBackend
LAYOUTS = [*((ROWS, *case) for case in CASES), (TREES, 4, 1), (TREES, 2, 1)]


def speculation(topk):
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": N,
        "speculative_draft_attention_backend": "attn_core",
    }


def build(modules, pool, page, topk, num_steps=0, layout=ROWS):
    """Return the runner and the backend of its steps, or of its draft extend."""
    run = runner(modules, pool, page, draft=True, **speculation(topk))
    tree = (topk, topk * (num_steps - 1)) if layout is TREES else None
    backend = AttnCoreBackend(run, tree)
    return run, layout(backend, topk, num_steps - 1) if num_steps else backend


def steps(topk, num_steps):
    return Drafts((3, 1, 7), (17, 40, 15), topk, num_steps)


@pytest.mark.parametrize("num_steps", [2, 3, 4])
@pytest.mark.parametrize(("layout", "topk", "page"), LAYOUTS)
def test_every_step_attends_to_its_own_branch(layout, topk, page, num_steps):
    torch.manual_seed(page)
    module = attention()
    run, backend = build([module], mha_pool(page=page), page, topk, num_steps, layout)
    assert len(backend.attn_backends) == num_steps - 1
    assert draft_error(backend, run, steps(topk, num_steps), module) < 1e-5


@pytest.mark.parametrize("layout", [ROWS, TREES])
def test_latents_of_a_draft_model(layout):
    torch.manual_seed(0)
    module = attention(heads=4, kv_heads=1, dim=80, v_head_dim=64)
    run, backend = build([module], mla_pool(page=1), 1, 4, 3, layout)
    assert draft_error(backend, run, steps(4, 3), module) < 1e-5


@pytest.mark.parametrize(("layout", "topk", "page"), [(ROWS, 1, 16), (ROWS, 4, 1), (TREES, 4, 1)])
def test_windows_of_a_draft_model(layout, topk, page):
    torch.manual_seed(0)
    window, plain = attention(0, sliding_window_size=7), attention(1)
    run, backend = build([window, plain], swa_pool(page=page), page, topk, 4, layout)
    assert draft_error(backend, run, steps(topk, 4), window, window=8) < 1e-5
    assert draft_error(backend, run, steps(topk, 4), plain) < 1e-5


@pytest.mark.parametrize(("layout", "topk"), [(ROWS, 1), (ROWS, 4), (TREES, 4)])
def test_lengths_that_only_the_device_knows_are_not_asked_for(layout, topk):
    run, backend = build([attention()], mha_pool(), 1, topk, 3, layout)
    made = steps(topk, 3)
    batch = made.batch(run)
    planned = []
    for part in backend.attn_backends:
        part.dispatcher.init_forward_metadata = planned.append
    backend.init_forward_metadata(batch)
    assert [x.views["full"].max_seq_len for x in planned] == [128, 128]
    assert [x.views["full"].seq_lens_host for x in planned] == [None, None]
    batch.seq_lens_cpu, backend.passes.host_lengths = batch.seq_lens, True
    backend.init_forward_metadata(batch)
    for step, x in enumerate(planned[2:], 1):
        view = x.views["full"]
        each, new = (1, topk * step) if layout is TREES else (topk, step)
        assert view.max_seq_len == 40 + (8 if layout is TREES else 2)  # those of the last step
        assert view.seq_lens_host == tuple(view.seq_lens.tolist())
        assert view.seq_lens_host[::each] == tuple(n + new for n in made.prefix)


@pytest.mark.parametrize(("topk", "page"), CASES)
def test_the_tables_are_those_of_sglangs_own_backends(topk, page):
    run = runner([attention()], mha_pool(page=page), page)
    table, made = run.req_to_token_pool.req_to_token, steps(topk, 4)
    batch, rows = made.batch(run), 3 * topk
    ours = Branches.create(rows, 128 // page, 3, torch.device("cpu"))
    fill_branches(table, batch.req_pool_indices, batch.seq_lens, topk, page, ours)
    indices = torch.zeros(4, rows * 128, dtype=torch.int64)
    starts = torch.zeros(4, rows + 1, dtype=torch.int32)
    generate_draft_decode_kv_indices[(4, 3, topk)](
        batch.req_pool_indices, table, batch.seq_lens, indices, starts, batch.positions,
        128, indices.shape[1], starts.shape[1], 4, 4, 16, page,
    )  # fmt: skip
    for step in range(3):
        for row in range(rows):
            begin, end = starts[step, row : row + 2].tolist()
            theirs = indices[step, begin:end]
            at = torch.arange(end - begin)
            slots = ours.page_table[row, at // page] * page + at % page
            prefix = made.prefix[row // topk]
            copied = torch.zeros(len(at), dtype=torch.bool)
            if row % topk:  # SGLang has copied the head of a branch's page to its own
                copied[prefix // page * page : prefix] = True
            assert ours.lengths[step, row] == prefix + step + 1 == len(theirs)
            assert slots[~copied].equal(theirs[~copied])
            assert ours.slots[step, row] == theirs[-1]
            assert ours.positions[step, row] == prefix + step


class Captured:
    """A dispatcher that captures on a CPU: a replay plans from the memory of the capture.

    A backend's metadata is its own and may be the batch's views, so it is replaced, not changed.
    """

    def __init__(self, dispatcher):
        self.dispatcher = dispatcher

    def init_forward_metadata(self, batch):
        return [self.dispatcher.init_forward_metadata(batch)]

    def forward(self, q, k, v, layer, batch, metadata, **options):
        return self.dispatcher.forward(q, k, v, layer, batch, *metadata, **options)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.limits = max_bs, max_num_tokens

    def get_cuda_graph_seq_len_fill_value(self):
        return 1

    init_forward_metadata_capture_cuda_graph = init_forward_metadata

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        metadata[:] = self.init_forward_metadata(batch)


@pytest.mark.parametrize(
    ("layout", "topk", "page", "window"),
    [*((*x, None) for x in LAYOUTS), (ROWS, 1, 1, 8), (ROWS, 1, 16, 8), (TREES, 4, 1, 8)],
)
def test_captured_steps_are_replayed_for_fewer_requests(layout, topk, page, window):
    torch.manual_seed(page)
    module = attention(0, sliding_window_size=-1 if window is None else window - 1)
    pool = mha_pool(page=page) if window is None else swa_pool(page=page)
    modules = [module] if window is None else [module, attention(1)]
    run, backend = build(modules, pool, page, topk, 4, layout)
    for part in backend.attn_backends:
        part.dispatcher = Captured(part.dispatcher)
    backend.init_cuda_graph_state(4, 4 * topk)
    limits = [part.dispatcher.limits for part in backend.attn_backends]
    if layout is TREES:
        assert limits == [(4, 4 * topk), (4, 8 * topk), (4, 12 * topk)]
    else:
        assert limits == [(4 * topk, 4 * topk)] * 3
    fill = backend.attn_backends[0].get_cuda_graph_seq_len_fill_value()
    empty = Drafts((0,) * 4, (fill,) * 4, topk, 4).batch(run)
    backend.init_forward_metadata_out_graph(empty, in_capture=True)
    tables = [x._pass[0].views["full"].page_table for x in backend.attn_backends]
    assert len({x.data_ptr() for x in tables}) == 1  # all steps share a table
    made = steps(topk, 4)

    def replay(batch):
        padded = SimpleNamespace(**vars(batch))
        padded.batch_size = 4
        padded.seq_lens = torch.cat([batch.seq_lens, torch.tensor([fill])])
        padded.req_pool_indices = torch.cat([batch.req_pool_indices, torch.tensor([0])])
        padded.seq_lens_cpu = padded.seq_lens
        backend.init_forward_metadata_out_graph(padded)
        backend.init_forward_metadata_in_graph(padded)
        for part, table in zip(backend.attn_backends, tables, strict=True):
            assert part._pass[0].views["full"].page_table is table  # what the graph reads

    assert draft_error(backend, run, made, module, window=window, plan=replay) < 1e-5
    assert draft_error(backend, run, made, module, window=window, plan=replay, seed=1) < 1e-5


def extend(new, prefix=(17, 0, 33)):
    return Pass(ForwardMode.DRAFT_EXTEND_V2, (3, 1, 7), prefix, new)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("new", [(N, N, N), (3, 5, 1)])
@pytest.mark.parametrize("latent", [False, True])
def test_draft_extend_takes_in_what_was_accepted(new, page, latent):
    torch.manual_seed(page)
    module = attention(heads=4, kv_heads=1, dim=80, v_head_dim=64) if latent else attention()
    pool = mla_pool(page=page) if latent else mha_pool(page=page)
    run, backend = build([module], pool, page, 4)
    for prefix in [(17, 0, 33), (18, 4, 38)]:  # one, four and five tokens were accepted
        assert error(backend, run, extend(new, prefix), module) < 1e-5


def test_a_prompt_of_the_draft_model_is_a_prefill():
    torch.manual_seed(0)
    run, backend = build([attention()], mha_pool(page=16), 16, 4)
    made = Pass(ForwardMode.EXTEND, (3, 1, 7), (17, 0, 33), (6, 19, 1))
    assert error(backend, run, made, run.model[0]) < 1e-5


def test_captured_draft_extend_has_room_for_its_queries():
    torch.manual_seed(0)
    module = attention()
    run, backend = build([module], mha_pool(page=16), 16, 4)
    backend.dispatcher = Captured(backend.dispatcher)
    backend.init_cuda_graph_state(4, 4 * N)
    assert backend.get_verify_buffers_to_fill_after_draft() == [None, None]
    fill = backend.get_cuda_graph_seq_len_fill_value()
    assert fill == N  # a padded request has as many queries as a real one
    empty = Pass(ForwardMode.DRAFT_EXTEND_V2, (0,) * 4, (0,) * 4, (N,) * 4).batch(run)
    backend.init_forward_metadata_out_graph(empty, in_capture=True)
    made = extend((N, N, N))
    assert error(backend, run, made, module) < 1e-5  # writes the keys of the prefix
    batch = made.batch(run)
    graph = SimpleNamespace(  # SGLang hands over whole buffers and the tokens of real requests
        batch_size=4,
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        seq_lens=torch.cat([batch.seq_lens, torch.tensor([fill, 77])]),
        seq_lens_cpu=torch.cat([batch.seq_lens, torch.tensor([fill, 77])]),
        req_pool_indices=torch.cat([batch.req_pool_indices, torch.tensor([0, 5])]),
        out_cache_loc=batch.out_cache_loc,
        spec_info=None,
    )
    q = torch.randn(3 * N, 4, 32)
    eager = backend.forward_extend(q.flatten(1), None, None, module, batch)
    backend.init_forward_metadata_out_graph(graph)
    padded = torch.cat([q, torch.randn(N, 4, 32)]).flatten(1)
    replayed = backend.forward_extend(padded, None, None, module, graph)
    torch.testing.assert_close(replayed[: 3 * N], eager)
    assert replayed.isfinite().all()


def moved(**changed):
    """Return fill_branches with a fault in what it writes."""

    def fill(*args):
        fill_branches(*args)
        branches = args[5]
        for name, change in changed.items():
            tensor = getattr(branches, name)
            tensor.copy_(change(tensor.clone()))

    return fill


FAULTS = {
    "lengths off by the step": moved(lengths=lambda x: x[:1].expand_as(x)),
    "lengths off by one": moved(lengths=lambda x: x - 1),
    "another branch's row": moved(page_table=lambda x: x.roll(1, 0)),
    "one row for all branches": moved(page_table=lambda x: x[::4].repeat_interleave(4, 0)),
    "slots of other steps": moved(slots=lambda x: x.flip(0)),
    "slots of other branches": moved(slots=lambda x: x.flip(1)),
}


def moved_trees(**changed):
    """Return fill_trees with a fault in what it writes."""

    def fill(*args):
        fill_trees(*args)
        for name, change in changed.items():
            tensor = getattr(args[3], name)
            tensor.copy_(change(tensor.clone()))

    return fill


def other_parents(*args):
    """Return masks in which a draft sees those of the next branch."""
    masks = branch_masks(*args)
    return [mask.roll(1, 2) | torch.eye(mask.shape[1], dtype=torch.bool) for mask in masks]


TREE_FAULTS = {
    "lengths off by the step": {"fill_trees": moved_trees(lengths=lambda x: x[:1].expand_as(x))},
    "lengths off by one": {"fill_trees": moved_trees(lengths=lambda x: x - 1)},
    "another request's row": {"fill_trees": moved_trees(page_table=lambda x: x.roll(1, 0))},
    "a column late": {"fill_trees": moved_trees(page_table=lambda x: x.roll(1, 1))},
    "slots of other steps": {"fill_trees": moved_trees(slots=lambda x: x.flip(0))},
    "slots of other branches": {"fill_trees": moved_trees(slots=lambda x: x.flip(1))},
    "the mask transposed": {
        "branch_masks": lambda *args: [x.mT.contiguous() for x in branch_masks(*args)]
    },
    "the mask of other branches": {"branch_masks": other_parents},
}


@pytest.mark.parametrize(
    ("layout", "fault"), [*((ROWS, x) for x in FAULTS), *((TREES, x) for x in TREE_FAULTS)]
)
def test_the_comparison_sees_planted_faults(layout, fault, monkeypatch):
    torch.manual_seed(0)
    if layout is TREES:
        for name, function in TREE_FAULTS[fault].items():
            monkeypatch.setattr(draft_trees, name, function)
    else:
        monkeypatch.setattr(drafts, "fill_branches", FAULTS[fault])
    module = attention()
    run, backend = build([module], mha_pool(), 1, 4, 4, layout)
    with pytest.raises((AssertionError, AttnError, IndexError)):
        assert draft_error(backend, run, steps(4, 4), module) < 1e-5


def test_parents_in_another_order_are_seen(monkeypatch):
    """Branches whose drafts are read newest first; lengths and slots are right."""
    torch.manual_seed(0)

    def fill(table, rows, lens, topk, page, branches, *rest):
        fill_branches(table, rows, lens, topk, page, branches, *rest)
        for row in range(len(branches.page_table)):
            begin = int(lens[row // topk])
            drafts = branches.page_table[row, begin : begin + 3]
            drafts.copy_(drafts.flip(0).clone())

    monkeypatch.setattr(drafts, "fill_branches", fill)
    module = attention()
    run, backend = build([module], mha_pool(), 1, 4, 4)
    assert draft_error(backend, run, steps(4, 4), module) > 1e-2


def factory(run, num_steps=4):
    return DraftBackendFactory(run.server_args, run, run.server_args.speculative_eagle_topk,
                               num_steps)  # fmt: skip


@pytest.fixture
def hooked(monkeypatch):
    """SGLang's factory with the hooks that SGLang applies for the plugin."""
    names = ("create_decode_backend", "create_draft_extend_backend")
    for name in names:
        monkeypatch.setattr(DraftBackendFactory, name, getattr(DraftBackendFactory, name))
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    from sglang.srt import server_args

    monkeypatch.setattr(server_args, "ATTENTION_BACKEND_CHOICES", ["fa3"])
    integration.register()
    kept = [x for x in HookRegistry._hooks if x.rpartition(".")[2] in names]
    assert len(kept) == 2
    for target in set(HookRegistry._hooks) - set(kept):
        del HookRegistry._hooks[target]
    HookRegistry.apply_hooks()


def drafting(topk=4, target=("attn_core", "attn_core"), **changed):
    values = speculation(topk) | {
        "get_attention_backends": lambda: target,
        "attention_backend": target[0],
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
    }
    module = attention()
    return runner([module], mha_pool(), 1, draft=True, **(values | changed))


@pytest.mark.usefixtures("hooked")
def test_the_factory_creates_what_the_flag_names():
    for topk, target in [(1, ("attn_core", "attn_core")), (4, ("fa3", "fa3"))]:
        run = drafting(topk, target)
        made = factory(run).create_decode_backend()
        assert type(made) is (ROWS if topk == 1 else TREES)
        assert len(made.attn_backends) == 3
        assert draft_error(made, run, steps(topk, 4), run.model[0]) < 1e-5
        assert isinstance(factory(run).create_draft_extend_backend(), AttnCoreBackend)
        assert factory(run, num_steps=1).create_decode_backend() is None
    unnamed = drafting(1, speculative_draft_attention_backend=None)
    assert isinstance(factory(unnamed).create_decode_backend(), DraftDecodeBackend)


@pytest.mark.usefixtures("hooked")
def test_other_names_stay_sglangs():
    run = drafting(speculative_draft_attention_backend="nobody")
    with pytest.raises(ValueError, match="nobody"):
        factory(run).create_decode_backend()
    with pytest.raises(ValueError, match="nobody"):
        factory(run).create_draft_extend_backend()


def test_the_choice_is_for_the_draft_model_and_logged(caplog):
    with caplog.at_level("INFO", logger="attn_core"):
        run = drafting(topk=4)
        backend = AttnCoreBackend(run)
    assert "of the draft model" in caplog.text
    config = backend.dispatcher.backend("draft").config
    assert (config.topk, config.num_draft_tokens) == (1, N)  # a branch is a row: no trees
    assert config.max_bs == 8 * 4
    assert backend.decode_attention_backend_str == "attn_core"


def test_branches_are_rows_where_nothing_verifies_trees(monkeypatch):
    def only_rows(run, tree=None):
        if tree is not None:
            raise NoBackendError("no trees here", None)
        return AttnCoreBackend(run)

    monkeypatch.setattr(draft_trees, "AttnCoreBackend", only_rows)
    assert type(decode_backend(drafting(4), 4, 3)) is ROWS


def test_steps_share_a_choice_and_no_plan():
    _run, backend = build([attention()], mha_pool(), 1, 4, 4)
    first, *others = backend.attn_backends
    assert len({id(x.dispatcher.backend("draft")) for x in backend.attn_backends}) == 3
    assert all(x.layers is first.layers and x.pool is first.pool for x in others)


def test_other_draft_models_are_refused_by_name(monkeypatch):
    for changed, text in (
        ({"enable_multi_layer_eagle": True}, "multi-layer EAGLE"),
        ({"speculative_algorithm": "FROZEN_KV_MTP"}, "FROZEN_KV_MTP"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            AttnCoreBackend(drafting(**changed))
    monkeypatch.setattr(server.importlib.metadata, "version", lambda name: "0.5.17")
    with pytest.raises(UnsupportedError, match="--speculative-draft-attention-backend"):
        AttnCoreBackend(drafting(topk=1))


def test_a_draft_model_minds_no_phases_of_other_backends():
    AttnCoreBackend(drafting(target=("fa3", "flashinfer")))
