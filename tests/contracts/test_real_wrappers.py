"""Our backends call the wheels' own Python over torch ops with the wheels' own schemas.

Only the compiled kernel below is emulated: a name, type or order that the real library would
refuse is refused here, by its code and by torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import pathlib
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import Device, parse_device
from attn_core.testing.plan import PlannedCheck, plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from leaves import INFERRED, LIBRARIES, defined, read
from wheels import MISSING, VENDOR, folders, pinned

pytestmark = pytest.mark.skipif(not folders(), reason=MISSING)

HOPPER, BLACKWELL = parse_device("cuda:sm90"), parse_device("cuda:sm100")
SCHEMAS = {(x.distribution, name): s for x in LIBRARIES for name, s in read(x).items()}
SCHEMAS |= {("sglang-kernel", name): s for name, s in INFERRED.items()}


def unpacked(module: str) -> pathlib.Path:
    """Return the wheel's folder that holds a module."""
    return next(f for f in folders() if (f / module).is_dir())


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `sgl_kernel` and `flash_mla` be the wheels' Python, everything else of VENDOR."""
    for path in (str(VENDOR), str(unpacked("flash_mla"))):
        monkeypatch.syspath_prepend(path)
    ours = {p.stem for p in VENDOR.iterdir()}
    before = {m: sys.modules.pop(m) for m in [*sys.modules] if m.partition(".")[0] in ours}
    package = types.ModuleType("sgl_kernel")
    package.__path__ = [str(unpacked("sgl_kernel") / "sgl_kernel")]
    sys.modules["sgl_kernel"] = package  # its own __init__ loads the compiled code
    for name in ("flash_ops", "flashmla_ops"):
        setattr(package, name, types.ModuleType(name))
        sys.modules[f"sgl_kernel.{name}"] = getattr(package, name)
    loader = types.ModuleType("flash_mla._loader")
    loader.get_ops = lambda use_legacy: getattr(torch.ops, "flash_mla" + "_legacy" * use_legacy)
    loader.has_legacy = lambda: True
    sys.modules["flash_mla._loader"] = loader
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    yield
    for m in [*sys.modules]:
        if m.partition(".")[0] in ours:
            del sys.modules[m]
    sys.modules.update(before)


Leaves = dict[tuple[str, str, str], Callable[..., object]]  # (distribution, namespace, op)


def leaves_of(name: str) -> Leaves:
    """Return what stands for the compiled code below a backend's libraries."""
    if name == "fa3":
        leaf = importlib.import_module("fa3_leaf")
        sgl = ("sglang-kernel", "sgl_kernel")
        return {(*sgl, op): getattr(leaf, op) for op in ("fwd", "get_scheduler_metadata")}
    if name == "cutlass_mla":
        return cutlass_leaves()
    if name == "nsa":
        return leaves_of("fa3") | sparse_leaves()
    leaf = importlib.import_module("flash_mla_leaf")

    def schedule(seqlens_k, num_q_tokens_per_head_k, h_k, h_q, is_fp8_kvcache, topk):
        assert not is_fp8_kvcache
        assert topk is None
        return leaf.schedule(seqlens_k, num_q_tokens_per_head_k, h_k)

    def decode(q, kv, dv, seqlens, table, scale, causal, tiles, splits, is_fp8, *sparse):
        assert not is_fp8
        assert all(x is None for x in sparse)
        return leaf.decode(q, kv, table, seqlens, dv, tiles, splits, scale, causal)

    def dense(q, kcache, dv, seqlens, table, scale, causal, tiles, splits):
        out, lse = leaf.decode(q, kcache, table, seqlens, dv, tiles, splits, scale, causal)
        return out, lse, tiles, splits

    def schedule_fp8(seqlens_k, rows, h_k):
        return leaf.schedule(seqlens_k, rows, h_k, fp8=True)

    def decode_fp8(q, kv, dv, seqlens, table, scale, causal, tiles, splits, *descales):
        arguments = (q, kv, table, seqlens, dv, tiles, splits, scale, causal, *descales)
        return leaf.decode_fp8(*arguments)

    sgl, fork = ("sglang-kernel", "sgl_kernel"), ("sgl-flash-mla", "flash_mla_legacy")
    both = {
        "get_mla_decoding_metadata": schedule,
        "get_mla_decoding_metadata_dense_fp8": schedule_fp8,
        "fwd_kvcache_mla_fp8": decode_fp8,
    }
    return {
        **{(*where, op): f for where in (sgl, fork) for op, f in both.items()},
        (*sgl, "fwd_kvcache_mla"): decode,
        (*fork, "dense_decode_fwd"): dense,
    }


