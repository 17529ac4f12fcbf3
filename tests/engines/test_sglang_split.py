"""Decode context parallelism in the adapter: two and three processes beside one, and a softmax.

Each process is a rank with SGLang's own group over gloo, its pool and its passes. All requests are
served from their first token on, so that what a pass writes is what the next ones read.
"""

import os
from contextlib import suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from attn_core import BatchError, UnsupportedError
from attn_core.integrations import choice
from attn_core.integrations.sglang import server, split_keys
from attn_core.integrations.sglang.backend import AttnCoreBackend
from attn_core.integrations.sglang.split_keys import SplitKeys, SplitPasses, check_heads
from engine_passes import Pass, attention, dense, mha_pool, mla_pool, runner, swa_pool
from interpreted import interpreted
from ranks import on_ranks
from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

HEADS, DIM = 12, 32  # of all ranks, over one KV head that is repeated on each
ROWS = (3, 1, 7, 5)
# tokens before a pass and new ones; after the first pass, ranks of three have no key of request 1
EXTEND, MIXED, DECODE = ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE
PASSES = (
    (EXTEND, (0, 0, 0, 0), (17, 1, 30, 2), 0),
    (EXTEND, (17, 1, 30, 2), (6, 1, 1, 20), 7),  # with a prefix, and rows of padding
    (DECODE, (23, 2, 31, 22), (1, 1, 1, 1), 0),
    (MIXED, (24, 3, 32, 23), (1, 9, 1, 1), 0),
    (DECODE, (25, 12, 33, 24), (1, 1, 1, 1), 0),
)


class Engine:
    """One rank: its backend, and the new tokens of each pass, alike on all ranks."""

    def __init__(self, rank, size, page, backend="torch_native"):
        named = {"PREFILL": "torch_native", "DECODE": backend}
        variables = {f"ATTN_{role}_ATTENTION_BACKEND": name for role, name in named.items()}
        torch.manual_seed(0)
        self.rank, self.size, self.heads = rank, size, HEADS // size
        self.module = attention(heads=self.heads, kv_heads=1, dim=DIM)
        pool = mha_pool(page=page, heads=1, dim=DIM)
        self.run = runner([self.module], pool, page * size, dcp_size=size)
        self.run.page_size = page
        self.run.model_config.get_total_num_kv_heads = lambda: 1
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch.object(choice, "load_plugins", interpreted),
        ):
            self.backend = AttnCoreBackend(self.run)

    def tokens(self, made, seed):
        """Return q [T, H, D] of this rank's heads and k, v [T, 1, D], with rows of padding."""
        rng = torch.Generator().manual_seed(seed)
        many = sum(made.new) + made.padding
        q, k, v = (torch.randn(50, n, DIM, generator=rng)[:many] for n in (HEADS, 1, 1))
        assert many == len(q)
        return q[:, self.rank * self.heads : (self.rank + 1) * self.heads], k, v

    def attend(self, made, batch, seed):
        q, k, v = self.tokens(made, seed)
        call = self.backend.forward_decode if made.mode is DECODE else self.backend.forward_extend
        return call(q.flatten(1), k, v, self.module, batch).view(len(q), self.heads, DIM)

    def serve(self):
        """Run the passes one after another."""
        found = []
        for seed, (mode, prefix, new, padding) in enumerate(PASSES):
            made = Pass(mode, ROWS, prefix, new, padding=padding)
            batch = made.batch(self.run)
            self.backend.init_forward_metadata(batch)
            if self.size > 1:  # without a mask, some of SGLang's models write keys themselves
                mine = batch.positions % self.size == self.rank
                assert batch.dcp_kv_mask.equal(mine)
            found.append(self.attend(made, batch, seed))
        return found

    def replay(self):
        """Run the decode passes in the static buffers, with one row of padding behind."""
        backend, found = self.backend, []
        backend.init_cuda_graph_state(8, 8)
        first = Pass(DECODE, (0,) * 5, (0,) * 5, (1,) * 5).batch(self.run)
        backend.init_forward_metadata_out_graph(first, in_capture=True)
        captured = backend.planned[0].views
        static = {name: (view.page_table, view.seq_lens) for name, view in captured.items()}
        for seed, (mode, prefix, new, _padding) in enumerate(PASSES):
            if mode is not DECODE:
                made = Pass(mode, ROWS, prefix, new)
                batch = made.batch(self.run)
                backend.init_forward_metadata(batch)
                self.attend(made, batch, seed)
                continue
            made = Pass(DECODE, (*ROWS, 0), (*prefix, 0), (*new, 1))
            batch = made.batch(self.run)
            batch.out_cache_loc = batch.out_cache_loc[:-1]  # SGLang does not pad these
            backend.init_forward_metadata_out_graph(batch)
            out = self.attend(made, batch, seed)
            for name, view in backend.planned[0].views.items():
                kept = (view.page_table.data_ptr(), view.seq_lens.data_ptr())
                assert kept == tuple(x.data_ptr() for x in static[name])
            found.append(out[:-1])
        return found


