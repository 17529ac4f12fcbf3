"""nsa over emulated FlashMLA and FlashAttention-3: the suite, and which kernel runs a pass."""

import dataclasses
import importlib
import math

import pytest
import torch
from attn_core.errors import BackendError, UnsupportedError
from attn_core.ops.index import to_fp8_queries
from attn_core.plugins.registry import load_plugins
from attn_core.testing import BackendSuite
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.passes import attend, compare, create, prepared
from attn_core.testing.sparse_catalog import SPARSE
from attn_core.testing.sparse_passes import check_selection, chosen
from attn_core.testing.tolerance import CheckFailed
from attn_nvidia import indexer, nsa
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


class Named(BackendSuite):
    """The suite on the rows of one kernel; each declares its store, and some a phase alone."""

    name = "nsa"
    kinds = ("dsa",)
    device = "cuda:sm90"
    on = "cpu"
    libraries = LIBRARIES
    passes = 12
    reduced = True
    sub_backend = ""

    @classmethod
    def spec(cls):
        spec = super().spec()
        rows = [r for r in spec.capabilities if r.sub_backend == cls.sub_backend]
        return dataclasses.replace(spec, capabilities=rows)


@pytest.mark.long
class TestFlashmlaSparse(Named):
    sub_backend = "flashmla_sparse"


@pytest.mark.long
class TestFlashmlaKV(Named):
    sub_backend = "flashmla_kv"


@pytest.mark.long
class TestFlashmlaAuto(Named):
    sub_backend = "flashmla_auto"


@pytest.mark.long
class TestFA3(Named):
    sub_backend = "fa3"


class Pass:
    """A pass of the suite on the first row of nsa with these sinks, store and kernel."""

    def __init__(self, case, *, sinks=False, named=None, page_size=64, **changes):
        spec = load_plugins().get("nsa")
        self.case = dataclasses.replace(CASES[case], sinks=sinks, **changes)
        store = "bf16" if self.case.kv_dtype == "auto" else self.case.kv_dtype
        self.row = next(
            r
            for r in spec.capabilities
            if r.sinks == sinks and store in r.kv_dtypes and named in (None, r.sub_backend)
        )
        self.point = Point(dtype="bf16", page_size=page_size)
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
    """Count the calls of the kernels: flashmla_sparse, fa3 and flashmla_kv."""
    leaves = [
        ("flash_mla_leaf", "sparse_prefill"), ("fa3_leaf", "fwd"),
        ("flash_mla_leaf", "sparse_decode"),
    ]  # fmt: skip
    return [counted(monkeypatch, importlib.import_module(m), name) for m, name in leaves]


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
    assert [len(x) for x in calls] == ([2, 0, 0] if kernel == "flashmla_sparse" else [0, 2, 0])


KERNELS = ("flashmla_sparse", "fa3", "flashmla_kv")
FP8 = {"kv_dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("named", "kernel", "store"),
    [
        (None, "flashmla_kv", FP8),
        ("flashmla_kv", "flashmla_kv", FP8),
        ("flashmla_sparse", "flashmla_sparse", FP8),
        ("flashmla_auto", "flashmla_kv", FP8),
        ("flashmla_auto", "flashmla_sparse", {}),
        ("flashmla_sparse", "flashmla_sparse", {}),
        ("fa3", "fa3", {}),
    ],
)
@pytest.mark.parametrize("case", ["dsa-prefill", "dsa-verify-chain", "dsa-few-keys"])
def test_a_row_runs_the_kernel_of_its_name(named, kernel, store, case, calls):
    Pass(case, named=named, **store).check()
    assert [len(x) for x in calls] == [name == kernel for name in KERNELS]


@pytest.mark.parametrize("case", ["dsa-all-keys-fp8", "dsa-all-keys-decode-fp8"])
@pytest.mark.parametrize("named", ["flashmla_kv", "flashmla_sparse"])
def test_over_fp8_a_pass_without_a_selection_selects_all(named, case, calls):
    Pass(case, named=named).check()
    assert [len(x) for x in calls] == [name == named for name in KERNELS]


@pytest.mark.parametrize("named", ["flashmla_kv", "flashmla_sparse"])
def test_fp8_pages_may_be_larger(named):
    Pass("dsa-decode-fp8", named=named, page_size=128).check()


def stacked(k):
    """Pages of a tensor that has others between them."""
    return torch.stack([k, torch.zeros_like(k)], 1)[:, 0]


