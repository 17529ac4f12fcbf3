"""Kernels of sparse MLA named per phase: by flags of both spellings, variables and select()."""

import json
import sys

import pytest
from attn_core import cli
from attn_core.errors import UsageError
from attn_core.integrations.choice import overrides
from attn_core.plugins.registry import load_plugins
from attn_core.selection.diagnosis import why_not
from attn_core.selection.result import NoBackendError, Overrides
from attn_core.selection.solver import select
from attn_core.spec.device import parse_device
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from attn_nvidia.indexer import _DISTRIBUTION

REGISTRY = load_plugins()
SM90 = parse_device("cuda:sm90")
V32 = LayerRequirements(kind="dsa", head_dim=576, v_head_dim=512, num_q_heads=128, num_kv_heads=1)
LIBRARIES = dict.fromkeys(("sglang-kernel", "sgl-flash-mla", "triton"))


def needs(store="auto", **more):
    return Requirements(layers=(V32,), kv_cache_dtype=store, **more)


def chosen(store="auto", device=SM90, topk=None, **names):
    speculation = Speculation(topk=topk) if topk else None
    return select(
        needs(store, speculation=speculation), device, REGISTRY, LIBRARIES, Overrides(**names),
        simulated=True,
    )  # fmt: skip


def kernels(selection):
    return {role: choice.row.sub_backend for role, choice in selection.roles.items()}


def test_without_a_name_the_documented_kernels_run():
    """One row of bf16 has both; FP8 has one kernel."""
    assert kernels(chosen()) == {"prefill": "", "decode": ""}
    assert chosen().roles["prefill"].row is chosen().roles["decode"].row
    fp8 = chosen("fp8_e4m3")
    assert kernels(fp8) == {"prefill": "flashmla_kv", "decode": "flashmla_kv"}
    assert fp8.roles["decode"].reason == "flashmla_kv, highest priority of those that fit (30)"


def test_a_name_is_for_its_phase():
    both = chosen(nsa_prefill_backend="fa3", nsa_decode_backend="flashmla_sparse")
    assert kernels(both) == {"prefill": "fa3", "decode": "flashmla_sparse"}
    assert both.roles["prefill"].reason == "fa3, named by --nsa-prefill-backend"
    assert both.roles["decode"].reason == "flashmla_sparse, named by --nsa-decode-backend"
    assert kernels(chosen(nsa_decode_backend="fa3")) == {"prefill": "", "decode": "fa3"}


def test_trtllm_is_blackwells_by_name_alone():
    device = parse_device("cuda:sm100")
    libraries = {**LIBRARIES, "flashinfer-python": "0.6.14"}
    names = Overrides(nsa_prefill_backend="trtllm", nsa_decode_backend="trtllm")
    for page in (32, 64):
        found = select(needs(page_size=page), device, REGISTRY, libraries, names, simulated=True)
        assert {c.backend for c in found.roles.values()} == {"nsa"}
        assert set(kernels(found).values()) == {"trtllm"}
    without = select(needs(), device, REGISTRY, libraries, Overrides(), simulated=True)
    assert without.backend("decode") == "triton"
    with pytest.raises(
        NoBackendError, match=r"on cuda:sm90; nearest are nsa: --nsa-decode-backend trtllm"
    ):
        chosen(nsa_decode_backend="trtllm")
    with pytest.raises(NoBackendError, match="fp8_e4m3"):
        select(needs("fp8_e4m3"), device, REGISTRY, libraries, names, simulated=True)


def test_a_kernel_of_another_store_says_which_flag_it_needs():
    with pytest.raises(NoBackendError, match=r"; add --kv-cache-dtype fp8_e4m3 for nsa; `attn"):
        chosen(nsa_decode_backend="flashmla_kv")
    with pytest.raises(NoBackendError, match=r"; add --kv-cache-dtype auto for nsa; `attn"):
        chosen("fp8_e4m3", nsa_decode_backend="fa3")
    with pytest.raises(NoBackendError) as refused:  # it needs another device
        chosen(nsa_decode_backend="trtllm")
    assert "; add " not in str(refused.value)


