"""ascend over the latent cache, on emulated torch-npu: the suite, and what would fail."""

from dataclasses import replace

import pytest
import torch
from attn_ascend import mla
from attn_ascend.fused import Fused
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.passes import attend
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from mla_passes import Pass

NPU = {"torch-npu": "2.13.0"}


class TestAscendMLA(BackendSuite):
    name = "ascend"
    kinds = ("mla",)
    device = "npu:910b"
    on = "cpu"
    libraries = NPU
    passes = 30


@pytest.mark.long  # the same wrapper again
class TestA3(TestAscendMLA):
    device = "npu:910c"
    passes = 10


def spec():
    return load_plugins().get("ascend")


def run(planned):
    run_check(planned, spec(), torch.device("cpu"), arch="910b")


def checks(*wanted):
    """List the checks whose name begins with one of `wanted`."""
    result = plan(spec(), parse_device("npu:910b"), NPU, kinds=("mla",), passes=10)
    requested = [p for p in result if p.row and p.check.id.startswith(wanted)]
    assert requested
    return requested


@pytest.mark.parametrize("lengths", [((4, 4), (70, 9)), ((3, 1, 2), (3, 300, 9))])
def test_every_draft_sees_the_tokens_up_to_itself(vendor, lengths):
    queries, seq_lens = lengths
    that = Pass(
        "ascend", "mla-draft-extend", arch="910b", page_size=128, heads=(16, 1),
        query_lens=queries, seq_lens=seq_lens,
    )  # fmt: skip
    plans = that.backend().init_forward_metadata(that.inputs.batch)
    assert plans["full"].lengths.tolist() == [
        n - count + 1 + i for count, n in zip(queries, seq_lens, strict=True) for i in range(count)
    ]
    that.check(that.backend())
    that.check(that.backend(), preallocated=True)


def test_more_queries_than_a_call_takes_are_shared_out(vendor, monkeypatch):
    monkeypatch.setattr(mla, "MOST_REQUESTS", 3)
    counts = []
    _decode(lambda given: counts.append(len(given["query"])) or {})(monkeypatch)
    that = Pass(
        "ascend", "mla-draft-extend", arch="910b", page_size=128, heads=(16, 1),
        query_lens=(3, 1, 3), seq_lens=(3, 300, 9),
    )  # fmt: skip
    that.check(that.backend(), preallocated=True)
    assert counts == [3, 3, 1]


@pytest.mark.parametrize("most", [3, 8192])
def test_tokens_that_pad_a_batch_are_in_no_call(vendor, monkeypatch, most):
    monkeypatch.setattr(mla, "MOST_REQUESTS", most)
    that = Pass(
        "ascend", "mla-draft-extend", arch="910b", page_size=128, heads=(16, 1),
        query_lens=(3, 1), seq_lens=(3, 300),
    )  # fmt: skip
    inputs = that.inputs
    backend, batch = that.backend(), inputs.batch
    right, _ = attend(backend, inputs)
    padded = replace(
        batch,
        positions=torch.cat([batch.positions, batch.positions.new_zeros(2)]),
        query_lens_host=None,
        views={
            n: replace(v, out_cache_loc=None, seq_lens_host=None) for n, v in batch.views.items()
        },
    )
    q, plan = torch.cat([inputs.q, inputs.q[:2]]), backend.init_forward_metadata(padded)
    actual = backend.forward(q, None, None, inputs.layer, inputs.after, padded, plan)
    assert torch.equal(actual[: len(right)], right)
    assert not actual[len(right) :].any()


def test_the_operator_takes_so_many_requests_and_no_more(vendor):
    import npu_leaf

    count = mla.MOST_REQUESTS + 1
    q, cache = torch.zeros(count, 1, 576).half(), torch.zeros(1, 128, 1, 576).half()
    table, lengths = torch.zeros(count, 1).int(), torch.ones(count).int()
    out = torch.empty(count, 1, 512).half()
    with pytest.raises(RuntimeError, match="up to 8192 requests"):
        npu_leaf._npu_paged_attention_mla(q, cache, 1, 1, 1.0, table, lengths, 512, out)


# mistakes


def _decode(change):
    """Change the arguments of every call of decode."""

    def mistake(monkeypatch):
        real = mla.operator

        def operator(name, parameters):
            attend = real(name, parameters)
            return lambda **kwargs: attend(**kwargs | change(kwargs))

        monkeypatch.setattr(mla, "operator", operator)

    return mistake


def _no_offset_within_a_pool_page(monkeypatch):
    monkeypatch.setattr(
        mla,
        "split_pages",
        lambda table, size, page: (table * (size // page)).repeat_interleave(size // page, 1),
    )


def _cumulative_lengths(given):
    most = given["block_table"].shape[1] * given["key_cache"].shape[1]
    return {"context_lens": given["context_lens"].cumsum(0, dtype=torch.int32).clamp(max=most)}


def _lse(change):
    def mistake(monkeypatch):
        real = Fused._call

        def call(self, *args):
            result, lse = real(self, *args)
            return result, None if lse is None else change(lse)

        monkeypatch.setattr(Fused, "_call", call)

    return mistake


MISTAKES = {
    "no offset within a page": (
        _no_offset_within_a_pool_page,
        ("page-edges-decode-bf16-page256",),
    ),
    "the latent's scale": (
        _decode(lambda given: {"scale_value": 512**-0.5}),
        ("mla-decode-bf16-page128",),
    ),
    "cumulative lengths": (_decode(_cumulative_lengths), ("mla-decode-bf16-page128",)),
    "one token less": (
        _decode(lambda given: {"context_lens": (given["context_lens"] - 1).clamp(min=1)}),
        ("mla-verify-chain-bf16-page128",),
    ),
    "tables of other requests": (
        _decode(lambda given: {"block_table": given["block_table"].roll(1, 0)}),
        ("mla-decode-bf16-page128",),
    ),
    "LSE to base 2": (_lse(lambda x: x * 1.4427), ("mla-ragged-bf16", "prefix-in-chunks")),
    "transposed LSE": (
        _lse(lambda x: x.T.reshape(x.shape)),
        ("mla-ragged-bf16", "prefix-in-chunks"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_wrapper_is_seen(name, monkeypatch):
    mistake, wanted = MISTAKES[name]
    requested = [p for w in wanted for p in checks(w)[:1]]
    for planned in requested:
        run(planned)
    mistake(monkeypatch)
    for planned in requested:
        with pytest.raises(CheckFailed):
            run(planned)
