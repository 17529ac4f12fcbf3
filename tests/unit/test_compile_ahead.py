"""An engine's start runs every kind of pass over its own cache, and survives one that fails."""

import logging
from types import SimpleNamespace

import pytest
import torch
from attn_core import HybridDispatcher, Overrides, Requirements, load_plugins, probe_device, select
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.errors import BackendRunError
from attn_core.integrations.ahead import compile_ahead
from attn_core.integrations.vllm.layers import EnginePool, to_latent_layer, to_layer
from attn_core.spec.requirements import LayerRequirements
from recording import make, recorder

CPU = torch.device("cpu")
LOGGER = logging.getLogger("an.engine")
MHA = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32}
MLA = {"num_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def over_vllms_cache(kind, stored):
    """Return a dispatcher over a cache as vLLM lays it out, and its bytes."""
    shape = (6, 16, 576) if kind == "mla" else (2, 6, 16, 2, 32)
    cache = torch.randn(shape).to(TORCH_DTYPES[stored])
    common = {"scale": 0.2, "sinks": None, "logits_soft_cap": None, "sliding_window": None}
    module = SimpleNamespace(
        layer_name="layer", impl=SimpleNamespace(**(MLA if kind == "mla" else MHA), **common),
        kv_cache=cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache,
        _k_scale_float=1.0, _v_scale_float=1.0,
    )  # fmt: skip
    layer = (to_latent_layer if kind == "mla" else to_layer)(0, module)
    needs = Requirements(
        layers=(LayerRequirements.of(layer, kind),), dtype="fp32", kv_cache_dtype=stored,
        page_size=16,
    )  # fmt: skip
    registry, libraries = load_plugins(), load_plugins().installed_libraries()
    overrides = Overrides(attention_backend="torch_native")
    selection = select(needs, probe_device(), registry, libraries, overrides)
    pool = EnginePool({0: module}, 16, stored, CPU)
    return HybridDispatcher.from_selection(selection, registry, (layer,), pool), cache


@pytest.mark.parametrize("stored", ["fp32", "fp8_e4m3"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_vllms_cache_is_written_in_its_null_block_alone(kind, stored, caplog):
    dispatcher, cache = over_vllms_cache(kind, stored)
    before = cache.clone()
    with caplog.at_level(logging.INFO):
        compile_ahead(dispatcher, max_bs=7, logger=LOGGER)
    assert caplog.record_tuples[-1][0] == LOGGER.name
    assert "kinds of passes ahead" in caplog.text
    others = (slice(1, None),) if kind == "mla" else (slice(None), slice(1, None))
    same = cache.view(torch.uint8) == before.view(torch.uint8)
    assert same[others].all()
    assert not same.all(), "no pass wrote anything"
    assert not dispatcher.passes, "the engine has run none"


def test_a_pass_that_fails_stops_no_engine(caplog):
    broken = recorder("decoder")
    broken.forward_decode = lambda *args, **kwargs: 1 / 0
    dispatcher, _pre, _dec = make("decode", decode=broken)
    with caplog.at_level(logging.WARNING):
        compile_ahead(dispatcher, max_bs=2, logger=LOGGER)
    assert "division by zero" in caplog.text
    assert "decoder" in caplog.text


def test_a_lost_device_does(monkeypatch):
    lost = BackendRunError("the device is lost")
    lost.restart = True

    def fails(*args, **kwargs):
        raise lost

    monkeypatch.setattr("attn_core.integrations.ahead.warmup", fails)
    with pytest.raises(BackendRunError, match="lost"):
        compile_ahead(make()[0], max_bs=2, logger=LOGGER)
