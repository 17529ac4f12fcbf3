"""Backends over copies of dequantised pages: fa4's prefill over FP4, and latents of MLA."""

import gc
import importlib
import weakref

import pytest
import torch
from attn_core.cache.page_table import pad_page_table
from attn_core.cache.pool import KVPool
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.graphs import without_host_lengths
from attn_core.runtime.layer import AttentionLayer
from attn_core.selection.result import NoBackendError, notes_of
from attn_core.selection.solver import Overrides, select
from attn_core.spec.device import parse_device
from attn_core.spec.requirements import LayerRequirements, Requirements
from attn_core.testing.tolerance import CheckFailed
from mla_passes import Pass, counted

FOUND = {"flash-attn-4": "4.0.0b18", "triton": "3.6.0", "flashinfer-python": "0.6.14"}
LAYER = AttentionLayer(
    layer_id=0, num_q_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125
)
PAGE = 128
LENGTHS, NEW, TABLE = (200, 5, 130), (200, 2, 30), [[7, 2], [5], [1, 4]]


def selected(device="cuda:sm90", prefill="fa4", decode="torch_native"):
    layer = LayerRequirements(num_q_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64)
    return select(
        Requirements(layers=(layer,), kv_cache_dtype="fp4_e2m1", page_size=PAGE),
        parse_device(device),
        load_plugins(),
        FOUND,
        Overrides(prefill_attention_backend=prefill, decode_attention_backend=decode),
        simulated=True,
    )


@pytest.mark.parametrize("device", ["cuda:sm90", "cuda:sm100"])
@pytest.mark.parametrize("decode", ["triton", "torch_native", "flex_attention"])
def test_every_row_that_decodes_an_fp4_cache_follows_fa4(device, decode):
    selection = selected(device, decode=decode)
    assert (selection.backend("prefill"), selection.backend("decode")) == ("fa4", decode)
    assert selection.page_size == PAGE
    assert "each layer of a prefill dequantises the pages of its pass" in notes_of(selection)


def test_fa4_does_not_decode_an_fp4_cache():
    with pytest.raises(NoBackendError, match=r"kv_cache_dtype fp4_e2m1 \(supports bf16, fp16\)"):
        selected(decode="fa4")


def prefill(name):
    """Return what a backend gives for requests whose tokens are in an FP4 pool: out, lse."""
    torch.manual_seed(0)
    pool = KVPool([LAYER], num_pages=9, page_size=PAGE, kv_cache_dtype="fp4_e2m1")
    cache = pool.layer(0)
    for store in (cache.k, cache.v):
        store.copy_(torch.randint(0, 256, store.shape, dtype=torch.uint8))
    for blocks in cache.block_scales:
        blocks.copy_(torch.rand(blocks.shape) + 0.5)
        blocks[[0, 3, 6, 8]] = torch.nan  # pages of nobody
    selection = selected(prefill=name)
    dispatcher = HybridDispatcher.from_selection(selection, load_plugins(), [LAYER], pool)
    batch = ForwardBatch.build(
        ForwardMode.EXTEND,
        query_lens=NEW,
        seq_lens=LENGTHS,
        page_table=pad_page_table(TABLE),
        page_size=PAGE,
    )
    backend, q = dispatcher.backend("prefill"), torch.randn(sum(NEW), 4, 64).bfloat16()
    plan = backend.init_forward_metadata(batch)
    return backend.forward(q, None, None, LAYER, cache, batch, plan, return_lse=True)