def sparse_leaves() -> Leaves:
    """Return FlashMLA's sparse kernels; the fork's says in which unit its prefill's LSE is."""
    leaf = importlib.import_module("flash_mla_leaf")

    def legacy(q, kv, indices, scale, d_v, sink=None, length=None, log2=False, stats=True):
        assert stats
        assert not log2
        return [*leaf.sparse_prefill(q, kv, indices, scale, d_v, sink, length)]

    def attend(*arguments):
        out, peak, lse = leaf.sparse_prefill(*arguments)
        return [out, peak, lse / math.log(2)]  # to base 2, as measured on an H200

    def legacy_decode(*arguments, kv_format=None):
        assert kv_format is None
        return leaf.sparse_decode(*arguments)

    sgl, fork = ("sglang-kernel", "sgl_kernel"), ("sgl-flash-mla", "flash_mla_legacy")
    return {
        (*sgl, "sparse_prefill_fwd"): attend,
        (*fork, "sparse_prefill_fwd"): legacy,
        (*sgl, "sparse_decode_fwd"): leaf.sparse_decode,
        (*fork, "sparse_decode_fwd"): legacy_decode,
    }


def cutlass_leaves() -> Leaves:
    """Return the kernel of cutlass_mla: the emulated wrapper does what both do."""
    path = VENDOR / "sgl_kernel" / "attention.py"
    spec = importlib.util.spec_from_file_location("emulated_attention", path)
    emulated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emulated)

    def decode(out, q_nope, q_pe, cache, lens, table, workspace, scale, splits):
        arguments = (q_nope, q_pe, cache, lens, table, workspace, scale, splits)
        out.copy_(emulated.cutlass_mla_decode(*arguments))

    size = emulated.cutlass_mla_get_workspace_size
    sgl = ("sglang-kernel", "sgl_kernel")
    return {(*sgl, "cutlass_mla_decode"): decode, (*sgl, size.__name__): size}


@contextlib.contextmanager
def over(leaves: Leaves, doctored: dict[str, str] | None = None) -> Iterator[dict[str, int]]:
    """Define the ops of some leaves; yields namespace.op → calls, once they are done."""
    calls: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for namespace in {n for _, n, _ in leaves}:
            mine = {op: leaf for (_, n, op), leaf in leaves.items() if n == namespace}
            schemas = {op: SCHEMAS[d, op] for d, n, op in leaves if n == namespace}
            calls_of = stack.enter_context(defined(namespace, schemas | (doctored or {}), mine))
            stack.callback(
                lambda n=namespace, c=calls_of: calls.update(
                    {f"{n}.{op}": number for op, number in c.items()}
                )
            )
        yield calls


def checks(name: str, libraries: dict[str, str], device: Device = HOPPER) -> list[PlannedCheck]:
    """List one check of each feature that a row declares with these libraries."""
    result: dict[tuple[str, str], PlannedCheck] = {}
    for p in plan(load_plugins().get(name), device, libraries, reduced=True, passes=8):
        # far pages ask for an accelerator's memory: that skips a test, and what it still has to do
        if p.row is not None and not p.check.id.startswith("far-"):
            result.setdefault((p.kind, p.check.feature), p)
    return [*result.values()]


def run(name: str, checks: list[PlannedCheck], device: Device = HOPPER) -> None:
    for planned in checks:
        run_check(planned, load_plugins().get(name), torch.device("cpu"), arch=device.arch)


