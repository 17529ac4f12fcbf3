"""intel_xpu over emulated vllm-xpu-kernels: the suite, and mistakes that it finds."""

import dataclasses
import math

import pytest
import torch
from attn_core import ScaleTensors
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from attn_intel.xpu import backend

XPU = {"vllm-xpu-kernels": "0.1.16.2"}
BMG = parse_device("xpu:bmg")
CPU = torch.device("cpu")


class TestBattlemage(BackendSuite):
    name = "intel_xpu"
    kinds = ("mha",)
    device = "xpu:bmg"
    on = "cpu"
    libraries = XPU
    passes = 20
    reduced = True


@pytest.mark.long
class TestWhole(TestBattlemage):
    """Every point of every case, as the evidence counts them."""

    passes = 60
    reduced = False


@pytest.mark.long  # the same wrapper again
class TestPonteVecchio(TestWhole):
    device = "xpu:pvc"
    passes = 20


def spec():
    return load_plugins().get("intel_xpu")


def checks(*names):
    """List the first check whose name begins with each of `names`."""
    result = plan(spec(), BMG, XPU, kinds=("mha",), passes=10)
    return [next(p for p in result if p.row and p.check.id.startswith(n)) for n in names]


# mistakes


def patched(name, change):
    """Change what a function of the backend returns."""

    def mistake(monkeypatch):
        real = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *a, **k: change(real(*a, **k)))

    return mistake


def planned(**changes):
    """Change arguments of a pass, each by a function of the plan."""

    def mistake(monkeypatch):
        real = backend.IntelXPU._plan

        def plan(self, *args):
            right = real(self, *args)
            wrong = {name: change(right) for name, change in changes.items()}
            return dataclasses.replace(right, arguments=right.arguments | wrong)

        monkeypatch.setattr(backend.IntelXPU, "_plan", plan)

    return mistake


def called(change):
    """Change the arguments of every call of the library: change(arguments) is merged into them."""

    def mistake(monkeypatch):
        real = backend.load

        def load():
            attend = real()

            def call(q, k, v, **more):
                more |= {"q": q, "k": k, "v": v}
                return attend(**more | change(more))

            return call

        monkeypatch.setattr(backend, "load", load)

    return mistake


def returned(change):
    """Change the log-sum-exp that the library returns."""

    def mistake(monkeypatch):
        real = backend.IntelXPU._call

        def call(self, *args):
            result = real(self, *args)
            return (result[0], change(result[1])) if isinstance(result, tuple) else result

        monkeypatch.setattr(backend.IntelXPU, "_call", call)

    return mistake


def heads_first(more):
    return {n: more[n].transpose(-2, -3).reshape(more[n].shape) for n in ("k", "v")}


def cumulative(plan):
    lengths = plan.view.seq_lens.cumsum(0, dtype=torch.int32)
    return lengths.clamp_(max=plan.view.max_seq_len)


def ignored_scales(monkeypatch):
    monkeypatch.setattr(ScaleTensors, "of", lambda self, scale: torch.ones(1))


def wider(change):
    return patched("window_of", lambda w: w if w[0] < 0 else (w[0] + change, w[1]))


def no_mask(monkeypatch):
    monkeypatch.setattr(backend, "without_keys", lambda *a, **k: None)


LSE = ("lse-whole", "lse-decode")
MISTAKES = {
    "a window of one token more": (wider(1), ("window-4-bf16", "window-decode-bf16")),
    "a window of one token less": (wider(-1), ("window-4-bf16", "window-decode-bf16")),
    "another layout": (called(heads_first), ("prefill-prefix-bf16", "decode-edges-bf16")),
    "no page offset": (
        planned(block_table=lambda plan: torch.zeros_like(plan.table)),
        ("prefill-prefix-bf16", "decode-edges-bf16"),
    ),
    "the head dim's scale": (
        called(lambda more: {"softmax_scale": more["q"].shape[-1] ** -0.5}),
        ("scale-large-bf16", "scale-small-bf16"),
    ),
    "cumulative lengths": (planned(seqused_k=cumulative), ("mixed-bf16", "decode-edges-bf16")),
    "no causal order": (called(lambda more: {"causal": False}), ("prefill-prefix-bf16",)),
    "LSE to base 2": (returned(lambda x: x / math.log(2)), LSE),
    "transposed LSE": (returned(lambda x: x.T.reshape(x.shape)), LSE),
    "scales ignored": (ignored_scales, ("fp8-e4m3-scaled-bf16",)),
    "sinks dropped": (called(lambda more: {"s_aux": None}), ("sinks-bf16",)),
    "splits in deterministic mode": (
        planned(num_splits_kv=lambda plan: None),
        ("same-bits-decode",),
    ),
    "queries without keys": (no_mask, ("encoder-no-keys-bf16",)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_wrapper_is_seen(name, monkeypatch):
    mistake, names = MISTAKES[name]
    killers = checks(*names)
    for check in killers:
        run_check(check, spec(), CPU, arch="bmg")
    mistake(monkeypatch)
    for check in killers:
        with pytest.raises(CheckFailed):
            run_check(check, spec(), CPU, arch="bmg")