def side_by_side(k):
    return torch.cat([k, torch.zeros_like(k)], -1)[..., : k.shape[-1]]


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("form", [stacked, side_by_side])
@pytest.mark.parametrize("named", ["flashmla_sparse", "fa3", "flashmla_kv"])
def test_latents_in_a_larger_tensor_are_read_there_or_refused(named, form, page_size):
    case = "dsa-decode-fp8" if named == "flashmla_kv" else "dsa-decode"
    that = Pass(case, named=named, page_size=page_size)
    cache = dataclasses.replace(that.inputs.cache, k=form(that.inputs.cache.k))
    that.inputs = dataclasses.replace(that.inputs, cache=cache, after=cache)
    try:
        actual = that.run()
    except UnsupportedError as error:
        assert "strides" in str(error)  # noqa: PT017  # other forms have to be right
        return
    compare((actual, None), that.right, that.inputs.real_tokens, torch.bfloat16, "output")


def test_flashmla_kv_reads_the_latents_in_place(calls):
    that = Pass("dsa-decode-fp8", heads=(64, 1), index_topk=128)
    that.run()
    (((q, kv, indices, *_), _),) = calls[2]
    for given, held in (
        (q, that.inputs.q), (kv, that.inputs.cache.k), (indices, that.inputs.indexer.topk_indices)
    ):  # fmt: skip
        assert given.data_ptr() == held.data_ptr()
    assert (kv.shape, kv.dtype) == (that.inputs.cache.k.shape, torch.float8_e4m3fn)


def test_the_layers_of_a_pass_share_a_schedule_and_passes_do_not(calls):
    that = Pass("dsa-decode-fp8")
    inputs, backend = that.inputs, that.backend
    first, second = (backend.init_forward_metadata(inputs.batch) for _ in range(2))
    for metadata in (first, first, second):
        got, lse = backend.forward(
            *(inputs.q, None, None, inputs.layer, inputs.cache, inputs.batch, metadata),
            topk_indices=inputs.indexer.topk_indices, return_lse=True,
        )  # fmt: skip
        compare((got, lse), that.right, inputs.real_tokens, torch.bfloat16, "output")
    tiles = [args[5] for args, _ in calls[2]]
    assert [t is None for t in tiles] == [True, False, True]