def test_a_library_that_no_row_requires_may_be_assumed(here):
    """nsa's indexer uses DeepGEMM where it is installed."""
    assert REGISTRY.get("nsa").optional == (_DISTRIBUTION,)
    asked = ("select", "--kind", "dsa", "--device", "cuda:sm90", "--assume-installed")
    done = here(*asked, f"triton,{_DISTRIBUTION}==0.1.4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "sgl-deep-gemm==0.1.4" in done.stdout
    assert "did you mean sgl-deep-gemm" in here(*asked, "sgl-deep-gem").stderr


def test_drafts_are_verified_by_the_kernel_of_their_role():
    found = kernels(chosen("fp8_e4m3", topk=1, nsa_prefill_backend="flashmla_sparse"))
    assert found["verify"] == found["prefill"] == "flashmla_sparse"
    assert found["decode"] == "flashmla_kv"


def test_a_backend_without_the_kernel_does_not_take_its_place():
    with pytest.raises(NoBackendError, match=r"fa3 .runs no kernel of this name."):
        chosen(attention_backend="triton", nsa_decode_backend="fa3")
    with pytest.raises(NoBackendError, match=r"fa3 .runs trtllm."):
        chosen(device=parse_device("cuda:sm100"), nsa_decode_backend="fa3")
    beside = chosen(prefill_attention_backend="triton", nsa_decode_backend="fa3")
    assert (beside.backend("prefill"), beside.backend("decode")) == ("triton", "nsa")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tilelang", "tilelang is not served: .* take flashmla_sparse"),
        ("aiter", "aiter is not served: .* on ROCm triton"),
        ("flashmla_q8", "flashmla_q8 is not served: .* take flashmla_kv"),
        ("flashmla", "flashmla: known: aiter, fa3, .*flashmla_kv"),
    ],
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_names_that_are_not_served(name, message, phase):
    with pytest.raises(UsageError, match=f"--nsa-{phase}-backend ({message})"):
        chosen(**{f"nsa_{phase}_backend": name})


def test_a_model_without_sparse_mla_has_no_such_kernels():
    with pytest.raises(UsageError, match="the model has no sparse MLA"):
        select(
            Requirements(layers=(LayerRequirements(),)), SM90, REGISTRY, LIBRARIES,
            Overrides(nsa_decode_backend="fa3"),
        )  # fmt: skip


def test_why_not_finds_the_store_that_a_kernel_reads():
    asked = Overrides(nsa_decode_backend="flashmla_kv")
    answer = why_not("nsa", needs(), SM90, REGISTRY, LIBRARIES, asked, simulated=True)
    assert [fix.text for fix in answer.fixes] == ["--kv-cache-dtype fp8_e4m3"]
    assert answer.after.overrides == asked
    triton = why_not("triton", needs(), SM90, REGISTRY, LIBRARIES, asked, simulated=True)
    assert [fix.text for fix in triton.fixes] == ["no --nsa-decode-backend flashmla_kv"]


@pytest.mark.parametrize("spelling", ["nsa", "dsa"])
def test_the_flags_have_two_spellings(spelling, monkeypatch, capsys):
    monkeypatch.delenv("ATTN_NSA_DECODE_BACKEND", raising=False)
    flags = [f"--{spelling}-prefill-backend", "fa3", f"--{spelling}-decode-backend", "fa3"]
    words = ["attn", "select", "--kind", "dsa", "--device", "cuda:sm90", "--json", *flags]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        cli.main()
    why = json.loads(capsys.readouterr().out)["why"]
    assert why["decode"] == "fa3, named by --nsa-decode-backend"
    assert why["prefill"] == "fa3, named by --nsa-prefill-backend"


def test_the_variables_name_them_in_an_engine_too():
    found = overrides({"ATTN_NSA_PREFILL_BACKEND": "fa3", "ATTN_NSA_DECODE_BACKEND": "flashmla_kv"})
    assert found == Overrides(nsa_prefill_backend="fa3", nsa_decode_backend="flashmla_kv")
