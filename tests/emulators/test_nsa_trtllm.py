"""nsa's kernel trtllm over emulated FlashInfer on an emulated sm100."""

import dataclasses
import importlib

import pytest
import torch
from attn_core.plugins.registry import load_plugins
from attn_core.testing import BackendSuite
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.passes import attend, compare, create, prepared
from attn_core.testing.sparse_catalog import SPARSE
from attn_core.testing.tolerance import CheckFailed
from attn_nvidia.trtllm import sparse
from mla_passes import FLASHINFER, counted, put_in

CASES = {case.feature: case for case in SPARSE}
PASSES = (
    "dsa-prefill", "dsa-mixed", "dsa-odd-number", "dsa-empty", "dsa-decode", "dsa-verify-chain",
    "dsa-draft-extend", "dsa-draft-decode", "dsa-few-keys", "dsa-all-keys",
)  # fmt: skip


@pytest.fixture(autouse=True)
def gpu(vendor):
    put_in("sm100")


def rows():
    return [r for r in load_plugins().get("nsa").capabilities if r.sub_backend == "trtllm"]


@pytest.mark.long  # its indexer runs in Triton's interpreter
class TestTrtllm(BackendSuite):
    name = "nsa"
    kinds = ("dsa",)
    device = "cuda:sm100"
    on = "cpu"
    libraries = FLASHINFER | {"triton": "3.4"}
    passes = 12
    reduced = True

    @classmethod
    def spec(cls):
        return dataclasses.replace(super().spec(), capabilities=rows())


class Pass:
    """A pass of the suite on the row of trtllm."""

    def __init__(self, case, *, page_size=64, **changes):
        self.case = dataclasses.replace(CASES[case], **changes)
        self.point = Point(dtype="bf16", page_size=page_size)
        bench = Bench(
            spec=load_plugins().get("nsa"), row=rows()[0], torch_device=torch.device("cpu"),
            arch="sm100",
        )  # fmt: skip
        self.inputs, self.right = prepared(bench, self.case, self.point)
        self.backend = create(bench, self.case, self.inputs, self.point)

    def check(self, *, preallocated=False):
        """Run the pass and compare every number."""
        actual = attend(self.backend, self.inputs, preallocated=preallocated, return_lse=False)
        compare(actual, self.right, self.inputs.real_tokens, torch.bfloat16, "output")


@pytest.fixture
def calls(monkeypatch):
    mla = importlib.import_module("flashinfer.mla")
    return counted(monkeypatch, mla, "trtllm_batch_decode_with_kv_cache_mla")


@pytest.mark.parametrize("case", PASSES)
def test_every_pass_is_one_call(case, calls):
    that = Pass(case)
    that.check()
    that.check(preallocated=True)
    assert len(calls) == 2


@pytest.mark.parametrize(("page_size", "page"), [(32, 32), (64, 64), (96, 32), (128, 64)])
def test_pages_are_split_into_the_kernels(page_size, page, calls):
    Pass("dsa-decode", page_size=page_size).check()
    [(args, _)] = calls
    assert args[1].shape[1:] == (page, 576)


def faulty(change):
    """Return pad with a change of what it is given: the slots that the kernel reads."""
    return lambda x, *how, **more: torch.constant_pad_nd(change(x), *how, **more)


@pytest.mark.parametrize(
    "change",
    [
        lambda slots: slots + 1,
        lambda slots: slots.roll(1, 0),
        lambda slots: torch.zeros_like(slots),
    ],
    ids=["the next slot", "another query's", "no slot"],
)
def test_wrong_slots_are_found(change, monkeypatch):
    that = Pass("dsa-decode")
    monkeypatch.setattr(sparse.torch.nn.functional, "pad", faulty(change))
    with pytest.raises((CheckFailed, RuntimeError, AssertionError, ValueError)):
        that.check()


def test_a_missing_scale_is_found(monkeypatch):
    that = Pass("dsa-prefill")
    decode = that.backend._decode
    monkeypatch.setattr(
        that.backend, "_decode", lambda *a, **more: decode(*a, **{**more, "bmm1_scale": 1.0})
    )
    with pytest.raises(CheckFailed):
        that.check()
