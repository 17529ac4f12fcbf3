"""Scratch memory of NVIDIA's kernels, and what is said while they are built."""

import logging
from types import SimpleNamespace

import attn_core.runtime.workspace as held
import pytest
import torch
from attn_core import workspace
from attn_nvidia.common import workspace_bytes
from attn_nvidia.common.jit_log import building

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(held, "_HELD", {})


def test_one_buffer_per_use_zeroed_and_kept():
    first = workspace(CPU, "a", 64)
    assert (first.dtype, first.numel(), int(first.sum())) == (torch.uint8, 64, 0)
    first.fill_(7)
    assert workspace(CPU, "a", 64) is first
    assert workspace(CPU, "a", 3) is first
    other = workspace(CPU, "b", 64)
    assert other is not first
    assert int(other.sum()) == 0


def test_a_larger_one_is_new_and_the_old_one_stays_as_it_was():
    small = workspace(CPU, "a", 8)
    small.fill_(7)
    large = workspace(CPU, "a", 9)
    assert large.numel() == 9
    assert int(large.sum()) == 0
    assert small.tolist() == [7] * 8
    assert workspace(CPU, "a", 8) is large


def test_one_that_is_made_inside_a_capture_serves_no_other_call(monkeypatch):
    """It is zeroed when the graph runs, and belongs to its memory."""
    small = workspace(CPU, "a", 8)
    with monkeypatch.context() as captured:
        captured.setattr(held, "capturing", lambda device: True)
        assert workspace(CPU, "a", 8) is small
        inside = workspace(CPU, "a", 9)
    assert workspace(CPU, "a", 8) is small
    assert workspace(CPU, "a", 9) is not inside


def test_what_flashinfer_needs():
    # Llama 3 8B on an H200: 33 parts of 128 rows of 32 heads, an output and an LSE each
    llama = workspace_bytes.flashinfer(132, 32, 8, 128)
    assert llama == workspace_bytes.RECOMMENDED
    assert workspace_bytes.flashinfer(132, 64, 4, 128) == 64 * 128 * 66 * 129 * 4 + 32
    assert workspace_bytes.flashinfer(132, 64, 4, 128, tile=16) == workspace_bytes.RECOMMENDED
    assert workspace_bytes.flashinfer_mla(132) == workspace_bytes.RECOMMENDED


@pytest.mark.parametrize(("heads", "rows"), [(32, 256), (128, 4096)])
def test_the_lse_of_tensorrt_llm_lies_beside_the_partial_results(heads, rows):
    """What XQA needs is held against its emulation; here one wave of partials hides the rest."""
    more = workspace_bytes.trtllm_gen(148, heads, 128, rows)
    assert more - workspace_bytes.trtllm_gen(148, heads, 128) >= rows * heads * 2 * 4


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("attn_nvidia.common.jit_log.time", clock)
    return clock


def test_a_slow_call_is_said_afterwards(caplog, clock):
    with caplog.at_level(logging.INFO, "attn_nvidia"):
        with building("a kernel"):
            pass
        assert not caplog.messages
        with building("a kernel"):
            clock.now += 0.51
    assert caplog.messages == ["built a kernel in 0.5 s"]


def test_what_will_be_compiled_is_said_before(caplog, clock):
    with caplog.at_level(logging.INFO, "attn_nvidia"), building("a kernel", always=True):
        assert caplog.messages == ["building a kernel …"]
    assert caplog.messages[1:] == ["built a kernel in 0.0 s"]


def test_a_failure_is_said_and_passes_through(caplog, clock):
    with (
        caplog.at_level(logging.INFO, "attn_nvidia"),
        pytest.raises(ValueError, match="nvcc"),
        building("a kernel", always=True),
    ):
        raise ValueError("nvcc")
    assert caplog.messages[-1] == "failed to build a kernel in 0.0 s"
