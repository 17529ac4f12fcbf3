"""intel_amx on this CPU: the suite at each level, mistakes that it finds, and its own edges."""

import dataclasses
import math
import shutil
import threading

import pytest
import torch
from amx_kernels import (
    LIBRARIES,
    at_level,
    build_edited,
    checks,
    compiled,
    emulated_tiles,
    level_of_this_cpu,
    spec,
)
from attn_core import BackendError, LayerCache, UnsupportedError
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.testing import BackendSuite
from attn_core.testing.cases import Case, RaggedCase
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.passes import run_case, run_ragged
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed
from attn_intel.cpu import build, library
from attn_intel.cpu.backend import IntelAMX

CPU = torch.device("cpu")
LEVELS = ("avx2", "avx512", "avx512_bf16", "amx_bf16")
FEW = ("prefill-long-bf16", "decode-edges-fp32", "fp8-e4m3-scaled-bf16", "decode-long-bf16")


class TestIntelAMX(BackendSuite):
    """At the highest level of this CPU."""

    name = "intel_amx"
    device = "cpu:avx512"
    on = "cpu"
    libraries = LIBRARIES
    passes = 20
    reduced = True

    @pytest.fixture(autouse=True)
    def _compiled(self):
        compiled()


@pytest.mark.long
class TestWhole(TestIntelAMX):
    passes = 60
    reduced = False


@pytest.mark.long
class TestLevels(TestIntelAMX):
    """At the levels below it, which other CPUs have."""

    passes = 40

    @pytest.fixture(autouse=True, params=LEVELS[:3])
    def _level(self, request, monkeypatch):
        with at_level(monkeypatch, request.param):
            yield


@pytest.mark.long
class TestTiles(TestIntelAMX):
    """The code for AMX, over tiles in plain C that fault where the hardware does."""

    reduced = False

    @pytest.fixture(autouse=True)
    def _tiles(self, over_emulated_tiles, monkeypatch):
        with at_level(monkeypatch, "amx_bf16", over_emulated_tiles):
            yield


@pytest.mark.parametrize("level", LEVELS)
def test_every_level(level, request, monkeypatch):
    """On this CPU or, where it lacks the level, in plain C."""
    lacks = LEVELS.index(level) > LEVELS.index(level_of_this_cpu())
    path = request.getfixturevalue("over_emulated_tiles") if lacks else None
    with at_level(monkeypatch, level, path):
        for check in checks(*FEW):
            run_check(check, spec(), CPU, arch="avx512")


def test_the_code_for_amx_over_emulated_tiles(over_emulated_tiles, monkeypatch):
    names = ("prefill-long-bf16", "decode-edges-bf16", "window-4-bf16", "verify-tree-bf16")
    with at_level(monkeypatch, "amx_bf16", over_emulated_tiles):
        for check in (*checks(*names), *checks("mla-prefill-bf16", "mla-decode-bf16", kind="mla")):
            run_check(check, spec(), CPU, arch="amx")


# mistakes: file of the source, what it has, what stands there instead, the level, who finds it

