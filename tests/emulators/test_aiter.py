"""aiter's MHA over emulated AITER: the suite, both of its versions, what would fail."""

import dataclasses
import functools
import importlib
import inspect
import math
import sys
import types

import pytest
import torch
from attn_core import ScaleTensors, workspace
from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import BackendError
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.case_catalog import RELATED
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.passes import attend, compare, create, prepared
from attn_core.testing.plan import plan
from attn_core.testing.replay import replayed
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from attn_rocm.aiter import library, paged, unified
from attn_rocm.page_list import CapturedLists, PageList, num_pages

AITER = {"amd-aiter": "0.1.7.post2.dev18"}
CPU = torch.device("cpu")


class TestAiter(BackendSuite):
    name = "aiter"
    kinds = ("mha",)
    device = "rocm:gfx942"
    on = "cpu"
    libraries = AITER
    passes = 20
    reduced = True


@pytest.mark.long
class TestWhole(TestAiter):
    """Every point of every case, as the evidence counts them."""

    passes = 60
    reduced = False


@pytest.mark.long  # the same wrapper again
class TestMI350(TestWhole):
    device = "rocm:gfx950"
    passes = 20


@pytest.mark.long
class TestMI200(TestMI350):
    device = "rocm:gfx90a"


def spec():
    return load_plugins().get("aiter")


def checks(*wanted):
    """List the checks whose name begins with one of `wanted`."""
    result = plan(spec(), parse_device("rocm:gfx942"), AITER, kinds=("mha",), passes=10)
    requested = [p for p in result if p.row and p.check.id.startswith(wanted)]
    assert requested
    return requested


def row(create):
    return next(r for r in spec().capabilities if r.create == f"attn_rocm.aiter.{create}")


# the versions of AITER


