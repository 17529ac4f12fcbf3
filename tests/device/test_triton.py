"""triton on a real GPU: the whole suite, replayed CUDA graphs and batch invariance included."""

import pytest
import torch
from attn_core.testing import BackendSuite

if not torch.cuda.is_available():
    pytest.skip("no CUDA or ROCm device", allow_module_level=True)


class TestTriton(BackendSuite):
    name = "triton"


class TestTritonCut(BackendSuite):
    """The same with short requests cut too, as in serving only long ones are: states are joined."""

    name = "triton"

    @pytest.fixture(autouse=True)
    def cut(self, monkeypatch):
        monkeypatch.setattr("attn_core.backends.triton.short_on", lambda device: 0)
