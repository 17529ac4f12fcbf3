"""What the host does in a call of sparse MLA: repeated launches and torch's operators, counted.

Kernels are not run: each launch is compared with what Triton would compile for its arguments.
"""

import collections
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from attn_core.backends.rows_sparse import triton_sparse
from attn_core.cache.pool import KVPool
from attn_core.errors import BatchError
from attn_core.runtime.backend import BackendConfig
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from attn_core.backends.triton.sparse import hopper, passes
from attn_core.backends.triton.sparse.backend import TritonSparse
from attn_core.ops import index, kv
from attn_core.ops.triton import merge
from forms import FORMS, shifted, spread
from frozen_launches import recorded_launches
from operators import Operators
from threads import at_once

HEADS, TOPK, PAGE, LONG = 128, 2048, 64, 65536
PACKED = "fp8_e4m3"


@pytest.fixture
def launches(monkeypatch):
    """Let tensors of the host count as a GPU's: caches are written by kernels too."""
    for module in (kv, index):
        module._writer.cache_clear()
        monkeypatch.setattr(module, "has_triton", lambda device: True)
    with torch.no_grad(), recorded_launches() as found:
        yield found
    for module in (kv, index):
        module._writer.cache_clear()


class Chain:
    """A layer of sparse MLA over a pool, and its calls in a pass of `queries` a request."""

    def __init__(self, store="bf16", *, requests=3, queries=1, length=LONG, portable=False):
        self.layer = AttentionLayer(
            layer_id=0, num_q_heads=HEADS, num_kv_heads=1, head_dim=576, v_head_dim=512,
            scale=0.07, index_topk=TOPK,
        )  # fmt: skip
        self.pool = KVPool(
            [self.layer], num_pages=8, page_size=PAGE, kv_cache_dtype=store, kind="dsa",
            index_dim=128, index_dtype="fp8_e4m3",
        )  # fmt: skip
        config = BackendConfig(
            name="triton", row=triton_sparse()[0], layers=(self.layer,), page_size=PAGE,
            dtype="bf16", kv_cache_dtype=store, device=torch.device("cpu"), arch="sm90",
            multiprocessors=132, topk=1, num_draft_tokens=queries,
        )  # fmt: skip
        self.backend = TritonSparse(config)
        self.backend._hopper = None if portable else hopper
        routes = dict.fromkeys(("prefill", "decode", "verify"), self.backend)
        self.dispatcher = HybridDispatcher(routes, self.pool)
        self.plan(requests, queries, length)

    def plan(self, requests, queries=1, length=LONG):
        """Plan a pass of so many requests, and draw its inputs."""
        tokens = requests * queries
        mode = ForwardMode.DECODE if queries == 1 else ForwardMode.TARGET_VERIFY
        view = CacheView(
            page_table=torch.zeros(requests, length // PAGE, dtype=torch.int32),
            seq_lens=torch.full((requests,), length, dtype=torch.int32),
            out_cache_loc=torch.arange(tokens),
            max_seq_len=length,
        )
        self.batch = ForwardBatch(
            forward_mode=mode,
            cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32) * queries,
            positions=torch.arange(tokens),
            max_q_len=queries,
            views={"full": view},
            spec=None if queries == 1 else SpecInfo(topk=1, num_draft_tokens=queries),
        )
        self.metadata = self.dispatcher.init_forward_metadata(self.batch)
        self.q = torch.zeros(tokens, HEADS, 576, dtype=torch.bfloat16)
        self.k = torch.zeros(tokens, 1, 576, dtype=torch.bfloat16)
        self.q_index = torch.zeros(tokens, 64, 128, dtype=torch.float8_e4m3fn)
        self.k_index = torch.zeros(tokens, 128, dtype=torch.bfloat16)
        self.weights = torch.zeros(tokens, 64)

    def select(self, **changes):
        """Write index keys and select."""
        x = SimpleNamespace(**{"together": False, **vars(self), **changes})
        index = (x.q_index, x.k_index, x.weights)
        written = {"k": x.k} if x.together else {}
        return self.dispatcher.index_topk(*index, self.layer, self.batch, x.metadata, **written)

    def attend(self, chosen, **changes):
        """Write latents and attend to a selection."""
        x = SimpleNamespace(**{"out": None, "return_lse": False, **vars(self), **changes})
        return self.dispatcher.forward(
            x.q, x.k, None, self.layer, self.batch, x.metadata,
            out=x.out, return_lse=x.return_lse, topk_indices=chosen,
        )  # fmt: skip


