"""What our wrappers reach behind FlashInfer's front door is there, and takes what we pass."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import attn_nvidia
import pytest
from offered import reached
from signatures import parameters
from wheels import MISSING, emulators, folders, libraries

WHEELS = libraries()
OURS = pathlib.Path(attn_nvidia.__file__).parent / "flashinfer"
TORCH = {"_version"}  # of a tensor
pytestmark = pytest.mark.skipif(not folders(), reason=MISSING)


@functools.cache
def held() -> set[str]:
    """Return the attributes that the classes of FlashInfer's wrappers give themselves."""
    result = set()
    for name in ("flashinfer.decode", "flashinfer.prefill", "flashinfer.mla._core"):
        tree = ast.parse(WHEELS.module(name).path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                result.add(node.attr)
    return result


PRIVATE = {a: p for a, p in reached(OURS).items() if a.startswith("_") and not a.startswith("__")}


@pytest.mark.parametrize("name", sorted(PRIVATE.keys() - TORCH))
def test_a_private_attribute_is_the_librarys(name: str) -> None:
    assert name in held(), f"{PRIVATE[name].name} takes {name}, which no wrapper sets"


def native(file: str, function: str) -> list[str]:
    """Return the parameter names of a C++ function that FlashInfer compiles."""
    folder = WHEELS.module("flashinfer").path.parent / "data" / "csrc"
    (result,) = re.findall(rf"\b{function}\(([^)]*)\)\s*{{", (folder / file).read_text())
    return [p.partition("=")[0].split()[-1] for p in result.split(",")]


PLANS = [
    ("flashinfer._kernels", "Prefill", ["fixed_split", "disable_split", "colocated"],
     "batch_prefill.cu", "BatchPrefillWithKVCachePlan"),
    ("flashinfer._kernels", "Prefill", [],
     "batch_prefill_sm90.cu", "BatchPrefillWithKVCacheSM90Plan"),
    ("flashinfer._kernels", "Decode", [], "batch_decode.cu", "BatchDecodeWithPagedKVCachePlan"),
    ("flashinfer.mla", "_Module", [], "batch_mla_plan.cu", "BatchMLAPagedAttentionPlan"),
    ("flashinfer.mla", "_Module", [], "batch_mla_sm90_plan.cu", "BatchMLAPagedAttentionSM90Plan"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "more", "file", "function"), PLANS)
def test_an_emulated_plan_takes_what_the_compiled_one_takes(
    module: str, name: str, more: list[str], file: str, function: str
) -> None:
    """As many parameters, each shares a word with its counterpart; `more` are its *arguments."""
    plan = emulators().members(emulators().find(module, name))["plan"]
    mine = [p.name for p in parameters(plan) if p.kind == "positional"][1:] + more
    theirs = native(file, function)
    assert len(mine) == len(theirs), theirs
    for ours, right in zip(mine, theirs, strict=True):
        shared = set(ours.split("_")) & set(right.split("_"))
        assert shared, f"{ours} where {function} has {right}"
