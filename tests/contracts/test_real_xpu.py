"""intel_xpu calls the Python of vllm-xpu-kernels' wheel over an op with the wheel's schema.

The emulated kernels are among those that the wheel's shared library has.
"""

from __future__ import annotations

import importlib.util
import mmap
import pathlib
import re
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing.plan import PlannedCheck, plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from leaves import LIBRARIES, defined, read
from wheels import MISSING, VENDOR, folders, pinned

PACKAGE = "vllm_xpu_kernels"
WHEEL = next((f for f in folders() if (f / PACKAGE).is_dir()), pathlib.Path())
pytestmark = pytest.mark.skipif(pathlib.Path() == WHEEL, reason=MISSING)
BMG = parse_device("xpu:bmg")
XPU = {"vllm-xpu-kernels": pinned()["vllm-xpu-kernels"]}
SCHEMAS = read(next(x for x in LIBRARIES if x.distribution == "vllm-xpu-kernels"))


@pytest.fixture
def leaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Let `vllm_xpu_kernels` be the wheel's Python; gives the emulation of its compiled part."""
    monkeypatch.syspath_prepend(str(VENDOR))
    ours = {p.stem for p in VENDOR.iterdir()}
    before = {m: sys.modules.pop(m) for m in [*sys.modules] if m.partition(".")[0] in ours}
    spec = importlib.util.spec_from_file_location("emulated_xpu", VENDOR / PACKAGE / "_leaf.py")
    emulated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emulated)
    package = sys.modules[PACKAGE] = types.ModuleType(PACKAGE)
    package.__path__ = [str(WHEEL / PACKAGE)]
    package._vllm_fa2_C = sys.modules[f"{PACKAGE}._vllm_fa2_C"] = types.ModuleType("_vllm_fa2_C")
    yield emulated
    for m in [*sys.modules]:
        if m.partition(".")[0] in ours:
            del sys.modules[m]
    sys.modules.update(before)


def checks() -> list[PlannedCheck]:
    """List one check of each feature that a row declares."""
    result: dict[str, PlannedCheck] = {}
    for p in plan(
        load_plugins().get("intel_xpu"), BMG, XPU, kinds=("mha",), reduced=True, passes=8
    ):
        if p.row is not None:
            result.setdefault(p.check.feature, p)
    return [*result.values()]


def run(checks: list[PlannedCheck]) -> None:
    for planned in checks:
        run_check(planned, load_plugins().get("intel_xpu"), torch.device("cpu"), arch=BMG.arch)


def test_intel_xpu_calls_its_library_as_it_wants(leaf: types.ModuleType) -> None:
    with defined("_vllm_fa2_C", SCHEMAS, {"varlen_fwd": leaf.varlen_fwd}) as calls:
        run(checks())
    assert calls["varlen_fwd"] > 100


DOCTORED = {
    "an argument less": ("Tensor? softmax_sink, ", ""),
    "another order": (
        "float softmax_scale, Tensor? softmax_sink",
        "Tensor? softmax_sink, float softmax_scale",
    ),
    "another type": ("int max_seqlen_q", "Tensor max_seqlen_q"),
}


@pytest.mark.parametrize("fault", DOCTORED)
def test_a_doctored_schema_is_found(leaf: types.ModuleType, fault: str) -> None:
    old, new = DOCTORED[fault]
    assert old in SCHEMAS["varlen_fwd"]
    schemas = {"varlen_fwd": SCHEMAS["varlen_fwd"].replace(old, new)}
    with (
        defined("_vllm_fa2_C", schemas, {"varlen_fwd": leaf.varlen_fwd}),
        pytest.raises(CheckFailed),
    ):
        run(checks()[:1])


# the functions that launch a kernel are named by its compile-time constants
PREFILL = rb"policy_dispatch_implI\d+chunk_policy_head(\d+)Lb(\d)ELb(\d)ELb(\d)ELb(\d)ELb(\d)EE"
DECODE = (
    rb"decode_policy_dispatch_implI26decode_policy_qpacked_headIN4cute1CILi(\d+)EEE"
    rb"NS\w_ILi(\d+)EEE(?:NS\w_ILi64EEE|(?<=Li64EEE)S7_)ELb0ELb(\d)ELb(\d)EE"
)


def numbers(pattern: bytes, data: mmap.mmap) -> set[tuple[int, ...]]:
    return {tuple(map(int, result)) for result in re.findall(pattern, data)}


def test_the_wheel_has_the_emulated_kernels(leaf: types.ModuleType) -> None:
    binary = WHEEL / PACKAGE / "libattn_kernels_xe_2.so"
    with binary.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        prefill, decode = numbers(PREFILL, data), numbers(DECODE, data)
    assert prefill >= leaf.PREFILL
    assert decode >= leaf.DECODE


def test_no_kernel_receives_a_soft_cap() -> None:
    """Both launchers take one number with a fraction, the scale of the scores."""
    binary = WHEEL / PACKAGE / "_vllm_fa2_C.abi3.so"
    names = set(re.findall(rb"_Z\d+cutlass_\w+_interface\w+", binary.read_bytes()))
    assert len(names) == 2
    for name in names:
        types_of = name.partition(b"_interface")[2]
        assert types_of.count(b"d") == 1, name
        assert b"f" not in types_of, name
