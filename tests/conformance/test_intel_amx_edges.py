"""intel_amx under random cases, wrong tensors, other users' libraries and missing compilers."""

import copy
import dataclasses
import importlib.util
import math
import multiprocessing
import os
import pathlib
import pickle
import platform
import stat
import subprocess
import sys
import threading
import types

import pytest
import torch
from amx_kernels import at_level, compiled, emulated_tiles, level_of_this_cpu, spec
from attn_core import BackendError, BatchError, LayerCache, SpecInfo, UnsupportedError
from attn_core.ops.kv import write_kv
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.testing.case_catalog import random_tree, renamed
from attn_core.testing.cases import Case
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.passes import run_case
from attn_intel import versions
from attn_intel.cpu import __main__ as command
from attn_intel.cpu import build, library
from attn_intel.cpu.library import LEVELS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DIMS = (
    *((1, 1), (3, 8), (8, 3), (40, 40), (72, 72), (80, 96), (96, 17), (192, 128), (256, 256)),
    *((64, 64), (80, 80), (96, 96), (128, 128)),
)
MODES = (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


LATENTS = ((576, 512), (72, 64), (40, 33))


def bench(kind="mha"):
    compiled()
    row = next(r for r in spec().capabilities if r.kind == kind)
    return Bench(spec=spec(), row=row, torch_device=torch.device("cpu"))


@st.composite
def cases(draw):
    """Draw a legal case, and the dtype, pages and layout that it is run on."""
    mode = draw(
        st.sampled_from([ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
    )
    requests = draw(st.integers(1, 3))
    trees = None
    if mode is ForwardMode.DECODE:
        news = [1] * requests
    elif mode is ForwardMode.TARGET_VERIFY:
        news = [draw(st.integers(2, 9))] * requests
        seeds = st.integers(0, 99)
        trees = tuple(renamed(random_tree(n, draw(seeds)), draw(seeds)) for n in news)
    else:
        news = [draw(st.sampled_from([0, 1, 2, 5, 17, 70, 140])) for _ in range(requests)]
    befores = [draw(st.sampled_from([0, 1, 15, 63, 64, 65, 200, 600])) for _ in range(requests)]
    causal = trees is not None or draw(st.integers(0, 5)) > 0
    kind = draw(st.sampled_from(["mha", "mha", "mha", "mla"]))
    latent = kind == "mla"
    kv_heads = 1 if latent else draw(st.sampled_from([1, 2, 3]))
    stored = draw(st.sampled_from(["auto", "auto", "fp8_e4m3", "fp8_e5m2"]))
    scaled = stored != "auto"
    dtype = draw(st.sampled_from(["fp32", "fp16", "bf16", "bf16"]))
    # near a cap of 30 a unit in the last place of float32 is a large part of the budget
    caps = [None, None, 1.5] if dtype == "fp32" else [None, None, 1.5, 30.0]
    scales = st.sampled_from([1.0, 0.25, 1e-3, 512.0])
    case = Case(
        feature="random",
        query_lens=tuple(news),
        seq_lens=tuple(n + b for n, b in zip(news, befores, strict=True)),
        mode=mode,
        trees=trees,
        kind=kind,
        heads=(kv_heads * draw(st.sampled_from([1, 2, 3, 5, 7, 9, 16])), kv_heads),
        dims=draw(st.sampled_from(LATENTS if latent else DIMS)),
        kv_dtype=stored,
        k_scale=draw(scales) if scaled else 1.0,
        v_scale=draw(scales) if scaled and not latent else 1.0,
        tensor_scales=scaled and draw(st.booleans()),
        window=draw(st.sampled_from([None, None, 1, 3, 64, 100, 5000])) if causal else None,
        logit_cap=draw(st.sampled_from(caps)),
        sinks=draw(st.booleans()),
        is_causal=causal,
        padding=draw(st.integers(0, 2)),
        strides=draw(st.sampled_from(["packed", "fused", "apart", "heads-first"])),
        device_lengths=draw(st.booleans()),
    )
    return case, Point(
        dtype=dtype,
        page_size=draw(st.sampled_from([1, 3, 16, 17, 128, 1024])),
        layout="NHD" if latent else draw(st.sampled_from(["NHD", "HND"])),
    )


def run_drawn(drawn):
    case, point = drawn
    run_case(bench(case.kind), case, point)


@given(cases())
@settings(max_examples=24, derandomize=True, deadline=None, suppress_health_check=CHECKS)
def test_random_cases_agree_with_the_oracle(drawn):
    """Pages, tails and memory between rows that no query may read hold NaN."""
    run_drawn(drawn)


def run_single_number(keys, dtype):
    """Run decode of one head whose keys and values are single numbers."""
    case = Case(
        feature="random",
        query_lens=(1,),
        seq_lens=(keys,),
        mode=ForwardMode.DECODE,
        heads=(1, 1),
        dims=(1, 1),
    )
    run_case(bench(), case, Point(dtype=dtype, page_size=16))


@pytest.mark.parametrize("level", LEVELS[:2])  # those of float32 numbers
@pytest.mark.parametrize("keys", [68, 215, 229])
def test_a_single_number_errs_by_the_order_of_its_keys(keys, level, monkeypatch):
    """It may nearly cancel; one run of the reference then has errors far below a rounding."""
    with at_level(monkeypatch, level):
        run_single_number(keys, "fp32")


@pytest.mark.parametrize("keys", [12, 176])
def test_a_single_number_errs_by_the_rounding_of_its_weights(
    keys, over_emulated_tiles, monkeypatch
):
    """It may nearly cancel, and bfloat16's roundings too in one run of the reference."""
    with at_level(monkeypatch, "amx_bf16", over_emulated_tiles):
        run_single_number(keys, "bf16")


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
def test_many_random_cases_agree_with_the_oracle(level, monkeypatch, tmp_path):
    @given(cases())
    @settings(max_examples=500, deadline=None, suppress_health_check=CHECKS)
    def many(drawn):
        run_drawn(drawn)

    emulated = level == "amx_bf16" and level_of_this_cpu() != level
    path = emulated_tiles(monkeypatch, tmp_path) if emulated else None
    with at_level(monkeypatch, level, path):
        many()


# one pass, of which one thing is wrong

LAYER = AttentionLayer(
    layer_id=0, num_q_heads=4, num_kv_heads=2, head_dim=32, v_head_dim=32, scale=0.2
)


def a_pass(layer=LAYER, *, queries=(3, 1), lengths=(40, 7), page_size=16, spec=None, pages=8):
    """Return a backend and the arguments of one pass."""
    torch.manual_seed(0)
    mode = ForwardMode.EXTEND if spec is None else ForwardMode.TARGET_VERIFY
    batch = ForwardBatch.build(
        mode,
        query_lens=queries,
        seq_lens=lengths,
        page_table=torch.tensor([[1, 2, 3], [4, -1, -1]], dtype=torch.int32),
        page_size=page_size,
        spec=spec,
    )
    pool = (pages, page_size, layer.num_kv_heads, layer.head_dim)
    cache = LayerCache(k=torch.randn(pool).bfloat16(), v=torch.randn(pool).bfloat16())
    backend = bench().create((layer,), dtype="bf16", page_size=page_size)
    q = torch.randn(sum(queries), layer.num_q_heads, layer.head_dim).bfloat16()
    return backend, [q, None, None, layer, cache, batch, backend.init_forward_metadata(batch)]


def test_page_ids_that_no_query_needs_are_not_read():
    backend, arguments = a_pass()
    assert backend.forward(*arguments).isfinite().all()


def test_a_pool_of_more_than_2_to_the_31_numbers():
    """Its memory is asked for and, but for the last pages, never touched."""
    heads, page_size, dim = 2, 16, 32
    pages = 2**31 // (heads * page_size * dim) + 8
    backend, arguments = a_pass()
    small = arguments[4].k
    arguments[4] = LayerCache(k=small, v=small)
    want = backend.forward(*arguments)
    large = torch.empty(pages, page_size, heads, dim, dtype=torch.bfloat16)
    large[-8:] = small
    arguments[4] = LayerCache(k=large, v=large)
    table = arguments[5].views["full"].page_table
    table[table >= 0] += pages - 8
    assert torch.equal(backend.forward(*arguments), want)


@pytest.mark.parametrize("page", [-1, 8, 2**31 - 1])
def test_a_page_outside_of_the_pool_is_refused(page):
    backend, arguments = a_pass()
    arguments[5].views["full"].page_table[1, 0] = page
    with pytest.raises(BatchError, match=r"request 1 has .*outside.*8 pages.*check.*page_table"):
        backend.forward(*arguments)


@pytest.mark.parametrize("length", [49, 2**31 - 1, -1])
def test_a_length_beyond_the_table_is_refused(length):
    backend, arguments = a_pass()
    arguments[5].views["full"].seq_lens[0] = length
    with pytest.raises(BatchError, match=r"request 0 has .*3 columns of the page table"):
        backend.forward(*arguments)


@pytest.mark.parametrize("cu", [(0, 3, 5), (0, -1, 4), (-1, 3, 4), (0, 2**31 - 1, 4)])
def test_queries_beyond_q_are_refused(cu):
    backend, arguments = a_pass()
    arguments[5].cu_seqlens_q.copy_(torch.tensor(cu))
    with pytest.raises(BatchError, match=r"request . has queries.*4 queries.*check cu_seqlens"):
        backend.forward(*arguments)


def test_ragged_keys_beyond_k_are_refused():
    backend, (q, *_) = a_pass()
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 4), (0, 9)))
    k = torch.randn(8, 2, 32).bfloat16()
    with pytest.raises(BatchError, match=r"request 0 has .*8 keys"):
        backend.forward_ragged(q, k, k, LAYER, cu_q, cu_k, 4, 9, causal=False)


