"""flashmla over emulated FlashMLA, of both its distributions, and emulated FlashInfer."""

import importlib

import pytest
import torch
from attn_core.errors import BackendError
from attn_core.runtime.graphs import without_host_lengths
from attn_core.testing.tolerance import CheckFailed
from attn_nvidia.mla.flashmla import FlashMLA
from mla_passes import FLASHINFER, Emulated, Pass, counted

FORK, SGLANG = {"sgl-flash-mla": "1.0.0"}, {"sglang-kernel": "0.4.5"}


def only(monkeypatch, *distributions):
    """Let of FlashMLA's distributions only these be found."""
    real = importlib.metadata.version

    def version(name):
        if name in FORK | SGLANG and name not in distributions:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


class TestFork(Emulated):
    name, device, libraries = "flashmla", "cuda:sm90", {**FLASHINFER, **FORK}
    reduced = True

    @pytest.fixture(autouse=True)
    def library(self, monkeypatch):
        only(monkeypatch, "sgl-flash-mla")


class TestSglang(Emulated):
    name, device, libraries = "flashmla", "cuda:sm90", {**FLASHINFER, **SGLANG}

    @pytest.fixture(autouse=True)
    def library(self, monkeypatch):
        only(monkeypatch, "sglang-kernel")


@pytest.mark.parametrize(
    ("found", "module"),
    [
        (("sgl-flash-mla", "sglang-kernel"), "flash_mla"),
        (("sgl-flash-mla",), "flash_mla"),
        (("sglang-kernel",), "sgl_kernel.flash_mla"),
    ],
)
def test_the_library_is_the_first_of_the_documented_order_that_is_found(found, module, monkeypatch):
    only(monkeypatch, *found)
    that = Pass("flashmla", "mla-decode")
    modules = {
        name: importlib.import_module(name) for name in ("flash_mla", "sgl_kernel.flash_mla")
    }
    calls = {n: counted(monkeypatch, m, "flash_mla_with_kvcache") for n, m in modules.items()}
    that.check(that.backend())
    assert [name for name, made in calls.items() if made] == [module]


def test_neither_library_is_an_error_that_names_both(monkeypatch):
    only(monkeypatch)
    that = Pass("flashmla", "mla-decode")
    with pytest.raises(BackendError, match="flashmla needs sgl-flash-mla or sglang-kernel"):
        that.backend()


@pytest.mark.parametrize("case", ["mla-prefill", "mla-mixed", "mla-draft-extend"])
def test_ragged_queries_are_flashinfers(case, monkeypatch):
    leaf = importlib.import_module("flash_mla_leaf")
    calls = counted(monkeypatch, leaf, "decode")
    that = Pass("flashmla", case)
    that.check(that.backend())
    assert not calls


@pytest.mark.parametrize(
    ("case", "causal"),
    [("mla-decode", False), ("mla-draft-decode", False), ("mla-verify-chain", True)],
)
def test_even_queries_are_flashmlas_and_scheduled_once_a_pass(case, causal, monkeypatch):
    leaf = importlib.import_module("flash_mla_leaf")
    schedules = counted(monkeypatch, leaf, "schedule")
    calls = counted(monkeypatch, leaf, "decode")
    that = Pass("flashmla", case)
    backend = that.backend()
    metadata = backend.init_forward_metadata(without_host_lengths(that.inputs.batch))
    assert len(schedules) == 1
    schedules.clear()
    that.check(backend, metadata=metadata, preallocated=True)
    that.check(backend, metadata=metadata)
    assert [args[-1] for args, _ in calls] == [causal] * 2


FP8 = {"kv_dtype": "fp8_e4m3", "k_scale": 0.4}


@pytest.mark.parametrize("found", [[*FORK], [*SGLANG]], ids="".join)
@pytest.mark.parametrize("case", ["mla-decode", "mla-draft-decode", "mla-verify-chain"])
def test_an_fp8_cache_is_read_with_rounded_queries(case, found, monkeypatch):
    only(monkeypatch, *found)
    leaf = importlib.import_module("flash_mla_leaf")
    calls = counted(monkeypatch, leaf, "decode_fp8")
    that = Pass("flashmla", case, **FP8)
    backend = that.backend()
    that.check(backend)
    inputs, q = that.inputs, that.inputs.q.clone()
    q[0, 0, 0] = 1e4  # a plain cast of it is NaN
    metadata = backend.init_forward_metadata(inputs.batch)
    actual = backend.forward(q, None, None, inputs.layer, inputs.cache, inputs.batch, metadata)
    assert actual.isfinite().all()
    for (kwargs, *_, descale_q, descale_k), _ in calls:
        assert kwargs.dtype == torch.float8_e4m3fn
        assert (descale_q.item(), descale_k.item()) == pytest.approx((1.0, 0.4))
    first, second = (args for args, _ in calls)
    assert second[0][0, 0, 0, 0].item() == 448.0
    assert first[-1] is second[-1]  # made once


