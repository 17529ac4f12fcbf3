"""ascend over emulated torch-npu: the suite, which call runs a pass, what would fail."""

import dataclasses
import math
from itertools import accumulate, pairwise

import pytest
import torch
from attn_ascend import calls, fused, library, paged
from attn_ascend.fused import Fused
from attn_core.errors import UnsupportedError
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite, case_catalog
from attn_core.testing.cases import Case
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point, make_inputs
from attn_core.testing.passes import attend, compare, create, prepared, run_case
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed

NPU = {"torch-npu": "2.13.0"}
CPU = torch.device("cpu")


class TestAscend(BackendSuite):
    name = "ascend"
    kinds = ("mha",)
    device = "npu:910b"
    on = "cpu"
    libraries = NPU
    passes = 20
    reduced = True


@pytest.mark.long
class TestWhole(TestAscend):
    """Every point of every case, as the evidence counts them."""

    passes = 60
    reduced = False


@pytest.mark.long  # the same wrapper again
class TestA3(TestWhole):
    device = "npu:910c"
    passes = 20


def spec():
    return load_plugins().get("ascend")


def checks(*wanted):
    """List the checks whose name begins with one of `wanted`."""
    result = plan(spec(), parse_device("npu:910b"), NPU, kinds=("mha",), passes=10)
    requested = [p for p in result if p.row and p.check.id.startswith(wanted)]
    assert requested
    return requested


def run(planned):
    run_check(planned, spec(), CPU, arch="910b")


def test_a_pool_beyond_int32_is_refused(vendor, monkeypatch):
    monkeypatch.setattr(paged, "LARGEST", 1000)
    with pytest.raises(CheckFailed, match=r"a pool of \d+ numbers .* create a smaller pool"):
        run(checks("decode-edges-bf16")[0])


# packed calls: the suite's cases with a head dim of which the operator packs unequal requests

PACKED = [
    "prefill-prefix",
    "prefill-padded",
    "mixed",
    "window-4",
    "window-1",
    "sinks",
    "draft-extend",
]


def run_packed(feature):
    """Run a case of the suite with a head dim of 128."""
    case = next(c for c in case_catalog.PAGED if c.feature == feature)
    row = next(r for r in spec().capabilities if r.create == "attn_ascend.paged:AscendPaged")
    bench = Bench(spec=spec(), row=row, torch_device=CPU, arch="910b")
    case = dataclasses.replace(case, dims=(128, 128))
    run_case(bench, case, Point(dtype="bf16", page_size=128))


@pytest.mark.parametrize("feature", PACKED)
def test_packed_calls_are_right(vendor, monkeypatch, feature):
    layouts = []
    _operands(lambda given: layouts.append(given["input_layout"]) or {})(monkeypatch)
    run_packed(feature)
    assert set(layouts) == {"TND"}


@pytest.mark.parametrize("order", [1, -1])
def test_layers_of_one_view_share_calls_only_where_both_are_packed(vendor, monkeypatch, order):
    """Of head dims 64 and 128 the operator packs the requests of one alone."""
    layouts = []
    _operands(lambda given: layouts.append(given["input_layout"]) or {})(monkeypatch)
    row = next(r for r in spec().capabilities if r.create == "attn_ascend.paged:AscendPaged")
    bench = Bench(spec=spec(), row=row, torch_device=CPU, arch="910b")
    point, passes = Point(dtype="bf16", page_size=128), []
    for number, dim in enumerate((64, 128)):
        case = Case(feature="", query_lens=(5, 1), seq_lens=(70, 9), dims=(dim, dim))
        inputs, right = prepared(bench, case, point)
        layer = dataclasses.replace(inputs.layer, layer_id=number)
        passes.append((dataclasses.replace(inputs, layer=layer), right))
    that = create(bench, case, inputs, point, layers=[x.layer for x, _ in passes[::order]])
    metadata = that.init_forward_metadata(inputs.batch)
    for inputs, right in passes:
        actual = attend(that, inputs, metadata=metadata)
        compare(actual, right, inputs.real_tokens, torch.bfloat16, "output")
    assert layouts == ["BSND", "BSND", "TND"]


@pytest.mark.parametrize("dim", [64, 128])  # a call for each length, a packed call
@pytest.mark.parametrize("queries", [(5, 1, 70), (1, 1, 1)])
def test_an_encoder_over_the_cache_has_no_order(vendor, queries, dim):
    """Its queries see the keys after them too: a mask in causal order hid those."""
    case = Case(
        feature="encoder-in-cache",
        query_lens=queries,
        seq_lens=(70, 9, 200),
        dims=(dim, dim),
        is_causal=False,
    )
    row = next(r for r in spec().capabilities if r.create == "attn_ascend.paged:AscendPaged")
    bench = Bench(spec=spec(), row=row, torch_device=CPU, arch="910b")
    run_case(bench, case, Point(dtype="bf16", page_size=128))


def test_a_window_without_causal_order_is_refused(vendor):
    """The operator would be given no band for it, and see all keys."""
    case = Case(
        feature="", query_lens=(5,), seq_lens=(70,), dims=(64, 64), is_causal=False, window=4
    )
    row = next(r for r in spec().capabilities if r.create == "attn_ascend.paged:AscendPaged")
    bench = Bench(spec=spec(), row=row, torch_device=CPU, arch="910b")
    point = Point(dtype="bf16", page_size=128)
    inputs = make_inputs(case, point, requires_finite_padding=True, fused=True)
    with pytest.raises(UnsupportedError, match="window of 4 without causal order"):
        create(bench, case, inputs, point)


