"""Inputs that the contract allows and that an engine seldom hands on: strides, slices, emptiness.

Every backend gives for them what it gives for the same numbers in a plain form.
"""

import dataclasses

import pytest
import torch
from attn_core.errors import BackendError, UnsupportedError
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.spec.kinds import Phase
from attn_core.testing.cases import Case
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point, clone_cache, make_inputs
from attn_core.testing.passes import attend, create
from mla_passes import put_in
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REGISTRY = load_plugins()
EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
# name, kind, architecture, store of the cache
BACKENDS = [
    ("fa3", "mha", "sm90", "bf16"),
    ("fa3", "mha", "sm90", "fp8_e4m3"),
    ("fa4", "mha", "sm90", "bf16"),
    ("flashinfer", "mha", "sm90", "bf16"),
    ("trtllm_mha", "mha", "sm90", "bf16"),
    ("trtllm_mha", "mha", "sm90", "fp8_e4m3"),
    ("trtllm_mha", "mha", "sm100", "bf16"),
    ("fa3", "mla", "sm90", "bf16"),
    ("fa4", "mla", "sm100", "bf16"),
    ("flashinfer", "mla", "sm90", "bf16"),
    ("flashmla", "mla", "sm90", "bf16"),
    ("flashmla", "mla", "sm90", "fp8_e4m3"),
    ("cutlass_mla", "mla", "sm100", "bf16"),
    ("trtllm_mla", "mla", "sm100", "bf16"),
    ("trtllm_mla", "mla", "sm100", "fp8_e4m3"),
    ("aiter", "mha", "gfx942", "bf16"),
    ("aiter", "mha", "gfx942", "fp8_e4m3"),
    ("wave", "mha", "gfx942", "bf16"),
    ("aiter", "mla", "gfx942", "bf16"),
    ("aiter", "mla", "gfx950", "fp8_e4m3"),
    ("ascend", "mha", "910b", "bf16"),
    ("ascend", "mla", "910b", "bf16"),
    ("intel_xpu", "mha", "bmg", "bf16"),
    ("intel_xpu", "mha", "bmg", "fp8_e4m3"),
]
LENGTHS = {EXTEND: ((5, 3), (70, 9)), DECODE: ((1, 1), (70, 9)), VERIFY: ((4, 4), (70, 9))}


def row_of(backend, mode):
    """Return the row that serves a mode over the cache, one that verifies chains where it can."""
    name, kind, arch, store = backend
    phase = Phase.PREFILL if mode is EXTEND else Phase.DECODE
    rows = [
        r
        for r in REGISTRY.get(name).capabilities
        if (r.kind == kind and arch in r.archs and store in r.kv_dtypes and r.absorbed)
        and phase in r.phases
        and (r.max_verify_topk or mode is not VERIFY)
        and (r.kind != "mha" or not r.head_dims or 64 in r.head_dims)
    ]
    return min(rows, key=lambda r: (r.sinks, r.max_verify_topk != 1), default=None)


def every(*modes):
    """Ask each backend for the modes that it serves."""
    requested = [(b, mode) for b in BACKENDS for mode in modes if row_of(b, mode)]
    ids = ["-".join((*b, mode.value)) for b, mode in requested]
    return pytest.mark.parametrize(("backend", "mode"), requested, ids=ids)


