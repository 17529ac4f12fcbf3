"""Pairs of backends over one shared cache, with the vendors' libraries emulated on a CPU."""

import importlib
import pathlib

import hybrid
import pytest
import torch
from attn_core.spec.device import parse_device
from attn_core.testing.tolerance import CheckFailed

VENDOR = pathlib.Path(__file__).parent / "vendor"
PASSES = 24


def emulated() -> dict[str, str]:
    """Return the versions that the emulators claim, and a Triton for the interpreter."""
    names = (p.name.removesuffix(".dist-info") for p in VENDOR.glob("*.dist-info"))
    versions = dict(name.replace("_", "-").rsplit("-", 1) for name in names)
    return versions | {"triton": "3.4"}


DEVICES = ("cuda:sm90", "rocm:gfx942", "npu:910b", "xpu:bmg")
SHORT = ("-plain", "-chain-decode")  # of other vendors than NVIDIA


def pairs():
    """Yield the pairs; those with Triton, which is interpreted here, marked `long`."""
    for name in DEVICES:
        device = parse_device(name)
        for param in hybrid.hybrids(device, emulated(), torch.device("cpu")):
            long = "triton" in param.id
            long |= device.type != "cuda" and not any(how in param.id for how in SHORT)
            marks = [*param.marks, pytest.mark.long] if long else param.marks
            yield pytest.param(*param.values, id=param.id, marks=marks)


PAIRS = [*pairs()]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_random_session_over_the_shared_cache(pair):
    hybrid.run_mixed_passes(pair, passes=PASSES)


@pytest.mark.parametrize("pair", PAIRS)
def test_replayed_passes_equal_eager(pair):
    hybrid.run_replays(pair)


def served(name):
    return next(p.values[0] for p in PAIRS if p.id.startswith(name))


def test_a_replay_without_a_refill_is_found(monkeypatch):
    pair = served("mha-fa3-flashinfer-plain")
    backend = importlib.import_module("attn_nvidia.flashinfer.mha").FlashInfer
    monkeypatch.setattr(backend, "init_forward_metadata_replay_cuda_graph", lambda *a: None)
    with pytest.raises(CheckFailed, match="replayed"):
        hybrid.run_replays(pair)


@pytest.mark.parametrize("backend", ["FA3", "FlashInfer"])
def test_a_fault_of_either_backend_is_found(monkeypatch, backend):
    pair = served("mha-fa3-flashinfer-chain-decode")
    module = {"FA3": "attn_nvidia.fa3.backend", "FlashInfer": "attn_nvidia.flashinfer.mha"}[backend]
    owner = getattr(importlib.import_module(module), backend)
    real = owner.forward

    def a_little_off(self, *args, **more):
        result = real(self, *args, **more)
        (result[0] if isinstance(result, tuple) else result).mul_(1.05)
        return result

    monkeypatch.setattr(owner, "forward", a_little_off)
    with pytest.raises(CheckFailed):
        hybrid.run_mixed_passes(pair, passes=PASSES)


REQUIRED = (
    *("mha-fa3-flashinfer", "mha-flashinfer-fa3", "mha-fa4-trtllm_mha", "mla-fa3-flashmla"),
    *(f"mha-triton-{name}" for name in hybrid.VENDORS),
    *(f"mha-{name}-triton" for name in ("flashinfer", "fa3", "fa4")),
    "mla-triton-flashmla",
    *("mha-aiter-torch_native", "mha-torch_native-aiter", "mla-torch_native-aiter"),
    *("mha-aiter-triton", "mha-triton-aiter", "mla-triton-aiter"),
    *("mha-ascend-torch_native", "mha-torch_native-ascend", "mla-torch_native-ascend"),
    *("mha-intel_xpu-torch_native", "mha-torch_native-intel_xpu"),
)
ANY_TOPK = ("mha-fa3-flashinfer", "mha-flashinfer-fa3", "mha-triton-flashinfer", "mha-triton-fa3")


@pytest.mark.parametrize("pair", REQUIRED)
def test_no_pair_is_lost(pair):
    """A pair that nothing serves any more would only be skipped."""
    modes = ("chain", "tree") if pair in ANY_TOPK else ("chain",)
    wanted = ["plain", *(f"{how}-{mode}" for how in modes for mode in ("prefill", "decode"))]
    served = [p.id for p in PAIRS if not any(m.name == "skip" for m in p.marks)]
    for how in wanted:
        assert any(name.startswith(f"{pair}-{how}-page") for name in served), how
