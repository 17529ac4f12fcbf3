"""flashinfer (MHA) against the emulated library: the suite, its conventions and its refusals."""

import dataclasses
import os
import pathlib
import re

import numpy as np
import pytest
import torch
from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.errors import BackendError, UnsupportedError
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.device import parse_device
from attn_core.spec.kinds import Phase
from attn_core.testing import BackendSuite
from attn_core.testing.case_catalog import TREE_A, TREE_B
from attn_core.testing.oracle import tree_mask, visible_keys
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check

M = ForwardMode
LIBRARIES = {"flashinfer-python": "0.6.14", "nvidia-cudnn-frontend": "1.13.0"}


class TestFlashInfer(BackendSuite):
    name = "flashinfer"
    kinds = ("mha",)
    device = "cuda:sm90"
    on = "cpu"
    libraries = LIBRARIES
    passes = 30
    reduced = True


@pytest.mark.long
class TestEveryPoint(TestFlashInfer):
    passes = 200
    reduced = False


@pytest.mark.long
class TestBlackwell(TestFlashInfer):
    device = "cuda:sm100"


def deterministic():
    """Yield the checks of extend passes in the deterministic mode, where they run on fa3."""
    spec, device = load_plugins().get("flashinfer"), parse_device("cuda:sm90")
    for planned in plan(spec, device, LIBRARIES, kinds=("mha",), passes=30, reduced=True):
        check = planned.check
        if planned.row is None or check.needs.deterministic or Phase.ENCODE in check.phases:
            continue
        check = dataclasses.replace(
            check, needs=dataclasses.replace(check.needs, deterministic=True)
        )
        requested = dataclasses.replace(planned, check=check)
        yield pytest.param(requested, id=check.id)


@pytest.mark.parametrize("planned", [*deterministic()])
def test_declared_in_the_deterministic_mode(planned):
    run_check(planned, load_plugins().get("flashinfer"), torch.device("cpu"), arch="sm90")


def make_layer(heads=(4, 2), dim=64, **more):
    return AttentionLayer(
        layer_id=0,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        v_head_dim=dim,
        scale=dim**-0.5,
        **more,
    )


def make_backend(*layers, encodes=False, **more):
    """Create the backend of the first row, or of the vision tower, for a Hopper."""
    spec = load_plugins().get("flashinfer")
    rows = [r for r in spec.capabilities if r.kind == "mha"]
    kwargs = {"page_size": 16, "dtype": "bf16", "kv_cache_dtype": "bf16", "arch": "sm90"} | more
    return create_backend(
        spec,
        BackendConfig(
            name="flashinfer",
            row=rows[-1] if encodes else rows[0],
            layers=layers,
            device=torch.device("cpu"),
            **kwargs,
        ),
    )