def with_parameters(function, *more):
    """Give a function the parameters that a later version adds at its end."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        assert not args, "parameters have other places in other versions"
        return function(**kwargs)

    signature = inspect.signature(function)
    added = [inspect.Parameter(p, inspect.Parameter.KEYWORD_ONLY, default=None) for p in more]
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])
    return call


def test_the_main_branch_is_served(vendor, monkeypatch):
    """Its Triton functions have moved, and functions have more parameters; no place is relied on.

    ROCm/aiter at e4048607 (August 2026).
    """
    import aiter

    prefill = ("kv_last_page_lens", "block_table", "seqlen_k", "q_descale", "sink_ptr")
    wider = with_parameters(aiter.mha_batch_prefill_func, *prefill)
    monkeypatch.setattr(aiter, "mha_batch_prefill_func", wider)
    for name in ("unified_attention", "extend_attention"):
        there = importlib.import_module(f"aiter.ops.triton.{name}")
        moved = types.ModuleType(f"aiter.ops.triton.attention.{name}")
        for member, value in vars(there).items():
            if member in ("unified_attention", "extend_attention_fwd"):
                setattr(moved, member, with_parameters(value, "q_scales", "skip_reduce"))
        monkeypatch.setitem(sys.modules, moved.__name__, moved)
        monkeypatch.setitem(sys.modules, f"aiter.ops.triton.{name}", None)
    monkeypatch.setitem(
        sys.modules, "aiter.ops.triton.attention", types.ModuleType("aiter.ops.triton.attention")
    )
    requested = checks("mixed-bf16-page16", "window-4-bf16-page16", "verify-tree-bf16-page1")
    for planned in [p for p in requested if p.check.layout == "NHD"][:6]:
        run_check(planned, spec(), CPU, arch="gfx942")


def test_another_project_of_the_same_module_name_is_named(vendor, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter"))
    with pytest.raises(BackendError, match=r"unrelated project .* pip uninstall aiter"):
        library.function("mha_batch_prefill_func", paged.PREFILL)


def test_a_version_with_other_parameters_is_named(vendor, monkeypatch):
    import aiter

    monkeypatch.setattr(aiter, "paged_attention_ragged", lambda out, query: None)
    with pytest.raises(BackendError, match=r"no parameter workspace_buffer, .*\(it has out, query"):
        library.function("paged_attention_ragged", paged.DECODE)


def test_a_version_without_the_triton_kernels_is_named(vendor):
    with pytest.raises(BackendError, match="no gone_attention in"):
        library.triton_function("gone_attention", ())


# lists of pages


def view_of(lengths, page_size, *, host=True):
    pages = [-(-n // page_size) for n in lengths]
    ids = iter(torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).tolist())
    table = torch.zeros(len(lengths), max(pages) + 2, dtype=torch.int32)
    for b, count in enumerate(pages):
        table[b, :count] = torch.tensor([next(ids) for _ in range(count)])
    view = CacheView.build(
        page_table=table, page_size=page_size, seq_lens=lengths, new_lens=[0] * len(lengths)
    )
    return view if host else dataclasses.replace(view, seq_lens_host=None)


@pytest.mark.parametrize("gap", [0, 256])
@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize(("page_size", "kernel_page"), [(1, 1), (16, 1), (16, 16), (64, 32)])
def test_a_page_list(page_size, kernel_page, host, gap):
    lengths = (70, 0, 1, 33, 64)
    view = view_of(lengths, page_size, host=host)
    size = num_pages(view, kernel_page) + gap * len(lengths)
    pages = PageList.of(view, page_size, kernel_page, size, spare=gap)
    assert pages.indices.shape == (size,)
    parts = page_size // kernel_page
    starts = pages.indptr.tolist()
    for b, n in enumerate(lengths):
        count = -(-n // kernel_page)
        right = [int(view.page_table[b, j // parts]) * parts + j % parts for j in range(count)]
        at = starts[2 * b if gap else b]
        assert pages.indices[at : at + count].tolist() == right
        after = starts[2 * b + 1] if gap else starts[b + 1]
        assert after == at + count
        assert int(pages.last_page_len[b]) == (n - (count - 1) * kernel_page if n else 0)
        if gap and n:
            assert set(pages.indices[after : after + gap].tolist()) == {right[-1]}
    assert all(t.dtype == torch.int32 for t in (pages.indptr, pages.indices, pages.last_page_len))


# what the suite asks on one page size alone


@pytest.mark.parametrize("create", ["paged:AiterPaged", "unified:AiterUnified"])
@pytest.mark.parametrize("case", ["decode", "chain"])
@pytest.mark.parametrize("page_size", [32, 128])
def test_replays_over_other_pages(create, case, page_size):
    bench = Bench(spec=spec(), row=row(create), torch_device=CPU, arch="gfx942")
    replayed(bench, RELATED["mha"][case], Point(dtype="bf16", page_size=page_size))


def test_replays_of_trees():
    tree = next(r for r in spec().capabilities if r.max_verify_topk > 1)
    bench = Bench(spec=spec(), row=tree, torch_device=CPU, arch="gfx942")
    replayed(bench, RELATED["mha"]["tree"], Point(dtype="bf16", page_size=1))


def test_a_layer_without_causal_order_sees_every_draft_of_a_tree():
    tree = next(r for r in spec().capabilities if r.max_verify_topk > 1)
    bench = Bench(spec=spec(), row=tree, torch_device=CPU, arch="gfx942")
    case = dataclasses.replace(RELATED["mha"]["tree"], is_causal=False)
    point = Point(dtype="bf16", page_size=1)
    inputs, right = prepared(bench, case, point)
    actual = attend(create(bench, case, inputs, point), inputs)
    compare(actual, right, inputs.real_tokens, torch.bfloat16, "output")


def capture_of(lengths):
    return ForwardBatch.build(
        ForwardMode.DECODE,
        query_lens=[1] * len(lengths),
        seq_lens=lengths,
        page_table=view_of(lengths, 16).page_table,
        page_size=16,
    )


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_steps_of_one_graph_are_all_refilled_before_it_runs(kind, vendor):
    """As the draft steps of speculation: each has its own pages, though their sizes are equal."""
    result = next(r for r in spec().capabilities if r.kind == kind and r.absorbed)
    shape = {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
    if kind == "mha":
        shape |= {"head_dim": 64, "v_head_dim": 64}
    layer = AttentionLayer(layer_id=0, scale=0.1, **shape)
    bench = Bench(spec=spec(), row=result, torch_device=CPU, arch="gfx942")
    backend = bench.create([layer], dtype="bf16", page_size=1)
    rng = torch.Generator().manual_seed(0)
    table = torch.randperm(60, generator=rng).view(3, 20).int()
    k, v = (torch.randn(60, 1, 1, x, generator=rng).bfloat16() for x in (layer.head_dim, 64))
    cache = LayerCache(k=k, v=v if kind == "mha" else None)
    q = torch.randn(3, 16, layer.head_dim, generator=rng).bfloat16()

    def decode(lengths):
        return ForwardBatch.build(
            ForwardMode.DECODE, query_lens=[1] * 3, seq_lens=lengths, page_table=table, page_size=1
        )

    def longest(batch):
        view = dataclasses.replace(batch.views["full"], max_seq_len=20)
        return dataclasses.replace(batch, views={"full": view})

    steps = [longest(decode([5 + i, 9 + i, 3 + i])) for i in range(3)]
    plans = [backend.init_forward_metadata_capture_cuda_graph(step) for step in steps]
    for step, lengths in zip(steps, ([7, 1, 4], [8, 2, 5], [9, 3, 6]), strict=True):
        step.views["full"].seq_lens.copy_(torch.tensor(lengths))
    for step, made in zip(steps, plans, strict=True):
        backend.init_forward_metadata_replay_cuda_graph(step, made)
    for i, (step, made) in enumerate(zip(steps, plans, strict=True)):
        eager = decode([7 + i, 1 + i, 4 + i])
        want = backend.forward(
            q, None, None, layer, cache, eager, backend.init_forward_metadata(eager)
        )
        actual = backend.forward(q, None, None, layer, cache, step, made)
        torch.testing.assert_close(actual, want, rtol=1e-2, atol=1e-2)


def test_captures_of_all_sizes_share_their_memory():
    lists, at = CapturedLists(), []
    for lengths in ((90,), (33, 7)):
        pages = PageList.of(view_of(lengths, 16), 16, 16, 8)
        at.append(lists.place(pages, "full", capture_of(lengths)))
    assert at[0].indices.data_ptr() == at[1].indices.data_ptr()
    small, large = (workspace(CPU, "test decode", n) for n in (100, 1000))
    assert small.numel() == 100
    assert workspace(CPU, "test decode", 10) is large
    assert workspace(CPU, "another use", 10) is not large


# mistakes


def _window_of(change):
    def mistake(monkeypatch):
        monkeypatch.setattr(
            unified, "window_of", lambda w: (-1, -1) if w is None else (w - 1 + change, 0)
        )

    return mistake


def _another_layout(monkeypatch):
    real = paged.AiterPaged._paged

    def heads_first(self, layer, cache, page):
        views = real(self, layer, cache, page)
        return tuple(x.transpose(-1, -2).reshape(x.shape) for x in views)

    monkeypatch.setattr(paged.AiterPaged, "_paged", heads_first)


def _no_offset_within_a_pool_page(monkeypatch):
    real = PageList.of.__func__

    def pages(cls, view, page_size, kernel_page, size, **more):
        listed = real(cls, view, page_size, kernel_page, size, **more)
        listed.indices.div_(page_size // kernel_page, rounding_mode="floor")
        return listed

    monkeypatch.setattr(PageList, "of", classmethod(pages))


def _full_last_pages(monkeypatch):
    real = PageList.of.__func__

    def pages(cls, view, page_size, kernel_page, size, **more):
        listed = real(cls, view, page_size, kernel_page, size, **more)
        listed.last_page_len.fill_(kernel_page)
        return listed

    monkeypatch.setattr(PageList, "of", classmethod(pages))


def _no_gap(monkeypatch):
    monkeypatch.setattr(paged, "LOOK_AHEAD", 1)


def _scale_of_the_head_dim(monkeypatch):
    real = paged.AiterPaged.__init__

    def init(self, config):
        real(self, config)
        prefill, decode = self._prefill, self._decode
        self._prefill = lambda **kwargs: prefill(**kwargs | {"softmax_scale": 64**-0.5})
        self._decode = lambda **kwargs: decode(**kwargs | {"scale": 64**-0.5})

    monkeypatch.setattr(paged.AiterPaged, "__init__", init)


def _cumulative_lengths(monkeypatch):
    real = unified.AiterUnified.init_forward_metadata

    def cumulative(view):
        total = view.seq_lens.cumsum(0, dtype=torch.int32).clamp_(max=view.max_seq_len)
        return dataclasses.replace(view, seq_lens=total, seq_lens_host=None)

    def plans(self, batch):
        result = real(self, batch)
        return {n: unified.Plan(cumulative(x.view), x.table) for n, x in result.items()}

    monkeypatch.setattr(unified.AiterUnified, "init_forward_metadata", plans)


def _lse(change):
    def mistake(monkeypatch):
        real = paged.AiterPaged.forward

        def forward(self, *args, **more):
            result = real(self, *args, **more)
            return (result[0], change(result[1])) if isinstance(result, tuple) else result

        monkeypatch.setattr(paged.AiterPaged, "forward", forward)

    return mistake


def _scales_ignored(monkeypatch):
    monkeypatch.setattr(ScaleTensors, "of", lambda self, scale: torch.ones(1))


def _stale_lists(monkeypatch):
    for backend in (paged.AiterPaged, unified.AiterUnified):
        monkeypatch.setattr(backend, "init_forward_metadata_replay_cuda_graph", lambda *a: None)


def _causal_trees(monkeypatch):
    real = paged.AiterPaged._verified

    def verified(self, tree, *args):
        tree.mask.fill_(True)
        return real(self, tree, *args)

    monkeypatch.setattr(paged.AiterPaged, "_verified", verified)


MISTAKES = {
    "a window of one token more": (_window_of(1), ("window-4-bf16", "window-decode-bf16")),
    "a window of one token less": (_window_of(-1), ("window-4-bf16", "window-decode-bf16")),
    "another layout": (_another_layout, ("prefill-prefix-bf16", "decode-edges-bf16")),
    "no offset within a page": (_no_offset_within_a_pool_page, ("prefill-prefix-bf16-page64",)),
    "full last pages": (_full_last_pages, ("decode-edges-bf16-page16",)),
    "no gap": (_no_gap, ("prefill-padded-bf16", "mixed-bf16")),
    "the head dim's scale": (_scale_of_the_head_dim, ("scale-large-bf16", "scale-small-bf16")),
    "cumulative lengths": (_cumulative_lengths, ("window-4-bf16-page16", "sinks-bf16-page16")),
    "LSE to base 2": (_lse(lambda x: x / math.log(2)), ("lse-whole", "lse-decode")),
    "transposed LSE": (_lse(lambda x: x.T.reshape(x.shape)), ("lse-whole", "lse-decode")),
    "scales ignored": (_scales_ignored, ("fp8-e4m3-scaled-bf16",)),
    "stale lists": (_stale_lists, ("graph-decode-bf16", "graph-chain-bf16")),
    "a tree without its mask": (_causal_trees, ("verify-tree-bf16-page1",)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_wrapper_is_seen(name, monkeypatch):
    mistake, wanted = MISTAKES[name]
    requested = [p for w in wanted for p in checks(w)[:1]]
    for planned in requested:
        run_check(planned, spec(), CPU, arch="gfx942")
    mistake(monkeypatch)
    for planned in requested:
        with pytest.raises(CheckFailed):
            run_check(planned, spec(), CPU, arch="gfx942")
