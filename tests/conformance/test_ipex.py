"""ipex over the real intel-extension-for-pytorch: the suite, its library's traps, planted faults.

It imports beside torch 2.8 alone: `nox -s ipex` installs the two and runs this file.
"""

import importlib.util
import math

import pytest
import torch
from attn_core import BatchError, LayerCache, UnsupportedError
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.device import probe_device
from attn_core.testing import BackendSuite
from attn_core.testing.cases import Case
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.passes import run_case
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from attn_intel.ipex.backend import IPEX

if importlib.util.find_spec("intel_extension_for_pytorch") is None:
    pytest.skip("intel-extension-for-pytorch is not installed", allow_module_level=True)

CPU = torch.device("cpu")
EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED


class TestIPEX(BackendSuite):
    name = "ipex"
    passes = 20
    reduced = True


def spec():
    return load_plugins().get("ipex")


def run(*names):
    """Run checks of the suite by their ids."""
    registry, here = load_plugins(), probe_device()
    found = {p.check.id: p for p in plan(spec(), here, registry.installed_libraries())}
    for name in names:
        assert found[name].row is not None, found[name].reason
        run_check(found[name], spec(), CPU, arch=here.arch)


# what the library does wrongly and the wrapper has to keep from it


def bench(kv_dtype="bf16"):
    row = next(r for r in spec().capabilities if kv_dtype in r.kv_dtypes)
    return Bench(spec=spec(), row=row, torch_device=CPU)


TRAPS = {
    "a window that leaves out parts of 128 keys": {
        "query_lens": (1, 1, 1),
        "seq_lens": (700, 130, 300),
        "window": 20,
        "scale_by": 40.0,
    },
    "a window and a soft cap": {
        "query_lens": (1, 1),
        "seq_lens": (300, 20),
        "window": 17,
        "logit_cap": 2.0,
    },
    "a window of one token": {"query_lens": (9, 1, 3), "seq_lens": (30, 17, 3), "window": 1},
    "rows without queries": {"query_lens": (0, 5, 0, 1), "seq_lens": (0, 9, 20, 300)},
    "encoders without keys": {
        "query_lens": (1, 3, 1),
        "seq_lens": (9, 8, 5),
        "encoder_lens": (0, 33, 0),
    },
    "no encoder has keys": {"query_lens": (3, 1), "seq_lens": (9, 8), "encoder_lens": (0, 0)},
    "long prompts": {"query_lens": (200, 800), "seq_lens": (260, 800), "heads": (2, 1)},
    "heads of odd dims": {"query_lens": (7, 1), "seq_lens": (70, 9), "dims": (33, 33)},
}


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TRAPS)
def test_what_the_library_does_not_do(name, dtype, page_size):
    shape = TRAPS[name]
    single = set(shape["query_lens"]) == {1}
    case = Case(feature="trap", mode=DECODE if single else EXTEND, **shape)
    run_case(bench(), case, Point(dtype=dtype, page_size=page_size, layout="HND"))


LAYER = AttentionLayer(
    layer_id=0, num_q_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125
)