def make_batch(mode, query_lens, seq_lens, *, page_size=16, **more):
    width = -(-max(seq_lens) // page_size)
    table = 1 + torch.arange(len(seq_lens) * width, dtype=torch.int32).view(len(seq_lens), width)
    return ForwardBatch.build(
        mode,
        query_lens=query_lens,
        seq_lens=seq_lens,
        page_table=table,
        page_size=page_size,
        **more,
    )


def make_cache(layer, batch, page_size=16, store="bf16"):
    pages = 1 + batch.views["full"].page_table.numel()
    shape = (pages, page_size, layer.num_kv_heads, layer.head_dim)
    k, v = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(
        TORCH_DTYPES[store]
    )
    return LayerCache(k=k, v=v)


def make_q(layer, batch):
    shape = (batch.num_tokens, layer.num_q_heads, layer.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def attend(backend, layer, batch, metadata=None, **more):
    """Run one pass."""
    metadata = backend.init_forward_metadata(batch) if metadata is None else metadata
    q, cache = make_q(layer, batch), make_cache(layer, batch)
    return backend.forward(q, None, None, layer, cache, batch, metadata, **more)


def kernels(backend, batch):
    """Name the kernel of each class of layers in a pass."""
    plans = backend.init_forward_metadata(batch)
    return [plan.planned.shape.kernel for plan in plans.values()]


# which kernel


@pytest.mark.parametrize(
    ("mode", "query_lens", "seq_lens", "layer", "config", "kernel"),
    [
        (M.EXTEND, [2048], [2048], {}, {}, "fa3"),
        (M.EXTEND, [2048], [32768], {}, {}, "fa3"),
        (M.EXTEND, [512] * 8, [4608] * 8, {}, {}, "fa3"),
        (M.EXTEND, [2048], [2048], {}, {"arch": "sm80"}, "fa2"),
        (M.EXTEND, [2048], [2048], {}, {"arch": "sm100"}, "fa2"),
        (M.EXTEND, [2048], [2048], {"sliding_window": 64}, {}, "fa2"),
        (M.EXTEND, [2048], [2048], {}, {"kv_cache_dtype": "fp8_e4m3"}, "fa2"),
        (M.EXTEND, [4] * 16, [4096] * 16, {}, {}, "fa2"),
        (M.EXTEND, [4] * 16, [4096] * 16, {}, {"deterministic": True}, "fa3"),
        (M.EXTEND, [128], [32768], {}, {}, "fa2"),
        (M.MIXED, [2048, *[1] * 200], [2048, *[8192] * 200], {}, {}, "fa2"),
        (M.DECODE, [1, 1], [40, 3], {}, {}, "fa2"),
        (M.DECODE, [1, 1], [40, 3], {"heads": (8, 4)}, {}, "decode"),
        (M.DECODE, [1, 1], [40, 3], {"heads": (8, 4)}, {"kv_cache_dtype": "fp8_e5m2"}, "fa2"),
        (M.DECODE, [1, 1], [40, 3], {"heads": (8, 4)}, {"deterministic": True}, "fa2"),
    ],
)
def test_the_kernel_of_a_pass(mode, query_lens, seq_lens, layer, config, kernel):
    layer = make_layer(**{"heads": (32, 8), "dim": 128} | layer)
    backend = make_backend(layer, **config)
    assert kernels(backend, make_batch(mode, query_lens, seq_lens)) == [kernel]


def test_a_chain_is_verified_by_fa2_however_long():
    layer = make_layer(heads=(32, 8), dim=128)
    batch = make_batch(
        M.TARGET_VERIFY, [300] * 4, [900] * 4, spec=SpecInfo(topk=1, num_draft_tokens=300)
    )
    assert kernels(make_backend(layer), batch) == ["fa2"]


def test_one_deterministic_split_for_every_batch():
    layer = make_layer(heads=(32, 8), dim=128)
    limits = {"max_bs": 64, "max_seq_len": 32768, "deterministic": True}
    backend = make_backend(layer, **limits)
    result = set()
    for lengths in ([40], [32768, 3], [8000] * 64):
        plans = backend.init_forward_metadata(make_batch(M.DECODE, [1] * len(lengths), lengths))
        result |= {(p.planned.shape.fixed_split, p.planned.shape.split) for p in plans.values()}
    assert result == {(2048 // 16, True)}
    unknown = make_backend(layer, deterministic=True)
    plans = unknown.init_forward_metadata(make_batch(M.DECODE, [1], [40]))
    assert [(p.planned.shape.fixed_split, p.planned.shape.split) for p in plans.values()] == [
        (None, False)
    ]


# plans


def test_plans_live_side_by_side_and_wrappers_are_used_again():
    layer = make_layer()
    backend = make_backend(layer)
    one = make_batch(M.EXTEND, [7, 3], [40, 9])
    two = make_batch(M.EXTEND, [5], [77])
    right = [attend(make_backend(layer), layer, b) for b in (one, two)]
    plans = [backend.init_forward_metadata(b) for b in (one, two)]
    for b, metadata, expected in zip((one, two), plans, right, strict=True):
        torch.testing.assert_close(attend(backend, layer, b, metadata), expected, rtol=0, atol=0)
    wrappers = {id(p.planned) for metadata in plans for p in metadata.values()}
    assert len(wrappers) == 2
    del metadata, plans
    for _ in range(3):
        plans = backend.init_forward_metadata(one)
        assert {id(p.planned) for p in plans.values()} <= wrappers


@pytest.mark.parametrize("window", [None, 9])
def test_a_wrapper_takes_the_tree_of_its_pass(window):
    layer = make_layer(sliding_window=window)
    backend, passes = make_backend(layer), []
    for trees, seq_lens in (((TREE_A, TREE_B), [40, 9]), ((TREE_B, TREE_A), [8, 77])):
        masks = torch.stack([tree_mask(t) for t in trees])
        n = masks.shape[1]
        spec = SpecInfo(topk=2, num_draft_tokens=n, tree_mask=masks)
        passes.append(make_batch(M.TARGET_VERIFY, [n, n], seq_lens, spec=spec))
    for batch in (*passes, *passes):
        right = attend(make_backend(layer), layer, batch)
        torch.testing.assert_close(attend(backend, layer, batch), right, rtol=0, atol=0)
    assert sum(map(len, backend._pool._wrappers.values())) == 1


def verify(trees, seq_lens, **more):
    """Return a batch that verifies one tree of as many drafts per request."""
    masks = torch.stack([tree_mask(t) for t in trees])
    n = masks.shape[1]
    spec = SpecInfo(topk=2, num_draft_tokens=n, tree_mask=masks)
    return make_batch(M.TARGET_VERIFY, [n] * len(trees), seq_lens, spec=spec, **more)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [1, 2, 3, 5, 9, 30])
def test_a_window_counts_positions_in_whatever_order_drafts_are_named(window, seed):
    layer, lens = make_layer(sliding_window=window), [40, 9]
    n = len(TREE_A)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    one = verify([TREE_A, TREE_B], lens)
    other = verify([renamed(t, order) for t in (TREE_A, TREE_B)], lens)
    cache, q, tokens = make_cache(layer, one), make_q(layer, one), torch.tensor(order)
    cache_of = {}
    for name in ("k", "v"):
        pool = getattr(cache, name).clone().flatten(0, 1)
        slots = one.views["full"].out_cache_loc.view(2, n)
        pool[slots] = pool[slots[:, tokens]]
        cache_of[name] = pool.view_as(cache.k)
    backend = make_backend(layer)

    def run(batch, q, cache):
        metadata = backend.init_forward_metadata(batch)
        return backend.forward(q, None, None, layer, cache, batch, metadata)

    right = run(one, q, cache).unflatten(0, (2, n))[:, tokens].flatten(0, 1)
    actual = run(other, q.unflatten(0, (2, n))[:, tokens].flatten(0, 1), LayerCache(**cache_of))
    torch.testing.assert_close(actual, right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", [M.EXTEND, M.DRAFT_EXTEND, M.MIXED])
def test_a_tree_that_is_left_over_masks_nothing(mode):
    layer = make_layer()
    batch = make_batch(mode, [7, 7], [40, 9])
    right = attend(make_backend(layer), layer, batch)
    spec = verify([TREE_A, TREE_B], [40, 9]).spec
    object.__setattr__(batch, "spec", spec)  # a batch does not take it
    torch.testing.assert_close(attend(make_backend(layer), layer, batch), right, rtol=0, atol=0)


def test_a_tree_masks_no_encoder_tokens():
    layer = make_layer()
    cross = dataclasses.replace(layer, layer_id=1, view="cross", is_cross=True)
    own = verify([TREE_A, TREE_B], [40, 9])
    table = own.views["full"].page_table
    view = CacheView.build(page_table=table, page_size=16, seq_lens=[20, 11], new_lens=[0, 0])
    batch = dataclasses.replace(own, views={**own.views, "cross": view})
    chain = SpecInfo(topk=1, num_draft_tokens=own.spec.num_draft_tokens)
    right = attend(make_backend(cross), cross, dataclasses.replace(batch, spec=chain))
    actual = attend(make_backend(layer, cross), cross, batch)
    torch.testing.assert_close(actual, right, rtol=0, atol=0)


def test_layers_that_differ_in_scale_and_cap():
    layers = [make_layer(), make_layer(logit_cap=5.0), make_layer()]
    layers = [dataclasses.replace(x, layer_id=i) for i, x in enumerate(layers)]
    layers[2] = dataclasses.replace(layers[2], scale=1.0)
    backend, batch = make_backend(*layers), make_batch(M.EXTEND, [7, 3], [40, 9])
    metadata = backend.init_forward_metadata(batch)
    assert len(metadata) == 2, "the scale is no part of a plan"
    for layer in layers:
        alone = attend(make_backend(layer), layer, batch)
        torch.testing.assert_close(attend(backend, layer, batch, metadata), alone, rtol=0, atol=0)


def test_lengths_on_the_device_alone():
    layer, batch = make_layer(), make_batch(M.EXTEND, [7, 3], [40, 9])
    views = {"full": dataclasses.replace(batch.views["full"], seq_lens_host=None)}
    bare = dataclasses.replace(batch, views=views, query_lens_host=None)
    right = attend(make_backend(layer), layer, batch)
    torch.testing.assert_close(attend(make_backend(layer), layer, bare), right, rtol=0, atol=0)


def test_pages_behind_a_window_are_not_named():
    layer = make_layer(sliding_window=20)
    backend, batch = make_backend(layer), make_batch(M.DECODE, [1, 1], [500, 9])
    (plan,) = backend.init_forward_metadata(batch).values()
    table = batch.views["full"].page_table
    assert plan.table.indices.data_ptr() == table.data_ptr(), "the page table is the page list"
    width = table.shape[1]
    assert plan.table.device.indptr.tolist() == [480 // 16, width, 2 * width]
    assert plan.table.keys.tolist() == [500 - 480, 9]


@pytest.mark.parametrize("window", [None, 20])
def test_rows_of_the_page_table_may_lie_apart_and_end_in_anything(window):
    layer = make_layer(sliding_window=window)
    batch = make_batch(M.EXTEND, [7, 3], [500, 9])
    right = attend(make_backend(layer), layer, batch)
    view = batch.views["full"]
    rows, width = view.page_table.shape
    wide = torch.full((rows, width + 5), 1 << 30, dtype=torch.int32)
    for row, n in zip(range(rows), (500, 9), strict=True):
        wide[row, : -(-n // 16)] = view.page_table[row, : -(-n // 16)]

    def with_table(page_table):
        changed = dataclasses.replace(view, page_table=page_table)
        return dataclasses.replace(batch, views={"full": changed})

    actual = attend(make_backend(layer), layer, with_table(wide[:, :width]))
    torch.testing.assert_close(actual, right, rtol=0, atol=0)
    twice = view.page_table[:1].expand(rows, width)  # both requests have the first one's pages
    right = attend(make_backend(layer), layer, with_table(twice.contiguous()))
    actual = attend(make_backend(layer), layer, with_table(twice))
    torch.testing.assert_close(actual, right, rtol=0, atol=0)
    with pytest.raises(BackendError, match="its rows must not overlap"):
        make_backend(layer).init_forward_metadata_capture_cuda_graph(with_table(twice))


def test_a_list_beyond_31_bits_of_tokens_is_not_read_as_one():
    """Kernels count its tokens in 32 bits, whatever the lengths."""
    from attn_nvidia.flashinfer.csr import adjacent

    rows, width = 4096, 1 << 13
    table = torch.empty(rows, width, dtype=torch.int32, device="meta")
    keys = np.array([1, 129], dtype=np.int32)
    assert adjacent(table, keys, 32, captured=True) is table
    assert adjacent(table, keys, 64, captured=False).shape == (rows, 3)
    with pytest.raises(BackendError, match=r"fewer than 2\^31 tokens"):
        adjacent(table, keys, 64, captured=True)


def test_a_replay_reads_the_pages_where_they_were():
    layer = make_layer()
    backend, batch = make_backend(layer), make_batch(M.DECODE, [1], [40])
    metadata = backend.init_forward_metadata_capture_cuda_graph(batch)
    backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
    view = batch.views["full"]
    moved = {"full": dataclasses.replace(view, page_table=view.page_table.clone())}
    with pytest.raises(BackendError, match="overwrite the captured batch in place"):
        backend.init_forward_metadata_replay_cuda_graph(
            dataclasses.replace(batch, views=moved), metadata
        )


def test_a_replay_that_does_not_fit_the_capture():
    layer = make_layer()
    backend = make_backend(layer)
    batch = make_batch(M.DECODE, [1], [40])
    metadata = backend.init_forward_metadata_capture_cuda_graph(batch)
    (plan,) = metadata.values()
    plan.planned._info = [*plan.planned._info[:-1], 12345]
    with pytest.raises(BackendError, match="capture it again"):
        backend.init_forward_metadata_replay_cuda_graph(batch, metadata)


@pytest.mark.parametrize(("batch_size", "splits"), [(4, True), (512, False)])
def test_a_captured_plan_splits_keys_where_its_workspace_has_room(batch_size, splits):
    layer = make_layer(heads=(32, 8), dim=128)
    backend = make_backend(layer)
    lens, spec = [8] * batch_size, SpecInfo(topk=1, num_draft_tokens=8)
    batch = make_batch(M.TARGET_VERIFY, lens, lens, spec=spec)
    (plan,) = backend.init_forward_metadata_capture_cuda_graph(batch).values()
    assert plan.planned.shape.split == splits
    backend.init_forward_metadata_replay_cuda_graph(
        batch, backend.init_forward_metadata_capture_cuda_graph(batch)
    )


def test_without_a_cache_a_layer_that_the_config_lacks_has_room_for_its_partial_results(
    monkeypatch,
):
    """64 query heads per KV head: more than the 128 MiB that a config of no layers asks for."""
    monkeypatch.setattr("attn_core.runtime.workspace._HELD", {})
    layer, backend = make_layer(heads=(64, 1), dim=128), make_backend(arch="sm80")
    q, k = torch.randn(24, 64, 128).bfloat16(), torch.randn(3000, 1, 128).bfloat16()
    cu_seqlens = (torch.tensor([0, n], dtype=torch.int32) for n in (24, 3000))
    actual = backend.forward_ragged(q, k, k, layer, *cu_seqlens, 24, 3000, causal=False)
    keys = k.double().squeeze(1)
    right = (q.double() @ keys.T * layer.scale).softmax(-1) @ keys
    torch.testing.assert_close(actual.double(), right, rtol=0.02, atol=0.01)


def test_captured_schedules_are_small():
    layer = make_layer(heads=(32, 8), dim=128)
    batch = make_batch(M.DECODE, [1] * 64, [40] * 64)
    (plan,) = make_backend(layer).init_forward_metadata_capture_cuda_graph(batch).values()
    assert plan.planned._wrapper._int_workspace_buffer.numel() < 1 << 18


# conventions


def renamed(parents, order):
    """Return a tree with its drafts named in another order: draft order[i] is now draft i."""
    place = {draft: i for i, draft in enumerate(order)} | {-1: -1}
    return tuple(place[parents[draft]] for draft in order)


BACKWARDS = tuple(reversed(range(len(TREE_A))))


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 30])
def test_bits_of_trees(window):
    from attn_nvidia.flashinfer.tree import loose_window, mask_bits

    last_first = [renamed(x, BACKWARDS) for x in (TREE_A, TREE_B)]
    trees, keys = [TREE_A, TREE_B, *last_first] * 2, [7, 8, 7, 9, 23, 61, 23, 61]
    n = len(TREE_A)
    tree = torch.stack([tree_mask(t) for t in trees])
    depth = tree.sum(-1) - 1
    bits, indptr = mask_bits(tree, torch.tensor(keys).int().numpy(), window=window, depth=depth)
    assert indptr.tolist()[-1] == len(bits)
    for b, (parents, s) in enumerate(zip(trees, keys, strict=True)):
        mine = (bits[indptr[b] : indptr[b + 1], None] >> torch.arange(8)) & 1
        mine = mine.flatten()[: n * s].view(n, s)
        for i in range(n):
            left = 0 if window is None else max(0, s - n + i - loose_window(window, n))
            seen = set(visible_keys(i, n, s, causal=True, window=window, parents=parents))
            actual = {j for j in range(left, s) if mine[i, j]}
            assert actual == seen, (b, i)
            assert min(seen) >= left, "the kernel's own window hides what a draft sees"


@pytest.mark.parametrize("mode", [M.EXTEND, M.DECODE])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_a_query_without_keys_has_no_weight(mode, heads):
    layer = make_layer(heads=heads, view="cross", is_cross=True)
    own = make_batch(mode, [1, 1], [5, 6])
    table = own.views["full"].page_table
    cross = CacheView.build(page_table=table, page_size=16, seq_lens=[9, 0], new_lens=[0, 0])
    batch = dataclasses.replace(own, views={**own.views, "cross": cross})
    out, lse = attend(make_backend(layer), layer, batch, return_lse=True)
    assert lse[0].isfinite().all()
    assert (lse[1] == -torch.inf).all()
    assert (out[1] == 0).all()


def test_an_output_with_gaps_is_filled():
    layer, batch = make_layer(), make_batch(M.EXTEND, [7, 3], [40, 9])
    wide = torch.full((10, 4, 128), torch.nan, dtype=torch.bfloat16)
    actual = attend(make_backend(layer), layer, batch, out=wide[..., :64])
    assert actual.data_ptr() == wide.data_ptr()
    right = attend(make_backend(layer), layer, batch)
    torch.testing.assert_close(actual, right, rtol=0, atol=0)
    assert wide[..., 64:].isnan().all()


# without a cache


def indptr(*lens):
    return torch.tensor([0, *lens]).cumsum(0).int()


def ragged(backend, layer, q_lens, k_lens, *, cu=None, causal=False, **more):
    cu_q, cu_k = cu or (indptr(*q_lens), indptr(*k_lens))
    rng = torch.Generator().manual_seed(2)
    q = torch.randn(sum(q_lens), layer.num_q_heads, layer.head_dim, generator=rng).bfloat16()
    k, v = torch.randn(2, sum(k_lens), layer.num_kv_heads, layer.head_dim, generator=rng).bfloat16()
    longest = max(q_lens), max(k_lens)
    return backend.forward_ragged(q, k, v, layer, cu_q, cu_k, *longest, causal=causal, **more)


@pytest.mark.parametrize("encodes", [False, True])
def test_the_layers_of_a_tower_share_what_the_first_one_found(encodes, monkeypatch):
    layer = make_layer(is_causal=False)
    backend = make_backend(layer, encodes=encodes)
    cu = indptr(9, 4), indptr(9, 4)
    first = ragged(backend, layer, [9, 4], [9, 4], cu=cu)
    result = backend._layout if encodes else backend._ragged._lengths
    for planned in () if encodes else backend._ragged._wrappers.values():
        monkeypatch.setattr(planned.wrapper, "plan", None)  # a second plan would fail
    again = ragged(backend, layer, [9, 4], [9, 4], cu=cu)
    assert (backend._layout if encodes else backend._ragged._lengths) is result
    monkeypatch.undo()
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    cu[0].copy_(indptr(4, 9))  # the same tensors, other lengths
    cu[1].copy_(indptr(4, 9))
    other = ragged(make_backend(layer, encodes=encodes), layer, [4, 9], [4, 9])
    changed = ragged(backend, layer, [4, 9], [4, 9], cu=cu)
    torch.testing.assert_close(changed, other, rtol=0, atol=0)


def test_lengths_that_count_no_changes_are_read_each_time():
    layer = make_layer(is_causal=False)
    backend = make_backend(layer)
    with torch.inference_mode():
        cu = indptr(9, 4), indptr(9, 4)
        ragged(backend, layer, [9, 4], [9, 4], cu=cu)
        cu[0].copy_(indptr(4, 9))
        cu[1].copy_(indptr(4, 9))
        changed = ragged(backend, layer, [4, 9], [4, 9], cu=cu)
    other = ragged(make_backend(layer), layer, [4, 9], [4, 9])
    torch.testing.assert_close(changed, other, rtol=0, atol=0)


def test_long_requests_without_a_cache_run_on_fa3():
    layer = make_layer(heads=(32, 8), dim=128)
    backend = make_backend(layer)
    ragged(backend, layer, [600], [600], causal=True, return_lse=True)
    ragged(backend, layer, [4], [600], causal=True)
    assert [key.kernel for key in backend._ragged._wrappers] == ["fa3", "fa2"]


def test_ragged_requests_without_keys():
    layer = make_layer(is_causal=False)
    out, lse = ragged(make_backend(layer), layer, [3, 2], [5, 0], return_lse=True)
    assert lse[:3].isfinite().all()
    assert (lse[3:] == -torch.inf).all()
    assert (out[3:] == 0).all()


# refusals


def test_causal_requests_with_fewer_keys_than_queries_are_refused():
    layer = make_layer()
    with pytest.raises(UnsupportedError, match="fewer keys than queries"):
        ragged(make_backend(layer), layer, [3, 4], [3, 2], causal=True)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"dim": 96}, "head_dim 96"),
        ({"sliding_window": 5, "is_causal": False}, "without causal order"),
        ({"sliding_window": 5, "is_cross": True, "view": "cross"}, "without causal order"),
    ],
)
def test_layers_that_no_kernel_takes_are_refused(layer, message):
    with pytest.raises(UnsupportedError, match=message):
        make_backend(make_layer(**layer))


def test_a_layer_that_was_not_planned():
    layer, batch = make_layer(), make_batch(M.EXTEND, [7, 3], [40, 9])
    backend = make_backend(layer)
    other = dataclasses.replace(layer, sliding_window=5)
    with pytest.raises(BackendError, match="was not planned"):
        attend(backend, other, batch, backend.init_forward_metadata(batch))


def test_a_vision_tower_has_no_cache():
    layer, batch = make_layer(), make_batch(M.DECODE, [1], [4])
    backend = make_backend(layer, encodes=True)
    with pytest.raises(UnsupportedError, match="has no cache"):
        backend.init_forward_metadata(batch)
    with pytest.raises(UnsupportedError, match="has no cache"):
        attend(backend, layer, batch, {})
    with pytest.raises(UnsupportedError, match="return_lse"):
        ragged(backend, layer, [3], [3], return_lse=True)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_towers_of_one_shape_share_the_graphs_of_the_library(scale):
    """It takes a graph for a shape, whatever strides and scale it was built for."""
    layer = make_layer(is_causal=False)
    rng = torch.Generator().manual_seed(4)
    q, k, v = torch.randn(3, 13, 4, 64, generator=rng).bfloat16()
    layer = dataclasses.replace(layer, num_kv_heads=4)
    plain = make_backend(layer, encodes=True)
    cu = indptr(9, 4)
    want = plain.forward_ragged(q, k, v, layer, cu, cu, 9, 9, causal=False)
    fused = torch.stack((q, k, v), 1)
    scaled = dataclasses.replace(layer, scale=layer.scale * scale)
    heads_first = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q / scale, k, v))
    for tensors in ((fused[:, 0] / scale, fused[:, 1], fused[:, 2]), heads_first):
        other = make_backend(scaled, encodes=True)
        actual = other.forward_ragged(*tensors, scaled, cu, cu, 9, 9, causal=False)
        torch.testing.assert_close(actual, want, rtol=0, atol=0)


