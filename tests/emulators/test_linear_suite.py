"""The suite of linear attention over emulated FlashInfer, as on a Hopper."""

import pytest
import torch
from attn_core.testing import LinearSuite

pytest.importorskip("triton")

if torch.cuda.is_available():
    pytest.skip("emulated on a CPU; `attn check` has the library", allow_module_level=True)

LIBRARIES = {"flashinfer-python": "0.6.14", "nvidia-cutlass-dsl": "4.6.0", "triton": "3.6.0"}


class Emulated(LinearSuite):
    device, on = "cuda:sm90", "cpu"
    libraries = LIBRARIES
    passes = 12
    reduced = True


class TestFlashInfer(Emulated):
    name = "flashinfer"


class TestCuteDsl(Emulated):
    """The same decode; of flashinfer it is asked in fp16, which only prefill has."""

    name = "cutedsl"
