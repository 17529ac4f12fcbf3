"""Linear layers inside SGLang on a CPU, beside SGLang's own backend over float64 recurrences."""

import copy
import dataclasses

import engine_linear as el
import pytest
import torch
from attn_core import UnsupportedError, load_plugins, parse_device, select
from attn_core.integrations.sglang import (
    draft_kernels,
    linear,
    linear_layers,
    linear_passes,
    linear_states,
    server,
)
from attn_core.integrations.sglang.backend import AttnCoreBackend
from attn_core.integrations.sglang.linear import HybridBackend, LinearBackend
from attn_core.integrations.sglang.linear_layers import served_layers, to_linear_layer
from attn_core.integrations.sglang.server import serves_linear
from engine_passes import attention, mha_pool, server_args
from sglang.srt import runtime_context
from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
from sglang.srt.layers.attention.linear import gdn_backend, kda_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
VERIFY = ForwardMode.TARGET_VERIFY
CHAIN = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}
TREE = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 2}
N = 5  # drafts
PARENTS = ((-1, 0, 0, 1, 2), (-1, 0, 1, 0, 3), (-1, 0, 0, 0, 1))


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    """Let SGLang run without a GPU, and with a prefix cache of states."""
    saved = {m: dict(vars(m)) for m in (gdn_backend, kda_backend, hybrid, el.scatter)}
    el.stand_ins()
    args = server_args(mamba_cache_chunk_size=64, mamba_track_interval=256)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: args)
    monkeypatch.setattr(hybrid, "get_server_args", lambda: args)
    torch.manual_seed(0)
    yield
    for module, values in saved.items():
        vars(module).update(values)


def links(parents):
    """Return (children, siblings) of trees, int64 [B, n] each, as SGLang builds them."""
    children = torch.full((len(parents), N), -1)
    siblings = torch.full((len(parents), N), -1)
    for b, tree in enumerate(parents):
        for i in range(N - 1, 0, -1):
            siblings[b, i] = children[b, tree[i]]
            children[b, tree[i]] = i
    return children, siblings


