"""ascend over sparse MLA, on emulated torch-npu: the suite, and what would fail."""

from attn_core.testing import BackendSuite

NPU = {"torch-npu": "2.13.0"}


class TestAscendSparse(BackendSuite):
    name = "ascend"
    kinds = ("dsa",)
    device = "npu:910b"
    on = "cpu"
    libraries = NPU
    passes = 12
