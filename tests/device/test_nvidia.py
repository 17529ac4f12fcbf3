"""NVIDIA's backends on a real GPU with the real libraries: the whole suite, graphs included."""

import pytest
import torch
from attn_core.errors import BackendError, UnsupportedError
from attn_core.runtime.batch import ForwardMode
from attn_core.testing import BackendSuite
from without_keys import RAGGED, check_cross, check_ragged

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


ASKED = [("fa3", True), ("fa3", False), ("fa4", True), ("fa4", False), ("flashinfer", False)]


@pytest.fixture
def arch():
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def asked(check, *what, **more):
    """Ask a backend, or skip with its own reason."""
    try:
        check(*what, **more, device="cuda")
    except (BackendError, ImportError, UnsupportedError) as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize(("name", "sinks"), ASKED)
def test_a_ragged_query_without_keys(name, sinks, case, arch):
    asked(check_ragged, name, case, sinks=sinks, arch=arch)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
@pytest.mark.parametrize(("name", "sinks"), ASKED)
def test_a_request_without_encoder_tokens(name, sinks, mode, arch):
    asked(check_cross, name, mode, sinks=sinks, arch=arch)