def test_one_token_of_any_stride_builds_the_graph_of_dense_tensors():
    """torch calls a dimension of size 1 contiguous at any stride."""
    layer = dataclasses.replace(make_layer(is_causal=False), num_kv_heads=4)
    rng = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 7, 4, 64, generator=rng).bfloat16()
    backend = make_backend(layer, encodes=True)
    for n in (1, 7):  # a graph serves both
        cu = indptr(n)
        right = [x[:n].contiguous() for x in (q, k, v)]
        odd = [x.as_strided(x.shape, (99, 64, 1)) if n == 1 else x for x in right]
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1).float() for x in right), scale=layer.scale
        )
        actual = backend.forward_ragged(*odd, layer, cu, cu, n, n, causal=False)
        torch.testing.assert_close(actual.float(), want.transpose(0, 1), rtol=2e-2, atol=2e-2)


def test_the_library_is_loaded_when_a_backend_is_created(monkeypatch):
    """Nothing of it is there after the plugin and every module of the wrapper were imported."""
    import importlib
    import sys

    for name in ("", ".mha", ".vision", ".ragged", ".wrappers"):
        importlib.import_module(f"attn_nvidia.flashinfer{name}")
    assert "flashinfer" not in sys.modules
    make_backend(make_layer())
    assert sys.modules["flashinfer"].__version__ == "0.6.14"