SELECTED = ["write_index_rows", "index_scores", "select_topk"]
ATTENDED = {
    "bf16": ["_write", "count_slots", "decode_mla_hopper", "_merge"],
    PACKED: ["write_latent", "decode_selected", "decode_mla_hopper", "_merge"],
    "portable": ["_write", "attend_selected", "_merge"],
}


SCRATCH = {"bf16": 2, PACKED: 4, "portable": 2}  # tensors, those of cut selections included


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("way", ATTENDED)
def test_a_chain_of_sparse_mla_is_launched_again(way, queries, launches):
    """Neither Triton binds arguments again, nor does torch run an operator but for new tensors."""
    chain = Chain("bf16" if way == "portable" else way, queries=queries, portable=way == "portable")
    chosen = chain.select()
    chain.attend(chosen)
    assert launches.names(slow=True) == SELECTED + ATTENDED[way]
    for requests in (3, 4):  # another size is no other kernel
        chain.plan(requests, queries)
        with Operators() as ran:
            chosen = chain.select()
        assert launches.names(slow=False) == SELECTED
        assert ran.names == ["new_empty", "empty", "empty"], "the selection, scores, candidates"
        with Operators() as ran:
            chain.select()
        assert launches.names(slow=False) == SELECTED
        assert ran.names == ["new_empty"], "layers of a pass share their scratch"
        with Operators() as ran:
            chain.attend(chosen)
        assert launches.names(slow=False) == ATTENDED[way]
        assert ran.names[0] == "new_empty", "the output"
        assert ran.names[1:] == ["empty"] * SCRATCH[way]
        with Operators() as ran:
            chain.attend(chosen)
        assert launches.names(slow=False) == ATTENDED[way]
        assert ran.names == ["new_empty"], "layers of a pass share their scratch"


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("way", ATTENDED)
def test_latents_and_index_keys_are_written_at_once(way, queries, launches):
    """index_topk is given both; attention then writes nothing."""
    chain = Chain("bf16" if way == "portable" else way, queries=queries, portable=way == "portable")
    cache = chain.pool.layer(0)
    for requests in (3, 3, 4):
        chain.plan(requests, queries)
        for _ in range(3):
            launches.clear()
            with Operators() as ran:
                chain.attend(chain.select(together=True), k=None)
            assert [x.name for x in launches] == ["write_both", *SELECTED[1:], *ATTENDED[way][1:]]
            given = {chain.k.data_ptr(), chain.k_index.data_ptr(), cache.k.data_ptr()}
            assert given <= launches[0].addresses
            assert cache.index.data_ptr() in launches[0].addresses
        assert ran.names == ["new_empty"] * 2, "the selection and the output"
        assert not any(x.slow for x in launches)
    for form in FORMS:
        for name in ("k", "k_index"):
            for _ in range(2):
                chain.select(together=True, **{name: form(getattr(chain, name))})
                chain.select(together=True)


@pytest.mark.parametrize("way", ATTENDED)
def test_a_graph_keeps_no_scratch_between_layers(way, launches):
    """Layers of all graphs share one pool of memory, which what a plan held would grow."""
    chain = Chain("bf16" if way == "portable" else way, portable=way == "portable")
    chain.dispatcher.init_cuda_graph_state(8, 8)
    chain.metadata = chain.dispatcher.init_forward_metadata_capture_cuda_graph(chain.batch)
    for _ in range(2):
        with Operators() as ran:
            chain.attend(chain.select())
        made = [x for x in ran.names if x in ("empty", "new_empty")]
        assert len(made) == 3 + 1 + SCRATCH[way]


