"""trtllm_mla over emulated FlashInfer on an emulated sm100."""

import dataclasses
import importlib

import pytest
import torch
from attn_core.errors import UnsupportedError
from attn_core.runtime.graphs import without_host_lengths
from attn_core.testing.tolerance import CheckFailed
from mla_passes import FLASHINFER, Emulated, Pass, attend_ragged, counted, ragged


class TestTrtllmMLA(Emulated):
    name, device, libraries = "trtllm_mla", "cuda:sm100", FLASHINFER


def that_pass(case, **more):
    return Pass("trtllm_mla", case, arch="sm100", **more)


@pytest.mark.parametrize(("page_size", "page"), [(32, 32), (64, 64), (96, 32), (128, 64)])
def test_pages_are_split_into_the_kernels_and_the_table_is_padded(page_size, page, monkeypatch):
    mla = importlib.import_module("flashinfer.mla")
    calls = counted(monkeypatch, mla, "trtllm_batch_decode_with_kv_cache_mla")
    that = that_pass("mla-decode", page_size=page_size)
    that.check(that.backend())
    [(args, _)] = calls
    pages, table = args[1], args[6]
    assert pages.shape[1:] == (page, 576)
    assert table.shape[1] % (128 // page) == 0
    assert table.is_contiguous()


@pytest.mark.parametrize(
    ("case", "ours"),
    [
        ("mla-decode", 1),
        ("mla-draft-decode", 1),
        ("mla-verify-chain", 1),
        ("mla-prefill", 0),
        ("mla-mixed", 0),
        ("mla-draft-extend", 0),
    ],
)
def test_even_queries_are_trtllms_and_ragged_ones_flashinfers(case, ours, monkeypatch):
    mla = importlib.import_module("flashinfer.mla")
    calls = counted(monkeypatch, mla, "trtllm_batch_decode_with_kv_cache_mla")
    that = that_pass(case)
    that.check(that.backend(), batch=without_host_lengths(that.inputs.batch), preallocated=True)
    assert len(calls) == ours


def test_an_output_buffer_with_strides_is_filled_all_the_same():
    that = that_pass("mla-decode-padded")
    backend, inputs = that.backend(), that.inputs
    metadata = backend.init_forward_metadata(inputs.batch)
    room = torch.full((inputs.q.shape[0], 4, 1024), torch.nan, dtype=torch.bfloat16)
    out = room[..., :512]
    args = (inputs.q, None, None, inputs.layer, inputs.cache, inputs.batch, metadata)
    assert backend.forward(*args, out=out) is out
    right = backend.forward(*args)
    real = slice(0, inputs.real_tokens)
    assert torch.equal(out[real], right[real])
    assert room[..., 512:].isnan().all()


@pytest.mark.parametrize("return_lse", [True, False])
def test_a_request_whose_prefix_has_no_more_chunks_sees_nothing(return_lse):
    """The kernel leaves its rows unwritten, NaN in the emulation."""
    that = that_pass("mla-prefill")
    query_lens, key_lens = (5, 9, 3), (30, 0, 17)
    tensors, indptr = ragged(query_lens, key_lens)
    dims = {"num_kv_heads": 4, "head_dim": 192, "v_head_dim": 128, "scale": 192**-0.5}
    layer = dataclasses.replace(that.inputs.layer, **dims)
    actual = that.backend().forward_ragged(
        *tensors, layer, *indptr, 9, 30, causal=False, return_lse=return_lse
    )
    out, lse = actual if return_lse else (actual, None)
    right, sums = attend_ragged(*tensors, query_lens, key_lens, layer.scale)
    torch.testing.assert_close(out.float(), right.nan_to_num(), rtol=0, atol=2e-2)
    if return_lse:
        torch.testing.assert_close(lse, sums, rtol=0, atol=1e-4)


def test_causal_queries_before_all_keys_see_nothing():
    that = that_pass("mla-prefill")
    query_lens, key_lens = (3, 4, 5), (0, 2, 5)
    tensors, indptr = ragged(query_lens, key_lens)
    dims = {"num_kv_heads": 4, "head_dim": 192, "v_head_dim": 128, "scale": 192**-0.5}
    layer = dataclasses.replace(that.inputs.layer, **dims)
    out, lse = that.backend().forward_ragged(
        *tensors, layer, *indptr, 5, 5, causal=True, return_lse=True
    )
    assert not out[:5].any()
    assert lse[:5].eq(-torch.inf).all()
    assert lse[5:].isfinite().all()
    assert out[5:].isfinite().all()


def test_a_graph_refills_a_padded_table_and_leaves_the_batchs_own():
    for page_size, own in ((32, False), (128, False), (64, True)):
        that = that_pass("decode", page_size=page_size)
        backend, batch = that.backend(), that.inputs.batch
        view = batch.views["full"]
        even = view.page_table.shape[1] * page_size % 128 == 0
        table = view.page_table.contiguous()
        views = {"full": dataclasses.replace(view, page_table=table)}
        batch = dataclasses.replace(batch, views=views)
        metadata = backend.init_forward_metadata_capture_cuda_graph(batch)
        (plan,) = metadata.of.values()
        assert (plan.table is table) == (own and even)
        if plan.table is not table:
            plan.table.zero_()
        backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
        that.check(backend, batch=batch, metadata=metadata)


def test_the_scratch_grows_with_the_lse_and_its_counters_stay_zero():
    that = that_pass("mla-decode", heads=(128, 1))
    backend = that.backend()
    (plan,) = backend.init_forward_metadata(that.inputs.batch).of.values()
    small = plan.extra.numel()
    which = next(iter(backend._classes))
    large = backend.plan(which, plan.table.new_zeros(600, 2), plan.seq_lens, 4)
    assert large.numel() > max(small, 600 * 256 * 128 * 8)
    that.check(backend)
    assert not plan.extra[: 8 << 20].any()


FP8 = {"kv_dtype": "fp8_e4m3", "k_scale": 0.4}


@pytest.mark.parametrize(
    "case", ["mla-decode", "mla-draft-decode", "mla-verify-chain", "mla-draft-extend"]
)
def test_an_fp8_cache_is_read_with_rounded_queries_ragged_ones_too(case, monkeypatch):
    mla = importlib.import_module("flashinfer.mla")
    calls = counted(monkeypatch, mla, "trtllm_batch_decode_with_kv_cache_mla")
    that = that_pass(case, **FP8)
    that.check(that.backend(), batch=without_host_lengths(that.inputs.batch), preallocated=True)
    backend, inputs, q = that.backend(), that.inputs, that.inputs.q.clone()
    q[0, 0, 0] = 1e4  # a plain cast of it is NaN
    metadata = backend.init_forward_metadata(inputs.batch)
    actual = backend.forward(q, None, None, inputs.layer, inputs.cache, inputs.batch, metadata)
    assert actual[: inputs.real_tokens].isfinite().all()
    for args, more in calls:
        assert args[0].dtype == torch.float8_e4m3fn
        scales = more["bmm1_scale"], more["bmm2_scale"]
        assert scales == pytest.approx((inputs.layer.scale * 0.4, 0.4))
        assert ("cum_seq_lens_q" in more) == (case == "mla-draft-extend")
    assert len(calls) == 2


@pytest.mark.parametrize("lost", ["bmm1_scale", "bmm2_scale"])
def test_a_lost_scale_is_seen(lost, monkeypatch):
    that = that_pass("mla-draft-extend", **FP8)
    backend = that.backend()
    real, right = backend._decode, {"bmm1_scale": that.inputs.layer.scale, "bmm2_scale": 1.0}
    backend._decode = lambda *args, **more: real(*args, **more | {lost: right[lost]})
    with pytest.raises(CheckFailed):
        that.check(backend)


def test_a_replay_reads_the_batchs_own_ragged_lengths():
    that = that_pass("mla-draft-extend", **FP8)
    backend, batch = that.backend(), that.inputs.batch
    cu = batch.cu_seqlens_q.clone()
    batch.cu_seqlens_q.copy_(torch.tensor([0, 3, 4]))
    metadata = backend.init_forward_metadata_capture_cuda_graph(batch)
    batch.cu_seqlens_q.copy_(cu)
    backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
    that.check(backend, metadata=metadata)


def test_prefill_over_an_fp8_cache_is_ragged_alone():
    that = that_pass("mla-prefill", phase="prefill", **FP8)
    assert not that.row.absorbed
    backend, inputs = that.backend(), that.inputs
    assert backend.init_forward_metadata(inputs.batch) is None  # planned, as any pass is
    with pytest.raises(UnsupportedError, match="extend: the chosen row of trtllm_mla has no abs"):
        backend.forward(inputs.q, None, None, inputs.layer, inputs.cache, inputs.batch, None)
    query_lens, key_lens = (5, 9), (30, 17)
    tensors, indptr = ragged(query_lens, key_lens)
    dims = {"num_kv_heads": 4, "head_dim": 192, "v_head_dim": 128, "scale": 192**-0.5}
    layer = dataclasses.replace(inputs.layer, **dims)
    out, lse = backend.forward_ragged(
        *tensors, layer, *indptr, 9, 30, causal=False, return_lse=True
    )
    right, sums = attend_ragged(*tensors, query_lens, key_lens, layer.scale)
    torch.testing.assert_close(out.float(), right, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse, sums, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"q": torch.bfloat16}, RuntimeError, "Missing TRTLLM-GEN kernel"),
        ({"return_lse": True}, NotImplementedError, "does not support return_lse"),
        ({"max_q_len": 3}, ValueError, "cannot exceed the flattened query length"),
        ({"cum_seq_lens_q": torch.tensor([0, 2])}, ValueError, "int32"),
        ({"cum_seq_lens_q": torch.tensor([0, 1, 2]).int()}, ValueError, "Batch size mismatch"),
        ({"cum_seq_lens_q": None}, ValueError, "max_q_len is only supported when"),
    ],
)
def test_the_emulation_refuses_what_ragged_fp8_queries_may_not_be(change, error, why):
    that_pass("mla-decode")  # puts the GPU in
    mla = importlib.import_module("flashinfer.mla")
    fp8 = torch.float8_e4m3fn
    more = {"cum_seq_lens_q": torch.tensor([0, 2]).int(), "max_q_len": 2, **change}
    with pytest.raises(error, match=why):
        mla.trtllm_batch_decode_with_kv_cache_mla(
            torch.zeros(2, 4, 576).to(more.pop("q", fp8)),
            torch.zeros(3, 64, 576).to(fp8),
            torch.zeros(16 << 20, dtype=torch.uint8),
            128,
            512,
            64,
            torch.ones(1, 2, dtype=torch.int32),
            torch.full((1,), 9, dtype=torch.int32),
            9,
            backend="trtllm-gen",
            **more,
        )
