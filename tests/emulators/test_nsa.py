"""nsa over emulated FlashMLA and FlashAttention-3: the suite, and which kernel runs a pass."""

import dataclasses
import importlib
import math

import pytest
import torch
from attn_core.errors import BackendError
from attn_core.plugins.registry import load_plugins
from attn_core.testing import BackendSuite
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.passes import attend, compare, create, prepared
from attn_core.testing.sparse_catalog import SPARSE
from attn_core.testing.sparse_passes import chosen
from attn_core.testing.tolerance import CheckFailed
from attn_nvidia import nsa
from mla_passes import counted

SGLANG, FORK = {"sglang-kernel": "0.4.5"}, {"sgl-flash-mla": "1.0.0"}
LIBRARIES = {**SGLANG, **FORK, "triton": "3.4"}
CASES = {case.feature: case for case in SPARSE}
PREFILLS = ("dsa-prefill", "dsa-mixed", "dsa-odd-number", "dsa-empty")
DECODES = ("dsa-decode", "dsa-verify-chain", "dsa-draft-extend", "dsa-draft-decode")


@pytest.mark.long  # its indexer runs in Triton's interpreter
class TestNSA(BackendSuite):
    name = "nsa"
    kinds = ("dsa",)
    device = "cuda:sm90"
    on = "cpu"
    libraries = LIBRARIES
    passes = 12
    reduced = True


class Pass:
    """A pass of the suite on the row of nsa, with `sinks` on its second row."""

    def __init__(self, case, *, sinks=False, **changes):
        spec = load_plugins().get("nsa")
        self.case = dataclasses.replace(CASES[case], sinks=sinks, **changes)
        self.row = next(r for r in spec.capabilities if r.sinks == sinks)
        self.point = Point(dtype="bf16", page_size=64)
        self.bench = Bench(spec=spec, row=self.row, torch_device=torch.device("cpu"), arch="sm90")
        self.inputs, self.right = prepared(self.bench, self.case, self.point)
        self.backend = create(self.bench, self.case, self.inputs, self.point)

    def check(self, *, preallocated=False):
        """Run the pass and compare every number and the LSE."""
        got = attend(self.backend, self.inputs, preallocated=preallocated, return_lse=True)
        compare(got, self.right, self.inputs.real_tokens, torch.bfloat16, "output")

    def run(self):
        """Run the pass over the cache itself, of which `check` makes a copy."""
        inputs, backend = self.inputs, self.backend
        return backend.forward(
            *(inputs.q, None, None, inputs.layer, inputs.cache, inputs.batch),
            backend.init_forward_metadata(inputs.batch),
            topk_indices=inputs.indexer.topk_indices,
        )


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of both kernels: flashmla_sparse and fa3."""
    leaves = {"flash_mla_leaf": "sparse_prefill", "fa3_leaf": "fwd"}
    return [
        counted(monkeypatch, importlib.import_module(module), name)
        for module, name in leaves.items()
    ]


@pytest.mark.parametrize(
    ("case", "sinks", "kernel"),
    [
        *((case, False, "flashmla_sparse") for case in PREFILLS),
        *((case, False, "fa3") for case in DECODES),
        *((case, True, "flashmla_sparse") for case in (*PREFILLS, *DECODES)),
    ],
)
def test_each_pass_runs_the_documented_kernel(case, sinks, kernel, calls):
    that = Pass(case, sinks=sinks)
    that.check()
    that.check(preallocated=True)
    assert [len(x) for x in calls] == ([2, 0] if kernel == "flashmla_sparse" else [0, 2])


@pytest.mark.parametrize("case", ["dsa-all-keys", "dsa-all-keys-decode"])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_pass_without_a_selection_attends_to_all_keys(case, sinks, calls):
    """fa3's absorbed kernel has no sinks: with them every visible slot is selected."""
    Pass(case, sinks=sinks).check()
    assert [len(x) for x in calls] == ([1, 0] if sinks else [0, 1])