def test_tensors_that_do_not_fit_are_refused():
    backend, (q, _, _, _, cache, *rest) = a_pass()
    k, v = cache.k, cache.v
    for wrong, text in (
        ({"q": q.to(torch.float8_e4m3fn)}, r"q .*float8.*expected \[4, 4, 32\] in .*bfloat16"),
        ({"q": q.double()}, "q .*float64"),
        ({"q": q.to("meta")}, "q .*on meta.*on cpu"),
        ({"q": q[:, :3]}, "q .4, 3, 32"),
        ({"out": torch.empty(4, 4, 32, dtype=torch.float8_e5m2)}, "out .*float8_e5m2"),
        ({"out": torch.empty(3, 4, 32)}, "out .3, 4, 32"),
        ({"k": k[..., :16], "v": v}, "k .8, 16, 2, 16"),
        ({"k": k[:, :, :1], "v": v}, "k .8, 16, 1, 32"),
        ({"k": k, "v": v.float()}, "v .*float32.*expected .*in torch.bfloat16"),
        ({"k": k, "v": v[:7]}, "v .7, 16, 2, 32"),
        ({"k": k.to("meta"), "v": v}, "k .*on meta"),
        ({"k": k.long(), "v": v}, "k .*int64"),
    ):
        store = LayerCache(k=wrong["k"], v=wrong["v"]) if "k" in wrong else cache
        with pytest.raises(UnsupportedError, match=text):
            backend.forward(wrong.get("q", q), None, None, LAYER, store, *rest,
                            out=wrong.get("out"))  # fmt: skip