SGL = {"sglang-kernel": pinned()["sglang-kernel"]}
FLASHINFER = {"flashinfer-python": pinned()["flashinfer-python"]}


def test_fa3_calls_sglang_kernel_as_it_wants(wheels: None) -> None:
    with over(leaves_of("fa3")) as calls:
        run("fa3", checks("fa3", SGL))
    assert all(calls.values()), calls


@pytest.mark.parametrize(
    ("distribution", "namespace"),
    [("sglang-kernel", "sgl_kernel"), ("sgl-flash-mla", "flash_mla_legacy")],
)
def test_flashmla_calls_its_libraries_as_they_want(
    wheels: None, monkeypatch: pytest.MonkeyPatch, distribution: str, namespace: str
) -> None:
    version = {distribution: pinned()[distribution]}
    monkeypatch.setattr("attn_core.plugins.dependencies.installed", lambda groups: version)
    with over(leaves_of("flashmla")) as calls:
        run("flashmla", checks("flashmla", version | FLASHINFER))
    mine = {op: n for op, n in calls.items() if op.startswith(namespace)}
    assert all(mine.values()), calls
    assert not any(n for op, n in calls.items() if op not in mine), "the other library was called"


@pytest.mark.parametrize(
    ("distribution", "op"),
    [("sglang-kernel", "sgl_kernel"), ("sgl-flash-mla", "flash_mla_legacy")],
)
def test_nsa_calls_its_libraries_as_they_want(
    wheels: None, monkeypatch: pytest.MonkeyPatch, distribution: str, op: str
) -> None:
    """fa3 is sglang-kernel's in both; flashmla_sparse is what is found first."""
    result = SGL | {distribution: pinned()[distribution]}
    monkeypatch.setattr("attn_core.plugins.dependencies.installed", lambda groups: result)
    requested = checks("nsa", result | {"triton": "3.4"})
    with over(leaves_of("nsa")) as calls:
        run(
            "nsa", [c for c in requested if not c.check.alone]
        )  # those are for an accelerator's memory
    for kernel in ("sparse_prefill_fwd", "sparse_decode_fwd"):
        sparse = {name: n for name, n in calls.items() if name.endswith(kernel)}
        assert [name for name, n in sparse.items() if n] == [f"{op}.{kernel}"]
    assert calls["sgl_kernel.fwd"]


def test_cutlass_mla_calls_sglang_kernel_as_it_wants(wheels: None) -> None:
    with over(leaves_of("cutlass_mla")) as calls:
        run("cutlass_mla", checks("cutlass_mla", SGL | FLASHINFER, BLACKWELL), BLACKWELL)
    assert all(calls.values()), calls


DOCTORED = {
    "an argument less": ("Tensor? sinks, ", ""),
    "another order": (
        "float? softmax_scale, bool is_causal",
        "bool is_causal, float softmax_scale",
    ),
    "another type": ("int max_seqlen_q", "Tensor max_seqlen_q"),
}


@pytest.mark.parametrize("fault", DOCTORED)
def test_a_doctored_schema_is_found(wheels: None, fault: str) -> None:
    """Another schema below the same wrapper is refused, as another wrapper above it would be."""
    old, new = DOCTORED[fault]
    schema = SCHEMAS["sglang-kernel", "fwd"].replace("int? max", "int max")
    assert old in schema
    with over(leaves_of("fa3"), {"fwd": schema.replace(old, new)}), pytest.raises(CheckFailed):
        run("fa3", checks("fa3", SGL)[:1])


def test_an_argument_that_the_library_does_not_have_is_found(
    wheels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attn_nvidia.fa3 import plan as fa3_plan

    real = fa3_plan.Planner._call
    monkeypatch.setattr(
        fa3_plan.Planner, "_call", lambda *a, **k: real(*a, **k) | {"block_table": None}
    )
    with over(leaves_of("fa3")), pytest.raises(CheckFailed, match="block_table"):
        run("fa3", checks("fa3", SGL)[:1])