MISTAKES = {
    "a window of one token more": (
        *("sight.h", "see.position - a->window + 1;", "see.position - a->window;"),
        *("avx512_bf16", ("window-4-bf16",)),
    ),
    "a causal query sees the next key": (
        *("sight.h", "see.high = position + 1", "see.high = position + 2"),
        *("avx512_bf16", ("prefill-long-bf16",)),
    ),
    "no rescaling": (
        *("attend.c", "if (factor != 1)", "if (0)"),
        *("avx512_bf16", ("decode-long-bf16",)),
    ),
    "the parts of the keys are added, not merged": (
        *("attend.c", "expf(largest_of[r] - base)", "expf(base - base)"),
        *("avx512_bf16", ("decode-long-bf16",)),
    ),
    "the page's offset is lost": (
        *("rows.h", "offset = first % a->page_size", "offset = 0"),
        *("avx512_bf16", ("window-decode-bf16",)),
    ),
    "LSE to base 2": (
        *("attend.c", "most + logf(total)", "most + log2f(total)"),
        *("avx512_bf16", ("lse-decode",)),
    ),
    "even and odd columns left apart": (
        *("attend.c", "type == BF16 && h < item->heads", "0 && h < item->heads"),
        *("avx2", ("decode-long-bf16", "heads-8-1-decode-bf16")),
    ),
    "tiles of columns exchanged": (
        *("tiles.h", "_tile_dpbf16ps(1, 4, 7)", "_tile_dpbf16ps(1, 4, 6)"),
        *("amx_bf16", ("prefill-long-bf16",)),
    ),
    "keys of other pages taken for neighbours": (
        *("tiles.h", "even = keys[first + i] - keys[first] == i * distance", "even = 1"),
        *("amx_bf16", ("verify-chain-bf16-page1",)),
    ),
    "the first keys taken twice": (
        *("tiles.h", "_tile_dpbf16ps(t, rows_of, 7)", "_tile_dpbf16ps(t, 4, 7)"),
        *("amx_bf16", ("heads-8-1-decode-bf16",)),
    ),
    "the second half of the probabilities lost": (
        *("tiles.h", "_tile_dpbf16ps(t, 5, b1)", "_tile_dpbf16ps(t, 4, b1)"),
        *("amx_bf16", ("heads-8-1-decode-bf16",)),
    ),
}


@pytest.mark.long  # each compiles the kernels
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_source_is_seen(name, monkeypatch, tmp_path):
    file, right, wrong, level, finders = MISTAKES[name]
    source = tmp_path / "source"
    shutil.copytree(build.SOURCE, source)
    text = (source / file).read_text()
    assert text.count(right) == 1
    (source / file).write_text(text.replace(right, wrong))
    if level == "amx_bf16":
        path = emulated_tiles(monkeypatch, tmp_path, source)
    else:
        with at_level(monkeypatch, level):  # or skipped
            path = build_edited(monkeypatch, tmp_path, source=source)
    with at_level(monkeypatch, level, path):
        for check in checks(*finders):
            with pytest.raises(CheckFailed):
                run_check(check, spec(), CPU, arch="avx512")


# mistakes of the wrapper: what it tells the kernels, or hands on of what they return


def told(**changes):
    """Change fields of every call, each by a function of the call."""

    def mistake(monkeypatch):
        real = IntelAMX._attend

        def attend(self, call):
            for name, change in changes.items():
                setattr(call, name, change(call))
            return real(self, call)

        monkeypatch.setattr(IntelAMX, "_attend", attend)

    return mistake


def returned(change):
    """Change the log-sum-exp."""

    def mistake(monkeypatch):
        real = IntelAMX._call

        def call(self, *args):
            result = real(self, *args)
            return (result[0], change(result[1])) if isinstance(result, tuple) else result

        monkeypatch.setattr(IntelAMX, "_call", call)

    return mistake


def cumulative_lengths(monkeypatch):
    real = IntelAMX.init_forward_metadata

    def views(self, batch):
        return {
            name: dataclasses.replace(
                view,
                seq_lens=view.seq_lens.cumsum(0, dtype=torch.int32).clamp_(max=view.max_seq_len),
                seq_lens_host=None,
            )
            for name, view in real(self, batch).items()
        }

    monkeypatch.setattr(IntelAMX, "init_forward_metadata", views)


