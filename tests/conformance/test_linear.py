"""Linear attention against the suite: torch_native on the CPU."""

from attn_core.testing import LinearSuite


class TestTorchNative(LinearSuite):
    name = "torch_native"
