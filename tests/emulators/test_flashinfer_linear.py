"""FlashInfer's GDN kernels under the contract of linear attention, over its emulated library."""

import dataclasses
import logging

import pytest
import torch

pytest.importorskip("triton")

from attn_core import (
    BatchError,
    LayerRequirements,
    LinearRoutes,
    NoBackendError,
    Overrides,
    Requirements,
    Speculation,
    UnsupportedError,
    create_backend,
    load_plugins,
    parse_device,
    select,
)
from attn_core.backends.torch_native.linear import TorchNativeLinear
from attn_nvidia.flashinfer.linear import FlashInferLinear
from gdn_cases import NORMED, PLAIN, GdnCases, make, make_layer
from linear_passes import M, config, inputs, int32, make_batch, make_pool, run, speculation
from no_waiting import NoWaiting

if torch.cuda.is_available():
    pytest.skip("emulated on a CPU; tests/device has the library itself", allow_module_level=True)

REGISTRY = load_plugins()
LIBRARIES = {"flashinfer-python": "0.6.14", "nvidia-cutlass-dsl": "4.6.0", "triton": "3.6.0"}


def select_linear(**flags):
    needs = Requirements(dtype="bf16", layers=(LayerRequirements(), NORMED.requirements))
    device = parse_device("cuda:sm90")
    return select(needs, device, REGISTRY, LIBRARIES, Overrides(**flags), simulated=True)


def test_both_names_are_of_the_class():
    chosen = select_linear(linear_attn_backend="flashinfer").roles
    for role in ("linear_prefill", "linear_decode"):
        assert chosen[role].backend == "flashinfer"
        backend = create_backend(
            REGISTRY.get("flashinfer", "linear"),
            config(NORMED, row=chosen[role].row, dtype="bf16", arch="sm90"),
            "linear",
        )
        assert isinstance(backend, FlashInferLinear)
    roles = select_linear(linear_attn_decode_backend="cutedsl").roles
    assert (roles["linear_prefill"].backend, roles["linear_decode"].backend) == (
        "triton",
        "cutedsl",
    )
    assert roles["linear_decode"].row == chosen["linear_decode"].row


def test_drafts_are_left_to_triton_and_the_selection_says_why():
    needs = Requirements(
        dtype="bf16",
        layers=(LayerRequirements(), NORMED.requirements),
        speculation=Speculation(topk=1),
    )
    device, why = parse_device("cuda:sm90"), {}
    for name in ("flashinfer", None):
        flags = Overrides(linear_attn_backend=name)
        chosen = select(needs, device, REGISTRY, LIBRARIES, flags, simulated=True)
        assert chosen.backend("linear_verify") == "triton"
        why[name] = chosen.roles["linear_verify"].reason
        assert ("gated_delta_rule_mtp returns no updates" in chosen.explain()) is (name is not None)
    assert why == {
        "flashinfer": "flashinfer does not verify topk 1; highest priority of those that do (10)",
        None: "the backend of linear decode",
    }


def test_it_is_chosen_by_name_alone():
    assert select_linear().backend("linear_prefill") == "triton"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"dtype": "fp16"}, r"dtype fp16 \(supports bf16\)"),
        ({"k": 64}, r"head_dim 64 \(supports 128\)"),
        ({"lacks": "triton"}, r"triton not installed \(needs triton>=3.4\)"),
        ({"lacks": "nvidia-cutlass-dsl"}, r"nvidia-cutlass-dsl not installed"),
        ({"device": "cuda:sm80"}, r"device cuda:sm80 \(supports cuda:sm90"),
        ({"kind": "kda"}, r"kind kda \(supports gdn\)"),
    ],
)
@pytest.mark.parametrize("name", ["flashinfer", "cutedsl"])
def test_the_selection_says_what_decode_lacks(name, flags, why):
    dim = flags.get("k", 128)
    layer = dataclasses.replace(
        PLAIN, head_k_dim=dim, head_v_dim=dim, scale=None, kind=flags.get("kind", "gdn")
    )
    needs = Requirements(
        dtype=flags.get("dtype", "bf16"), layers=(LayerRequirements(), layer.requirements)
    )
    libraries = {n: v for n, v in LIBRARIES.items() if n != flags.get("lacks")}
    device = parse_device(flags.get("device", "cuda:sm90"))
    named = Overrides(linear_attn_decode_backend=name)
    with pytest.raises(NoBackendError, match=why):
        select(needs, device, REGISTRY, libraries, named, simulated=True)


class TestEmulated(GdnCases):
    rounded, exact = 4e-3, 1e-5


