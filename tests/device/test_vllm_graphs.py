"""Passes as vLLM pads them, in CUDA graphs over a cache as vLLM lays it out: no vLLM is needed."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from attn_core import HybridDispatcher, NoBackendError
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.integrations.choice import choose
from attn_core.integrations.vllm.layers import EnginePool, to_layer
from attn_core.integrations.vllm.passes import PassBuilder
from attn_core.ops.kv import write_kv
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from triton_passes import oracle

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
ROWS, COLUMNS, BLOCK, HEADS, KV_HEADS, DIM = 6, 40, 16, 16, 4, 128
LENGTHS = ((530, 17, 64, 5, 300, 2), (33, 610, 48, 100), (1, 636))  # less the new tokens


class Engine:
    """What vLLM keeps between passes: a cache, its blocks, and the tensors of a pass."""

    def __init__(self, stored, window):
        self.stored = stored
        blocks = ROWS * COLUMNS + 1
        shape = (2, blocks, BLOCK, KV_HEADS, DIM)
        cache = torch.zeros(shape, device=DEVICE, dtype=TORCH_DTYPES[stored])
        impl = SimpleNamespace(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=DIM, scale=DIM**-0.5, sinks=None,
            logits_soft_cap=None, sliding_window=window,
        )  # fmt: skip
        self.module = SimpleNamespace(
            layer_name="layer", impl=impl, kv_cache=cache.view(torch.uint8)
            if cache.dtype.itemsize == 1
            else cache, _k_scale_float=0.5, _v_scale_float=0.5,
        )  # fmt: skip
        self.layer = to_layer(0, self.module)
        self.pool = EnginePool({0: self.module}, BLOCK, stored, DEVICE)
        order = torch.randperm(blocks - 1, device=DEVICE).int() + 1
        self.own = order.view(ROWS, COLUMNS)
        self.table = torch.zeros(ROWS, COLUMNS, dtype=torch.int32, device=DEVICE)
        self.seq_lens = torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)

    def slots(self, row, first, last):
        at = torch.arange(first, last, device=DEVICE)
        return self.own[row, at // BLOCK].long() * BLOCK + at % BLOCK

    def common(self, queries, lengths):
        """Fill the tensors for requests of `lengths`, the rest of the rows as vLLM pads them."""
        padded = [*lengths, *[0] * (ROWS - len(lengths))]
        self.table.zero_()
        self.table[: len(lengths)] = self.own[: len(lengths)]
        self.seq_lens.copy_(torch.tensor(padded, dtype=torch.int32))
        starts = torch.tensor([0, *[queries] * len(lengths), *[0] * (ROWS - len(lengths))])
        starts = starts.cumsum(0).int()
        return SimpleNamespace(
            query_start_loc=starts.to(DEVICE), query_start_loc_cpu=starts, seq_lens=self.seq_lens,
            num_reqs=ROWS, num_actual_tokens=ROWS * queries, max_seq_len=max(lengths),
            block_table_tensor=self.table, positions=None,
            seq_lens_cpu_upper_bound=torch.tensor(padded),
        )  # fmt: skip


@contextmanager
def no_waiting():
    """Raise where the host waits for the device: each step of an engine would."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def passes_of(engine, drafts):
    requirements = Requirements(
        layers=(LayerRequirements.of(engine.layer),), dtype="bf16", kv_cache_dtype=engine.stored,
        page_size=BLOCK, graphs=True,
        speculation=Speculation(topk=1, num_draft_tokens=drafts, mode="decode") if drafts else None,
    )  # fmt: skip
    selection, registry = choose(requirements, DEVICE)

    def create():
        return HybridDispatcher.from_selection(
            selection, registry, (engine.layer,), engine.pool, max_bs=ROWS,
            max_seq_len=COLUMNS * BLOCK,
        )  # fmt: skip

    return PassBuilder(
        create, selection, device=DEVICE, page_size=BLOCK, drafts=drafts, max_bs=ROWS,
        max_num_tokens=64,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("stored", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("name", ["", "triton", "fa3", "flashinfer"])
def test_a_graph_replays_padded_passes_of_other_lengths(name, drafts, stored, window, monkeypatch):
    if name:
        monkeypatch.setenv("ATTN_DECODE_ATTENTION_BACKEND", name)
    torch.manual_seed(0)
    engine, queries = Engine(stored, window), drafts or 1
    try:
        passes = passes_of(engine, drafts)
        passes.dispatcher  # noqa: B018  # a library may be missing
    except NoBackendError as error:
        pytest.skip(str(error).splitlines()[0])
    tokens = ROWS * queries
    q = torch.randn(tokens, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(tokens, KV_HEADS, DIM, device=DEVICE).bfloat16() for _ in range(2))
    slots = torch.full((tokens,), -1, device=DEVICE)
    out = torch.zeros_like(q)
    cache = engine.pool.layer(0)
    part = passes.capture(engine.common(queries, [queries] * ROWS))

    def step():
        write_kv(cache, k, v, slots)
        passes.dispatcher.forward(q, None, None, engine.layer, part.batch, part.plan, out=out)

    step()  # warms up what the graph is to hold
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for prefixes in LENGTHS:
        lengths = [n + queries for n in prefixes]
        stale = cache.k.clone()
        common = engine.common(queries, lengths)
        # lengths of drafts that the host has to know are read from the device
        with nullcontext() if drafts and passes.host_lengths else no_waiting():
            again = passes.even(common, ROWS, tokens)
        assert again.plan is part.plan
        slots.fill_(-1)
        for row, n in enumerate(prefixes):
            new = slice(row * queries, (row + 1) * queries)
            slots[new] = engine.slots(row, n, n + queries)
            prefix = torch.randn(2, n, KV_HEADS, DIM, device=DEVICE)
            write_kv(cache, *prefix.bfloat16(), engine.slots(row, 0, n))
        q.normal_(), k.normal_(), v.normal_()
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(cache.k[0].view(torch.uint8), stale[0].view(torch.uint8))  # block 0
        for row, n in enumerate(lengths):
            at = engine.slots(row, 0, n)
            keys, values = (
                x.view(-1, KV_HEADS, DIM).float()[at] * (0.5 if x.dtype.itemsize == 1 else 1.0)
                for x in (cache.k, cache.v)
            )
            own = torch.arange(n - queries, n, device=DEVICE)[:, None]
            j = torch.arange(n, device=DEVICE)[None]
            seen = (j <= own) & (j > own - (window or n + 1))
            rows = slice(row * queries, (row + 1) * queries)
            want, _lse = oracle(engine.layer, q[rows], keys, values, seen)
            error = (out[rows].double() - want).norm() / want.norm()
            # FP8 kernels round the queries or the weights to FP8, too
            assert error < (6e-3 if stored == "bf16" else 5e-2), (row, n, float(error))