def decode_pass(lengths, page_size=16, table=None, shared=False, layer=LAYER):
    """Return a backend, its plan of a decode pass, and the other arguments of the pass."""
    torch.manual_seed(0)
    per = -(-max(lengths) // page_size)
    pages = len(lengths) * per
    if table is None:
        table = torch.arange(pages).view(-1, per).int()
    if shared:
        table[:, 0] = 0
    pool = (pages, 2, page_size, 64)
    cache = LayerCache(k=torch.randn(pool), v=torch.randn(pool), layout="HND")
    batch = ForwardBatch.build(
        DECODE,
        query_lens=[1] * len(lengths),
        seq_lens=lengths,
        page_table=table,
        page_size=page_size,
    )
    backend = bench().create((layer,), dtype="fp32", page_size=page_size, kv_dtype="fp32")
    return backend, batch, torch.randn(len(lengths), 8, 64), cache


def attend(backend, batch, q, cache, layer=LAYER, **more):
    plan = backend.init_forward_metadata(batch)
    return backend.forward(q, None, None, layer, cache, batch, plan, **more)


@pytest.mark.parametrize("logit_cap", [None, 2.0])
def test_requests_that_begin_with_one_page_have_their_own_lengths(logit_cap):
    layer = AttentionLayer(
        layer_id=0, num_q_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125,
        logit_cap=logit_cap,
    )  # fmt: skip
    lengths = [40, 17, 300, 64, 33, 18, 20, 90]
    backend, batch, q, cache = decode_pass(lengths, shared=True, layer=layer)
    together = attend(backend, batch, q, cache, layer)
    view = batch.views["full"]
    for i in range(q.shape[0]):
        alone = ForwardBatch.build(
            DECODE,
            query_lens=[1],
            seq_lens=[int(view.seq_lens[i])],
            page_table=view.page_table[i : i + 1],
            page_size=16,
        )
        own = attend(backend, alone, q[i : i + 1], cache, layer)
        torch.testing.assert_close(together[i : i + 1], own)


@pytest.mark.parametrize("window", [None, 20])
def test_scores_that_are_all_negative_count(window):
    """With a window the decode operator loses them: it takes parts left out for a score of 0."""
    layer = AttentionLayer(
        layer_id=0, num_q_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125,
        sliding_window=window,
    )  # fmt: skip
    backend, batch, q, cache = decode_pass([300, 700], layer=layer)
    q.fill_(-2.0)
    cache.k.fill_(8.0)  # scores of -128
    cache.v.fill_(1.0)
    out = attend(backend, batch, q, cache, layer)
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize(("entry", "page"), [(0, -1), (1, -7), (1, 99)])
def test_pages_outside_of_the_pool_never_reach_the_library(entry, page):
    table = torch.arange(4).view(2, 2).int()
    table[1, entry] = page
    backend, batch, q, cache = decode_pass([17, 32], table=table)
    with pytest.raises(BatchError, match=rf"page {page}\b"):
        attend(backend, batch, q, cache)


def test_a_page_that_is_not_read_may_be_anything():
    backend, batch, q, cache = decode_pass([17, 16])
    want = attend(backend, batch, q, cache)
    batch.views["full"].page_table[1, 1] = -1
    assert torch.equal(attend(backend, batch, q, cache), want)


@pytest.mark.parametrize("length", [-1, 33])
def test_lengths_beyond_the_table_are_refused(length):
    backend, batch, q, cache = decode_pass([17, 32])
    batch.views["full"].seq_lens[0] = length
    with pytest.raises(BatchError, match="check seq_lens and page_table"):
        attend(backend, batch, q, cache)


def test_a_length_of_zero_gives_zeros():
    backend, batch, q, cache = decode_pass([17, 32])
    want = attend(backend, batch, q, cache)
    batch.views["full"].seq_lens[0] = 0
    out = attend(backend, batch, q, cache, out=torch.full_like(q, math.nan))
    assert not out[0].any()
    assert torch.equal(out[1], want[1])


def test_pages_that_are_no_dense_blocks_are_refused():
    backend, batch, q, cache = decode_pass([17, 32])
    wide = torch.randn(4, 2, 16, 128)
    for k, v in ((wide[..., :64], wide[..., 64:]), (cache.k, wide[..., :64].contiguous().mT)):
        with pytest.raises(UnsupportedError, match=r"reads dense blocks \[16, 64\] of 2 KV heads"):
            attend(backend, batch, q, LayerCache(k=k, v=v, layout="HND"))


def test_an_output_of_any_strides_is_filled():
    backend, batch, q, cache = decode_pass([20, 300])
    want = attend(backend, batch, q, cache)
    for out in (torch.full((2, 64, 8), math.nan).mT, torch.full((2, 8, 128), math.nan)[..., ::2]):
        assert attend(backend, batch, q, cache, out=out) is out
        assert torch.equal(out, want)


def test_a_log_sum_exp_is_refused():
    backend, batch, q, cache = decode_pass([20])
    with pytest.raises(UnsupportedError, match="returns no log-sum-exp"):
        attend(backend, batch, q, cache, return_lse=True)


# faults of the wrapper: what it hands to an operator, by position


def changed(operator, index, change):
    """Change one argument of every call of an operator."""

    def fault(monkeypatch):
        real = IPEX.__init__

        def init(self, config):
            real(self, config)
            call = getattr(self._operators, operator)

            def run(*args):
                return call(*args[:index], change(args), *args[index + 1 :])

            self._operators = self._operators._replace(**{operator: run})

        monkeypatch.setattr(IPEX, "__init__", init)

    return fault


PREFILL, DECODES = "prefill-prefix-bf16-page16-HND", "decode-edges-bf16-page16-HND"
WINDOW = "window-prefill-bf16-page16-HND"
FAULTS = {
    "prefill: scale of the head dim": ("prefill", 8, lambda a: a[1].shape[-1] ** -1.0, PREFILL),
    "prefill: no causal order": ("prefill", 9, lambda a: False, PREFILL),
    "prefill: one table row for all": (
        "prefill",
        10,
        lambda a: a[10][:1].expand_as(a[10]).contiguous(),
        PREFILL,
    ),
    "prefill: lengths of new tokens": ("prefill", 5, lambda a: a[4], PREFILL),
    "prefill: a window of one more": ("prefill", 12, lambda a: a[12] + 1, WINDOW),
    "prefill: a window of one less": ("prefill", 12, lambda a: a[12] - 1, WINDOW),
    "decode: cumulative lengths": (
        "decode",
        7,
        lambda a: a[7].cumsum(0).clamp(max=a[9]).int(),
        DECODES,
    ),
    "decode: scale of the head dim": ("decode", 5, lambda a: a[1].shape[-1] ** -1.0, DECODES),
    "decode: one table row for all": (
        "decode",
        6,
        lambda a: a[6][:1].expand_as(a[6]).contiguous(),
        DECODES,
    ),
    "decode: values for keys": ("decode", 2, lambda a: a[3], DECODES),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_wrapper_is_seen(name, monkeypatch):
    operator, index, change, finder = FAULTS[name]
    run(finder)
    changed(operator, index, change)(monkeypatch)
    with pytest.raises(CheckFailed):
        run(finder)