@pytest.mark.parametrize("count", [2, 8])
def test_slots_that_are_not_those_of_the_tokens_are_refused_after_a_pass_that_fits(launches, count):
    """The launch that writes index keys has a row for each slot."""
    chain = Chain()
    chain.select()
    chain.plan(3)
    view = dataclasses.replace(chain.batch.views["full"], out_cache_loc=torch.arange(count))
    chain.batch = dataclasses.replace(chain.batch, views={"full": view})
    before = len(launches)
    with pytest.raises(BatchError, match=f"{count} slots for the 3 tokens"):
        chain.select()
    assert len(launches) == before


def test_pages_of_a_prompt_are_decoded_by_kernels(launches):
    """Where a pass has fewer tokens than it selects, all its FP8 pages are decoded."""
    chain = Chain(PACKED, queries=4, length=4096)
    chosen = chain.select()
    chain.attend(chosen)
    attended = ["decode_pages", "place_slots", "decode_mla_hopper"]
    assert [x for x in launches.names(slow=True) if x in attended] == attended
    with Operators() as ran:
        chain.attend(chosen)
    assert [x for x in launches.names(slow=False) if x in attended] == attended
    assert ran.names == ["new_empty"], "layers of a pass share their scratch"
    cache = chain.pool.layer(0)
    moved = torch.zeros_like(cache.k)
    cache.k.set_(moved)
    chain.attend(chosen)
    assert sum(moved.data_ptr() in x.addresses for x in launches) == 2, (
        "the write, and what decodes"
    )


def test_scratch_that_is_large_is_not_kept(launches, monkeypatch):
    chain = Chain(PACKED)
    chain.attend(chain.select())
    inputs = chain.metadata.views["full"].inputs
    assert len(inputs.kept) == 2
    monkeypatch.setattr(passes, "MOST_KEPT", 1 << 10)
    chain.plan(3)
    chain.attend(chain.select())
    assert chain.metadata.views["full"].inputs.kept == {}


@pytest.mark.parametrize("way", ATTENDED)
def test_other_forms_of_inputs_are_other_launches(way, launches):
    """Each launch is one that Triton would have compiled alike, whatever came before it."""
    chain = Chain("bf16" if way == "portable" else way, portable=way == "portable")
    usual = chain.select()
    chain.attend(usual)
    for form in FORMS:
        for name in ("q_index", "weights"):
            chain.select(**{name: form(getattr(chain, name))})
        chain.attend(usual, q=form(chain.q))
        k, k_index = form(chain.k), form(chain.k_index)
        chain.attend(usual, k=k)
        chain.select(k_index=k_index)
        write = "write_latent" if way == PACKED else "_write"
        for name, new in ((write, k), ("write_index_rows", k_index)):
            written = [x for x in launches if x.name == name][-1]
            assert {new.data_ptr(), new.stride(0)} <= written.addresses
        chain.attend(form(usual))
        out = torch.zeros(3, HEADS, 512, dtype=torch.bfloat16)
        chain.attend(usual, out=form(out), return_lse=True)
        chain.backend.forward(  # as an engine without a dispatcher calls it
            chain.q, None, None, chain.layer, chain.pool.layer(0), chain.batch, chain.metadata,
            out=form(out), topk_indices=usual,
        )  # fmt: skip
        for _ in range(2):  # what was last is another form
            chain.select()
            chain.attend(usual)
            chain.attend(usual, out=form(out))
            chain.attend(usual, out=out)
    chain.select(q_index=chain.q_index.to(torch.bfloat16))
    chain.attend(usual, k=chain.k.float())
    chain.attend(usual[:, :1024].contiguous())
    if way == "portable":
        chain.q = chain.q.half()
        chain.attend(usual)
    seen = len(launches)
    for length, requests in ((1024, 1), (LONG, 1), (LONG, 16), (LONG, 200)):
        chain.plan(requests, 1, length)
        chain.attend(chain.select())
    assert len(launches) >= seen + 4 * 4


