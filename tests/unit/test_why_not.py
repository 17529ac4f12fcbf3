"""A suggestion is a command line that works as it is printed, and nothing of it can be left out."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys

import pytest
from attn_core import cli
from attn_core.cli.command_line import applier, changed_flags, written
from attn_core.cli.inputs import selection_inputs
from attn_core.cli.options import InputFlags
from attn_core.errors import AttnError
from attn_core.plugins.registry import Origin, Registry, load_plugins
from attn_core.selection.diagnosis import why_not
from attn_core.selection.mismatch import Fix
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.spec.requirements import Requirements
from hypothesis import example, given, settings
from hypothesis import strategies as st

REGISTRY = load_plugins()
HERE = Registry.installed_libraries


def run(*arguments: str, installed: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run `attn` in this process, beside libraries that count as installed on this machine."""
    text, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("ATTN_")]:
            patch.delenv(name)
        found = {**HERE(REGISTRY), **dict.fromkeys(installed)}
        patch.setattr(Registry, "installed_libraries", lambda self: found)
        patch.setattr("attn_core.cli.select.load_plugins", lambda: REGISTRY)
        patch.setattr(sys, "argv", ["attn", *arguments])
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
            try:
                cli.main()
            except SystemExit as end:
                code = int(end.code or 0)
    return code, text.getvalue()


def roles(command: str, name: str, installed: tuple[str, ...] = ()) -> set[str]:
    """Return the roles of a backend in what a command line selects."""
    code, text = run(*shlex.split(command)[1:], "--json", installed=installed)
    return set() if code else served(json.loads(text), name)


def served(got: dict, name: str) -> set[str]:
    linear = {f"linear {r}": n for r, n in (got["linear"] or {}).items()}
    return {r for r in ("prefill", "decode", "multimodal") if got[r] == name} | {
        r for r, n in linear.items() if n == name
    }


def optional(**values: st.SearchStrategy) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries({}, optional=values)


DEVICES = ("cuda:sm80", "cuda:sm90", "cuda:sm100", "cuda:sm120", "rocm:gfx942", "npu:910b")
FLAGS = optional(
    device=st.sampled_from((*DEVICES, "xpu:bmg", "cpu:amx")),
    runtime_version=st.sampled_from(("8.0", "12.2", "12.9")),
    dtype=st.sampled_from(("bf16", "fp16", "fp32")),
    kv_cache_dtype=st.sampled_from(("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")),
    page_size=st.sampled_from((1, 8, 48, 64, 128)),
    kind=st.sampled_from(("mha", "mla", "dsa", "gdn")),
    sinks=st.just(True),
    sliding_window=st.just(128),
    logit_cap=st.just(30.0),
    deterministic=st.just(True),
    shared_prefix=st.just(True),
    speculative_eagle_topk=st.sampled_from((1, 4)),
    attention_backend=st.sampled_from(("triton", "fa3", "torch_native")),
    decode_attention_backend=st.sampled_from(("triton", "flashinfer")),
    deny=st.sampled_from((["fa3"], ["flashinfer,triton"])),
    assume_installed=st.sampled_from((["all"], ["triton"], ["triton,flashinfer-python==0.6.14"])),
)
NAMES = sorted({spec.name for spec in REGISTRY.backends.values()})


