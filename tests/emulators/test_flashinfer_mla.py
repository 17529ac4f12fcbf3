"""flashinfer's latent attention over emulated FlashInfer: fa3 on sm90, fa2 elsewhere."""

import dataclasses
import gc
import importlib

import pytest
import torch
from attn_core.errors import BackendError, UnsupportedError
from attn_core.ops.merge import merge_states
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.graphs import without_host_lengths
from attn_core.testing.inputs import clone_cache
from attn_core.testing.passes import attend
from mla_passes import FLASHINFER, Emulated, Pass, attend_ragged, counted, put_in, ragged


class TestHopper(Emulated):
    name, device, libraries = "flashinfer", "cuda:sm90", FLASHINFER


@pytest.mark.long  # the same wrapper again
class TestAmpere(Emulated):
    name, device, libraries = "flashinfer", "cuda:sm80", FLASHINFER
    reduced = True


@pytest.mark.long  # the same wrapper again
class TestBlackwell(Emulated):
    name, device, libraries = "flashinfer", "cuda:sm100", FLASHINFER
    reduced = True


@pytest.fixture
def mla():
    return importlib.import_module("flashinfer.mla")


@pytest.fixture
def prefill():
    return importlib.import_module("flashinfer.prefill")


@pytest.mark.parametrize(("arch", "family"), [("sm90", "fa3"), ("sm80", "fa2"), ("sm100", "fa2")])
def test_the_family_of_kernels_is_that_of_the_chip(arch, family, mla, monkeypatch):
    made = counted(monkeypatch, mla, "get_batch_mla_module")
    that = Pass("flashinfer", "mla-decode", arch=arch)
    that.check(that.backend())
    assert {args[0] for args, _ in made} == {family}


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 96])
def test_the_pools_pages_are_the_kernels(page_size, mla, monkeypatch):
    plans = counted(monkeypatch, mla.BatchMLAPagedAttentionWrapper, "plan")
    that = Pass("flashinfer", "mla-prefill", page_size=page_size)
    that.check(that.backend())
    assert plans[0][0][8] == page_size


