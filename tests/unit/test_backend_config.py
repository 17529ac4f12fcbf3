"""A config asks its device once for what it was not given."""

from types import SimpleNamespace

import pytest
import torch
from attn_core.runtime import backend_config
from attn_core.runtime.backend_config import BackendConfig
from recording import ROW


def config(device, **more):
    return BackendConfig(
        name="a",
        row=ROW,
        layers=(),
        page_size=1,
        dtype="fp32",
        kv_cache_dtype="fp32",
        device=torch.device(device),
        **more,
    )


@pytest.fixture
def asked(monkeypatch):
    """Stand for one GPU with compute capability 12.1; list how often it is asked."""
    result = SimpleNamespace(
        major=12, minor=1, multi_processor_count=48, shared_memory_per_block_optin=101376
    )
    devices = []

    def properties(device):
        devices.append(device)
        return result

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    backend_config.properties_of.cache_clear()
    yield devices
    backend_config.properties_of.cache_clear()


def test_a_gpu_is_asked_once(asked):
    for _ in range(2):
        result = config("cuda:0")
        assert (result.arch, result.multiprocessors) == ("sm120", 48), (
            "an sm121 runs code for sm120"
        )
        assert result.shared_memory == 101376
    assert asked == [torch.device("cuda:0")]


def test_what_is_given_stays(asked):
    result = config("cuda:0", arch="sm90", multiprocessors=3)
    assert (result.arch, result.multiprocessors) == ("sm90", 3)
    assert asked == []
    assert config("cuda:0", arch="sm90").multiprocessors == 48


def test_elsewhere_nothing_is_known(asked):
    result = config("cpu")
    assert (result.arch, result.multiprocessors, result.shared_memory) == (None, 0, 0)
    assert asked == []