WINDOW = ("window-4-bf16", "window-decode-bf16")
PAGED = ("prefill-prefix-bf16", "decode-edges-bf16")
LSE = ("lse-whole", "lse-decode")
WRAPPED = {
    "a window of one token more": (told(window=lambda x: x.window and x.window + 1), WINDOW),
    "a window of one token less": (told(window=lambda x: max(x.window - 1, 0)), WINDOW),
    "another layout": (
        told(
            k_token=lambda x: x.head_dim,
            k_head=lambda x: x.head_dim * x.page_size,
            v_token=lambda x: x.v_head_dim,
            v_head=lambda x: x.v_head_dim * x.page_size,
        ),
        ("prefill-prefix-bf16-page16", "decode-edges-bf16-page16"),
    ),
    "no page offset": (told(table_row=lambda x: 0), ("mixed-bf16", "decode-edges-bf16")),
    "the head dim's scale": (
        told(scale=lambda x: x.head_dim**-0.5),
        ("scale-large-bf16", "scale-small-bf16"),
    ),
    "cumulative lengths": (cumulative_lengths, ("mixed-bf16", "decode-edges-bf16")),
    "no causal order": (told(causal=lambda x: 0), ("prefill-prefix-bf16",)),
    "LSE to base 2": (returned(lambda x: x / math.log(2)), LSE),
    "transposed LSE": (returned(lambda x: x.T.reshape(x.shape)), LSE),
    "sinks dropped": (told(sinks=lambda x: None), ("sinks-bf16",)),
    "scales of keys for values": (
        told(v_scale=lambda x: x.scale * x.head_dim**0.5),
        ("fp8-e4m3-scaled-bf16",),
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_mistake_in_the_wrapper_is_seen(name, monkeypatch):
    mistake, finders = WRAPPED[name]
    compiled()
    for check in checks(*finders):
        run_check(check, spec(), CPU, arch="avx512")
    mistake(monkeypatch)
    for check in checks(*finders):
        with pytest.raises(CheckFailed):
            run_check(check, spec(), CPU, arch="avx512")


# what is ugly and legal

VERIFY = ForwardMode.TARGET_VERIFY
ANY_ORDER = ((1, -1, 1, 0, 2), (4, 3, 1, -1, 2))  # a child may be named before its parent
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
        for window in (1, 2, 4, None)
    ),
    Case(feature="empty-rows", query_lens=(0, 3, 0, 1), seq_lens=(0, 3, 7, 20), sinks=True),
    Case(feature="ones", query_lens=(1,), seq_lens=(1,), heads=(1, 1), dims=(1, 1), sinks=True),
    Case(feature="odd", query_lens=(3, 70), seq_lens=(5, 133), heads=(7, 1), dims=(33, 17)),
    Case(feature="wide-group", query_lens=(1, 3), seq_lens=(600, 70), heads=(131, 1)),
    Case(feature="split", query_lens=(1, 9, 2), seq_lens=(1500, 1100, 3), sinks=True, window=700),
    Case(feature="both-ways", query_lens=(17, 3), seq_lens=(40, 3), is_causal=False),
)


def bench():
    row = next(r for r in spec().capabilities if r.kind == "mha")
    return Bench(spec=spec(), row=row, torch_device=CPU)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", UGLY, ids=lambda c: c.feature)
def test_what_is_ugly_and_legal(case, dtype):
    compiled()
    for page_size in (1, 16):
        run_case(bench(), case, Point(dtype=dtype, page_size=page_size))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ragged_attention(dtype):
    compiled()
    for case in (
        RaggedCase(feature="more", query_lens=(9, 70), key_lens=(4, 66), causal=True),
        RaggedCase(feature="none", query_lens=(0, 3, 2), key_lens=(4, 0, 5), sinks=True),
        RaggedCase(feature="fused", query_lens=(9, 70), key_lens=(9, 70), strides="fused"),
        RaggedCase(feature="softcap", query_lens=(9, 20), key_lens=(9, 90), logit_cap=2.0),
    ):
        run_ragged(bench(), case, dtype)


LAYER = AttentionLayer(
    layer_id=0, num_q_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125
)