# what a plan uses that the library keeps inside


@pytest.mark.skipif("ATTN_WHEELS" not in os.environ, reason="ATTN_WHEELS names no unpacked wheels")
def test_the_wheel_keeps_what_a_second_plan_sets():
    from attn_nvidia.flashinfer import wrappers

    (root,) = pathlib.Path(os.environ["ATTN_WHEELS"]).glob("*/flashinfer/prefill.py")
    library = root.read_text() + root.with_name("decode.py").read_text()
    names = set(re.findall(r"\bw\.(_\w+)", pathlib.Path(wrappers.__file__).read_text()))
    assert len(names) > 8
    assert [n for n in sorted(names) if f"self.{n}" not in library] == []
    # the arguments of the schedulers, in order
    paged = library.partition("def plan(")[2]
    order = (
        "self._float_workspace_buffer, self._int_workspace_buffer, "
        "self._pin_memory_int_workspace_buffer, qo_indptr_host, paged_kv_indptr_host, "
        "kv_lens_arr_host, self._max_total_num_rows or total_num_rows, batch_size, num_qo_heads, "
        "num_kv_heads, page_size, self.is_cuda_graph_enabled, head_dim_qk, head_dim_vo, causal, "
        "window_left, ]"
    )
    assert order in re.sub(r"\s+", " ", paged)
    decode = re.sub(r"\s+", " ", root.with_name("decode.py").read_text())
    assert (
        "indptr_host, batch_size, num_qo_heads, num_kv_heads, page_size, "
        "self.is_cuda_graph_enabled, window_left, logits_soft_cap, head_dim, head_dim, "
        "torch.empty(0, dtype=q_data_type), torch.empty(0, dtype=kv_data_type), )"
    ) in decode