def test_fa3_reads_a_selection_in_place_as_pages_of_one_token(calls):
    that = Pass("dsa-decode")
    that.run()
    (((_, rope, latent, *more), _),) = calls[1]
    assert rope.shape[1] == latent.shape[1] == 1
    pool = that.inputs.cache.k.untyped_storage().data_ptr()
    assert [x.untyped_storage().data_ptr() for x in (rope, latent)] == [pool, pool]
    selection = that.inputs.indexer.topk_indices.data_ptr()
    assert selection in [x.data_ptr() for x in more if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(("heads", "padded"), [(4, 64), (64, 64), (65, 128), (128, 128)])
def test_queries_and_selections_are_padded_to_what_the_kernel_has(heads, padded, calls):
    that = Pass("dsa-prefill", heads=(heads, 1))
    that.check()
    (((q, kv, indices, *_), _),) = calls[0]
    assert (q.shape[1], kv.shape[1], indices.shape[1:]) == (padded, 1, (1, 128))


def test_nothing_is_padded_or_copied_at_the_models_shapes(calls):
    that = Pass("dsa-prefill", heads=(64, 1), index_topk=128, seq_lens=(150, 170))
    that.run()
    (((q, kv, indices, *_), _),) = calls[0]
    for given, held in (
        (q, that.inputs.q), (kv, that.inputs.cache.k), (indices, that.inputs.indexer.topk_indices)
    ):  # fmt: skip
        assert given.data_ptr() == held.data_ptr()


@pytest.mark.parametrize(
    ("found", "module"), [(SGLANG | FORK, "flash_mla"), (SGLANG, "sgl_kernel.flash_mla")]
)
def test_flashmla_is_the_first_library_that_is_found(found, module, monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name in SGLANG | FORK and name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    modules = ("flash_mla", "sgl_kernel.flash_mla")
    calls = {
        m: counted(monkeypatch, importlib.import_module(m), "flash_mla_sparse_fwd") for m in modules
    }
    Pass("dsa-prefill").check()
    assert [m for m in modules if calls[m]] == [module]


def test_without_a_flashmla_the_error_names_both(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "sglang-kernel" or name in FORK:
            raise importlib.metadata.PackageNotFoundError(name)
        return "3.0.0b1" if name == "flash-attn-3" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(nsa, "FA3MLA", lambda config: None)
    with pytest.raises(BackendError, match="nsa needs sgl-flash-mla or sglang-kernel"):
        Pass("dsa-prefill")


def _every_key_counts(monkeypatch):
    real = nsa.NSA._selected

    def selected(self, layer, topk_indices, cu_seqlens_q):
        return real(self, layer, topk_indices.clamp(min=0), cu_seqlens_q)

    monkeypatch.setattr(nsa.NSA, "_selected", selected)


def _selection_of_the_first_token(monkeypatch):
    real = nsa.NSA._selected

    def selected(self, layer, topk_indices, cu_seqlens_q):
        return real(self, layer, topk_indices[:1].expand_as(topk_indices), cu_seqlens_q)

    monkeypatch.setattr(nsa.NSA, "_selected", selected)


def _padded_with_slot_0(monkeypatch):
    real = nsa.NSA._flashmla_sparse

    def sparse(self, q, layer, cache, topk_indices, out, return_lse):
        return real(self, q, layer, cache, topk_indices.clamp(min=0), out, return_lse)

    monkeypatch.setattr(nsa.NSA, "_flashmla_sparse", sparse)


def _selection_ignored(monkeypatch):
    real = nsa.NSA.forward

    def forward(self, *args, topk_indices=None, **more):
        return real(self, *args, **more)

    monkeypatch.setattr(nsa.NSA, "forward", forward)


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (_every_key_counts, "dsa-decode"),
        (_selection_of_the_first_token, "dsa-decode"),
        (_padded_with_slot_0, "dsa-few-keys"),
        (_selection_ignored, "dsa-prefill"),
        (_selection_ignored, "dsa-verify-chain"),
    ],
)
def test_a_mistake_is_seen(mistake, case, monkeypatch):
    that = Pass(case)
    mistake(monkeypatch)
    with pytest.raises(CheckFailed):
        that.check()


@pytest.mark.parametrize("change", ["sinks", "future", "first"])
def test_a_mistake_with_sinks_is_seen(change, monkeypatch):
    that = Pass("dsa-all-keys", sinks=True)
    if change == "sinks":
        monkeypatch.setattr(
            nsa.NSA, "_padded_sinks", lambda self, layer: torch.full((64,), -torch.inf)
        )
    else:
        real = nsa.NSA._every_slot

        def wrong(self, layer, batch):
            slots = real(self, layer, batch)
            return slots.roll(-1, 0) if change == "future" else slots[:1].expand_as(slots)

        monkeypatch.setattr(nsa.NSA, "_every_slot", wrong)
    with pytest.raises(CheckFailed):
        that.check()


def test_a_replay_without_the_indexers_plan_still_selects_by_the_lengths_on_the_device():
    """The indexer's plan has the request of each token alone, which no replay changes."""
    that = Pass("dsa-decode")
    right = chosen(that.backend, that.inputs)
    batch, indexer = that.inputs.batch, that.inputs.indexer
    view = batch.views["full"]
    lengths = view.seq_lens.clone()
    view.seq_lens.fill_(1)
    metadata = that.backend.init_forward_metadata_capture_cuda_graph(batch)
    view.seq_lens.copy_(lengths)
    that.backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
    got = that.backend.index_topk(
        indexer.q_index, indexer.weights, that.inputs.layer, that.inputs.cache, batch, metadata
    )
    assert torch.equal(got, right)


@pytest.mark.parametrize("library", ["flash_mla", "sgl_kernel.flash_mla"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"heads": 16}, "Unsupported h_q: 16"),
        ({"topk": 64}, "Invalid topk: 64"),
        ({"dim": 512}, "Unsupported d_qk: 512"),
        ({"dtype": torch.float16}, "q must have dtype"),
        ({"indices": torch.int64}, "indices must have dtype"),
        ({"sinks": torch.bfloat16}, "attn_sink must have dtype"),
        ({"sink_heads": 4}, "attn_sink must have shape"),
        ({"kv_heads": 2}, "kv must have shape"),
        ({"d_v": 256}, "Invalid d_v"),
    ],
)
def test_the_emulation_refuses_what_the_library_refuses(library, change, why):
    heads, dim = change.get("heads", 64), change.get("dim", 576)
    dtype = change.get("dtype", torch.bfloat16)
    kv_heads = change.get("kv_heads", 1)
    indices = torch.zeros(2, 1, change.get("topk", 128), dtype=change.get("indices", torch.int32))
    sinks = torch.zeros(change.get("sink_heads", heads), dtype=change.get("sinks", torch.float32))
    module = importlib.import_module(library)
    with pytest.raises(RuntimeError, match=why):
        module.flash_mla_sparse_fwd(
            torch.zeros(2, heads, dim, dtype=dtype),
            torch.zeros(9, kv_heads, dim, dtype=dtype),
            indices,
            0.1,
            change.get("d_v", 512),
            attn_sink=sinks,
            **({"use_legacy": True} if library == "flash_mla" else {}),
        )


def test_the_emulation_takes_slots_out_of_range_for_none():
    module = importlib.import_module("sgl_kernel.flash_mla")
    rng = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(n, h, 576, generator=rng).bfloat16() for n, h in ((2, 64), (9, 1)))
    indices = torch.full((2, 1, 128), -1, dtype=torch.int32)
    indices[0, 0, ::40] = torch.tensor([3, 9, 7, 1 << 30], dtype=torch.int32)
    out, peak, lse = module.flash_mla_sparse_fwd(q, kv, indices, 0.05)
    scores = q[0].float() @ kv[[3, 7], 0].float().T * 0.05
    right = scores.softmax(-1) @ kv[[3, 7], 0, :512].float()
    assert torch.allclose(out[0].float(), right, atol=2e-2)
    assert torch.allclose(lse[0] * math.log(2), scores.logsumexp(-1))
    assert torch.allclose(peak[0], scores.amax(-1))
    assert (out[1] == 0).all()
    assert (lse[1] == torch.inf).all()