def decode_pass(lengths, page_size=16):
    """Return a backend and the arguments of one decode pass of requests of these lengths."""
    compiled()
    torch.manual_seed(0)
    per = -(-max(lengths) // page_size)
    table = torch.randperm(len(lengths) * per).view(len(lengths), per).int()
    pool = (len(lengths) * per, page_size, 2, 64)
    cache = LayerCache(k=torch.randn(pool).bfloat16(), v=torch.randn(pool).bfloat16())
    ones = [1] * len(lengths)
    batch = ForwardBatch.build(
        ForwardMode.DECODE,
        query_lens=ones,
        seq_lens=lengths,
        page_table=table,
        page_size=page_size,
    )
    backend = bench().create((LAYER,), dtype="bf16", page_size=page_size, kv_dtype="bf16")
    q = torch.randn(len(lengths), 8, 64).bfloat16()
    return backend, (q, None, None, LAYER, cache, batch, backend.init_forward_metadata(batch))


def test_bits_depend_on_no_number_of_threads(monkeypatch):
    backend, arguments = decode_pass([2000, 5, 700])
    answers = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        answers.append(backend.forward(*arguments, return_lse=True))
    for out, lse in answers[1:]:
        assert torch.equal(out, answers[0][0])
        assert torch.equal(lse, answers[0][1])


def test_several_threads_call_one_backend():
    backend, arguments = decode_pass([1500, 80])
    want = backend.forward(*arguments)
    wrong = []

    def run():
        for _ in range(30):
            if not torch.equal(backend.forward(*arguments), want):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_without_openmp_one_thread_does_the_work(monkeypatch):
    backend, arguments = decode_pass([1500, 80])
    want = backend.forward(*arguments)
    monkeypatch.setattr(backend._kernels, "parallel", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(backend.forward(*arguments), want)


def test_queries_whose_last_dimension_is_not_dense_are_refused():
    backend, (q, *rest) = decode_pass([20])
    with pytest.raises(UnsupportedError, match=r"last dimension has to be dense.*contiguous"):
        backend.forward(q.mT.contiguous().mT, *rest)


def test_an_output_of_any_strides_is_filled():
    backend, arguments = decode_pass([20, 300])
    want = backend.forward(*arguments)
    for shape in ((2, 64, 8), (2, 8, 128)):
        out = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        out = out.mT if shape[2] == 8 else out[..., ::2]
        assert backend.forward(*arguments, out=out) is out
        assert torch.equal(out, want)


def test_without_kernels_the_error_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr(library, "compiled_library", lambda: None)
    library.load.cache_clear()
    try:
        with pytest.raises(BackendError, match=r"not compiled here.*python -m attn_intel\.cpu"):
            library.load()
    finally:
        library.load.cache_clear()


def test_a_broken_library_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(library, "compiled_library", lambda: broken)
    library.load.cache_clear()
    try:
        with pytest.raises(BackendError, match=r"kernels\.so does not load: .*delete it"):
            library.load()
    finally:
        library.load.cache_clear()


def test_without_a_compiler_the_reason_is_said(monkeypatch, tmp_path, capsys):
    from attn_intel.cpu import __main__ as command

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "compiler", lambda: None)
    monkeypatch.setattr(command, "compiled_library", lambda: None)
    with pytest.raises(SystemExit, match=r"no C compiler: install GCC 11 .*, or set CC"):
        command.main()
    assert "compiling the kernels" in capsys.readouterr().out


def test_the_name_changes_with_the_source(monkeypatch, tmp_path):
    """So that no library of another source is ever loaded."""
    before = build.name()
    source = tmp_path / "source"
    shutil.copytree(build.SOURCE, source)
    monkeypatch.setattr(build, "SOURCE", source)
    assert build.name() == before
    (source / "attend.c").write_text("/* other */")
    assert build.name() != before


def test_rows_require_what_the_plugin_finds(monkeypatch):
    from attn_intel import versions

    monkeypatch.setattr(versions, "compiled_library", lambda: None)
    assert versions.attn_register_libraries() == []
    monkeypatch.undo()
    compiled()
    assert versions.attn_register_libraries() == [build.KERNELS]
    assert all(build.KERNELS in row.requires for row in spec().capabilities)