def as_rank(rank, size):
    """Make SGLang's groups of this process, all ranks sharing a request's keys."""
    group = parallel_state.init_model_parallel_group(
        [list(range(size))], rank, "gloo", use_pynccl=False, use_custom_allreduce=False,
        use_mscclpp_allreduce=False, use_torch_symm_mem_allreduce=False, group_name="dcp",
    )  # fmt: skip
    parallel_state._TP = parallel_state._DCP = group
    return get_parallel().override(attn_tp_size=size, dcp_group=group)


CASES = {
    2: [(1, "serve"), (16, "serve"), (1, "replay")],
    3: [(1, "serve"), (4, "serve"), (4, "replay")],
}


BACKENDS = {"serve": "torch_native", "replay": "triton"}  # the first is not captured


def every_case(rank, size):
    """Return case → what this rank has of each pass, the planted faults among them."""
    with as_rank(rank, size):
        found = {
            (page, what): getattr(Engine(rank, size, page, BACKENDS[what]), what)()
            for page, what in CASES[size]
        }
        for fault, (owner, name, broken) in FAULTS.items() if size == 2 else ():
            with mock.patch.object(owner, name, broken), suppress(BatchError):  # alike on all
                found[fault] = Engine(rank, size, 1).serve()
    return found


@pytest.fixture(scope="module")
def together():
    """Case → the outputs of each pass, of all heads; each process imports SGLang, for a while."""
    found = {}
    for size in CASES:
        ranks = on_ranks(size, every_case)
        for case in ranks[0]:
            parts = zip(*(rank[case] for rank in ranks), strict=True)
            found[size, case] = [torch.cat(each, 1) for each in parts]
    return found


def expected():
    """Return the dense softmax of each pass in float64, from the keys of the passes before."""
    engine = SimpleNamespace(rank=0, heads=HEADS)
    held, found = {row: [torch.empty(2, 0, 1, DIM)] for row in ROWS}, []
    for seed, (mode, prefix, new, padding) in enumerate(PASSES):
        made = Pass(mode, ROWS, prefix, new, padding=padding)
        q, k, v = Engine.tokens(engine, made, seed)
        parts, start = [], 0
        for i, row in enumerate(ROWS):
            own = slice(start, start + new[i])
            held[row].append(torch.stack([k[own], v[own]]))
            keys = torch.cat(held[row], 1)
            assert keys.shape[1] == prefix[i] + new[i]
            parts.append(dense(q[own], *keys, made.seen(i), DIM**-0.5))
            start += new[i]
        found.append(torch.cat([*parts, torch.zeros(padding, HEADS, DIM)]))
    return found


def apart(found, wanted):
    return max((x - y).abs().max().item() for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("size", "page"), [(2, 1), (2, 16), (3, 1), (3, 4)])
def test_ranks_that_share_keys_attend_as_one(together, size, page):
    found, alone = together[size, (page, "serve")], Engine(0, 1, page).serve()
    assert apart(alone, expected()) < 1e-5
    assert apart(found, expected()) < 1e-5
    assert apart(found, alone) < 1e-5


@pytest.mark.parametrize(("size", "page"), [(2, 1), (3, 4)])
def test_captured_passes_read_what_a_replay_brings(together, size, page):
    decode = [x for x, (mode, *_) in zip(expected(), PASSES, strict=True) if mode is DECODE]
    assert apart(together[size, (page, "replay")], decode) < 1e-5


