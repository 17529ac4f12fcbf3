"""ascend over sparse MLA, on emulated torch-npu: the suite, and what would fail."""

import dataclasses
import functools
import importlib

import pytest
import torch
from attn_ascend import indexer, sparse
from attn_core import UnsupportedError
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.passes import attend, compare
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from mla_passes import counted
from no_waiting import NoWaiting
from npu_indexed import Indexed

NPU = {"torch-npu": "2.13.0"}
CPU = torch.device("cpu")


class TestAscendSparse(BackendSuite):
    name = "ascend"
    kinds = ("dsa",)
    device = "npu:910b"
    on = "cpu"
    libraries = NPU
    passes = 12


@pytest.mark.long  # the same wrapper again
class TestA3(TestAscendSparse):
    device = "npu:910c"


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of the operators: attention's and the indexer's."""
    leaf = importlib.import_module("npu_leaf")
    names = ("npu_sparse_flash_attention", "npu_lightning_indexer")
    return [counted(monkeypatch, leaf, name) for name in names]


# which keys are selected

SELECTED = (
    *("dsa-prefill", "dsa-decode", "dsa-mixed", "dsa-empty", "dsa-prefill-padded"),
    *("dsa-verify-chain", "dsa-draft-extend", "dsa-odd-number", "dsa-few-keys", "dsa-strided"),
)


@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("case", SELECTED)
def test_the_operator_selects(case, page_size, calls):
    Indexed(case, page_size=page_size).check()
    assert [len(x) for x in calls] == [0, 1]


@pytest.mark.parametrize(
    "shape",
    [{"index_shape": (8, 32)}, {"index_shape": (65, 128)}, {"index_dtype": "fp8_e4m3"}],
    ids=str,
)
def test_torch_selects_what_the_operator_does_not_take(shape, calls):
    Indexed("dsa-decode", **shape).check()
    assert [len(x) for x in calls] == [0, 0]


@pytest.mark.parametrize("case", ["dsa-prefill", "dsa-decode"])
def test_torch_selects_in_parts(case, monkeypatch):
    full = Indexed(case, index_shape=(8, 32)).choose()
    monkeypatch.setattr(indexer, "MOST_NUMBERS", 4000)
    assert torch.equal(Indexed(case, index_shape=(8, 32)).choose(), full)


def test_of_equal_scores_the_operator_selects_any():
    """Its documentation does not say which; the emulation takes the latest, torch the earliest."""
    that = Indexed("dsa-ties-decode")
    with pytest.raises(CheckFailed, match="come later"):
        that.check()
    Indexed("dsa-ties-decode", index_shape=(8, 32)).check()


# what is gathered


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("dsa-decode", 5 * 16),  # the selected tokens: fewer than those of five requests' pages
        ("dsa-prefill", 2 * 128),  # the page of each request: fewer than 79 times 16
        ("dsa-longest", 2048),
    ],
)
def test_the_fewer_tokens_are_gathered(case, keys, calls):
    that = Indexed(case)
    for preallocated in (False, True):
        actual = attend(that.backend, that.inputs, preallocated=preallocated, return_lse=False)
        compare(actual, that.right, that.inputs.real_tokens, torch.bfloat16, "output")
    assert [args[1].shape[0] for args, _ in calls[0]] == [keys, keys]


def test_latents_in_a_larger_tensor_are_refused():
    that = Indexed("dsa-decode")
    k = that.inputs.cache.k
    apart = torch.stack([k, torch.zeros_like(k)], 1)[:, 0]
    with pytest.raises(UnsupportedError, match="strides"):
        attend(that.backend, that.inputs, cache=dataclasses.replace(that.inputs.cache, k=apart))


def test_many_selected_tokens_are_gathered_in_parts(calls, monkeypatch):
    monkeypatch.setattr(sparse, "MOST_GATHERED", 2 * 16)
    that = Indexed("dsa-decode")
    actual = attend(that.backend, that.inputs, preallocated=False, return_lse=False)
    compare(actual, that.right, that.inputs.real_tokens, torch.bfloat16, "output")
    assert [len(args[0]) for args, _ in calls[0]] == [2, 2, 1]


@pytest.mark.parametrize(
    ("case", "index_shape"),
    [
        ("dsa-prefill", (32, 128)), ("dsa-decode", (32, 128)), ("dsa-decode", (8, 32)),
        ("dsa-all-keys-decode", (32, 128)),
    ],
)  # fmt: skip
def test_no_pass_waits_for_the_device(case, index_shape):
    that = Indexed(case, index_shape=index_shape)
    inputs, backend = that.inputs, that.backend
    with NoWaiting():
        slots = that.choose() if inputs.indexer is not None else None
        backend.forward(
            *(inputs.q, None, None, inputs.layer, inputs.cache, inputs.batch, None),
            topk_indices=slots,
        )


def test_the_log_sum_exp_is_refused():
    that = Indexed("dsa-decode")
    with pytest.raises(UnsupportedError, match="log-sum-exp"):
        attend(that.backend, that.inputs, preallocated=False, return_lse=True)


# mistakes


def spec():
    return load_plugins().get("ascend")


@functools.cache
def planned():
    result = plan(spec(), parse_device("npu:910b"), NPU, kinds=("dsa",), passes=10)
    return [p for p in result if p.row]


def first(wanted):
    """Return the first check whose name begins so."""
    return next(p for p in planned() if p.check.id.startswith(wanted))


@functools.cache
def right(wanted):
    """Run a check of the wrapper as it is, once."""
    run_check(first(wanted), spec(), CPU, arch="910b")


def _operand(module, change):
    """Change the arguments of every call of a module's operator."""

    def mistake(monkeypatch):
        real = module.operator

        def operator(name, parameters):
            call = real(name, parameters)
            return lambda **kwargs: call(**kwargs | change(kwargs))

        monkeypatch.setattr(module, "operator", operator)

    return mistake