def test_prefill_over_an_fp8_cache_is_flashinfers_with_queries_as_they_are(monkeypatch):
    wrapper = importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
    calls = counted(monkeypatch, wrapper, "run")
    that = Pass("flashmla", "mla-prefill", **FP8)
    that.check(that.backend())
    assert [args[1].dtype for args, _ in calls] == [torch.bfloat16]


def _scale_forgotten(monkeypatch):
    real = FlashMLA._arguments
    monkeypatch.setattr(FlashMLA, "_arguments", lambda self, scale: real(self, 1.0))


def _scheduled_for_16_bits(monkeypatch):
    real = FlashMLA.plan

    def plan(self, *args):
        kernels, self._kernels = self._kernels, self._legacy
        schedule = real(self, *args)
        self._kernels = kernels
        return schedule

    monkeypatch.setattr(FlashMLA, "plan", plan)


@pytest.mark.parametrize("mistake", [_scale_forgotten, _scheduled_for_16_bits])
def test_a_mistake_with_an_fp8_cache_is_seen(mistake, monkeypatch):
    that = Pass("flashmla", "mla-decode", **FP8)
    mistake(monkeypatch)
    with pytest.raises(CheckFailed):
        that.check(that.backend())


def test_a_replay_reschedules_in_place():
    """The emulated kernel skips all rows of a schedule that is not of their lengths."""
    that = Pass("flashmla", "decode", page_size=128)
    backend, batch = that.backend(), that.inputs.batch
    view = batch.views["full"]
    backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
    lens, table = view.seq_lens.clone(), view.page_table.clone()
    view.seq_lens.fill_(1)
    view.page_table.zero_()
    metadata = backend.init_forward_metadata_capture_cuda_graph(batch)
    (plan,) = metadata.of.values()
    tensors = [plan.table, *plan.extra.tensors]
    before = [t.data_ptr() for t in tensors]
    view.seq_lens.copy_(lens)
    view.page_table.copy_(table)
    with pytest.raises(AssertionError, match="not finite"):
        that.check(backend, metadata=metadata)
    backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
    assert [t.data_ptr() for t in (plan.table, *plan.extra.tensors)] == before
    that.check(backend, metadata=metadata)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"page": 32}, "page_block_size must be 64"),
        ({"dtype": torch.float32}, "kBFloat16"),
        ({"lens": torch.int64}, "seqlens_k must have dtype"),
        ({"table": torch.int64}, "block_table must have dtype torch.int32"),
        ({"dim": 512}, "head_size_k == 576"),
    ],
)
def test_the_emulation_refuses_what_the_library_refuses(change, why):
    library = importlib.import_module("sgl_kernel.flash_mla")
    dtype, dim = change.get("dtype", torch.bfloat16), change.get("dim", 576)
    q = torch.zeros(1, 1, 4, dim, dtype=dtype)
    pages = torch.zeros(2, change.get("page", 64), 1, dim, dtype=dtype)
    lens = torch.ones(1, dtype=torch.int32)
    tiles = library.get_mla_metadata(lens, 4, 1)
    table = torch.ones(1, 1, dtype=change.get("table", torch.int32))
    with pytest.raises(RuntimeError, match=why):
        library.flash_mla_with_kvcache(
            q, pages, table, lens.to(change.get("lens", torch.int32)), 512, *tiles
        )


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"q": torch.bfloat16}, RuntimeError, "query and key must have the same dtype"),
        ({"pages": torch.bfloat16}, RuntimeError, "query and key must have the same dtype"),
        ({"scales": None}, RuntimeError, "descale is required"),
        ({"scales": torch.ones(2)}, RuntimeError, r"descale_q_ must have shape \(1\)"),
        ({"scales": torch.ones(1).double()}, RuntimeError, "torch::kFloat"),
        ({"fp8": False}, AssertionError, "the dense fp8 path only"),
        ({"scheduled": False}, AssertionError, "before the first call"),
    ],
)
def test_the_emulation_refuses_what_fp8_kernels_refuse(change, error, why):
    library = importlib.import_module("flash_mla")
    fp8 = torch.float8_e4m3fn
    lens, table = torch.ones(1, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
    metadata, _ = library.get_mla_metadata()
    if change.get("scheduled", True):
        metadata.tile_scheduler_metadata, metadata.num_splits = library.get_mla_decoding_metadata(
            lens, 4, 1, is_fp8_kvcache=True, use_legacy=True
        )
    scales = change.get("scales", torch.ones(1))
    if "q" in change:  # sglang-kernel goes by the queries
        library, more = importlib.import_module("sgl_kernel.flash_mla"), {}
        metadata = library.get_mla_metadata(lens, 4, 1, is_fp8_kvcache=False)
    else:
        more = {"use_legacy": True, "is_fp8_kvcache": change.get("fp8", True)}
        metadata = (metadata, None)
    with pytest.raises(error, match=why):
        library.flash_mla_with_kvcache(
            torch.zeros(1, 1, 4, 576, dtype=change.get("q", fp8)),
            torch.zeros(2, 64, 1, 576).to(change.get("pages", fp8)),
            table,
            lens,
            512,
            *metadata,
            descale_q=scales,
            descale_k=scales,
            **more,
        )
