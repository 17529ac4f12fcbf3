"""torch_native against the suite, with tiles of two sizes, and what it does beyond its rows."""

import dataclasses

import attn_core.backends.torch_native.backend as torch_native
import pytest
import torch
from attn_core.backends.torch_native import kernels, limits
from attn_core.errors import BackendError, UnsupportedError
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.testing import BackendSuite
from attn_core.testing.case_catalog import LATENT, PAGED
from attn_core.testing.cases import Case, RaggedCase
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.metamorphic import with_pages_moved
from attn_core.testing.neighbours import same_bits
from attn_core.testing.passes import attend, create, prepared, run_case, run_ragged

SPEC = load_plugins().get("torch_native")
ROWS = {r.kind: r for r in SPEC.capabilities if r.device == "cpu"}
POINT = Point(dtype="bf16", page_size=16)
BY_NAME = {case.feature: case for case in PAGED}


class TestTorchNative(BackendSuite):
    name = "torch_native"
    passes = 60


@pytest.mark.long
class TestLongSessions(BackendSuite):
    name = "torch_native"
    reduced = True


class TestTorchNativeInTiles(BackendSuite):
    """With the smallest tiles on two cores, so that short cases are split and merged too."""

    name = "torch_native"
    device = "cpu"
    passes = 30

    @pytest.fixture(autouse=True)
    def _smallest(self, monkeypatch):
        monkeypatch.setattr(limits, "CPU_TILE", 1)
        seem(monkeypatch, cores=2)