@pytest.mark.parametrize("named", ["flashmla_kv", "flashmla_sparse"])
def test_over_fp8_a_query_without_keys_gives_zeros(named):
    that = Pass("dsa-decode-fp8", named=named)
    inputs, none = that.inputs, torch.full_like(that.inputs.indexer.topk_indices, -1)
    out, lse = that.backend.forward(
        *(inputs.q, None, None, inputs.layer, inputs.cache, inputs.batch),
        that.backend.init_forward_metadata(inputs.batch),
        topk_indices=none, return_lse=True,
    )  # fmt: skip
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_shared_pages_are_gathered_for_each_request():
    """Two requests with a page in common: any of its copies has the same latents."""
    that = Pass("dsa-prefill-fp8", named="flashmla_sparse")
    inputs, view = that.inputs, that.inputs.batch.views["full"]
    table = view.page_table.clone()
    used = -(-that.case.seq_lens[1] // that.point.page_size)
    table[0, 1:] = table[1, used - 1]  # behind request 0's only page
    batch = dataclasses.replace(
        inputs.batch, views={"full": dataclasses.replace(view, page_table=table)}
    )
    that.inputs = dataclasses.replace(inputs, batch=batch)
    that.check()


@pytest.mark.parametrize("case", ["dsa-all-keys", "dsa-all-keys-decode"])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_pass_without_a_selection_attends_to_all_keys(case, sinks, calls):
    """fa3's absorbed kernel has no sinks: with them every visible slot is selected."""
    Pass(case, sinks=sinks).check()
    assert [len(x) for x in calls] == ([1, 0, 0] if sinks else [0, 1, 0])


def test_a_layer_without_sinks_on_a_row_with_them_reads_no_tail(calls):
    """That row says that tails may be anything, and fa3 loads them."""
    spec = load_plugins().get("nsa")
    row = next(r for r in spec.capabilities if r.sinks)
    bench = Bench(spec=spec, row=row, torch_device=torch.device("cpu"), arch="sm90")
    case, point = CASES["dsa-all-keys"], Point(dtype="bf16", page_size=128)
    inputs, right = prepared(bench, case, point)
    assert inputs.layer.sinks is None
    got = attend(create(bench, case, inputs, point), inputs, return_lse=True)
    compare(got, right, inputs.real_tokens, torch.bfloat16, "output")
    assert not calls[1]


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

    def sparse(self, q, layer, latents, topk_indices, out, return_lse):
        return real(self, q, layer, latents, topk_indices.clamp(min=0), out, return_lse)

    monkeypatch.setattr(nsa.NSA, "_flashmla_sparse", sparse)


def _fp8_padded_with_slot_0(monkeypatch):
    real = nsa.NSA._flashmla_kv

    def sparse(self, q, layer, cache, topk_indices, *more):
        return real(self, q, layer, cache, topk_indices.clamp(min=0), *more)

    monkeypatch.setattr(nsa.NSA, "_flashmla_kv", sparse)


def _slots_of_the_pool_in_what_was_gathered(monkeypatch):
    real = nsa.gather_pages

    def gathered(layer, cache, batch, topk_indices, dtype):
        latents, _ = real(layer, cache, batch, topk_indices, dtype)
        return latents, topk_indices

    monkeypatch.setattr(nsa, "gather_pages", gathered)


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


@pytest.mark.parametrize(
    ("mistake", "case", "named"),
    [
        (_fp8_padded_with_slot_0, "dsa-few-keys", "flashmla_kv"),
        (_slots_of_the_pool_in_what_was_gathered, "dsa-prefill-fp8", "flashmla_sparse"),
        (_selection_ignored, "dsa-prefill-fp8", "flashmla_kv"),
    ],
)
def test_a_mistake_over_fp8_is_seen(mistake, case, named, monkeypatch):
    that = Pass(case, named=named, **FP8)
    mistake(monkeypatch)
    with pytest.raises(CheckFailed):
        that.check()


@pytest.mark.parametrize("change", ["sinks", "future", "first"])
def test_a_mistake_with_sinks_is_seen(change, monkeypatch):
    that = Pass("dsa-all-keys", sinks=True)
    if change == "sinks":
        monkeypatch.setattr(nsa, "_padded_sinks", lambda layer: torch.full((64,), -torch.inf))
    else:
        real = nsa.every_slot

        def wrong(layer, batch, page_size):
            slots = real(layer, batch, page_size)
            return slots.roll(-1, 0) if change == "future" else slots[:1].expand_as(slots)

        monkeypatch.setattr(nsa, "every_slot", wrong)
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


KV = {"heads": 64, "topk": 64, "dim": 576, "dtype": torch.bfloat16, "store": torch.uint8,
      "bytes": 656, "page": 64, "d_v": 512, "causal": False, "fp8": True}  # fmt: skip


def kv_call(library, meta=None, tokens=2, slots=(0,), **changes):
    """Call flash_mla_with_kvcache over two pages of zeros."""
    asked = KV | changes
    module = importlib.import_module(library)
    indices = torch.full((tokens, 1, asked["topk"]), -1, dtype=torch.int32)
    indices[:, 0, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    return module.flash_mla_with_kvcache(
        torch.zeros(tokens, 1, asked["heads"], asked["dim"], dtype=asked["dtype"]),
        torch.zeros(2, asked["page"], 1, asked["bytes"], dtype=torch.uint8).view(asked["store"]),
        None, None, asked["d_v"], meta or module.get_mla_metadata()[0],
        causal=asked["causal"], is_fp8_kvcache=asked["fp8"], indices=indices,
        **({"use_legacy": True} if library == "flash_mla" else {}),
    )  # fmt: skip


@pytest.mark.parametrize("library", ["flash_mla", "sgl_kernel.flash_mla"])
@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"heads": 16}, RuntimeError, "Unsupported h_q: 16"),
        ({"topk": 100}, RuntimeError, "Invalid topk: 100"),
        ({"dim": 512}, RuntimeError, "Unsupported d_qk 512"),
        ({"d_v": 256}, RuntimeError, "d_v 256"),
        ({"dtype": torch.float16}, RuntimeError, "q must be a bfloat16"),
        ({"store": torch.bfloat16}, RuntimeError, "key must have dtype"),
        ({"bytes": 576}, RuntimeError, "kcache must have shape"),
        ({"page": 32}, RuntimeError, "kcache must have shape"),
        ({"causal": True}, AssertionError, "causal must be False"),
        ({"fp8": False}, AssertionError, "is_fp8_kvcache must be True"),
    ],
)
def test_the_emulated_decode_refuses_what_the_library_refuses(library, change, error, why):
    with pytest.raises(error, match=why):
        kv_call(library, **change)