def _attended(change):
    return _operand(sparse, change)


def _no_offset_within_a_page(monkeypatch):
    real = sparse._in_pages

    def in_pages(cache, pages, slots):
        result = real(cache, pages, slots)
        return torch.where(result < 0, result, result - result % cache.page_size)

    monkeypatch.setattr(sparse, "_in_pages", in_pages)


def _place_of_other_pages(monkeypatch):
    real = sparse._pages
    monkeypatch.setattr(sparse, "_pages", lambda cache, pages, dim: real(cache, pages.roll(1), dim))


def _latents_of_all_zeros_beside(monkeypatch):
    """Read what lies in slot 0 for the entries without a slot, as if they were selected."""
    real = sparse._gathered

    def gathered(*kwargs):
        for part, latents, rope, indices in real(*kwargs):
            yield part, latents, rope, indices.clamp(min=0)

    monkeypatch.setattr(sparse, "_gathered", gathered)


PREFILL, DECODE = "dsa-prefill-bf16-page128", "dsa-decode-bf16-page128"
MISTAKES = {
    "the latent's scale": (_attended(lambda x: {"scale_value": 512**-0.5}), (PREFILL, DECODE)),
    "no rope": (
        _attended(lambda x: {"query_rope": torch.zeros_like(x["query_rope"])}),
        (PREFILL, DECODE),
    ),
    "the rope of other keys": (
        _attended(lambda x: {"key_rope": x["key_rope"].roll(1, 0)}),
        (PREFILL, DECODE),
    ),
    "another query's keys": (
        _attended(lambda x: {"sparse_indices": x["sparse_indices"].roll(1, 0)}),
        (PREFILL, DECODE),
    ),
    "one key less": (
        _attended(lambda x: {"sparse_indices": x["sparse_indices"].clone().index_fill_(
            2, torch.tensor([x["sparse_indices"].shape[2] - 1]), -1)}),
        (PREFILL, DECODE),
    ),
    "no offset within a page": (_no_offset_within_a_page, (PREFILL,)),
    "other pages": (_place_of_other_pages, (PREFILL,)),
    "entries without a slot": (_latents_of_all_zeros_beside, ("dsa-few-keys", DECODE)),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_wrapper_is_seen(name, monkeypatch):
    mistake, wanted = MISTAKES[name]
    for check in wanted:
        right(check)
    mistake(monkeypatch)
    for check in wanted:
        with pytest.raises((CheckFailed, RuntimeError)):
            run_check(first(check), spec(), CPU, arch="910b")


def _sums(x):
    most = x["block_table"].shape[1] * 128
    lengths = x["actual_seq_lengths_key"].cumsum(0, dtype=torch.int32)
    return {"actual_seq_lengths_key": lengths.clamp(max=most)}


def _lengths(x):
    sums = x["actual_seq_lengths_query"]
    return {"actual_seq_lengths_query": sums.diff(prepend=sums.new_zeros(1)).sort().values}


def _pool_pages(monkeypatch):
    monkeypatch.setattr(
        indexer,
        "split_pages",
        lambda table, size, page: (table * (size // page)).repeat_interleave(size // page, 1),
    )


INDEX_MISTAKES = {
    "sums of the keys": (_operand(indexer, _sums), "dsa-decode", 128),
    "lengths of the queries": (_operand(indexer, _lengths), "dsa-prefill", 128),
    "tables of other requests": (
        _operand(indexer, lambda x: {"block_table": x["block_table"].roll(1, 0)}),
        "dsa-decode", 128,
    ),
    "no causal order": (_operand(indexer, lambda x: {"sparse_mode": 0}), "dsa-prefill", 128),
    "no weights": (
        _operand(indexer, lambda x: {"weights": torch.ones_like(x["weights"])}), "dsa-decode", 128
    ),
    "one key less": (
        _operand(indexer, lambda x: {
            "actual_seq_lengths_key": x["actual_seq_lengths_key"] - 1}), "dsa-decode", 128
    ),
    "no offset within a page": (_pool_pages, "page-edges", 256),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEX_MISTAKES)
def test_a_mistake_in_the_indexer_is_seen(name, monkeypatch):
    mistake, case, page_size = INDEX_MISTAKES[name]
    more = {}
    if case == "page-edges":
        case, more = "dsa-decode", {"query_lens": (1, 1), "seq_lens": (300, 200)}
    Indexed(case, page_size=page_size, **more).check()
    mistake(monkeypatch)
    with pytest.raises((CheckFailed, RuntimeError, IndexError)):
        Indexed(case, page_size=page_size, **more).check()