def _lengths_of_requests(given):
    """Return lengths where the operator takes their sums, in an order that it does not refuse."""
    return {"actual_seq_qlen": sorted(b - a for a, b in pairwise([0, *given["actual_seq_qlen"]]))}


@pytest.mark.parametrize(
    ("feature", "change"),
    [
        ("mixed", lambda given: {"actual_seq_kvlen": [*accumulate(given["actual_seq_kvlen"])]}),
        ("mixed", _lengths_of_requests),
        ("window-4", lambda given: {"pre_tokens": given["pre_tokens"] + 1}),
        ("window-4", lambda given: {"pre_tokens": given["pre_tokens"] - 1}),
        ("prefill-prefix", lambda given: {"sparse_mode": 0, "atten_mask": None}),
        ("prefill-prefix", lambda given: {"block_table": given["block_table"].roll(1, 0)}),
    ],
)
def test_a_mistake_in_a_packed_call_is_seen(vendor, monkeypatch, feature, change):
    run_packed(feature)
    _operands(change)(monkeypatch)
    with pytest.raises((CheckFailed, RuntimeError, IndexError)):
        run_packed(feature)


# mistakes


def _operands(change):
    """Change the arguments of every call of the operator."""

    def mistake(monkeypatch):
        real = Fused.__init__

        def init(self):
            real(self)
            attend = self._attend
            self._attend = lambda **kwargs: attend(**kwargs | change(kwargs))

        monkeypatch.setattr(Fused, "__init__", init)

    return mistake


def _another_layout(monkeypatch):
    real = paged.AscendPaged._paged

    def heads_first(self, layer, cache):
        pages, size, width = (views := real(self, layer, cache))[0].shape
        heads = layer.num_kv_heads
        return tuple(
            x.view(pages, size, heads, -1).transpose(1, 2).reshape(pages, size, width)
            for x in views
        )

    monkeypatch.setattr(paged.AscendPaged, "_paged", heads_first)


def _no_offset_within_a_pool_page(monkeypatch):
    monkeypatch.setattr(
        paged,
        "split_pages",
        lambda table, size, page: (table * (size // page)).repeat_interleave(size // page, 1),
    )


def _window(change):
    def mistake(monkeypatch):
        real = fused.masked

        def masked(call, window, causal, device):
            result = real(call, window, causal, device)
            if "pre_tokens" in result:
                result["pre_tokens"] += change
            return result

        monkeypatch.setattr(fused, "masked", masked)

    return mistake


def _window_of_a_lone_query(change):
    def mistake(monkeypatch):
        real = calls._narrow
        monkeypatch.setattr(calls, "_narrow", lambda c, n, window: real(c, n, window + change))

    return mistake


def _cumulative_lengths(given):
    if "block_table" not in given:
        return {}
    most = given["block_table"].shape[1] * given["block_size"]
    return {"actual_seq_kvlen": [min(n, most) for n in accumulate(given["actual_seq_kvlen"])]}


def _nz_cache(monkeypatch):
    real = library.operator

    def operator(name, parameters):
        result = real(name, parameters)
        if name != "npu_scatter_pa_kv_cache":
            return result
        return lambda **kwargs: result(**kwargs | {"cache_mode": "PA_NZ"})

    monkeypatch.setattr(paged, "operator", operator)


def _lse(change):
    def mistake(monkeypatch):
        real = Fused._call

        def call(self, *args):
            result, lse = real(self, *args)
            return result, None if lse is None else change(lse)

        monkeypatch.setattr(Fused, "_call", call)

    return mistake


def _rows_of_other_requests(monkeypatch):
    real = calls.calls_of

    def found(*args, **more):
        made = real(*args, **more)
        for call in made:
            call.first_request = 0
        return made

    monkeypatch.setattr(calls, "calls_of", found)


PLAIN = ("prefill-prefix-bf16-page128", "decode-edges-bf16-page128")
WINDOW = ("window-4-bf16-page128",)
LONE = ("window-decode-bf16-page128",)
LSE = ("lse-whole", "lse-decode", "sinks-bf16")
MISTAKES = {
    "another layout": (_another_layout, PLAIN),
    "no offset within a page": (_no_offset_within_a_pool_page, ("prefill-prefix-bf16-page256",)),
    "a window of one token more": (_window(1), WINDOW),
    "a window of one token less": (_window(-1), WINDOW),
    "one token more in decode": (_window_of_a_lone_query(1), LONE),
    "one token less in decode": (_window_of_a_lone_query(-1), LONE),
    "the head dim's scale": (
        _operands(lambda given: {"softmax_scale": 64**-0.5}),
        ("scale-large-bf16", "scale-small-bf16"),
    ),
    "cumulative lengths": (
        _operands(_cumulative_lengths),
        ("decode-edges-bf16-page128", "verify-chain-bf16-page128"),
    ),
    "the NZ layout": (_nz_cache, PLAIN),
    "LSE to base 2": (_lse(lambda x: x / math.log(2)), LSE),
    "transposed LSE": (_lse(lambda x: x.T.reshape(x.shape)), LSE),
    "tables of other requests": (_rows_of_other_requests, ("prefill-prefix-bf16-page128",)),
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