@pytest.mark.parametrize("library", ["flash_mla", "sgl_kernel.flash_mla"])
def test_the_emulated_decode_knows_minus_1_alone_and_its_schedules(library):
    out, lse = kv_call(library, slots=(5, 127))
    assert out.isfinite().all()
    assert lse.shape == (2, 64, 1)
    for beyond in (128, -2):
        assert kv_call(library, slots=(5, beyond))[0].isnan().any()
    out, lse = kv_call(library, slots=())
    assert not out.any()
    assert (lse == torch.inf).all()
    meta, _ = importlib.import_module(library).get_mla_metadata()
    kv_call(library, meta)
    kv_call(library, meta)
    for other in ({"tokens": 3}, {"heads": 128}, {"topk": 128}):
        with pytest.raises(AssertionError, match="inconsistent"):
            kv_call(library, meta, **other)


# DeepGEMM's scores

SCORES = ("fp8_mqa_logits", "fp8_paged_mqa_logits")
V32 = {
    "index_dtype": "fp8_e4m3", "fp8_queries": True, "index_shape": (32, 128), "exact_index": True,
}  # fmt: skip


@pytest.fixture
def scored(monkeypatch):
    """Count the calls of DeepGEMM: of gathered keys and of pages."""
    import deep_gemm

    return [counted(monkeypatch, deep_gemm, name) for name in SCORES]


def select(that):
    """Select as the pass does; it is compared with the oracle's selection."""
    got = chosen(that.backend, that.inputs)
    table = that.inputs.batch.views["full"].page_table
    check_selection(got, that.case, that.inputs.indexer, table, that.point.page_size)
    return got


@pytest.mark.parametrize(
    ("case", "calls_of"),
    [
        ("dsa-prefill", [2, 0]),
        ("dsa-empty", [1, 0]),
        ("dsa-mixed", [3, 0]),
        ("dsa-decode", [0, 1]),
        ("dsa-decode-padded", [0, 1]),
        ("dsa-verify-chain", [0, 1]),
        ("dsa-draft-extend", [0, 1]),
        ("dsa-device-lengths", [0, 1]),
    ],
)
def test_deep_gemm_scores_fp8_queries(case, calls_of, scored):
    """Prompts gather the keys of each request; the others read the pages in place."""
    select(Pass(case, **V32))
    assert [len(x) for x in scored] == calls_of


@pytest.mark.parametrize("heads", [32, 64])
def test_its_selection_is_that_of_scores_that_are_not_exact(heads, scored):
    select(Pass("dsa-decode", **V32 | {"exact_index": False, "index_shape": (heads, 128)}))
    assert any(map(len, scored))


@pytest.mark.parametrize(
    ("change", "page_size"),
    [
        ({"fp8_queries": False}, 64),
        ({"index_dtype": "bf16"}, 64),
        ({"index_shape": (16, 128)}, 64),
        ({"index_shape": (32, 64)}, 64),
        ({"index_topk": 200}, 64),
        ({}, 128),
    ],
)
def test_what_it_is_not_built_for_triton_scores(change, page_size, scored):
    """Its pages are of 64, its heads 32 or 64 of 128; up to K keys nothing is scored."""
    select(Pass("dsa-decode", page_size=page_size, **V32 | change))
    assert not any(scored)


def test_without_the_library_triton_scores(monkeypatch, scored):
    real = importlib.metadata.version

    def version(name):
        if name == "sgl-deep-gemm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    that = Pass("dsa-decode", **V32)
    assert that.backend._deep_gemm is None
    select(that)
    assert not any(scored)


@pytest.mark.parametrize(
    "case", [pytest.param("dsa-prefill", marks=pytest.mark.long), "dsa-decode"]
)
def test_scores_of_bounded_memory(case, monkeypatch, scored):
    that = Pass(case, **V32)
    whole = select(that)
    monkeypatch.setattr(indexer, "_MOST_SCORES", 3 * 192)
    assert torch.equal(select(that), whole)
    assert sum(map(len, scored)) > (4 if case == "dsa-prefill" else 2)


@pytest.mark.parametrize(
    "case", ["dsa-decode", pytest.param("dsa-verify-chain", marks=pytest.mark.long)]
)
def test_layers_of_a_pass_share_what_its_scores_read(case, monkeypatch, scored):
    """Another pass has its own; in a graph each layer makes it, for the lengths of a replay."""
    import deep_gemm

    schedules = counted(monkeypatch, deep_gemm, "get_paged_mqa_logits_metadata")
    that = Pass(case, **V32)
    batch, asked, backend = that.inputs.batch, that.inputs.indexer, that.backend
    of = (that.inputs.layer, that.inputs.cache, batch)
    right = select(that)
    for plan, made in (
        (backend.init_forward_metadata(batch), 1),
        (backend.init_forward_metadata(batch), 1),
        (backend.init_forward_metadata_capture_cuda_graph(batch), 3),
    ):
        schedules.clear()
        for _ in range(3):
            assert torch.equal(backend.index_topk(asked.q_index, asked.weights, *of, plan), right)
        assert len(schedules) == 3 + made  # the emulation makes one for itself in each call


