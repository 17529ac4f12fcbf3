"""Our backend of linear attention calls FlashInfer's own Python over kernels that are emulated.

What its functions assert, and what they pass on to a kernel, is the wheel's own code.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from attn_core import LinearLayer
from attn_core.plugins.registry import load_plugins
from attn_nvidia.flashinfer.linear import FlashInferLinear
from linear_passes import (
    M,
    close,
    config,
    expected,
    gate,
    inputs,
    int32,
    make_batch,
    make_pool,
    run,
)
from wheels import MISSING, VENDOR, folders

pytestmark = pytest.mark.skipif(not folders(), reason=MISSING)
PLAIN = LinearLayer(layer_id=0, num_k_heads=2, num_v_heads=4, head_k_dim=128, head_v_dim=128)
KERNELS = VENDOR / "flashinfer" / "gdn_kernels"
BF16 = 4e-3


def module(name: str, **names: object) -> types.ModuleType:
    """Put a module of some names into sys.modules."""
    found = sys.modules[name] = types.ModuleType(name)
    found.__dict__.update(names)
    return found


def emulated(file: str, name: str) -> types.ModuleType:
    """Load an emulated kernel's module under a name."""
    spec = importlib.util.spec_from_file_location(name, KERNELS / file)
    found = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def undecorated(function=None, *, trace=None):
    return (lambda f: f) if function is None else function


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let `flashinfer` be the wheel's Python; yields the kernels that were called."""
    before = {m: sys.modules.pop(m) for m in [*sys.modules] if m.partition(".")[0] == "flashinfer"}
    root = next(f / "flashinfer" for f in folders() if (f / "flashinfer").is_dir())
    module("flashinfer", __path__=[str(root)])
    logger = types.SimpleNamespace(warning_once=pytest.fail)
    module("flashinfer.jit", __path__=[])
    module("flashinfer.jit.core", logger=logger)
    module("flashinfer.api_logging", flashinfer_api=undecorated)
    module("flashinfer.trace", __path__=[])
    module("flashinfer.trace.templates", __path__=[])
    traces = ("gated_delta_rule_decode_trace", "gdn_mtp_trace", "gdn_prefill_trace")
    module("flashinfer.trace.templates.gdn", **dict.fromkeys(traces))
    hopper = {"get_compute_capability": lambda d: (9, 0), "get_device_sm_count": lambda d: 132}
    module("flashinfer.utils", **hopper)
    kernels = "flashinfer.gdn_kernels"
    calls: list[str] = []

    def noted(function):
        def call(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return call

    package = module(kernels, __path__=[])
    decode = emulated("gdn_decode_pretranspose.py", f"{kernels}.gdn_decode_pretranspose")
    decode.run_pretranspose_decode = noted(decode.run_pretranspose_decode)
    module(f"{kernels}.delta_rule_dsl", __path__=[])
    folder = "delta_rule_dsl"
    prefill = emulated(f"{folder}/delta_rule_sm90.py", f"{kernels}.{folder}.delta_rule_sm90")
    few = emulated(f"{folder}/delta_rule_cp_sm90.py", f"{kernels}.{folder}.delta_rule_cp_sm90")
    package.chunk_gated_delta_rule_sm90 = noted(prefill.delta_rule_prefill_dsl_sm90)
    package.cp_delta_rule_dsl_sm90 = noted(few.cp_delta_rule_dsl_sm90)
    package.chunk_gated_delta_rule_sm100 = package.chunk_gated_delta_rule_sm120 = None
    yield calls
    for m in [*sys.modules]:
        if m.partition(".")[0] == "flashinfer":
            del sys.modules[m]
    sys.modules.update(before)


def make(layer: LinearLayer, phase: str) -> FlashInferLinear:
    [row] = [r for r in load_plugins().get("flashinfer", "linear").capabilities
             if next(iter(r.phases)).value == phase]  # fmt: skip
    return FlashInferLinear(config(layer, name="flashinfer", row=row, dtype="bf16", arch="sm90"))


def layers() -> dict[str, LinearLayer]:
    torch.manual_seed(0)
    normed = dataclasses.replace(PLAIN, qk_norm=1e-6)
    return {"gate": dataclasses.replace(normed, gate=gate(normed)), "no gate": normed}


@pytest.mark.parametrize("layer", layers().values(), ids=layers())
def test_decode(wheel: list[str], layer: LinearLayer) -> None:
    backend, pool = make(layer, "decode"), make_pool(layer)
    states, tensors = pool.states.state[0], inputs(layer, 4, dtype=torch.bfloat16)
    before = states.clone()
    fresh = torch.tensor([False, True, False, False])
    slots = {"state_slots_out": int32(6, 4, -1, 1), "state_fresh": fresh}
    found, _ = run(
        backend, make_batch(M.DECODE, [1] * 4, (2, 4, -1, 1), **slots), layer, pool, tensors
    )
    wanted = expected(tensors, [1] * 4, layer, [before[2], None, None, before[1]])
    for request, slot in ((0, 6), (1, 4), (3, 1)):
        close(found[request], wanted[request][0][0], BF16)
        close(states[slot], wanted[request][1][0], BF16)
    assert torch.equal(states[[0, 2, 3, 5, 7]], before[[0, 2, 3, 5, 7]])
    assert wheel == ["run_pretranspose_decode"]


@pytest.mark.parametrize("layer", layers().values(), ids=layers())
@pytest.mark.parametrize("longest", [66, 2050])
def test_extend(wheel: list[str], layer: LinearLayer, longest: int) -> None:
    backend, pool = make(layer, "prefill"), make_pool(layer)
    lens, slots = [longest, 0, 3, 1], (1, 2, 3, 4)
    states, tensors = pool.states.state[0], inputs(layer, sum(lens), dtype=torch.bfloat16)
    before = states.clone()
    found, _ = run(backend, make_batch(M.EXTEND, lens, slots), layer, pool, tensors)
    wanted = expected(tensors, lens, layer, before[1:5])
    close(found, torch.cat([out for out, _ in wanted]), BF16)
    for slot, n, (_, after) in zip(slots, lens, wanted, strict=True):
        close(states[slot], after[-1] if n else before[slot].double(), BF16)
    short = "delta_rule_prefill_dsl_sm90"
    assert wheel == [short if longest < 2048 else "cp_delta_rule_dsl_sm90"]


def test_verification_of_chains_returns_no_updates(wheel: list[str]) -> None:
    """Why no row verifies. A version that takes or returns more is one to look at again."""
    decode = importlib.import_module("flashinfer.gdn_decode")
    function = inspect.signature(decode.gated_delta_rule_mtp)
    assert list(function.parameters) == [
        *("q", "k", "v", "initial_state", "initial_state_indices", "A_log", "a", "dt_bias", "b"),
        *("scale", "output", "intermediate_states_buffer", "ssm_state_indices"),
        *("disable_state_update", "use_qk_l2norm", "output_state_indices"),
    ]
    result = ast.parse(inspect.getsource(decode.gated_delta_rule_mtp)).body[0].body[-1]
    assert ast.unparse(result) == "return (output, initial_state)"
    for name in ("gated_delta_rule_decode_pretranspose", "gated_delta_rule_decode"):
        assert "accepted_steps" not in inspect.signature(getattr(decode, name)).parameters


def test_what_the_library_does_not_take_is_found(
    wheel: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a wrong argument of ours would be."""
    layer = layers()["gate"]
    backend, pool = make(layer, "decode"), make_pool(layer)
    batch, tensors = make_batch(M.DECODE, [1], (2,)), inputs(layer, 1, dtype=torch.bfloat16)
    monkeypatch.setattr("attn_nvidia.flashinfer.linear.contiguous16", lambda x: x.double())
    with pytest.raises(AssertionError, match=r"A_log must be float32, got torch.float64"):
        run(backend, batch, layer, pool, tensors)
