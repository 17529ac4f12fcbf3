"""What the wrappers of every vendor use: tensors that kernels can load, scales, vision towers."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from attn_core import (
    Capabilities,
    ScaleTensors,
    UnsupportedError,
    VisionBackend,
    align16,
    contiguous16,
    contiguous_out,
    copy_to_out,
    empty_attention,
    to_e4m3_saturating,
)
from attn_core.runtime import kernel_tensors
from attn_core.runtime.backend import BackendConfig
from recording import DV, HQ, LAYERS, M, batch

CPU = torch.device("cpu")


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


FUSED = bf16(5, 12, 64)  # Q, K and V of a token beside each other
BYTES = torch.randn(5 * 4 * 64 + 8).bfloat16()
SHIFTED = BYTES[1:][: 5 * 4 * 64].view(5, 4, 64)
LAYOUTS = {  # tensor, whether its 16 bytes lie at multiples of 16, whether it is dense too
    "dense": (bf16(5, 4, 64), True, True),
    "a slice of fused": (FUSED[:, 4:8], True, False),
    "shifted by a value": (SHIFTED, False, False),
    "heads of odd length": (bf16(5, 4, 65)[..., :64], False, False),
    "columns strided": (bf16(5, 4, 128)[..., ::2], False, False),
    "broadcast": (bf16(1, 4, 64).expand(5, 4, 64), True, False),
    "no tokens": (bf16(0, 4, 64), True, True),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dense", [False, True], ids=["align16", "contiguous16"])
def test_what_a_kernel_cannot_load_is_copied_and_nothing_else(name, dense):
    x, reached, contiguous = LAYOUTS[name]
    got = contiguous16(x) if dense else align16(x)
    assert (got is x) is (contiguous if dense else reached)
    assert torch.equal(got, x)
    assert not got.data_ptr() % 16
    assert got.is_contiguous() or not dense


def test_queries_beyond_e4m3_saturate():
    q = torch.tensor([[1e4, -1e4, 448.0, 0.5]]).expand(2, 4)
    got = to_e4m3_saturating(q)
    assert got.is_contiguous()
    assert got.float().tolist() == [[448.0, -448.0, 448.0, 0.5]] * 2


@pytest.mark.parametrize("how", ["none", "dense", "strided"])
def test_an_output_is_filled_where_it_was_given(how):
    q = bf16(3, 2, 8)
    out = {"none": None, "dense": bf16(3, 2, 4), "strided": bf16(3, 2, 8)[..., ::2]}[how]
    target = contiguous_out(q, 4, out)
    assert (target is out) is (how == "dense")
    assert (target.shape, target.dtype, target.is_contiguous()) == ((3, 2, 4), q.dtype, True)
    filled = copy_to_out(target.fill_(7.0), out)
    assert out is None or filled is out
    assert bool((filled == 7).all())


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0]).bfloat16()])
@pytest.mark.parametrize("strided", [None, False, True])
def test_without_keys_the_output_is_zero_and_the_lse_the_sink(tokens, sinks, strided):
    layer = dataclasses.replace(LAYERS[0], sinks=sinks)
    q = bf16(tokens, HQ, 8)
    out = None
    if strided is not None:
        out = bf16(tokens, HQ, DV * 2)[..., ::2] if strided else bf16(tokens, HQ, DV)
    got, lse = empty_attention(q, layer, out, True)
    assert out is None or got is out
    assert (got.shape, got.dtype) == ((tokens, HQ, DV), q.dtype)
    assert not got.any()
    assert (lse.shape, lse.dtype) == ((tokens, HQ), torch.float32)
    wanted = torch.full((HQ,), -torch.inf) if sinks is None else sinks.float()
    assert torch.equal(lse, wanted.expand(tokens, HQ))
    alone = empty_attention(q, layer, out, False)
    assert isinstance(alone, torch.Tensor)
    assert not alone.any()


def test_a_scale_is_made_once_and_one_in_a_tensor_is_read_where_it_lies():
    scales, own = ScaleTensors(CPU), torch.tensor(3.0)
    assert scales.of(0.5) is scales.of(0.5)
    assert (scales.of(0.5).item(), scales.of(1.0).item()) == (0.5, 1.0)
    assert (scales.of(0.5).shape, scales.of(0.5).dtype) == ((1,), torch.float32)
    assert scales.of(own).data_ptr() == own.data_ptr(), "a change of it is seen"


def test_a_scale_of_a_capture_is_the_graphs(monkeypatch):
    scales = ScaleTensors(CPU)
    monkeypatch.setattr(kernel_tensors, "capturing", lambda device: True)
    scales.of(0.5).fill_(torch.nan)  # holds no value before the replay
    assert scales.of(0.5).item() == 0.5


@pytest.mark.parametrize("type", ["cuda", "xpu", "npu"])
def test_every_device_that_captures_graphs_is_asked(type, monkeypatch):
    asked = {}

    def module(device):
        return SimpleNamespace(is_current_stream_capturing=lambda: asked[device.type])

    monkeypatch.setattr(torch, "get_device_module", module)
    device = SimpleNamespace(type=type)
    for asked[type] in (True, False):
        assert kernel_tensors.capturing(device) is asked[type]
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert kernel_tensors.capturing(device) is False, "it captures no graphs"
    assert kernel_tensors.capturing(CPU) is False


class Tower(VisionBackend):
    def forward_ragged(self, q, *args, **more):
        return q


def tower(layer):
    row = Capabilities(
        kind="mha", device="any", dtypes={"fp32"}, kv_dtypes={"fp32"}, priority=0, encoder=True
    )
    return Tower(
        BackendConfig(
            name="tower", row=row, layers=(layer,), page_size=1, dtype="fp32",
            kv_cache_dtype="fp32", device=CPU,
        )
    )  # fmt: skip


def test_a_vision_tower_has_no_passes_over_a_cache():
    layer = dataclasses.replace(LAYERS[0], v_head_dim=8, is_causal=False)
    made, q = tower(layer), torch.zeros(2, HQ, 8)
    decode = batch(M.DECODE)
    with pytest.raises(UnsupportedError, match="tower was created for a vision tower"):
        made.init_forward_metadata(decode)
    for attend in (made.forward, made.forward_extend, made.forward_decode):
        with pytest.raises(UnsupportedError, match="through forward_ragged"):
            attend(q, None, None, layer, None, decode, None)
    assert made.forward_ragged(q) is q


def test_a_vision_tower_refuses_a_layer_that_its_row_does_not_support():
    with pytest.raises(UnsupportedError, match="sinks"):
        tower(dataclasses.replace(LAYERS[0], v_head_dim=8, sinks=torch.zeros(HQ)))


def test_a_vision_tower_is_abstract():
    with pytest.raises(TypeError, match="forward_ragged"):
        VisionBackend(None)
