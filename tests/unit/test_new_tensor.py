"""New tensors lie beside those that they are made for, by whatever makes them."""

import pytest
import torch
from attn_core.ops import new_tensor as module
from attn_core.ops.new_tensor import new_tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens", [3, 0])
def test_a_tensor_is_new_and_contiguous(tokens, dtype):
    x = torch.zeros(5, 4, device=DEVICE)
    made = [new_tensor(x, (tokens, 2, 4), (8, 4, 1), dtype) for _ in range(2)]
    for y in made:
        assert (tuple(y.shape), y.stride(), y.dtype) == ((tokens, 2, 4), (8, 4, 1), dtype)
        assert y.device == x.device
        assert not y.requires_grad
    assert not tokens or made[0].data_ptr() != made[1].data_ptr()
    with torch.inference_mode():
        assert new_tensor(x, (3, 4), (4, 1), dtype).is_inference()


def test_only_tensors_of_the_current_gpu_are_made_quickly(monkeypatch):
    """What torch's compiler calls takes no device: another GPU's tensor must not land here."""
    monkeypatch.setattr(module, "_QUICK", lambda shape, strides, dtype: (shape, strides, dtype))
    monkeypatch.setattr(module, "_current_device", lambda: 0)
    asked = ((3, 4), (4, 1), torch.int32)
    for device, quick in ((0, True), (1, False), (-1, False)):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda self, device=device: device)
        assert (new_tensor(torch.zeros(2), *asked) == asked) is quick
