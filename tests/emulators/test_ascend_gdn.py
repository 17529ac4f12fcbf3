"""triton's row of GDN on an NPU, on emulated torch-npu: the suite, and what would fail."""

from attn_core.testing import LinearSuite

NPU = {"torch-npu": "2.13.0", "attn-ascend": "0.1.0"}


class TestAscendGDN(LinearSuite):
    name = "triton"
    device = "npu:910b"
    on = "cpu"
    libraries = NPU
    passes = 12
    reduced = True