def test_other_pages_and_lengths_are_other_launches(launches):
    """The plan's tensors may lie anywhere, as those of a static batch do."""
    chain = Chain()
    chain.attend(chain.select())
    batch, view = chain.batch, chain.batch.views["full"]
    for form in (shifted, spread):
        tables = {"page_table": form(view.page_table)}
        others = {} if form is spread else {"seq_lens": form(view.seq_lens)}
        changed = dataclasses.replace(view, **tables, **others)
        chain.batch = dataclasses.replace(
            batch, views={"full": changed}, cu_seqlens_q=shifted(batch.cu_seqlens_q, 3)
        )
        chain.metadata = chain.dispatcher.init_forward_metadata(chain.batch)
        launches.clear()
        chain.attend(chain.select())
        assert {"index_scores", "select_topk"} <= {*launches.names(slow=True)}
    chain.batch = batch
    chain.metadata = chain.dispatcher.init_forward_metadata(batch)
    chain.attend(chain.select())
    assert launches.names(slow=True) == []


@pytest.mark.parametrize("way", ATTENDED)
def test_a_pool_that_moved_is_read_where_it_lies(way, launches):
    """What is kept holds addresses; an engine may put a pool elsewhere between two passes."""
    chain = Chain("bf16" if way == "portable" else way, portable=way == "portable")
    cache = chain.pool.layer(0)
    for together in (False, True):
        for pool in (cache.k, cache.index):
            for _ in range(3):  # what is made again knows nothing of the first time's addresses
                chain.attend(chain.select(together=together))
            before, held = pool.data_ptr(), pool.view_as(pool)  # so that nothing else lies there
            pool.set_(torch.zeros_like(pool))
            for _ in range(3):
                launches.clear()
                chain.attend(chain.select(together=together))
                given = {address for x in launches for address in x.addresses}
                assert before not in given, held
                assert pool.data_ptr() in given


def test_each_launch_is_queued_on_the_current_stream(launches):
    chain = Chain()
    for _ in range(3):
        chain.attend(chain.select())
    for device, stream in ((0, 0), (0, 7), (0, 0)):
        launches.clear()
        launches.driver.device, launches.driver.stream = device, stream
        chain.attend(chain.select())
        assert {x.stream for x in launches} == {1000 * (device + 1) + stream}


def test_devices_have_launchers_of_their_own(launches, monkeypatch):
    """A compiled kernel is loaded on one device: another one may not launch its function."""
    monkeypatch.setattr(merge, "_LAUNCHERS", {})
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: launches.driver.device)
    out, lse = torch.zeros(2, 3, HEADS, 512), torch.zeros(2, 3, HEADS)
    for launches.driver.device, slow in ((0, ["_merge"]), (1, ["_merge"]), (0, []), (1, [])):
        merge.merge_states(out, lse)
        streams = {x.stream for x in launches}
        assert launches.names(slow=True) == slow
        assert streams == {1000 * (launches.driver.device + 1)}
    first, second = Chain(), Chain()
    assert first.backend._launchers is not second.backend._launchers


def test_threads_share_a_backend(launches):
    """Each has a plan, so its own scratch; what two make at once is made twice, no more."""
    chain = Chain()
    plans = [chain.dispatcher.init_forward_metadata(chain.batch) for _ in range(4)]

    def passes(thread):
        for _ in range(20):
            chain.attend(chain.select(metadata=plans[thread]), metadata=plans[thread])

    at_once(passes)
    expected = collections.Counter(SELECTED + ATTENDED["bf16"])
    assert collections.Counter(x.name for x in launches) == dict.fromkeys(expected, 80)
    assert all(n <= 4 for n in collections.Counter(x.name for x in launches if x.slow).values())
