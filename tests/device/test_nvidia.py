"""NVIDIA's backends on a real GPU with the real libraries: the whole suite, graphs included."""

import pytest
import torch
from attn_core.errors import UnsupportedError
from attn_core.testing import BackendSuite

if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("no CUDA device", allow_module_level=True)


class OnDevice(BackendSuite):
    """The suite of a backend; where its library or its architecture lacks, one skip says so."""

    @classmethod
    def pytest_generate_tests(cls, metafunc):
        try:
            super().pytest_generate_tests(metafunc)
        except UnsupportedError as error:
            skip = pytest.mark.skip(reason=str(error))
            metafunc.parametrize("ask", [pytest.param(None, id="unsupported", marks=[skip])])


class TestFA3(OnDevice):
    name = "fa3"


class TestFlashMLA(OnDevice):
    name = "flashmla"


class TestFlashInfer(OnDevice):
    """Reduced: each dtype, head dim and feature is a kernel that is compiled for minutes."""

    name = "flashinfer"
    reduced = True


class TestTrtllmMHA(OnDevice):
    """Reduced: each page size, group and head dim of XQA is compiled."""

    name = "trtllm_mha"
    kinds = ("mha",)
    reduced = True


class TestFA4(OnDevice):
    """Reduced: every shape and feature is compiled. MLA is ragged on Hopper: no cache is read."""

    name = "fa4"
    reduced = True