def test_a_nan_reaches_the_output_and_the_lse():
    """A part whose LSE were -inf would be left out of a merge without a word."""
    backend, arguments = a_pass()
    arguments[0][1, 2] = torch.nan
    out, lse = backend.forward(*arguments, return_lse=True)
    assert out[1, 2].isnan().all()
    assert lse[1, 2].isnan()
    assert lse.isnan().sum() == 1


@pytest.mark.parametrize("level", LEVELS[:2])  # those of float32 numbers
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_nan_with_any_bits_reaches_the_output_and_the_lse(tokens, cap, level, monkeypatch):
    """Exponentials by the bits of a float once counted NaNs with a payload as numbers."""
    layer = dataclasses.replace(LAYER, logit_cap=cap)
    with at_level(monkeypatch, level):
        backend = bench().create((layer,), dtype="fp32", page_size=16)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (tokens, 4))
    q, k, v = torch.randn(tokens, 4, 32), torch.randn(4, 2, 32), torch.randn(4, 2, 32)
    for bits in (0x7FC00000, 0x7FC00001, 0x7F800001, 0x7FC00101, 0x7FFFFFFF, -1):
        for damaged, reached in ((q[0, :2], 2), (k[1, :1], 2), (v[1, :1], 2)):
            before = damaged.clone()
            damaged[:, 3].view(torch.int32).fill_(bits)
            out, lse = backend.forward_ragged(
                q, k, v, layer, cu_q, cu_k, tokens, 4, causal=False, return_lse=True
            )
            assert (out[0].isnan().any(-1)).tolist() == [i < reached for i in range(4)]
            if damaged.data_ptr() != v[1].data_ptr():
                assert lse[0].isnan().tolist() == [i < reached for i in range(4)]
            damaged.copy_(before)