@pytest.fixture(autouse=True)
def gpu(backend, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", backend[2].removeprefix("sm"))
    put_in(backend[2])


def made(backend, mode, lengths=None, pages=1, **changes):
    """Return a backend and the inputs of a pass; pages: of the kernel in a page of the pool."""
    name, kind, arch, store = backend
    row = row_of(backend, mode)
    query_lens, seq_lens = lengths or LENGTHS[mode]
    changes.setdefault("heads", (max(row.q_heads or {4}), 1) if kind == "mla" else (4, 2))
    case = Case(
        feature="",
        kind=kind,
        dims=(576, 512) if kind == "mla" else (64, 64),
        query_lens=query_lens,
        seq_lens=seq_lens,
        mode=mode,
        kv_dtype="auto" if store == "bf16" else store,
        **changes,
    )
    size = max((p for p in row.page_sizes if p <= 128), default=16)
    point = Point(dtype="bf16", page_size=size * pages)
    inputs = make_inputs(
        case, point, requires_finite_padding=row.requires_finite_padding, fused=row.fused_kv_write
    )
    spec = REGISTRY.get(name)
    bench = Bench(spec=spec, row=row, torch_device=torch.device("cpu"), arch=arch)
    return create(bench, case, inputs, point), inputs


def fused(x):
    """A slice of fused Q, K and V, the same bytes between all rows."""
    wide = torch.cat([x, x, x], 1)
    return wide[:, x.shape[1] : 2 * x.shape[1]]


def odd(x):
    """A slice that begins and goes on at odd places, which no kernel loads 16 bytes at a time."""
    tokens, heads, dim = x.shape
    flat = torch.zeros(tokens, heads * dim + 3, dtype=x.dtype)
    flat[:, 1:-2] = x.flatten(1)
    return flat[:, 1:-2].view(x.shape)


def late(x):
    """A dense tensor that begins at an odd place."""
    flat = torch.zeros(x.numel() + 1, dtype=x.dtype)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def heads_first(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("form", [fused, odd, late, heads_first])
@every(*LENGTHS)
def test_queries_of_any_strides(backend, mode, form):
    that, inputs = made(backend, mode)
    right, _ = attend(that, inputs)
    ugly = dataclasses.replace(inputs, q=form(inputs.q))
    assert torch.equal(ugly.q, inputs.q)
    assert ugly.q.stride(-1) == 1
    actual, _ = attend(that, ugly)
    assert torch.equal(actual, right)


@every(*LENGTHS)
def test_a_page_table_that_is_a_slice(backend, mode):
    that, inputs = made(backend, mode)
    right, _ = attend(that, inputs)
    view = inputs.batch.views["full"]
    rows, width = view.page_table.shape
    wide = torch.full((rows + 2, width + 5), 1 << 30, dtype=torch.int32)
    wide[:rows, :width] = view.page_table
    views = {"full": dataclasses.replace(view, page_table=wide[:rows, :width])}
    actual, _ = attend(that, inputs, batch=dataclasses.replace(inputs.batch, views=views))
    assert torch.equal(actual, right)


def stacked(x, other):
    """K and V of a page one after the other, as some engines keep them."""
    return torch.stack([raw(x), raw(other)], 1)[:, 0].view(x.dtype)


def side_by_side(x, other):
    return torch.cat([raw(x), raw(other)], -1)[..., : x.shape[-1]].view(x.dtype)


def raw(x):
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize("form", [stacked, side_by_side])
@every(*LENGTHS)
def test_pages_that_are_parts_of_a_larger_tensor(backend, mode, form, pages):
    """They are read where they lie, or refused before any number is wrong."""
    that, inputs = made(backend, mode, pages=pages)
    right, _ = attend(that, inputs)
    of = inputs.after
    v = None if of.v is None else form(of.v, of.k)
    cache = dataclasses.replace(of, k=form(of.k, of.k if of.v is None else of.v), v=v)
    try:
        actual, _ = attend(that, dataclasses.replace(inputs, k=None, v=None), cache=cache)
    except UnsupportedError as error:
        assert "strides" in str(error)  # noqa: PT017  # other backends have to be right
        return
    assert torch.equal(actual, right)


@pytest.mark.parametrize("pages", [1, 2])
@every(*LENGTHS)
def test_keys_and_values_at_different_strides(backend, mode, pages):
    """They are read where they lie, or refused before any number is wrong."""
    that, inputs = made(backend, mode, pages=pages)
    of = inputs.after
    if of.v is None:
        pytest.skip("its values are part of the keys")
    right, _ = attend(that, inputs)
    plain = dataclasses.replace(inputs, k=None, v=None)
    wide = torch.cat([raw(of.v)] * 3, -1)[..., : of.v.shape[-1]].view(of.v.dtype)
    for cache in (
        dataclasses.replace(of, k=stacked(of.k, of.v)),
        dataclasses.replace(of, v=stacked(of.v, of.k)),
        dataclasses.replace(of, v=wide),
    ):
        assert cache.k.stride() != cache.v.stride()
        try:
            actual, _ = attend(that, plain, cache=cache)
        except UnsupportedError as error:
            assert "strides" in str(error)  # noqa: PT017  # other backends have to be right
            continue
        assert torch.equal(actual, right)


@every(DECODE)
def test_pages_that_move_are_read_where_they_lie_now(backend, mode):
    """As those of an engine that gave its memory back meanwhile, of K and V or of one alone."""
    that, inputs = made(backend, mode, pages=2)
    cache, plain = clone_cache(inputs.after), dataclasses.replace(inputs, k=None, v=None)
    right, _ = attend(that, plain, cache=cache)
    for moved in ((cache.k, cache.v), (cache.v,), (cache.k,)):
        for pages in (x for x in moved if x is not None):
            old, pages.data = pages.data, pages.data.clone()
            raw(old).zero_()
        actual, _ = attend(that, plain, cache=cache)
        assert torch.equal(actual, right)


@every(DECODE)
def test_a_layer_of_more_heads_than_were_planned_is_right_or_refused(backend, mode):
    """Scratch is made for the layers that a config lists."""
    small, _ = made(backend, mode)
    row = row_of(backend, mode)
    if row.kind == "mla" or 8 // 2 not in (row.group_sizes or {4}):
        pytest.skip("it has kernels for other groups")
    _, inputs = made(backend, mode, heads=(8, 2))
    big, _ = made(backend, mode, heads=(8, 2))
    right, _ = attend(big, inputs)
    try:
        actual, _ = attend(small, inputs)
    except BackendError as error:
        assert "was not planned" in str(error)  # noqa: PT017  # others have to be right
        return
    assert torch.equal(actual, right)


@every(DECODE)
def test_one_token_of_one_request_in_one_page(backend, mode):
    """Sizes of 1, whose strides may be anything in a tensor that is contiguous all the same."""
    that, inputs = made(backend, mode, ((1,), (7,)))
    right, _ = attend(that, inputs)
    view = inputs.batch.views["full"]

    def apart(x):
        return x.as_strided(x.shape, (7, *x.stride()[1:]))

    views = {
        "full": dataclasses.replace(
            view, page_table=apart(view.page_table), seq_lens=apart(view.seq_lens)
        )
    }
    batch = dataclasses.replace(inputs.batch, views=views)
    actual, _ = attend(that, dataclasses.replace(inputs, q=apart(inputs.q)), batch=batch)
    assert torch.equal(actual, right)


@every(EXTEND)
def test_a_request_without_queries(backend, mode):
    that, inputs = made(backend, mode, ((5, 0, 3), (70, 20, 9)))
    right, _ = attend(that, inputs)
    assert right.isfinite().all()
    for first, tokens, length, row in ((0, 5, 70, 0), (5, 3, 9, 2)):
        view = inputs.batch.views["full"]
        batch = ForwardBatch.build(
            mode,
            query_lens=[tokens],
            seq_lens=[length],
            page_table=view.page_table[row : row + 1],
            page_size=inputs.cache.page_size,
        )
        queries = inputs.q[first : first + tokens]
        part = dataclasses.replace(inputs, q=queries, k=None, v=None, batch=batch)
        actual, _ = attend(that, part, cache=inputs.after)
        torch.testing.assert_close(actual, right[first : first + tokens], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("requests", [0, 2])
@every(EXTEND)
def test_a_pass_without_tokens(backend, mode, requests):
    that, inputs = made(backend, mode)
    view = inputs.batch.views["full"]
    batch = ForwardBatch.build(
        mode,
        query_lens=[0] * requests,
        seq_lens=[9] * requests,
        page_table=view.page_table[:requests],
        page_size=inputs.cache.page_size,
    )
    nothing = dataclasses.replace(inputs, q=inputs.q[:0], k=None, v=None, batch=batch)
    lse = that.config.row.lse
    out, sums = attend(that, nothing, cache=inputs.after, preallocated=True, return_lse=lse)
    assert out.shape[0] == 0
    assert sums is None or sums.shape == (0, inputs.q.shape[1])


class Capture(TorchDispatchMode):
    """Collects the numbers that a captured call writes: they hold no value before the replay."""

    def __init__(self):
        super().__init__()
        self.written = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if is_float(t)}
        self.written += [
            t
            for t in tree_leaves(result)
            if is_float(t) and t.untyped_storage().data_ptr() not in known
        ]
        return result


def is_float(x):
    return isinstance(x, torch.Tensor) and x.dtype in (torch.float32, torch.bfloat16)


@every(DECODE)
def test_what_a_capture_makes_serves_no_other_call(backend, mode, monkeypatch):
    fp8 = backend[-1] != "bf16"
    latent = row_of(backend, mode).kind == "mla"  # stores no V
    scales = {"k_scale": 0.5, "v_scale": 1.0 if latent else 0.5} if fp8 else {}
    sinks = {"sinks": True} if row_of(backend, mode).sinks else {}
    that, inputs = made(backend, mode, **scales, **sinks)
    if sinks:  # not the dtype that a kernel reads
        layer = dataclasses.replace(inputs.layer, sinks=inputs.layer.sinks.bfloat16())
        inputs = dataclasses.replace(inputs, layer=layer)
        that = type(that)(dataclasses.replace(that.config, layers=(layer,)))
    metadata = that.init_forward_metadata(inputs.batch)

    def attended():
        return attend(that, inputs, cache=inputs.after, metadata=metadata)[0]

    with monkeypatch.context() as captured, Capture() as capture:
        captured.setattr("attn_core.runtime.kernel_tensors.capturing", lambda device: True)
        result = attended()
    right = result.clone()
    assert right.isfinite().all()
    for x in capture.written:
        x.fill_(torch.nan)
    assert torch.equal(attended(), right)