def test_a_prefill_reads_what_the_reference_reads():
    out, lse = prefill("fa4")
    wanted, wanted_lse = prefill("torch_native")
    torch.testing.assert_close(out.float(), wanted.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, wanted_lse, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("fault", ["order", "page"])
def test_a_wrong_number_of_a_page_is_seen(monkeypatch, fault):
    from attn_nvidia.dequantized import Dequantized

    right = Dequantized._numbered

    def wrong(self, view):
        view, pages = right(self, view)
        return view, pages.flip(0) if fault == "order" else pages.clamp(max=5)

    monkeypatch.setattr(Dequantized, "_numbered", wrong)
    wanted, _ = prefill("torch_native")
    out, _ = prefill("fa4")
    assert not torch.allclose(out.float(), wanted.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("requests", "columns"), [(0, 1), (0, 0), (2, 1), (2, 0)])
def test_a_pass_without_keys(requests, columns):
    """There is no longest request, whose pages would be the table's columns."""
    pool = KVPool([LAYER], num_pages=1, page_size=PAGE, kv_cache_dtype="fp4_e2m1")
    dispatcher = HybridDispatcher.from_selection(selected(), load_plugins(), [LAYER], pool)
    batch = ForwardBatch.build(
        ForwardMode.EXTEND,
        query_lens=[0] * requests,
        seq_lens=[0] * requests,
        page_table=torch.zeros(requests, columns, dtype=torch.int32),
        page_size=PAGE,
    )
    plan = dispatcher.init_forward_metadata(batch)
    q = torch.zeros(0, 4, 64, dtype=torch.bfloat16)
    assert dispatcher.forward(q, None, None, LAYER, batch, plan).shape == (0, 4, 64)


# ---- Latents ---------------------------------------------------------------------------------

# backend → where it runs, its page, heads, and the function beneath it that decodes
LATENT = {
    "flashinfer": ("sm90", 16, (4, 1), "flashinfer.mla", "BatchMLAPagedAttentionWrapper.run"),
    "flashmla": ("sm90", 128, (4, 1), "flash_mla_leaf", "decode"),
    "trtllm_mla": (
        *("sm100", 64, (4, 1), "flashinfer.mla"),
        "trtllm_batch_decode_with_kv_cache_mla",
    ),
    "cutlass_mla": ("sm100", 128, (128, 1), "sgl_kernel.attention", "cutlass_mla_decode"),
}
PASSES = ("prefill", "mixed", "decode", "decode-padded", "draft-decode", "draft-extend")


def over_copies(name, case, store="fp4_e2m1"):
    arch, page, heads, *_ = LATENT[name]
    phase = "prefill" if case in ("mla-prefill", "mla-mixed", "mla-draft-extend") else "decode"
    more = {"kv_dtype": store, "k_scale": 0.3}
    if phase == "decode" and heads != (4, 1):
        more["heads"] = heads
    that = Pass(name, case, arch=arch, page_size=page, phase=phase, **more)
    assert that.row.create.startswith("attn_nvidia.dequantized:")
    return that


@pytest.mark.parametrize("case", [f"mla-{name}" for name in (*PASSES, "verify-chain")])
@pytest.mark.parametrize("name", LATENT)
def test_every_pass_over_fp4_latents_is_right(name, case):
    that = over_copies(name, case)
    backend = that.backend()
    that.check(backend)
    # lengths that are on the device alone are asked for
    that.check(backend, batch=without_host_lengths(that.inputs.batch), preallocated=True)


@pytest.mark.parametrize("case", ["mla-prefill", "mla-mixed"])
def test_fa4_prefills_over_fp4_latents_on_blackwell(case, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "100")
    more = {"kv_dtype": "fp4_e2m1", "k_scale": 0.3}
    that = Pass("fa4", case, arch="sm100", page_size=16, phase="prefill", **more)
    that.check(that.backend())


@pytest.mark.parametrize("case", ["mla-prefill", "mla-decode"])
def test_cutlass_mla_reads_an_fp8_cache(case):
    that = over_copies("cutlass_mla", case, "fp8_e4m3")
    that.check(that.backend())


@pytest.mark.parametrize("name", LATENT)
def test_the_named_kernel_decodes_copies_of_the_pages_of_the_pass(name, monkeypatch):
    *_, module, function = LATENT[name]
    owner, _, method = function.rpartition(".")
    module = importlib.import_module(module)
    that = over_copies(name, "mla-decode")
    calls = counted(monkeypatch, getattr(module, owner) if owner else module, method)
    that.check(that.backend())
    [(args, named)] = calls
    inputs = that.inputs
    count = sum(-(-n // inputs.cache.page_size) for n in inputs.batch.views["full"].seq_lens_host)
    wide = [x for x in (*args, *named.values()) if isinstance(x, torch.Tensor)]
    stores = [
        x for x in wide if x.dim() >= 3 and x.shape[0] * x.shape[1] == count * that.point.page_size
    ]
    assert stores
    assert {x.dtype for x in stores} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["flashinfer", "flashmla"])
def test_copies_live_as_long_as_the_call(name, monkeypatch):
    from attn_nvidia import dequantized

    made, read = [], dequantized.read_pages

    def watched(*args):
        k, v = read(*args)
        made.append(weakref.ref(k))
        return k, v

    monkeypatch.setattr(dequantized, "read_pages", watched)
    that = over_copies(name, "mla-decode")
    backend = that.backend()
    that.check(backend)
    gc.collect()
    assert [copy() for copy in made] == [None]


@pytest.mark.parametrize("fault", ["order", "scale"])
def test_a_wrong_copy_of_latents_is_seen(monkeypatch, fault):
    from attn_nvidia import dequantized

    right = dequantized.read_pages

    def wrong(cache, pages, dtype):
        k, v = right(cache, pages.flip(0) if fault == "order" else pages, dtype)
        return k if fault == "order" else k / 0.3, v

    monkeypatch.setattr(dequantized, "read_pages", wrong)
    that = over_copies("flashmla", "mla-decode")
    with pytest.raises(CheckFailed):
        that.check(that.backend())