class Pair:
    """SGLang's own backend and ours over equal pools, which run the same passes."""

    def __init__(self, kind, **args):
        self.kind = kind
        drafts = N if args.get("speculative_algorithm") else 0
        args = {**args, "speculative_num_draft_tokens": drafts or None}
        self.modules = [el.module(kind, 2 * i) for i in range(el.LAYERS)]
        self.theirs_pool = el.pool(kind, drafts, args.get("speculative_eagle_topk") or 1)
        self.pool = copy.deepcopy(self.theirs_pool)
        own = {"gdn": gdn_backend.GDNAttnBackend, "kda": kda_backend.KDAAttnBackend}[kind]
        theirs = own(el.runner(self.modules, self.theirs_pool, **args))
        run = el.runner(self.modules, self.pool, **args)
        self.ours = LinearBackend(run, served_layers(run), None)
        self.theirs = theirs
        full = type("Full", (), dict.fromkeys(["token_to_kv_pool", "req_to_token_pool"]))()
        full.needs_cpu_seq_lens = False
        self.their_pair = hybrid.HybridLinearAttnBackend(full, theirs, [])
        self.pair = HybridBackend(full, self.ours, [])

    def run(self, mode, *shape, **more):
        """Run a pass on both; return the outputs of the tokens that are no padding."""
        batch = el.a_pass(mode, *shape, **more)
        tokens = sum(shape[2])
        inputs = [el.inputs(self.kind, mode, tokens) for _ in self.modules]
        outs = []
        for backend in (self.theirs, self.ours):
            own = copy.deepcopy(batch)
            backend.init_forward_metadata(own)
            outs.append(el.run(backend, own, self.modules, copy.deepcopy(inputs)))
        real = sum(shape[2][: len(shape[2]) - more.get("padding", 0)])
        assert torch.isfinite(outs[1]).all()
        return [x[:, :real] for x in outs]

    def commit(self, accepted, slots=None, steps=None):
        for pair in (self.their_pair, self.pair):
            pair.update_mamba_state_after_mtp_verify(accepted, slots, steps, None)

    def check(self, outs=None):
        """Compare outputs, and every slot of states and of convolution."""
        if outs is not None:
            torch.testing.assert_close(outs[1], outs[0], atol=2e-5, rtol=1e-5)
        theirs, ours = (x.mamba_pool.mamba_cache for x in (self.theirs_pool, self.pool))
        torch.testing.assert_close(ours.temporal, theirs.temporal, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(ours.conv[0], theirs.conv[0], atol=1e-6, rtol=0)


KINDS = pytest.mark.parametrize("kind", ["gdn", "kda"])


@KINDS
def test_prompts_in_chunks_mixed_passes_and_decode(kind):
    pair = Pair(kind)
    pair.check(pair.run(EXTEND, (3, 1, 7), (0, 0, 0), (100, 1, 37)))
    pair.check(pair.run(EXTEND, (3, 2), (100, 0), (64, 5)))
    pair.check(pair.run(MIXED, (3, 2, 1, 7), (164, 5, 1, 37), (70, 3, 1, 1)))
    for step in range(3):
        pair.check(pair.run(DECODE, (7, 3, 1), (38 + step, 234 + step, 2 + step), (1, 1, 1)))


@KINDS
def test_a_prefix_cache_finds_the_states_of_its_checkpoints(kind):
    pair = Pair(kind)
    keeps = {0: 21, 1: 22, 3: 23}  # inside a prompt, at its end; the third is too short
    pair.check(pair.run(EXTEND, (3, 1, 7, 2), (0, 64, 0, 0), (150, 128, 37, 70), keeps=keeps))
    pair.check(pair.run(DECODE, (3, 1), (150, 192), (1, 1), keeps={1: 20}))
    pool = pair.pool.mamba_pool  # a hit continues from a copy
    for one in (pool, pair.theirs_pool.mamba_pool):
        one.copy_from(torch.tensor([21]), torch.tensor([19]))
    for requests in (pair.pool, pair.theirs_pool):
        requests.req_index_to_mamba_index_mapping[4] = 19
    pair.check(pair.run(EXTEND, (4,), (128,), (30,)))


@KINDS
def test_padded_and_idle_passes(kind):
    pair = Pair(kind)
    pair.check(pair.run(DECODE, (3, 1, 0), (9, 4, 1), (1, 1, 1), padding=1))
    batch = el.a_pass(ForwardMode.IDLE, (), (), ())
    pair.ours.init_forward_metadata(batch)
    assert pair.ours._pass is None


def test_tokens_behind_the_real_ones_give_zeros():
    pair = Pair("gdn")
    batch = el.a_pass(EXTEND, (3, 1), (0, 9), (20, 6))
    pair.ours.init_forward_metadata(batch)
    inputs = [el.inputs("gdn", EXTEND, 33) for _ in pair.modules]
    outs = el.run(pair.ours, batch, pair.modules, inputs)
    assert outs[:, :26].abs().amax(-1).all()
    assert not outs[:, 26:].any()


def test_a_softmax_backend_of_ours_has_chosen_for_both():
    softmax, modules = attention(1), [el.module("gdn", 0)]
    more = {"speculative_num_draft_tokens": N, "get_attention_backends": lambda: ATTN}
    run = el.runner([softmax, *modules], el.pool("gdn", N, 2), **TREE, **more)
    run.token_to_kv_pool, run.page_size = mha_pool(layers=2), 1
    full = AttnCoreBackend(run)
    assert set(full.selection.roles) >= {"prefill", "verify", "linear_prefill", "linear_verify"}
    ours = LinearBackend(
        run, {0: to_linear_layer(modules[0]), 2: to_linear_layer(modules[0])}, full
    )
    assert ours.routes.routes["linear_verify"].config.num_draft_tokens == N
    pair = HybridBackend(full, ours, [1])
    assert pair.get_verify_buffers_to_fill_after_draft() == [None, None]
    full.init_cuda_graph_state(4, 4 * N)
    mask, _positions = pair.get_verify_buffers_to_fill_after_draft()
    assert mask.data_ptr() == full._static.tree_mask.data_ptr()


@KINDS
@pytest.mark.parametrize("accepted", [(4, 0, 2), (1, 3, 0)])
def test_a_chain_commits_what_was_accepted(kind, accepted):
    pair = Pair(kind, **CHAIN)
    assert pair.pool.mamba_pool.mamba_cache.intermediate_ssm is None
    pair.check(pair.run(VERIFY, (3, 1, 7), (17, 40, 1), (N, N, N)))
    pair.commit(torch.tensor(accepted))
    pair.check(pair.run(DECODE, (3, 1, 7), (17, 40, 1), (1, 1, 1)))


@KINDS
def test_a_tree_commits_the_path_to_what_was_accepted(kind):
    pair = Pair(kind, **TREE)
    pair.check(pair.run(VERIFY, (3, 1, 7), (17, 40, 1), (N, N, N), tree=links(PARENTS)))
    pair.commit(torch.tensor([3, 4, 2]))
    pair.check(pair.run(DECODE, (3, 1, 7), (17, 40, 1), (1, 1, 1)))


@KINDS
@pytest.mark.parametrize("topk", [1, 2])
def test_a_commit_keeps_a_state_for_the_prefix_cache(kind, topk):
    pair = Pair(kind, **(TREE if topk > 1 else CHAIN))
    tree = links(PARENTS) if topk > 1 else None
    pair.check(pair.run(VERIFY, (3, 1, 7), (17, 40, 1), (N, N, N), tree=tree))
    slots, steps = torch.tensor([21, 22, 23]), torch.tensor([1, -1, 0])
    pair.commit(torch.tensor([3, 4, 2]), slots, steps)
    pair.check()


def for_hopper(requirements, device):
    """Choose as on a GPU: the kernels run in Triton's interpreter here."""
    registry = load_plugins()
    libraries = registry.installed_libraries()
    requirements = dataclasses.replace(requirements, graphs=True)
    return select(requirements, parse_device("cuda:sm90"), registry, libraries), registry


@pytest.mark.parametrize("mode", ["decode", "chain", "tree"])
@KINDS
def test_captured_passes_are_refilled_in_place(kind, mode, monkeypatch):
    monkeypatch.setattr(linear, "choose", for_hopper)
    pair = Pair(kind, **{"decode": {}, "chain": CHAIN, "tree": TREE}[mode])
    ours, size = pair.ours, 4
    forward, new = (DECODE, 1) if mode == "decode" else (VERIFY, N)
    ours.init_cuda_graph_state(size, size * new)
    dummy = el.a_pass(forward, (0,) * size, (1,) * size, (new,) * size)
    ours.init_forward_metadata_out_graph(dummy, in_capture=True)
    inputs = [el.inputs(kind, forward, size * new) for _ in pair.modules]
    el.run(ours, dummy, pair.modules, copy.deepcopy(inputs))
    theirs, own = (x.mamba_pool.mamba_cache for x in (pair.theirs_pool, pair.pool))
    theirs.temporal.copy_(own.temporal)  # as the capture has left it
    theirs.conv[0].copy_(own.conv[0])
    for rows in ((3, 1, 7, 0), (2, 5, 0, 0)):
        padding = rows.count(0)
        tree = links([*PARENTS, PARENTS[0]]) if mode == "tree" else None
        shape = (forward, rows, (17, 40, 1, 1), (new,) * size)
        batch = el.a_pass(*shape, tree=tree, padding=padding)
        pair.theirs.init_forward_metadata(copy.deepcopy(batch))
        expected = el.run(pair.theirs, batch, pair.modules, copy.deepcopy(inputs))
        ours.init_forward_metadata_out_graph(batch)
        outs = el.run(ours, batch, pair.modules, copy.deepcopy(inputs))
        assert torch.isfinite(outs).all()
        real = (size - padding) * new
        pair.check((expected[:, :real], outs[:, :real]))
        if mode != "decode":
            pair.commit(torch.tensor([3, 4, 0, 2])[: size - padding])
            pair.check()


FAULTS = {
    "another request's slot": (
        "chain",
        "gdn",
        lambda m: m.setattr(linear, "LinearRoutes", Misplaced),
    ),
    "no parents": ("tree", "gdn", lambda m: m.setattr(linear_states, "fill_tree_mask", as_chain)),
    "one draft too few": ("chain", "gdn", lambda m: m.setattr(linear, "commit", one_less)),
    "a checkpoint a chunk late": (
        "prompt",
        "gdn",
        lambda m: m.setattr(linear, "checkpoint_slots", one_late),
    ),
    "two sigmoids": ("chain", "kda", lambda m: m.setattr(linear, "raw_gates", two_sigmoids)),
}


class Misplaced(linear.LinearRoutes):
    def plan(self, batch):
        return super().plan(dataclasses.replace(batch, state_slots=batch.state_slots.flip(0)))


def as_chain(children, siblings, masks):
    masks.copy_(torch.ones(N, N, dtype=torch.bool).tril())


def one_less(routes, batch, parts, states, accepted, *more):
    linear_states.commit(routes, batch, parts, states, accepted - 1, *more)


def one_late(batch, lens):
    return linear_passes.checkpoint_slots(batch, lens).roll(1)


def two_sigmoids(layer, a, b, dtype, *, decodes):
    return linear_layers.raw_gates(layer, a, b, dtype, decodes=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_planted_faults(fault, monkeypatch):
    name, kind, plant = FAULTS[fault]
    plant(monkeypatch)
    pair = Pair(kind, **{"prompt": {}, "chain": CHAIN, "tree": TREE}[name])
    if name == "prompt":
        outs = pair.run(EXTEND, (3, 1), (0, 0), (150, 70), keeps={0: 21, 1: 22})
    else:
        tree = links(PARENTS) if name == "tree" else None
        outs = pair.run(VERIFY, (3, 1, 7), (17, 40, 1), (N, N, N), tree=tree)
        pair.commit(torch.tensor([3, 4, 2]))
    with pytest.raises(AssertionError):
        pair.check(outs)


def test_the_kernels_of_trees_and_records_are_their_torch():
    children, siblings = links(PARENTS)
    expected = torch.zeros(3, N, N, dtype=torch.bool)
    draft_kernels.fill_tree_mask(children, siblings, expected)
    assert expected[1, 4].tolist() == [True, False, False, True, True]  # 4 comes after 3, 3 after 0
    found = torch.zeros(3, N, N, dtype=torch.uint8)
    draft_kernels._tree_kernel()[(3,)](children, siblings, found, N, N, N, BLOCK=8)
    assert found.bool().equal(expected)
    records = torch.randn(2, 9, 3, 5)
    slots, targets, taken = (torch.tensor(x, dtype=torch.int32) for x in
                             ([2, 4, -1], [7, 8, 6], [1, -1, 2]))  # fmt: skip
    kernel, expected = records.clone(), records.clone()
    expected[:, 7] = records[:, 2]
    draft_kernels.move_records((records,), slots, targets, taken)
    assert records.equal(expected)
    draft_kernels._move_kernel()[(3, 2)](
        kernel, slots, targets, taken, 15, kernel.stride(0), kernel.stride(1), BLOCK=8
    )
    assert kernel.equal(expected)


ATTN = ("attn_core", "attn_core")
SERVED = {
    "beside our attention": (ATTN, "triton", None, None, True),
    "another backend by name": (ATTN, "flashinfer", None, None, False),
    "SGLang's default by name": (ATTN, "triton", "triton", "triton", False),
    "beside other attention": (("fa3", "fa3"), "triton", None, None, False),
    "by name alone": (("fa3", "fa3"), "attn_core", None, None, True),
    "by name for each phase": (("fa3", "fa3"), "triton", "attn_core", "attn_core", True),
}


@pytest.mark.parametrize("case", SERVED)
def test_who_serves_linear_layers(case):
    attention, base, prefill, decode, served = SERVED[case]
    args = server_args(
        get_attention_backends=lambda: attention, linear_attn_backend=base,
        linear_attn_prefill_backend=prefill, linear_attn_decode_backend=decode,
    )  # fmt: skip
    assert serves_linear(args) is served


def test_what_is_not_served_is_refused_at_the_start(monkeypatch):
    modules, requests = [el.module("gdn", 0)], el.pool("gdn")

    def refused(text, modules=modules, **args):
        run = el.runner(modules, requests, **args)
        with pytest.raises(UnsupportedError, match=text):
            LinearBackend(run, served_layers(run), None)

    refused("for the two phases", linear_attn_decode_backend="cutedsl")
    refused("without GDN or KDA", [torch.nn.Linear(2, 2)])
    refused("enable-linear-replayssm", enable_linear_replayssm=True)
    draft = el.runner(modules, requests)
    draft.is_draft_worker = True
    assert served_layers(draft) == {}
    monkeypatch.setattr(server.importlib.metadata, "version", lambda name: "0.5.17")
    refused(r"SGLang 0\.5\.17")


def test_a_prefix_cache_needs_a_row_with_checkpoints(monkeypatch):
    modules = [el.module("gdn", 2 * i) for i in range(el.LAYERS)]
    run = el.runner(modules, el.pool("gdn"), enable_mamba_extra_buffer=lambda: True)
    layers = served_layers(run)
    LinearBackend(run, layers, None)
    choose = linear.choose

    def without(requirements, device):
        selection, registry = choose(requirements, device)
        roles = dict(selection.roles)
        row = dataclasses.replace(roles["linear_prefill"].row, checkpoints=False)
        roles["linear_prefill"] = dataclasses.replace(roles["linear_prefill"], row=row)
        return dataclasses.replace(selection, roles=roles), registry

    monkeypatch.setattr(linear, "choose", without)
    with pytest.raises(UnsupportedError, match="no_buffer"):
        LinearBackend(run, layers, None)


def test_a_verified_pass_is_decode_one_by_one():
    pair = Pair("gdn", **CHAIN)
    pool = copy.deepcopy(pair.pool)
    shape, inputs = ((3, 1), (17, 40)), [el.inputs("gdn", VERIFY, 2 * N) for _ in pair.modules]
    batch = el.a_pass(VERIFY, *shape, (N, N))
    pair.ours.init_forward_metadata(batch)
    verified = el.run(pair.ours, batch, pair.modules, copy.deepcopy(inputs))
    pair.pair.update_mamba_state_after_mtp_verify(torch.tensor([N - 1, N - 1]), None, None, None)
    run = el.runner(pair.modules, pool, **CHAIN, speculative_num_draft_tokens=N)
    one = LinearBackend(run, served_layers(run), None)
    for draft in range(N):
        batch = el.a_pass(DECODE, *shape, (1, 1))
        one.init_forward_metadata(batch)
        at = torch.tensor([draft, N + draft])
        out = el.run(one, batch, pair.modules, [tuple(x[at] for x in y) for y in inputs])
        torch.testing.assert_close(out, verified[:, at], atol=2e-5, rtol=1e-5)
    ours = pair.pool.mamba_pool.mamba_cache.temporal
    torch.testing.assert_close(pool.mamba_pool.mamba_cache.temporal, ours, atol=2e-5, rtol=1e-5)
