"""AITER's own Triton kernels, from its wheel, run in Triton's interpreter below our backend.

They are held to the suite's oracle, case by case, as the emulations of them are.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing.plan import PlannedCheck, plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from attn_rocm.aiter import tree, unified
from wheels import MISSING, VENDOR, folders, pinned

pytestmark = pytest.mark.skipif(not folders(), reason=MISSING)
MI300 = parse_device("rocm:gfx942")
LIBRARIES = {"amd-aiter": pinned()["amd-aiter"]}


def module(name: str, **names: object) -> types.ModuleType:
    """Put a module of some names into sys.modules."""
    result = sys.modules[name] = types.ModuleType(name)
    result.__dict__.update(names)
    return result


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `aiter.ops.triton` be the wheel's Python, and what compiles the rest the emulation."""
    monkeypatch.syspath_prepend(str(VENDOR))
    ours = {p.stem for p in VENDOR.iterdir()}
    before = {m: sys.modules.pop(m) for m in [*sys.modules] if m.partition(".")[0] in ours}
    import aiter

    root = next(f for f in folders() if (f / "aiter" / "ops").is_dir()) / "aiter" / "ops" / "triton"
    aiter.ops.triton = module("aiter.ops.triton", __path__=[str(root)])
    module("aiter.ops.triton.utils.device_info", get_num_sms=lambda: 304, get_num_xcds=lambda: 8)
    chip = {"get_arch": lambda: "gfx942", "get_device": lambda: "MI300X"}
    module("aiter.ops.triton.utils._triton.arch_info", **chip)
    yield
    for m in [*sys.modules]:
        if m.partition(".")[0] in ours:
            del sys.modules[m]
    sys.modules.update(before)


def checks(create: str, wanted: str) -> list[PlannedCheck]:
    """List one check of each feature that a class has the rows for; wanted: a part of its name."""
    result: dict[str, PlannedCheck] = {}
    spec = load_plugins().get("aiter")
    for p in plan(spec, MI300, LIBRARIES, kinds=("mha",), passes=8):
        if p.row is not None and p.row.create == create and wanted in p.check.feature:
            result.setdefault(p.check.feature, p)
    assert result
    return [*result.values()]


def run(checks: list[PlannedCheck]) -> None:
    for planned in checks:
        run_check(planned, load_plugins().get("aiter"), torch.device("cpu"), arch=MI300.arch)


UNIFIED, PAGED = (
    f"attn_rocm.aiter.{name}" for name in ("unified:AiterUnified", "paged:AiterPaged")
)


@pytest.mark.parametrize(
    "wanted", ["window", "sinks", "fp8", "dim-", "heads-17", "heads-64", "session", "layers"]
)
def test_unified_attention_is_right(wheel: None, wanted: str) -> None:
    run(checks(UNIFIED, wanted))


def test_trees_are_right(wheel: None) -> None:
    run(checks(PAGED, "tree"))


def test_a_window_of_one_token_more_is_found(wheel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unified, "window_of", lambda w: (-1, -1) if w is None else (w, 0))
    with pytest.raises(CheckFailed):
        run(checks(UNIFIED, "window-decode"))


def test_a_mask_of_another_request_is_found(wheel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tree.TreePlan.of

    def rolled(*args: object, **more: object) -> object:
        plan = real(*args, **more)
        plan.mask_indptr.copy_(plan.mask_indptr.roll(1))
        return plan

    monkeypatch.setattr(tree.TreePlan, "of", rolled)
    with pytest.raises(CheckFailed):
        run(checks(PAGED, "verify-tree"))


def test_a_page_table_without_whole_tiles_is_found(
    wheel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel looks up the pages of a whole tile: the interpreter refuses stray addresses."""
    monkeypatch.setattr(unified, "TILE", 16)
    with pytest.raises(CheckFailed, match="StrayAddress"):
        run(checks(UNIFIED, "session"))
