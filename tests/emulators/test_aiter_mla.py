"""aiter over the latent cache, on emulated AITER: the suite, its conventions, what would fail."""

import functools
import importlib
import inspect
import math
from dataclasses import replace

import pytest
import torch
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from attn_rocm.aiter import mla
from attn_rocm.page_list import PageList
from mla_passes import Pass, counted

AITER = {"amd-aiter": "0.1.7.post2.dev18"}
CPU = torch.device("cpu")


class TestMI350(BackendSuite):
    name = "aiter"
    kinds = ("mla",)
    device = "rocm:gfx950"
    on = "cpu"
    libraries = AITER
    passes = 30


class TestMI300(TestMI350):
    """Its FP8 is of another bias, so there is no FP8 cache."""

    device = "rocm:gfx942"
    reduced = True


def spec():
    return load_plugins().get("aiter")


def checks(*wanted):
    """List the checks whose name begins with one of `wanted`."""
    result = plan(spec(), parse_device("rocm:gfx950"), AITER, kinds=("mla",), passes=10)
    requested = [p for p in result if p.row and p.check.id.startswith(wanted)]
    assert requested
    return requested


def pass_of(case, *, store="auto", **changes):
    fp8 = store != "auto"
    changes |= {"heads": (16, 1), "kv_dtype": store}
    return Pass("aiter", case, arch="gfx950" if fp8 else "gfx942", page_size=16, **changes)


@pytest.fixture
def calls(vendor, monkeypatch):
    """Count the calls of the decode kernel and of prefill's."""
    module = importlib.import_module("aiter.mla")
    made = {}
    for name in ("mla_decode_fwd", "mla_prefill_fwd"):
        real = getattr(module, name)
        seen = counted(monkeypatch, module, name)
        functools.update_wrapper(getattr(module, name), real)
        made[name] = seen
    return made


@pytest.mark.parametrize(
    ("case", "store", "kernel"),
    [
        ("mla-decode", "auto", "mla_decode_fwd"),
        ("mla-verify-chain", "auto", "mla_decode_fwd"),
        ("mla-prefill", "auto", "mla_prefill_fwd"),
        ("mla-draft-extend", "auto", "mla_prefill_fwd"),
        ("mla-decode", "fp8_e4m3", "mla_decode_fwd"),
        ("mla-draft-extend", "fp8_e4m3", "mla_decode_fwd"),
    ],
)
def test_which_kernel_runs_a_pass(calls, case, store, kernel):
    that = pass_of(case, store=store)
    that.check(that.backend())
    assert [name for name, made in calls.items() if made] == [kernel]


def test_a_chain_of_more_than_four_drafts(calls):
    """Decode's kernels take four queries per request: prefill's run it or, over FP8, one each."""
    for store, kernel in (("auto", "mla_prefill_fwd"), ("fp8_e4m3", "mla_decode_fwd")):
        that = pass_of("mla-verify-chain", store=store, query_lens=(6, 6), seq_lens=(40, 9))
        that.check(that.backend())
        assert calls[kernel][-1][1]["max_seqlen_q"] == (6 if store == "auto" else 1)


def test_a_plan_keeps_what_its_graph_reads(vendor):
    """AITER keeps the last tensor of splits alone; a graph reads that of its capture."""
    module = importlib.import_module("aiter.mla")
    that = pass_of("mla-decode")
    backend = that.backend()
    plans = backend.init_forward_metadata_capture_cuda_graph(that.inputs.batch)
    before = module.get_meta_param.cache_info().misses
    that.check(backend, metadata=plans)
    assert module.get_meta_param.cache_info().misses == before, "the call made its own"
    [[kept]] = [plan.splits for plan in plans.values()]
    module.get_meta_param.cache_clear()
    assert kept[-1].tolist()[0] == 0


def test_the_main_branch_is_served(vendor, monkeypatch):
    """It has page_size and nhead_kv before the scale: nothing is passed by position."""
    module = importlib.import_module("aiter.mla")
    real = module.mla_decode_fwd
    parameters = [*inspect.signature(real).parameters.values()]
    at = [p.name for p in parameters].index("sm_scale")
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    more = [inspect.Parameter(n, kind, default=1) for n in ("page_size", "nhead_kv")]

    def later(**kwargs):
        return real(**kwargs)

    later.__signature__ = inspect.Signature([*parameters[:at], *more, *parameters[at:]])
    monkeypatch.setattr(module, "mla_decode_fwd", later)
    that = pass_of("mla-decode")
    that.check(that.backend())


