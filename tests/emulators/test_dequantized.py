"""The documented recipe over an FP4 cache: fa4 prefills, another backend decodes."""

import pytest
import torch
from attn_core.cache.page_table import pad_page_table
from attn_core.cache.pool import KVPool
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.selection.result import NoBackendError, notes_of
from attn_core.selection.solver import Overrides, select
from attn_core.spec.device import parse_device
from attn_core.spec.requirements import LayerRequirements, Requirements

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