@pytest.mark.parametrize(
    ("mode", "lens"), [(M.DECODE, [1, 1]), (M.EXTEND, [3, 2]), (M.EXTEND, [3, 0])]
)
def test_plans_do_not_wait(mode, lens):
    backend = make(NORMED, "decode" if mode is M.DECODE else "prefill")
    fresh = torch.tensor([False, True])
    batch = make_batch(mode, lens, (1, 2), state_fresh=fresh, state_slots_out=int32(3, 2))
    with NoWaiting():
        backend.init_forward_metadata(batch)


def test_what_the_rows_do_not_have_is_refused():
    prefill, decode = make(NORMED, "prefill"), make(NORMED)
    routes = {"linear_prefill": prefill, "linear_decode": decode}
    with pytest.raises(UnsupportedError, match=r"states in bf16: .* supports fp32; create the"):
        LinearRoutes(routes, make_pool(NORMED, dtype="bf16"))
    LinearRoutes(routes | {"linear_decode": TorchNativeLinear(config(NORMED))},
                 make_pool(NORMED, dtype="bf16"))  # fmt: skip
    narrow = dataclasses.replace(NORMED, head_v_dim=64)
    with pytest.raises(UnsupportedError, match=r"head_dim 128/64 \(supports 128\)"):
        LinearRoutes(dict.fromkeys(routes, make(narrow)), make_pool(narrow))
    checkpoint = make_batch(M.EXTEND, [3], (2,), checkpoint_slots=int32(4))
    with pytest.raises(UnsupportedError, match="writes no checkpoints; extend up to each"):
        LinearRoutes(routes, make_pool(NORMED)).plan(checkpoint)
    drafts = make_batch(M.TARGET_VERIFY, [2], (2,), spec=speculation(2))
    with pytest.raises(UnsupportedError, match="no backend for linear_verify"):
        LinearRoutes(routes, make_pool(NORMED)).plan(drafts)
    with pytest.raises(UnsupportedError, match=r"does not verify drafts: .*; create triton"):
        prefill.init_forward_metadata(drafts)


@pytest.mark.parametrize("mode", [M.DECODE, M.EXTEND])
def test_tokens_of_another_dtype_are_refused(mode):
    backend = make(NORMED, "decode" if mode is M.DECODE else "prefill")
    q, k, v, g, beta = inputs(NORMED, 1, dtype=torch.bfloat16)
    batch, pool, other = make_batch(mode, [1], (2,)), make_pool(NORMED), v.half()
    with pytest.raises(BatchError, match=r"v torch.float16 \(expected torch.bfloat16, for which"):
        run(backend, batch, NORMED, pool, (q, k, other, g, beta))


def test_a_request_is_not_as_finite_as_its_neighbour():
    """Why the row wants finite numbers beside a request; nothing of it gets into other slots."""
    layer = make_layer("kernel's gate")
    backend, pool = make(layer, "prefill"), make_pool(layer)
    assert backend.config.row.requires_finite_padding
    tensors = inputs(layer, 6, dtype=torch.bfloat16)
    tensors[2][3:] = torch.nan
    batch = make_batch(M.EXTEND, [3, 3], (2, -1))
    run(backend, batch, layer, pool, tensors)
    assert pool.states.state[0, 2].isnan().any()
    assert not pool.states.state[0, [0, 1, 3, 4, 5, 6, 7]].isnan().any()


def test_a_first_call_is_logged(caplog, monkeypatch):
    monkeypatch.setattr("attn_nvidia.common.jit_log.SILENT_S", 0)
    backend, pool, tensors = make(PLAIN), make_pool(PLAIN), inputs(PLAIN, 1, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO, "attn_nvidia"):
        for _ in range(2):
            run(backend, make_batch(M.DECODE, [1], (2,)), PLAIN, pool, tensors)
    [record] = caplog.records
    assert "built flashinfer, gated_delta_rule_decode_pretranspose" in record.getMessage()


def test_weights_of_a_gate_may_be_loaded_again():
    """In bfloat16 too, which the kernel does not read: a copy made once would be stale."""
    layer, tensors = make_layer("16-bit weights"), inputs(NORMED, 1, dtype=torch.bfloat16)
    backend, batch = make(layer), make_batch(M.DECODE, [1], (2,))
    layer.gate.dt_bias.add_(3)
    pools = make_pool(layer), make_pool(layer)
    pools[1].states.state.copy_(pools[0].states.state)
    got, _ = run(backend, batch, layer, pools[0], tensors)
    want, _ = run(make(layer), batch, layer, pools[1], tensors)
    assert torch.equal(got, want)
    assert torch.equal(pools[0].states.state, pools[1].states.state)