def test_the_page_table_is_the_page_list(mla, monkeypatch):
    """Nothing is copied: where a request's pages begin is a multiple of the table's stride."""
    that = Pass("flashinfer", "mla-prefill", page_size=16)
    batch, backend = that.inputs.batch, that.backend()
    table = batch.views["full"].page_table
    wide = torch.full((table.shape[0], table.shape[1] + 3), 1 << 30, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    view = dataclasses.replace(batch.views["full"], page_table=wide[:, : table.shape[1]])
    batch = dataclasses.replace(batch, views={"full": view})
    metadata = backend.init_forward_metadata(batch)
    that.check(backend, metadata=metadata)
    (plan,) = metadata.values()
    assert plan.library._kv_indices_buf.data_ptr() == wide.data_ptr()
    one = dataclasses.replace(view, page_table=table[:1].expand(table.shape))
    batch = dataclasses.replace(batch, views={"full": one})
    with pytest.raises(BackendError, match="its rows must not overlap"):
        backend.init_forward_metadata_capture_cuda_graph(batch)


def test_a_second_plan_leaves_out_what_has_not_changed(mla, monkeypatch):
    that = Pass("flashinfer", "mla-prefill")
    backend = that.backend()
    backend.init_forward_metadata(that.inputs.batch)
    front = counted(monkeypatch, mla.BatchMLAPagedAttentionWrapper, "plan")
    inner = counted(monkeypatch, mla._Module, "plan")
    metadata = backend.init_forward_metadata(that.inputs.batch)
    assert (len(front), len(inner)) == (0, 1)
    that.check(backend, metadata=metadata)


def test_a_plan_is_of_its_own_pass_whatever_is_planned_meanwhile():
    one = Pass("flashinfer", "decode")
    backend = one.backend()
    metadata = backend.init_forward_metadata(one.inputs.batch)
    other = Pass("flashinfer", "mla-decode-padded")
    held = backend.init_forward_metadata(other.inputs.batch)
    one.check(backend, metadata=metadata)
    assert held


def test_wrappers_are_planned_anew_and_not_made_anew(mla, monkeypatch):
    made = counted(monkeypatch, mla.BatchMLAPagedAttentionWrapper, "__init__")
    that = Pass("flashinfer", "decode")
    backend = that.backend()
    metadata = None
    for _ in range(5):
        metadata = backend.init_forward_metadata(that.inputs.batch)
        that.check(backend, metadata=metadata)
    del metadata
    gc.collect()
    assert len(made) == 2  # one is planned while the other's plan is still alive


def test_layers_that_differ_in_scale_have_plans_of_their_own():
    that = Pass("flashinfer", "mla-decode-padded")
    halved = dataclasses.replace(that.inputs.layer, layer_id=1, scale=that.inputs.layer.scale / 2)
    backend = that.bench.create((that.inputs.layer, halved), dtype="bf16", page_size=64)
    metadata = backend.init_forward_metadata(that.inputs.batch)
    assert len(metadata) == 2
    that.check(backend, metadata=metadata)
    other = Pass("flashinfer", "mla-decode-padded", scale_by=0.5)
    other.check(backend, metadata=metadata)


def test_a_layer_that_was_not_planned_is_refused():
    that = Pass("flashinfer", "mla-decode-padded")
    backend = that.backend()
    strange = Pass("flashinfer", "mla-decode-padded", scale_by=0.5)
    metadata = backend.init_forward_metadata(that.inputs.batch)
    with pytest.raises(BackendError, match=r"was not planned: .*; planned: \[\(LayerGroup\("):
        strange.check(backend, metadata=metadata)


@pytest.mark.parametrize("case", ["mla-decode", "mla-prefill", "mla-verify-chain"])
def test_lengths_on_the_device_alone_are_copied(case):
    that = Pass("flashinfer", case)
    that.check(that.backend(), batch=without_host_lengths(that.inputs.batch))


def test_queries_that_16_bytes_do_not_divide_are_copied():
    that = Pass("flashinfer", "mla-decode-padded")
    q = that.inputs.q
    room = torch.zeros(q.shape[0], q.shape[1], 577 + 2, dtype=q.dtype)
    room[..., 1:577] = q
    that.inputs = dataclasses.replace(that.inputs, q=room[..., 1:577])
    that.check(that.backend())


def test_pages_that_move_are_read_where_they_lie_now():
    """As those of an engine that gave its memory back meanwhile."""
    that = Pass("flashinfer", "mla-decode-padded")
    backend, cache = that.backend(), clone_cache(that.inputs.cache)
    first, _ = attend(backend, that.inputs, cache=cache)
    old, cache.k.data = cache.k.data, cache.k.data.clone()
    old.zero_()
    again, _ = attend(backend, that.inputs, cache=cache)
    tokens = that.inputs.real_tokens
    assert torch.equal(again[:tokens], first[:tokens])


def test_more_queries_than_a_plan_has_room_for_are_refused_before_they_corrupt_it(mla):
    that = Pass("flashinfer", "mla-prefill", heads=(128, 1))
    tokens, pages = 17000, 17000 // 64 + 1
    batch = ForwardBatch.build(
        ForwardMode.EXTEND,
        query_lens=[tokens],
        seq_lens=[tokens],
        page_table=torch.ones(1, pages, dtype=torch.int32),
        page_size=64,
    )
    with pytest.raises(UnsupportedError, match=r"17000 query tokens of 128 heads .* about 16127"):
        that.backend().init_forward_metadata(batch)
    wrapper = mla.BatchMLAPagedAttentionWrapper(torch.zeros(128 << 20, dtype=torch.uint8))
    lens = torch.tensor([tokens], dtype=torch.int32)
    indptr = torch.tensor([0, tokens], dtype=torch.int32)
    bf16 = torch.bfloat16
    with pytest.raises(AssertionError, match="in a buffer for 16384"):
        wrapper.plan(indptr, indptr, lens, lens, 128, 512, 64, 1, True, 1.0, bf16, bf16)


def test_an_e4m3_cache_is_hoppers_and_bfloat16s(mla):
    that = Pass("flashinfer", "mla-fp8-e4m3")
    that.check(that.backend())
    for arch, dtype in (("sm100", "bf16"), ("sm90", "fp16")):
        put_in(arch)
        config = dataclasses.replace(
            that.backend().config, arch=arch, dtype=dtype, kv_cache_dtype="fp8_e4m3"
        )
        from attn_nvidia.flashinfer.mla import FlashInferMLA

        with pytest.raises(ValueError, match="FP8 kv_data_type for MLA"):
            FlashInferMLA(config).init_forward_metadata(that.inputs.batch)


# ragged prefill


def _layer(that, scale=192**-0.5, layer_id=0):
    dims = {"num_kv_heads": 4, "head_dim": 192, "v_head_dim": 128, "scale": scale}
    return dataclasses.replace(that.inputs.layer, layer_id=layer_id, **dims)


def _run(backend, layer, tensors, indptr, query_lens, key_lens, *, causal=False, **more):
    return backend.forward_ragged(
        *tensors, layer, *indptr, max(query_lens), max(key_lens), causal=causal, **more
    )


def test_a_request_whose_prefix_has_no_more_chunks_sees_nothing():
    that = Pass("flashinfer", "mla-prefill")
    query_lens, key_lens = (5, 9, 3), (30, 0, 17)
    tensors, indptr = ragged(query_lens, key_lens)
    layer = _layer(that)
    out, lse = _run(that.backend(), layer, tensors, indptr, query_lens, key_lens, return_lse=True)
    right, sums = attend_ragged(*tensors, query_lens, key_lens, layer.scale)
    assert torch.equal(lse == -torch.inf, sums == -torch.inf)
    torch.testing.assert_close(lse, sums, rtol=0, atol=1e-4)
    torch.testing.assert_close(out.float(), right, rtol=0, atol=2e-2)
    merged, total = merge_states(torch.stack([out, out]), torch.stack([lse, lse]))
    assert merged[5:14].eq(0).all()
    assert total[5:14].eq(-torch.inf).all()


def test_no_keys_at_all_need_no_library(prefill, monkeypatch):
    plans = counted(monkeypatch, prefill.BatchPrefillWithRaggedKVCacheWrapper, "plan")
    that = Pass("flashinfer", "mla-prefill")
    tensors, indptr = ragged((5, 2), (0, 0))
    out, lse = _run(that.backend(), _layer(that), tensors, indptr, (5, 2), (0, 0), return_lse=True)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    assert not plans


@pytest.mark.parametrize("name", ["flashinfer", "flashmla"])
def test_causal_order_over_fewer_keys_than_queries_is_refused(name):
    """The library gives queries that see no key a mean of all values."""
    that = Pass(name, "mla-prefill")
    tensors, indptr = ragged((5, 2), (5, 1))
    with pytest.raises(UnsupportedError, match="fewer keys than queries"):
        _run(that.backend(), _layer(that), tensors, indptr, (5, 2), (5, 1), causal=True)


def test_ragged_lengths_are_planned_once_a_pass(prefill, monkeypatch):
    plans = counted(monkeypatch, prefill.BatchPrefillWithRaggedKVCacheWrapper, "plan")
    made = counted(monkeypatch, prefill.BatchPrefillWithRaggedKVCacheWrapper, "__init__")
    that = Pass("flashinfer", "mla-prefill")
    lens = (9, 11)
    tensors, indptr = ragged(lens, lens)
    backend = that.backend()
    layers = [_layer(that, layer_id=i) for i in range(3)]

    def all_layers(expected_plans):
        for layer in layers:
            _run(backend, layer, tensors, indptr, lens, lens, causal=True)
        assert len(plans) == expected_plans

    all_layers(1)
    backend.init_forward_metadata(that.inputs.batch)
    all_layers(2)
    _run(backend, layers[0], tensors, indptr, lens, lens, causal=False)
    assert len(plans) == 3
    other = torch.tensor([0, 2, 20], dtype=torch.int32)
    for x in indptr:
        x.copy_(other)  # in place, with no pass begun: seen all the same
    out = _run(backend, layers[0], tensors, indptr, (2, 18), (2, 18), causal=False)
    assert len(plans) == 4
    right, _ = attend_ragged(*tensors, (2, 18), (2, 18), layers[0].scale)
    torch.testing.assert_close(out.float(), right, rtol=0, atol=2e-2)
    assert len(made) == 3  # those of the pass before are free again


# CUDA graphs


def test_a_replay_schedules_and_nothing_else(mla, monkeypatch):
    that = Pass("flashinfer", "decode")
    backend = that.backend()
    batch = that.inputs.batch
    backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
    metadata = backend.init_forward_metadata_capture_cuda_graph(batch)
    (plan,) = metadata.values()
    pages = plan.library._kv_indices_buf.data_ptr()
    assert pages == batch.views["full"].page_table.data_ptr()
    front = counted(monkeypatch, mla.BatchMLAPagedAttentionWrapper, "plan")
    schedules = counted(monkeypatch, mla._Module, "plan")
    backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
    assert (len(front), len(schedules)) == (0, 1)
    assert plan.library._kv_indices_buf.data_ptr() == pages
    that.check(backend, metadata=metadata)
    view = batch.views["full"]
    moved = {"full": dataclasses.replace(view, page_table=view.page_table.clone())}
    with pytest.raises(BackendError, match="overwrite the captured batch in place"):
        backend.init_forward_metadata_replay_cuda_graph(
            dataclasses.replace(batch, views=moved), metadata
        )
    # the kernels read what was scheduled last: another library without these names still plans
    monkeypatch.delattr(plan.library, "_cached_module")
    backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
    assert len(front) == 1
    that.check(backend, metadata=metadata)