def test_a_tree_of_more_drafts_than_tokens_is_refused():
    """Its prefix would begin before the page table."""
    tree = torch.eye(8, dtype=torch.bool).repeat(2, 1, 1)
    spec = SpecInfo(topk=2, num_draft_tokens=8, tree_mask=tree)
    backend, arguments = a_pass(queries=(8, 8), lengths=(40, 8), spec=spec)
    batch = arguments[5]
    view = dataclasses.replace(batch.views["full"], seq_lens_host=None)
    view.seq_lens[1] = 7
    arguments[6] = {"full": view}
    with pytest.raises(BatchError, match="request 1 has queries, keys or pages outside"):
        backend.forward(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_that_change_count_as_they_are(dtype):
    layer = dataclasses.replace(LAYER, sinks=torch.zeros(4, dtype=dtype))
    backend, arguments = a_pass(layer)
    _, before = backend.forward(*arguments, return_lse=True)
    layer.sinks.fill_(50)  # as weights that are loaded into the model afterwards
    _, after = backend.forward(*arguments, return_lse=True)
    assert (before < 40).all()
    assert (after >= 50).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [1e4, 1e10, 1e30])
def test_scores_of_any_size_weigh_as_their_differences_say(scale, level, monkeypatch):
    """Products of them lose more than an exponent bears: rows once were 0, and equal keys unequal.

    Whole numbers, so that each score is exact; keys over several blocks of one request.
    """
    layer = dataclasses.replace(LAYER, scale=scale)
    dtype = torch.bfloat16 if level in LEVELS[2:] else torch.float32
    with at_level(monkeypatch, level):
        backend = bench().create((layer,), dtype="bf16" if level in LEVELS[2:] else "fp32")
    torch.manual_seed(0)
    for queries, keys in ((1, 300), (5, 140), (40, 300)):
        q, k = (torch.randint(-2, 3, (n, h, 32)) for n, h in ((queries, 4), (keys, 2)))
        v = torch.randn(keys, 2, 32).to(dtype)
        cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (queries, keys))
        out, lse = backend.forward_ragged(
            q.to(dtype), k.to(dtype), v, layer, cu_q, cu_k, queries, keys, causal=True,
            return_lse=True,
        )  # fmt: skip
        k, v = k.repeat_interleave(2, 1).double(), v.repeat_interleave(2, 1).double()
        scores = torch.einsum("qhd,khd->hqk", q.double(), k)
        later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        scores = scores.masked_fill(later, -torch.inf)
        p = ((scores - scores.amax(-1, keepdim=True)) * scale).exp()
        right = torch.einsum("hqk,khd->qhd", p / p.sum(-1, keepdim=True), v)
        torch.testing.assert_close(out.double(), right, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(
            lse.double(), (scores * scale).logsumexp(-1).T, atol=1e-3, rtol=1e-6
        )


@pytest.mark.parametrize("queries", [(3, 1), (0, 40)])
def test_an_infinite_sink_leaves_nothing_for_the_keys(queries):
    layer = dataclasses.replace(LAYER, sinks=torch.tensor([math.inf, 3e38, -math.inf, 0.5]))
    backend, arguments = a_pass(layer, queries=queries, lengths=(40, 40))
    arguments[5].views["full"].page_table[1] = torch.tensor([4, 5, 6])
    out, lse = backend.forward(*arguments, return_lse=True)
    assert (out[:, :2] == 0).all()
    assert (lse[:, 0] == math.inf).all()
    assert (lse[:, 1] > 2.9e38).all()
    assert (out[:, 2:] != 0).all()
    assert lse[:, 2:].isfinite().all()


@pytest.mark.parametrize("queries", [(0, 0), (3, 1)])
def test_requests_without_pages_have_no_keys(queries):
    """A page table without columns lies nowhere: the kernels once took the keys for ragged ones."""
    layer = dataclasses.replace(LAYER, is_cross=True, view="cross")
    backend, arguments = a_pass(layer, queries=queries)
    none = CacheView.build(
        page_table=torch.empty(2, 0, dtype=torch.int32),
        page_size=16,
        seq_lens=(0, 0),
        new_lens=(0, 0),
        writes=False,
    )
    batch = dataclasses.replace(arguments[5], views={"cross": none})
    arguments[5:] = [batch, backend.init_forward_metadata(batch)]
    out, lse = backend.forward(*arguments, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("window", [2**30, 2**31, 2**32 + 1, 2**62])
def test_a_window_beyond_all_keys_hides_none(window):
    backend, arguments = a_pass()
    want = backend.forward(*arguments)
    arguments[3] = dataclasses.replace(LAYER, sliding_window=window)
    assert torch.equal(backend.forward(*arguments), want)


def test_a_tree_hides_no_keys_of_an_encoder():
    layer = dataclasses.replace(LAYER, is_cross=True, view="cross")
    mask = torch.eye(3, dtype=torch.bool).expand(2, 3, 3).contiguous()
    backend, arguments = a_pass(
        layer, queries=(3, 3), spec=SpecInfo(topk=3, num_draft_tokens=3, tree_mask=mask)
    )
    q, batch = arguments[0], arguments[5]
    lengths = (33, 5)
    cross = CacheView.build(
        page_table=batch.views["full"].page_table,
        page_size=16,
        seq_lens=lengths,
        new_lens=(0, 0),
        writes=False,
    )
    batch = dataclasses.replace(batch, views={"cross": cross})
    arguments[5:] = [batch, backend.init_forward_metadata(batch)]
    got = backend.forward(*arguments)
    chain = dataclasses.replace(batch, spec=SpecInfo(topk=1, num_draft_tokens=3))
    assert torch.equal(got, backend.forward(*arguments[:5], chain, arguments[6]))
    cache = arguments[4]
    for b, n in enumerate(lengths):
        pages = cross.page_table[b, : -(-n // 16)].long()
        k, v = (x[pages].flatten(0, 1)[:n].repeat_interleave(2, 1).double() for x in
                (cache.k, cache.v))  # fmt: skip
        rows = q[3 * b : 3 * b + 3].double()
        p = (torch.einsum("qhd,khd->hqk", rows, k) * layer.scale).softmax(-1)
        right = torch.einsum("hqk,khd->qhd", p, v)
        torch.testing.assert_close(got[3 * b : 3 * b + 3].double(), right, atol=0.02, rtol=0.02)


def test_threads_of_python_call_one_backend_at_once():
    """Each has a workspace of its own; what calls share is described once and not written to."""
    backend, arguments = a_pass()
    long = a_pass(lengths=(48, 16))[1][5]
    passes = [arguments, [*arguments[:5], long, backend.init_forward_metadata(long)]]
    wants = [backend.forward(*x) for x in passes]
    wrong, start = [], threading.Barrier(4)

    def run(i):
        start.wait()
        for _ in range(300):
            if not torch.equal(backend.forward(*passes[i % 2]), wants[i % 2]):
                wrong.append(i)

    callers = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_cache_whose_memory_moves_is_found_again():
    """An engine that sleeps gives its memory back and takes other memory when it wakes."""
    backend, arguments = a_pass()
    want = backend.forward(*arguments)
    cache = arguments[4]
    for x in (cache.k, cache.v):
        x.data = x.clone()
    others = torch.zeros(2, 8, 2, 32).bfloat16()
    write_kv(cache, others[0], others[1], torch.arange(8))  # page 0, which no request has
    assert torch.equal(backend.forward(*arguments), want)
    cache.v.data = -cache.v
    write_kv(cache, others[0], others[1], torch.arange(8))
    assert torch.equal(backend.forward(*arguments), -want)
    assert not cache.v[0, :8].any()


def test_a_cache_is_copied_and_pickled_after_a_pass():
    """The addresses of its pages are bound to it in the first pass, and are no part of a copy."""
    backend, arguments = a_pass()
    cache, want = arguments[4], backend.forward(*arguments)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        copied.k[:, :, 1:].neg_()
        copied.v[:, :, 1:].neg_()
        arguments[4] = copied
        got = backend.forward(*arguments)
        assert torch.equal(got[:, :2], want[:, :2])  # of the first KV head
        assert not torch.equal(got[:, 2:], want[:, 2:])
    arguments[4] = cache
    assert torch.equal(backend.forward(*arguments), want)


def _child(arguments, backend, want, queue):
    torch.set_num_threads(1)
    queue.put(torch.equal(backend.forward(*arguments), want))


def test_a_forked_child_attends():
    backend, arguments = a_pass()
    want = backend.forward(*arguments)
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    child = fork.Process(target=_child, args=(arguments, backend, want, queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get()


FORKS = """
import os, sys, warnings
import torch
sys.path[:0] = sys.argv[1:]
warnings.simplefilter("ignore")
torch.set_num_threads(4)
from test_intel_amx_edges import a_pass
backend, arguments = a_pass()
want = backend.forward(*arguments)
torch.ones(1 << 22).sum()  # torch's own threads of the parent
child = os.fork()
if not child:
    os._exit(0 if torch.equal(backend.forward(*arguments), want) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_of_a_parent_with_threads_attends_alone():
    """OpenMP's threads stay behind in the parent: a child that counts on them waits for ever."""
    compiled()
    here = pathlib.Path(__file__).parent
    command = [sys.executable, "-c", FORKS, str(here), str(here.parent / "support")]
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    assert subprocess.run(command, env=environment, timeout=120, check=False).returncode == 0


def test_queries_that_require_a_gradient_and_inference_mode():
    backend, arguments = a_pass()
    want = backend.forward(*arguments)
    arguments[0].requires_grad_()
    assert torch.equal(backend.forward(*arguments), want)
    with torch.inference_mode():
        assert torch.equal(backend.forward(*arguments), want)


# where the library lies


@pytest.fixture
def in_cache(monkeypatch, tmp_path):
    """A cache in which this source is "compiled", and a package without a library."""
    source = tmp_path / "package" / "source"
    source.parent.mkdir()
    source.symlink_to(build.SOURCE)
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = build.cache()
    folder.mkdir(mode=0o700, parents=True)
    path = folder / build.name()
    path.write_bytes(b"")
    path.chmod(0o755)
    return path


def test_a_library_in_the_cache_is_found(in_cache):
    assert build.compiled_library() == in_cache


def test_what_others_can_write_is_not_loaded(in_cache):
    for path in (in_cache, in_cache.parent):
        mode = stat.S_IMODE(path.stat().st_mode)
        for bit in (0o002, 0o020):
            path.chmod(mode | bit)
            assert build.compiled_library() is None
            assert f"chmod go-w {path}" in build.distrusted(in_cache)
        path.chmod(mode)
    assert build.compiled_library() == in_cache


def test_what_lies_where_no_code_is_run_is_not_loaded(in_cache, monkeypatch):
    """Else intel_amx would be selected, and fail when the first pass loads it."""
    flags = os.statvfs(in_cache.parent)
    sealed = types.SimpleNamespace(f_flag=flags.f_flag | os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda path: sealed)
    assert build.compiled_library() is None
    assert versions.attn_register_libraries() == []
    monkeypatch.setattr(command, "build", lambda folder: in_cache)
    with pytest.raises(SystemExit, match=r"will not be loaded: .*noexec.*set XDG_CACHE_HOME"):
        command.main()


def test_what_belongs_to_others_is_not_loaded(in_cache, monkeypatch):
    if in_cache.stat().st_uid == 0:
        if os.geteuid() != 0:
            pytest.skip("root's files are trusted")
        os.chown(in_cache, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert build.compiled_library() is None
    assert "belongs to user" in build.distrusted(in_cache)
    assert "XDG_CACHE_HOME" in build.distrusted(in_cache)


def test_without_a_home_folder_the_plugin_loads(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and passwd
    assert build.cache() is None
    assert versions.attn_register_libraries() == []
    with pytest.raises(SystemExit, match="no home folder; set XDG_CACHE_HOME"):
        command.main()


def test_a_home_folder_that_cannot_be_read_is_no_error(in_cache, monkeypatch):
    stat_of = os.stat

    def denied(path, **options):
        if str(path).startswith(str(in_cache.parent)):
            raise PermissionError(13, "Permission denied", str(path))
        return stat_of(path, **options)

    monkeypatch.setattr(os, "stat", denied)
    assert build.compiled_library() is None


def test_a_relative_cache_folder_is_ignored(monkeypatch, tmp_path):
    """It would be another one in every folder that a program is started in."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert build.cache() == tmp_path / ".cache" / "attn-intel"


def test_a_library_without_the_kernels_says_what_to_do(in_cache):
    """An empty file loads nowhere, another library has other symbols."""
    if (reason := build.unsupported()) is not None:
        pytest.skip(reason)
    message = f"{in_cache} does not load.*delete it and run `python -m attn_intel.cpu`"
    library.load.cache_clear()
    try:
        with pytest.raises(BackendError, match=message):
            library.load()
        empty = [*build.compiler(), "-shared", "-x", "c", "/dev/null", "-o", str(in_cache)]
        subprocess.run(empty, check=True)
        with pytest.raises(BackendError, match=message):
            library.load()
    finally:
        library.load.cache_clear()


def test_a_cache_that_cannot_be_written_says_what_to_do(in_cache, monkeypatch, tmp_path):
    in_cache.unlink()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build, "unsupported", lambda: None)
    message = "cannot write into .*; set XDG_CACHE_HOME to a folder that this user can write"
    with pytest.raises(SystemExit, match=message):
        command.main()


def test_cc_is_a_command_or_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    tool = tmp_path / "some-cc"
    tool.write_text("#!/bin/sh\necho unknown option >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CC", f"{tool} -m64")
    assert build.compiler() == (str(tool), "-m64")
    assert build.unsupported() is None
    with pytest.raises(RuntimeError, match=r"unknown option\s+attn-intel needs GCC 11 or newer"):
        build.build(tmp_path)
    monkeypatch.setenv("CC", "no-such-cc -m64")
    with pytest.raises(RuntimeError, match="CC is 'no-such-cc -m64', which is not found: install"):
        build.build(tmp_path)


def test_a_compiled_library_is_this_users_alone_whatever_the_umask(monkeypatch, tmp_path):
    def link(command):
        pathlib.Path(command[command.index("-o") + 1]).write_bytes(b"")

    monkeypatch.setattr(build, "unsupported", lambda: None)
    monkeypatch.setattr(build, "compiler", lambda: ("cc",))
    monkeypatch.setattr(build, "_run", link)
    before = os.umask(0)
    try:
        path = build.build(tmp_path / "attn-intel")
    finally:
        os.umask(before)
    assert build.distrusted(path) is None


BUILD = """
import pathlib, sys
from attn_intel.cpu import build, library
from attn_intel.cpu.library import LEVELS
build.FLAGS = ("-O0", *build.FLAGS[1:])
print(build.build(pathlib.Path(sys.argv[1])))
"""


@pytest.mark.long
def test_two_processes_compile_at_once(tmp_path):
    compiled()
    if (reason := build.unsupported()) is not None:
        pytest.skip(reason)
    both = [
        subprocess.Popen([sys.executable, "-c", BUILD, tmp_path], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    paths = {p.communicate(timeout=300)[0] for p in both}
    assert [p.returncode for p in both] == [0, 0]
    assert len(paths) == 1
    assert len(list(tmp_path.iterdir())) == 1


# the wheel


class App:
    """What the hook prints to."""

    def __init__(self):
        self.said = []

    def display_info(self, text):
        pass

    def display_warning(self, text):
        self.said.append(text)


@pytest.fixture
def hook(monkeypatch, tmp_path):
    """Return the hook of the wheel over an empty package, which has the source alone."""
    pytest.importorskip("hatchling")
    file = pathlib.Path(build.__file__).parents[3] / "hatch_build.py"
    if not file.is_file():
        pytest.skip("attn-intel is not installed from its source")
    made = importlib.util.spec_from_file_location("hatch_build", file)
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    (tmp_path / "source").symlink_to(build.SOURCE)
    (tmp_path / "build.py").write_bytes(pathlib.Path(build.__file__).read_bytes())
    monkeypatch.setattr(module, "CPU", tmp_path)
    return module


def run_hook(hook):
    app, data = App(), {"artifacts": []}
    hook.CompiledKernels("", {}, None, None, "", "", app).initialize("standard", data)
    return app.said, data


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("#!/bin/sh\necho 'unrecognized option -mavx512bf16' >&2; exit 1\n", "unrecognized option"),
        (None, "no C compiler"),
    ],
)
def test_without_a_compiler_that_can_the_wheel_has_no_kernels(
    text, why, hook, monkeypatch, tmp_path
):
    """An old GCC knows neither bfloat16 nor tiles: the install goes on without the kernels."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin") if text is None else os.environ["PATH"])
    monkeypatch.delenv("CC", raising=False)
    if text is not None:
        old = tmp_path / "old-cc"
        old.write_text(text)
        old.chmod(0o755)
        monkeypatch.setenv("CC", str(old))
    if build.unsupported() not in (None, "there is no C compiler: install GCC 11 or newer, or "
                                   "clang 12 or newer, or set CC"):  # fmt: skip
        pytest.skip("the hook compiles on x86-64 Linux alone")
    said, data = run_hook(hook)
    assert data == {"artifacts": []}
    assert why in said[0]
    assert "without the kernels of intel_amx" in said[0]


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        (b"GLIBC_2.2.5 GLIBC_2.14", "manylinux_2_28_x86_64"),
        (b"GLIBC_2.2.5 GLIBC_2.34", "linux_x86_64"),
        (b"GLIBC_2.2.5 GLIBC_ABI_DT_RELR", "linux_x86_64"),
        (b"musl", "linux_x86_64"),
    ],
)
def test_the_wheel_names_the_platform_that_its_symbols_need(symbols, tag, hook, monkeypatch):
    if build.unsupported() is not None:
        pytest.skip("the hook compiles on x86-64 Linux alone")
    (hook.CPU / build.name()).write_bytes(symbols)
    (hook.CPU / "kernels-old.so").write_bytes(b"")
    said, data = run_hook(hook)
    assert not said
    assert data["tag"] == f"py3-none-{tag}"
    assert data["pure_python"] is False
    assert data["artifacts"] == [f"src/attn_intel/cpu/{build.name()}"]
    assert [x.name for x in hook.CPU.glob("*.so")] == [build.name()]


@pytest.mark.parametrize(
    ("system", "machine"), [("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64")]
)
def test_on_other_machines_the_wheel_is_pure_python(system, machine, hook, monkeypatch):
    """Even where an x86-64 machine has compiled in the same folder."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    (hook.CPU / build.name()).write_bytes(b"GLIBC_2.2.5")
    said, data = run_hook(hook)
    assert data == {"artifacts": []}
    assert f"for x86-64 Linux, this is {machine} {system}" in said[0]
