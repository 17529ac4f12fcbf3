"""The rules by which sparse MLA picks its kernels, on both sides of each."""

import pytest
from attn_core.errors import UsageError
from attn_core.runtime.batch import ForwardMode
from attn_core.spec.device import Device
from attn_nvidia import dsa

SM90, SM100, SM120 = (Device("cuda", arch) for arch in ("sm90", "sm100", "sm120"))
EXTEND, VERIFY = ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY


@pytest.mark.parametrize("queries", [1, 3, 1000])
def test_512_kv_tokens_a_query_is_the_boundary(queries):
    assert dsa.sparse_or_kv(512 * queries - 1, queries) == "flashmla_sparse"
    assert dsa.sparse_or_kv(512 * queries, queries) == "flashmla_kv"
    assert dsa.sparse_or_kv(512 * queries + 1, queries) == "flashmla_kv"


def test_flashmla_auto_follows_the_boundary_only_where_blackwell_extends_fp8():
    few, many = (511, 1), (512, 1)
    assert dsa.flashmla_auto(SM100, "fp8_e4m3", EXTEND, *few) == "flashmla_sparse"
    assert dsa.flashmla_auto(SM100, "fp8_e4m3", EXTEND, *many) == "flashmla_kv"
    assert dsa.flashmla_auto(SM90, "fp8_e4m3", EXTEND, *few) == "flashmla_kv"
    assert dsa.flashmla_auto(SM100, "fp8_e4m3", VERIFY, *few) == "flashmla_kv"
    assert dsa.flashmla_auto(SM90, "bf16", EXTEND, *many) == "flashmla_sparse"


@pytest.mark.parametrize(
    ("device", "store", "extra", "prefill", "decode"),
    [
        (SM90, "fp8_e4m3", {}, "flashmla_kv", "flashmla_kv"),
        (SM100, "fp8_e4m3", {}, "trtllm", "trtllm"),
        (SM90, "bf16", {}, "flashmla_sparse", "fa3"),
        (SM100, "bf16", {}, "flashmla_sparse", "trtllm"),
        (SM90, "bf16", {"sinks": True}, "flashmla_sparse", "flashmla_sparse"),
        (SM100, "bf16", {"sinks": True}, "flashmla_sparse", "flashmla_sparse"),
        (SM120, "fp8_e4m3", {"glm": True}, "flashinfer_sparse_mla", "flashinfer_sparse_mla"),
        (SM120, "fp8_e4m3", {}, "trtllm", "trtllm"),
        (SM100, "fp8_e4m3", {"glm": True}, "trtllm", "trtllm"),
        (Device("rocm", "gfx942"), "bf16", {}, "triton", "triton"),
        (Device("xpu", "pvc"), "bf16", {}, "intel_xpu", "intel_xpu"),
    ],
)
def test_documented_sub_backends(device, store, extra, prefill, decode):
    subs = dsa.sub_backends(device, store, **extra)
    assert (subs.prefill, subs.decode) == (prefill, decode)


def test_sub_backend_of_a_pass():
    subs = dsa.SubBackends("p", "d")
    extends = {EXTEND, ForwardMode.MIXED}
    assert {mode: subs.of(mode) for mode in ForwardMode} == {
        mode: "p" if mode in extends else "d" for mode in ForwardMode
    }


def test_sparse_mla_has_no_kernels_elsewhere():
    with pytest.raises(UsageError, match="no kernels on cpu:amx"):
        dsa.sub_backends(Device("cpu", "amx"), "bf16")


def test_store_of_sparse_mla():
    assert dsa.store_dtype(SM90) == "bf16"
    assert dsa.store_dtype(SM100) == dsa.store_dtype(SM120) == "fp8_e4m3"
    assert dsa.store_dtype(Device("rocm", "gfx942")) == "bf16"
    assert dsa.store_dtype(SM100, sinks=True) == "bf16"
    assert dsa.store_dtype(SM90, "fp8_e4m3") == "fp8_e4m3"
    with pytest.raises(UsageError, match="fp8_e4m3: sparse MLA stores bf16, for a model with"):
        dsa.store_dtype(SM100, "fp8_e4m3", sinks=True)
    with pytest.raises(UsageError, match="fp4_e2m1: sparse MLA stores auto, bf16, fp8_e4m3"):
        dsa.store_dtype(SM100, "fp4_e2m1")