def wrong_share(passes, tokens):
    """A rank has as many keys as the next one."""
    return (tokens + passes.rank) // passes.size


def all_tokens(passes, engine_batch, num_tokens, static=None):
    """A rank writes every token."""
    return engine_batch.out_cache_loc[:num_tokens].long() // passes.size


def in_base_2(outs, lses):
    """Merge as if the log-sum-exp was in base 2."""
    weights = torch.exp2(lses - lses.amax(0)).nan_to_num()
    weights = (weights / weights.sum(0))[..., None]
    return (outs * weights).sum(0), None


def prefix_with_new(passes, engine_batch, mode):
    """The new tokens of a prefill are among the keys before them; torch_native reads these."""
    lengths = super(SplitPasses, passes).lengths_host(engine_batch, mode)
    return tuple(map(passes.share, lengths))


def others_heads(keys, out, lse):
    """A rank keeps the heads of another one."""
    keys.group.rank_in_group = 1 - keys.group.rank_in_group
    try:
        return RIGHT_HEADS(keys, out, lse)
    finally:
        keys.group.rank_in_group = 1 - keys.group.rank_in_group


RIGHT_HEADS = SplitKeys._of_my_heads
FAULTS = {
    "the remainder of another rank": (SplitPasses, "share", wrong_share),
    "tokens of others written": (SplitPasses, "_window_slots", all_tokens),
    "own tokens in the prefix": (SplitPasses, "lengths_host", prefix_with_new),
    "base 2": (split_keys, "merge_states", in_base_2),
    "heads of another rank": (SplitKeys, "_of_my_heads", others_heads),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_planted_faults(together, fault):
    refused = (2, fault) not in together
    assert refused == (fault == "own tokens in the prefix"), "the device has other lengths"
    assert refused or apart(together[2, fault], expected()) > 1e-3


REFUSED = {
    "latents": (lambda: ([attention(kv_heads=1, dim=80, v_head_dim=64)], mla_pool()), "with MLA"),
    "windows": (
        lambda: ([attention(0, sliding_window_size=7), attention(1)], swa_pool()),
        "with sliding windows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_split_is_refused_by_name(name):
    make, text = REFUSED[name]
    run = runner(*make(), 1, dcp_size=2)
    with pytest.raises(UnsupportedError, match=rf"--dcp-size 2 {text}.*leave out --dcp-size"):
        AttnCoreBackend(run)


def test_other_releases_speculation_and_phases_are_refused(monkeypatch):
    args = {"dcp_size": 2, "speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4}
    with pytest.raises(UnsupportedError, match="--dcp-size 2 with speculation"):
        AttnCoreBackend(runner([attention()], mha_pool(), 1, **args))
    mixed = {"dcp_size": 2, "get_attention_backends": lambda: ("fa3", "attn_core")}
    with pytest.raises(UnsupportedError, match="another backend for one phase"):
        AttnCoreBackend(runner([attention()], mha_pool(), 1, **mixed))
    monkeypatch.setattr(server.importlib.metadata, "version", lambda name: "0.5.17")
    with pytest.raises(UnsupportedError, match=r"another SGLang than ==0\.5\.16"):
        AttnCoreBackend(runner([attention()], mha_pool(), 1, dcp_size=2))


@pytest.mark.parametrize(("heads", "ranks"), [(1, 2), (2, 4), (8, 16), (1, 4)])
def test_a_kv_head_on_all_ranks_is_served(heads, ranks):
    check_heads(2, heads, ranks)


@pytest.mark.parametrize(("heads", "ranks"), [(8, 2), (8, 8), (2, 2), (4, 4)])
def test_kv_heads_that_ranks_have_apart_are_refused(heads, ranks):
    with pytest.raises(UnsupportedError, match=f"choose --tp-size {heads * 2}"):
        check_heads(2, heads, ranks)


def test_keys_that_a_model_wrote_itself_are_refused():
    keys = SplitKeys({}, SimpleNamespace(world_size=2))
    with pytest.raises(UnsupportedError, match="writes its keys itself"):
        keys.forward(None, None, None, None, 3, None, None, None, None)
