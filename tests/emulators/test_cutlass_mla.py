"""cutlass_mla over emulated sglang-kernel and FlashInfer on an emulated sm100."""

import importlib

import pytest
from attn_core.errors import UnsupportedError
from attn_core.plugins.registry import load_plugins
from mla_passes import FLASHINFER, Emulated, Pass, counted


class TestCutlassMLA(Emulated):
    name, device = "cutlass_mla", "cuda:sm100"
    libraries = FLASHINFER | {"sglang-kernel": "0.4.5"}
    reduced = True


def that_pass(case, **more):
    return Pass("cutlass_mla", case, arch="sm100", page_size=128, heads=(128, 1), **more)


@pytest.mark.parametrize(
    ("case", "ours"), [("mla-decode", 1), ("mla-draft-decode", 1), ("mla-verify-chain", 0)]
)
def test_one_query_a_request_is_cutlasss_and_drafts_are_flashinfers(case, ours, monkeypatch):
    library = importlib.import_module("sgl_kernel.attention")
    calls = counted(monkeypatch, library, "cutlass_mla_decode")
    that = that_pass(case)
    that.check(that.backend(), preallocated=True)
    assert len(calls) == ours


def test_the_scale_is_the_layers():
    """FlashInfer's own wrapper of this kernel has 192 ** -0.5 built in."""
    that = that_pass("mla-decode", scale_by=3.0)
    that.check(that.backend())


def test_decode_has_no_lse():
    that = that_pass("mla-decode")
    backend, inputs = that.backend(), that.inputs
    metadata = backend.init_forward_metadata(inputs.batch)
    args = (inputs.q, None, None, inputs.layer, inputs.cache, inputs.batch, metadata)
    with pytest.raises(UnsupportedError, match="return_lse"):
        backend.forward(*args, return_lse=True)


def test_prefill_is_flashinfers_and_needs_no_other_library():
    spec = load_plugins().get("cutlass_mla")
    prefill = next(r for r in spec.capabilities if r.lse)
    assert prefill.requires == ("flashinfer-python>=0.6.14,<0.7",)
    that = that_pass("mla-draft-extend", phase="prefill")
    backend = that.backend()
    assert type(backend).__name__ == "FlashInferMLA"
    that.check(backend)