@given(FLAGS, st.sampled_from(NAMES))
@example({"device": "npu:910b", "kv_cache_dtype": "fp8_e5m2", "dtype": "fp32"}, "ascend")
@example({"device": "npu:910b", "runtime_version": "8.0"}, "intel_amx")
@example({"device": "npu:910b", "runtime_version": "8.0"}, "trtllm_mha")
@example({"device": "cuda:sm90", "assume_installed": ["triton"]}, "fa3")
@example({}, "fa3")
@example({"device": "cuda:sm90", "kind": "kda"}, "cutedsl")
@settings(max_examples=max(10, settings.default.max_examples // 6))
def test_the_printed_command_works_and_is_minimal(flags, name):
    asked = InputFlags(**flags)
    code, text = run("why-not", name, *shlex.split(written("select", asked))[2:], "--json")
    if code:  # flags that say nothing together
        assert code in (2, 3)
        return
    got = json.loads(text)
    for answer in (got, got.get("linear")):
        if answer is None or not answer["command"]:
            continue
        fixes = suggested(asked, answer)
        before = served(got["decision"], name)
        gained = roles(answer["command"], name, installs(asked, fixes)) - before
        assert gained, answer["command"]
        for left_out in fixes:
            rest = tuple(c for c in fixes if c is not left_out)
            less = applier(asked, REGISTRY)(rest)
            assert less is None or not gained <= asked_roles(less, name), left_out.text


def asked_roles(asked, name: str) -> set[str]:
    try:
        return served(asked.select(REGISTRY).to_json(), name)
    except AttnError:
        return set()


def suggested(asked, answer):
    """Return the changes behind the texts of an answer, its flag included."""
    here = selection_inputs(asked, REGISTRY)
    again = why_not(
        answer["backend"],
        here.requirements,
        here.device,
        REGISTRY,
        here.libraries,
        here.overrides,
        here.profile,
        workload=here.workload,
        simulated=here.simulated,
        family=answer["family"],
        apply=applier(asked, REGISTRY),
    )
    assert [c.text for c in again.fixes] == answer["changes"]
    return (*again.fixes, *again.named)


def installs(asked, fixes) -> tuple[str, ...]:
    """Return the libraries that no flag adds: those to be installed on this machine."""
    rest = changed_flags(asked, fixes)[1]
    return tuple(name for c in rest if c.target == "libraries" for name, _ in c.values)


@pytest.mark.parametrize(
    ("flags", "name", "command"),
    [
        (
            {"device": "npu:910b", "kv_cache_dtype": "fp8_e5m2", "dtype": "fp32"},
            "ascend",
            "attn select --dtype bf16 --device npu:910b",
        ),
        (
            {"device": "npu:910b", "runtime_version": "8.0"},
            "intel_amx",
            "attn select --device cpu:amx",
        ),
        ({"device": "cuda:sm90", "sinks": True}, "flashinfer_cudnn", None),
        (
            {"device": "cuda:sm90", "prefill_attention_backend": "fa3"},
            "triton",
            "attn select --prefill-attention-backend fa3 --decode-attention-backend triton "
            "--device cuda:sm90",
        ),
        (
            {"device": "cuda:sm90", "assume_installed": ["triton"]},
            "fa3",
            "attn select --device cuda:sm90 --assume-installed triton,sglang-kernel",
        ),
    ],
)
def test_the_command_of_a_situation(flags, name, command):
    code, text = run(
        "why-not", name, *shlex.split(written("select", InputFlags(**flags)))[2:], "--json"
    )
    assert code == 0
    if command is not None:
        assert json.loads(text)["command"] == command
    assert json.loads(text)["command"]


@pytest.mark.parametrize(
    "flag", [("--profile", "none"), ("--workload", '{"prompts": {"64": 1}, "requests": {"1": 1}}')]
)
def test_what_was_measured_is_that_of_the_flags(flag):
    """The decision that is explained is the one that select makes with the same flags."""
    shape = ("--num-q-heads", "32", "--num-kv-heads", "8", "--head-dim", "128")
    flags = ("--device", "h200", *shape, *flag, "--json")
    chosen = json.loads(run("select", *flags)[1])
    default = json.loads(run("select", *flags[:8], "--json")[1])
    assert chosen["why"]["decode"] != default["why"]["decode"]
    for name in ("fa3", "triton", "flashinfer"):
        answer = json.loads(run("why-not", name, *flags)[1])
        assert answer["decision"]["verdicts"] == chosen["verdicts"]
        assert set(answer["chosen"]) == served(chosen, name)


def test_a_placeholder_is_not_advised(monkeypatch):
    """Of two libraries the one that an index has, in the version for the torch that is here."""
    monkeypatch.setattr("attn_core.selection.diagnosis.torch_build", lambda: {"version": "2.13.0"})
    here = Device("cuda", "sm90", "13.0")
    answer = why_not("fa3", Requirements(), here, REGISTRY, {"triton": "3.7.1"})
    assert [c.text for c in answer.fixes] == ["pip install 'sglang-kernel==0.4.8'"]


def test_nothing_helps_only_where_nothing_does():
    """A backend that is only declared is not created here, whatever is changed."""
    row = Capabilities(kind="mha", device="cpu", dtypes={"bf16"}, kv_dtypes={"bf16"}, priority=9)
    spec = BackendSpec(name="planned", capabilities=[row])
    origin = Origin("attn-planned", "1", "attn_planned")
    registry = Registry({("softmax", "planned"): spec}, {("softmax", "planned"): origin})
    answer = why_not("planned", Requirements(), Device("cpu", "amx"), registry, {})
    assert answer.fixes is None


def test_a_variable_that_a_command_leaves_out_is_unset(monkeypatch):
    monkeypatch.setenv("ATTN_DETERMINISTIC", "1")
    asked = InputFlags(device="cuda:sm90", kind="mla", deterministic=True)
    after = changed_flags(
        asked, (Fix("requirements", (("deterministic", False),), 1, "no determinism"),)
    )[0]
    command = written("select", after)
    assert command == "env -u ATTN_DETERMINISTIC attn select --kind mla --device cuda:sm90"


def test_another_kind_of_linear_layers_is_a_flag():
    code, text = run("why-not", "cutedsl", "--device", "cuda:sm90", "--kind", "kda", "--json")
    answer = json.loads(text)
    assert (code, answer["changes"]) == (0, ["a model with gdn layers"])
    assert roles(answer["command"], "cutedsl") == {"linear decode"}