def _no_offset_within_a_page(monkeypatch):
    real = PageList.of.__func__

    def pages(cls, view, page_size, kernel_page, size, **more):
        listed = real(cls, view, page_size, kernel_page, size, **more)
        listed.indices.div_(page_size, rounding_mode="floor")
        return listed

    monkeypatch.setattr(PageList, "of", classmethod(pages))


def _scale_of_the_latent(monkeypatch):
    real = mla.AiterMLA.__init__

    def init(self, config):
        real(self, config)
        decode, prefill = self._decode, self._prefill
        self._decode = lambda **kwargs: decode(**kwargs | {"sm_scale": 512**-0.5})
        self._prefill = lambda **kwargs: prefill(**kwargs | {"sm_scale": 512**-0.5})

    monkeypatch.setattr(mla.AiterMLA, "__init__", init)


def _keys_without_their_scale(monkeypatch):
    monkeypatch.setattr(mla.ScaleTensors, "of", lambda self, scale: torch.ones(1))


def _all_keys_for_every_query(monkeypatch):
    real = mla._one_query_each

    def each(view, batch):
        result = real(view, batch)
        result.seq_lens.add_(1)
        return result

    monkeypatch.setattr(mla, "_one_query_each", each)


def _stale_lists(monkeypatch):
    monkeypatch.setattr(mla.AiterMLA, "init_forward_metadata_replay_cuda_graph", lambda *a: None)


def _cumulative_lengths(monkeypatch):
    real = PageList.of.__func__

    def pages(cls, view, page_size, kernel_page, size, **more):
        total = view.seq_lens.cumsum(0, dtype=torch.int32).clamp_(max=view.max_seq_len)
        size = int(total.sum())
        return real(cls, replace(view, seq_lens=total), page_size, kernel_page, size, **more)

    monkeypatch.setattr(PageList, "of", classmethod(pages))


def _lse(change):
    def mistake(monkeypatch):
        real = mla.AiterMLA.forward_ragged

        def forward(self, *args, **more):
            result = real(self, *args, **more)
            return (result[0], change(result[1])) if isinstance(result, tuple) else result

        monkeypatch.setattr(mla.AiterMLA, "forward_ragged", forward)

    mistake.__name__ = "lse"
    return mistake


MISTAKES = [
    (_no_offset_within_a_page, ("mla-prefill-bf16-page16", "mla-decode-bf16-page16")),
    (_scale_of_the_latent, ("mla-scale-large", "mla-decode-bf16-page16")),
    (_keys_without_their_scale, ("mla-fp8-e4m3-bf16-page16",)),
    (_stale_lists, ("graph-decode", "graph-chain")),
    (_cumulative_lengths, ("mla-decode-bf16-page16", "mla-mixed")),
    (_lse(lambda x: x / math.log(2)), ("mla-ragged-bf16", "prefix-in-chunks")),
    (_lse(lambda x: x.T.reshape(x.shape)), ("mla-ragged-bf16", "prefix-in-chunks")),
]


@pytest.mark.parametrize(("mistake", "wanted"), MISTAKES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mistake_in_the_wrapper_is_seen(mistake, wanted, monkeypatch):
    requested = [p for w in wanted for p in checks(w)[:1]]
    for planned in requested:
        run_check(planned, spec(), CPU, arch="gfx950")
    mistake(monkeypatch)
    for planned in requested:
        with pytest.raises(CheckFailed):
            run_check(planned, spec(), CPU, arch="gfx950")


def test_a_query_that_sees_the_next_one_is_seen(vendor, monkeypatch):
    that = pass_of("mla-draft-extend", store="fp8_e4m3")
    that.check(that.backend())
    _all_keys_for_every_query(monkeypatch)
    with pytest.raises((CheckFailed, IndexError)):
        that.check(that.backend())
