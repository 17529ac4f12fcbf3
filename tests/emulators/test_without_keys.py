"""Queries that see no key, and sinks that change, on the emulated backends that take them."""

from dataclasses import replace

import pytest
import torch
from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import UnsupportedError
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from without_keys import RAGGED, check_cross, check_ragged, make_backend, make_layer

CROSS = [
    ("fa3", "sm90", True),
    ("fa3", "sm90", False),
    ("fa4", "sm90", False),
    ("fa4", "sm100", True),
    ("fa4", "sm100", False),
    ("flashinfer", "sm90", False),
]


RAGGED_ALONE = [("fa4", "sm90", True), ("ascend", "910b", True)]


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize(("name", "arch", "sinks"), [*CROSS, *RAGGED_ALONE])
def test_a_ragged_query_without_keys(name, arch, sinks, case, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", arch.removeprefix("sm"))
    if name == "flashinfer" and RAGGED[case][2]:
        with pytest.raises(UnsupportedError, match="fewer keys than queries"):
            check_ragged(name, case, sinks=sinks, arch=arch, device="cpu")
        return
    check_ragged(name, case, sinks=sinks, arch=arch, device="cpu")


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
@pytest.mark.parametrize(("name", "arch", "sinks"), CROSS)
def test_a_request_without_encoder_tokens(name, arch, sinks, mode, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", arch.removeprefix("sm"))
    check_cross(name, mode, sinks=sinks, arch=arch, device="cpu")


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
@pytest.mark.parametrize(("name", "arch", "sinks"), CROSS)
def test_no_encoder_tokens_at_all_need_no_columns(name, arch, sinks, mode, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", arch.removeprefix("sm"))
    check_cross(name, mode, sinks=sinks, arch=arch, device="cpu", columns=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *(("fa3", "sm90"), ("fa4", "sm90"), ("fa4", "sm100"), ("trtllm_mha", "sm100")),
        *(("aiter", "gfx942"), ("ascend", "910b")),
    ],
)
def test_sinks_that_change_count_as_they_are(name, arch, dtype, monkeypatch):
    """As weights that are loaded into the model afterwards."""
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", arch.removeprefix("sm"))
    layer = make_layer(sinks=True, causal=True, device="cpu")
    layer = replace(layer, sinks=torch.zeros(4, dtype=dtype))
    backend = make_backend(name, layer, arch, "cpu")
    size = backend.config.page_size
    table = torch.ones(1, 1, dtype=torch.int32)
    batch = ForwardBatch.build(
        ForwardMode.EXTEND, query_lens=[3], seq_lens=[5], page_table=table, page_size=size
    )
    layout = (2, size, 2, 64) if "NHD" in backend.config.row.layouts else (2, 2, size, 64)
    k, v = torch.randn(2, *layout).bfloat16()
    cache = LayerCache(k=k, v=v, layout="NHD" if layout[1] == size else "HND")
    q, plan = torch.randn(3, 4, 64).bfloat16(), backend.init_forward_metadata(batch)
    before = backend.forward(q, None, None, layer, cache, batch, plan).clone()
    layer.sinks.fill_(80)
    after = backend.forward(q, None, None, layer, cache, batch, plan)
    assert before.abs().max() > 0.01
    assert after.abs().max() < 1e-6