def seem(monkeypatch, cores):
    """Let the backend cut for so many cores; threads that wait for each other make a test slow."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)


@pytest.fixture(params=["one-tile", "tiles"])
def bench(request, monkeypatch):
    if request.param == "tiles":
        monkeypatch.setattr(limits, "CPU_TILE", 1)
        seem(monkeypatch, cores=2)
    return bench_of("mha")


def bench_of(kind, **changes):
    row = dataclasses.replace(ROWS[kind], **changes)
    return Bench(spec=SPEC, row=row, torch_device=torch.device("cpu"))


def dtypes(*names):
    return pytest.mark.parametrize("dtype", names)


@dtypes("fp32", "bf16")
def test_a_cache_is_read_in_both_directions(bench, dtype):
    case = Case(
        feature="bidirectional",
        query_lens=(17, 3, 70),
        seq_lens=(40, 3, 70),
        is_causal=False,
    )
    run_case(bench, case, dataclasses.replace(POINT, dtype=dtype))


RAGGED = (
    RaggedCase(feature="causal", query_lens=(9, 70, 1), key_lens=(9, 70, 1), causal=True),
    RaggedCase(feature="bottom-right", query_lens=(9, 70, 1), key_lens=(30, 200, 77), causal=True),
    RaggedCase(feature="more-queries", query_lens=(9, 70), key_lens=(4, 66), causal=True),
    RaggedCase(feature="no-keys", query_lens=(3, 2), key_lens=(0, 5)),
    RaggedCase(feature="no-queries", query_lens=(0, 2), key_lens=(4, 5)),
    RaggedCase(
        feature="empty", query_lens=(0, 3, 2, 0), key_lens=(4, 0, 5, 0), causal=True, sinks=True
    ),
    RaggedCase(feature="ones", query_lens=(1, 1), key_lens=(1, 0), heads=(1, 1), dims=(1, 1)),
    RaggedCase(feature="fused", query_lens=(9, 70), key_lens=(9, 70), strides="fused", sinks=True),
    RaggedCase(
        feature="window", query_lens=(9, 70), key_lens=(30, 100), causal=True, window=5, sinks=True
    ),
    RaggedCase(feature="softcap", query_lens=(9, 20), key_lens=(9, 90), causal=True, logit_cap=2.0),
)


@dtypes("fp32", "bf16")
@pytest.mark.parametrize("case", RAGGED, ids=lambda c: c.feature)
def test_ragged_attention_of_every_form(bench, case, dtype):
    run_ragged(bench, case, dtype)


VERIFY = ForwardMode.TARGET_VERIFY
# drafts 0 and 2 hang on draft 1, and so on: a child may be named before its parent
ANY_ORDER = ((1, -1, 1, 0, 2), (4, 3, 1, -1, 2))
EMPTY = {"query_lens": (0, 3, 0, 1), "seq_lens": (0, 3, 7, 20)}
UGLY = (
    *(
        Case(
            feature=f"tree-window-{window}",
            query_lens=(5, 5),
            seq_lens=(70, 9),
            mode=VERIFY,
            trees=ANY_ORDER,
            window=window,
        )
        for window in (1, 2, 3, 4, None)
    ),
    Case(feature="empty-rows", **EMPTY),
    Case(feature="empty-rows-sinks", **EMPTY, sinks=True, window=2, strides="fused"),
    Case(
        feature="no-keys",
        query_lens=(2, 1, 1),
        seq_lens=(2, 1, 1),
        encoder_lens=(0, 3, 0),
        sinks=True,
    ),
    Case(feature="ones", query_lens=(1,), seq_lens=(1,), heads=(1, 1), dims=(1, 1), sinks=True),
)


@dtypes("fp32", "bf16")
@pytest.mark.parametrize("case", UGLY, ids=lambda c: c.feature)
def test_what_is_ugly_and_legal(bench, case, dtype):
    for page_size in (1, 16):
        run_case(bench, case, dataclasses.replace(POINT, dtype=dtype, page_size=page_size))


@pytest.mark.parametrize("window", [8, 9, 10, None])
@pytest.mark.parametrize("prefix", [0, 6])
def test_a_window_about_as_long_as_the_queries(bench, window, prefix):
    """Nine queries in one causal square see all of it from a window of nine."""
    case = Case(
        feature="square", query_lens=(9,), seq_lens=(9 + prefix,), heads=(2, 2), window=window
    )
    run_case(bench, case, dataclasses.replace(POINT, dtype="fp32"))


@pytest.fixture
def one_core(monkeypatch):
    seem(monkeypatch, cores=1)


@pytest.fixture
def two_cores(monkeypatch):
    seem(monkeypatch, cores=2)


@dtypes("fp32", "bf16")
def test_many_queries_over_more_tiles_than_are_merged_at_once(dtype, monkeypatch, one_core):
    monkeypatch.setattr(limits, "CPU_TILE", 1)
    merges = []

    def counted(states, pieces, requests):
        merges.append(len(states))
        return merge(states, pieces, requests)

    merge = torch_native._merge
    monkeypatch.setattr(torch_native, "_merge", counted)
    more = {"heads": (1, 1), "dims": (16, 16), "fixed": frozenset({"heads", "dims"}), "sinks": True}
    case = Case(feature="many-tiles", query_lens=(70,), seq_lens=(1200,), **more)
    run_case(bench_of("mha"), case, dataclasses.replace(POINT, dtype=dtype))
    assert max(merges) == torch_native._MOST_STATES
    assert len(merges) > 2


@pytest.mark.parametrize("more", [{}, {"window": 5}, {"heads": (2, 2)}], ids=str)
@pytest.mark.parametrize("scores", [1, 100, 1000])
def test_scores_are_formed_some_rows_at_a_time(monkeypatch, more, scores):
    monkeypatch.setattr(kernels, "_MAX_SCORES", scores)
    case = Case(feature="slices", query_lens=(17, 9), seq_lens=(17, 30), logit_cap=2.0, **more)
    run_case(bench_of("mha"), case, dataclasses.replace(POINT, dtype="fp32"))


@pytest.mark.parametrize(
    "name", ["prefill-prefix", "decode-padded", "verify-tree", "cross", "device-lengths"]
)
def test_lengths_on_the_device_alone_are_enough(bench, name):
    run_case(bench, dataclasses.replace(BY_NAME[name], device_lengths=True), POINT)


LATENT_BY_NAME = {case.feature: case for case in LATENT}


@pytest.mark.parametrize("name", ["prefill-prefix", "decode-edges", "verify-tree", "mla-decode"])
def test_where_the_pages_lie_changes_no_bit(name):
    case = {**BY_NAME, **LATENT_BY_NAME}[name]
    bench = bench_of(case.kind)
    inputs, _ = prepared(bench, case, POINT)
    backend = create(bench, case, inputs, POINT)
    passes = (inputs, with_pages_moved(inputs, POINT))
    want, actual = (attend(backend, x, return_lse=True) for x in passes)
    for a, b in zip(want, actual, strict=True):
        assert torch.equal(a[: inputs.real_tokens], b[: inputs.real_tokens])


SAME_BITS = (
    Case(feature="long-and-short", query_lens=(1, 1, 1), seq_lens=(256, 3, 256)),
    Case(feature="one-head", query_lens=(1,) * 3, seq_lens=(256, 256, 1024), heads=(1, 1)),
    Case(feature="softcap", query_lens=(1, 3, 1, 3), seq_lens=(256,) * 4, logit_cap=2.0),
    Case(feature="sinks", query_lens=(1,) * 3, seq_lens=(512, 256, 512), sinks=True, dims=(80, 80)),
)


@dtypes("fp32", "bf16")
@pytest.mark.parametrize("case", SAME_BITS, ids=lambda c: c.feature)
def test_on_two_cores_no_neighbour_changes_a_bit(case, dtype, two_cores):
    bench = dataclasses.replace(bench_of("mha"), deterministic=True)
    same_bits(bench, case, dataclasses.replace(POINT, dtype=dtype))


@pytest.mark.parametrize("layout", ["HND", "strided"])
def test_other_layouts_of_the_pool_are_read_alike(layout):
    bench, case = bench_of("mha"), BY_NAME["prefill-prefix"]
    inputs, _ = prepared(bench, case, POINT)
    backend = create(bench, case, inputs, POINT)
    want = attend(backend, inputs, return_lse=True)
    k, v = inputs.cache.k, inputs.cache.v
    if layout == "HND":
        cache = dataclasses.replace(
            inputs.cache,
            k=k.transpose(1, 2).contiguous(),
            v=v.transpose(1, 2).contiguous(),
            layout="HND",
        )
    else:  # K and V of a page beside each other
        both = torch.stack([k, v], 1)
        cache = dataclasses.replace(inputs.cache, k=both[:, 0], v=both[:, 1])
    actual = attend(backend, inputs, cache=cache, return_lse=True)
    for a, b in zip(want, actual, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("decode-equal", 2), ("prefill-equal", 2), ("verify-tree", 3), ("cross", 3)],
)
def test_equal_lengths_share_one_call(name, calls, monkeypatch):
    seen = []

    def counted(*args, **kwargs):
        seen.append(args[0].shape)
        return attend_tile(*args, **kwargs)

    attend_tile = torch_native.attend
    monkeypatch.setattr(torch_native, "attend", counted)
    bench, case = bench_of("mha"), BY_NAME[name]
    inputs, _ = prepared(bench, case, POINT)
    attend(create(bench, case, inputs, POINT), inputs)
    assert len(seen) == calls


WHOLE = Case(feature="whole", query_lens=(90, 33), seq_lens=(90, 33), window=40, sinks=True)


def backend_of(layer):
    return bench_of("mha").create((layer,), dtype="bf16", page_size=16)


def test_an_idle_pass_gives_an_empty_output():
    inputs, _ = prepared(bench_of("mha"), WHOLE, POINT)
    table = torch.zeros(0, 1, dtype=torch.int32)
    batch = ForwardBatch.build(
        ForwardMode.IDLE, query_lens=(), seq_lens=(), page_table=table, page_size=16
    )
    backend = backend_of(inputs.layer)
    metadata = backend.init_forward_metadata(batch)
    out = backend.forward(inputs.q[:0], None, None, inputs.layer, inputs.cache, batch, metadata)
    assert out.shape == (0, 4, 64)


def test_what_is_not_honoured_is_refused():
    inputs, _ = prepared(bench_of("mha"), WHOLE, POINT)
    layer = inputs.layer
    with pytest.raises(UnsupportedError, match="sliding window of 40"):
        backend_of(dataclasses.replace(layer, is_causal=False))
    with pytest.raises(UnsupportedError, match="sliding window of 40"):
        backend_of(dataclasses.replace(layer, is_cross=True))
    backend = backend_of(layer)
    metadata = backend.init_forward_metadata(inputs.batch)
    args = (inputs.q, None, None)
    with pytest.raises(UnsupportedError, match="topk_indices"):
        backend.forward(
            *args, layer, inputs.cache, inputs.batch, metadata, topk_indices=torch.zeros(1)
        )
    other = dataclasses.replace(layer, sliding_window=7, layer_id=3)
    with pytest.raises(BackendError, match="layer 3"):
        backend.forward(*args, other, inputs.cache, inputs.batch, metadata)