def test_a_replay_scores_by_the_lengths_on_the_device(scored):
    that = Pass("dsa-decode", **V32)
    right = select(that)
    batch, asked = that.inputs.batch, that.inputs.indexer
    view = batch.views["full"]
    lengths = view.seq_lens.clone()
    view.seq_lens.fill_(1)
    metadata = that.backend.init_forward_metadata_capture_cuda_graph(batch)
    view.seq_lens.copy_(lengths)
    that.backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
    got = that.backend.index_topk(
        asked.q_index, asked.weights, that.inputs.layer, that.inputs.cache, batch, metadata
    )
    assert torch.equal(got, right)


def _one_key_too_few(monkeypatch):
    real = indexer._Shared.of

    def shared(*asked):
        found = real(*asked)
        return found._replace(visible=found.visible - 1)

    monkeypatch.setattr(indexer._Shared, "of", shared)


def _keys_of_the_first_request(monkeypatch):
    real, kept = indexer.DeepGemmIndexer._keys, []

    def keys(self, cache, pages):
        kept.append(real(self, cache, pages))
        return kept[0]

    monkeypatch.setattr(indexer.DeepGemmIndexer, "_keys", keys)


def _weights_of_the_first_query(monkeypatch):
    real = indexer.DeepGemmIndexer._gathered

    def gathered(self, q_index, weights, *more):
        return real(self, q_index, weights[:1].expand_as(weights).contiguous(), *more)

    monkeypatch.setattr(indexer.DeepGemmIndexer, "_gathered", gathered)


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (_one_key_too_few, "dsa-decode"),
        (_keys_of_the_first_request, "dsa-prefill"),
        (_weights_of_the_first_query, "dsa-prefill"),
    ],
)
def test_a_mistake_in_the_scores_is_seen(mistake, case, monkeypatch):
    that = Pass(case, **V32)
    mistake(monkeypatch)
    with pytest.raises(CheckFailed):
        select(that)


def test_queries_are_quantised_for_it():
    """By powers of two, so that small integers stay what they are, and scales go to the weights."""
    rng = torch.Generator().manual_seed(0)
    q = torch.randint(-3, 4, (5, 32, 128), generator=rng).bfloat16()
    weights = torch.rand(5, 32, generator=rng)
    q[3] *= 1024.0
    q8, scaled = to_fp8_queries(q, weights)
    assert (q8.dtype, scaled.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert torch.equal(q8.float() * (scaled / weights)[..., None], q.float())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"heads": 16}, "Unsupported num_heads"),
        ({"page": 32}, "block_kv == 64"),
        ({"lengths": torch.int64}, "kInt"),
        ({"q": torch.bfloat16}, "float8_e4m3fn"),
        ({"weights": torch.bfloat16}, "float32"),
    ],
)
def test_the_emulated_scores_refuse_what_the_library_refuses(change, why):
    import deep_gemm

    heads, page = change.get("heads", 32), change.get("page", 64)
    lengths = torch.tensor([[3], [70]], dtype=change.get("lengths", torch.int32))
    call = (
        torch.zeros(2, 1, heads, 128).to(change.get("q", torch.float8_e4m3fn)),
        torch.zeros(4, page, 1, 132, dtype=torch.uint8),
        torch.zeros(2, heads, dtype=change.get("weights", torch.float32)),
    )
    table = torch.zeros(2, 2, dtype=torch.int32)
    schedule = torch.zeros(133, 2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=why):
        deep_gemm.fp8_paged_mqa_logits(*call, lengths, table, schedule, 128)


def test_the_emulated_scores_are_garbage_beside_a_context_and_by_another_schedule():
    import deep_gemm

    lengths = torch.tensor([[3], [70]], dtype=torch.int32)
    q = torch.zeros(2, 1, 32, 128).to(torch.float8_e4m3fn)
    call = (q, torch.zeros(4, 64, 1, 132, dtype=torch.uint8), torch.zeros(2, 32))
    table, sms = torch.zeros(2, 2, dtype=torch.int32), 132
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, sms)
    logits = deep_gemm.fp8_paged_mqa_logits(*call, lengths, table, schedule, 128)
    assert logits.isnan().sum(1).tolist() == [125, 58]
    other = deep_gemm.get_paged_mqa_logits_metadata(lengths + 64, 64, sms)
    assert deep_gemm.fp8_paged_mqa_logits(*call, lengths, table, other, 128).isnan().all()
