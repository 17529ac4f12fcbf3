"""fa4 over the emulated library: the suite on Hopper and Blackwell, conventions, mistakes."""

import functools
import logging
from dataclasses import replace

import pytest
import torch
from attn_core.cache.page_table import pad_page_table
from attn_core.cache.pool import KVPool
from attn_core.errors import BackendError, UnsupportedError
from attn_core.ops.kv import read_kv, write_kv
from attn_core.ops.merge import merge_states
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.selection.result import notes_of
from attn_core.selection.solver import Overrides, select
from attn_core.spec.device import parse_device
from attn_core.spec.requirements import LayerRequirements, Requirements
from attn_core.testing import BackendSuite
from attn_core.testing.cases import Case
from attn_core.testing.inputs import make_layer
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from attn_core.testing.tolerance import CheckFailed

FOUND = {"flash-attn-4": "4.0.0b18"}
LAYER = make_layer(Case(feature="", query_lens=(), seq_lens=()), torch.Generator().manual_seed(0))


class TestHopper(BackendSuite):
    name = "fa4"
    kinds = ("mha",)
    device = "cuda:sm90"
    on = "cpu"
    libraries = FOUND
    passes = 60


class TestHopperLatent(BackendSuite):
    name = "fa4"
    kinds = ("mla",)
    device = "cuda:sm90"
    on = "cpu"
    libraries = FOUND


@pytest.mark.usefixtures("blackwell")
@pytest.mark.long  # the same wrapper again
class TestBlackwell(BackendSuite):
    name = "fa4"
    device = "cuda:sm100"
    on = "cpu"
    libraries = FOUND
    passes = 30
    reduced = True


@pytest.fixture
def blackwell(monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "100")


@pytest.fixture
def calls(monkeypatch):
    """Record the keyword arguments of every call of the library."""
    from flash_attn.cute import interface

    made, real = [], interface._flash_attn_fwd

    @functools.wraps(real)
    def watched(*tensors, **named):
        made.append(named)
        return real(*tensors, **named)

    monkeypatch.setattr(interface, "_flash_attn_fwd", watched)
    return made


def spec():
    return load_plugins().get("fa4")


def decode(layer, *, page_size=128, backend=None, **more):
    """Decode two requests; returns the backend and what it gave."""
    row = next(
        r
        for r in spec().capabilities
        if r.kind == "mha" and "sm90" in r.archs and r.sinks == (layer.sinks is not None)
    )
    if backend is None:
        config = BackendConfig(
            name="fa4",
            row=row,
            layers=(layer,),
            page_size=page_size,
            dtype="bf16",
            kv_cache_dtype="bf16",
            device=torch.device("cpu"),
            arch="sm90",
        )
        backend = create_backend(spec(), config)
    pool = KVPool([layer], num_pages=4, page_size=page_size, kv_cache_dtype="bf16")
    batch = ForwardBatch.build(
        ForwardMode.DECODE,
        query_lens=[1, 1],
        seq_lens=[page_size + 3, 9],
        page_table=pad_page_table([[3, 1], [2]]),
        page_size=page_size,
    )
    metadata = backend.init_forward_metadata(batch)
    q = torch.randn(2, layer.num_q_heads, layer.head_dim).bfloat16()
    actual = backend.forward(
        q, None, None, layer, pool.layer(layer.layer_id), batch, metadata, **more
    )
    return backend, actual, metadata


def test_a_sink_far_above_the_scores_is_their_log_sum_exp():
    """All keys are zeros. The kernel's sum is infinite from e^88 on; its output is right."""
    layer = replace(LAYER, sinks=torch.tensor([150.0, 95.0, 2.0, -3.0]))
    _, (out, lse), _ = decode(layer, return_lse=True)
    keys = torch.tensor([[131.0], [9.0]]).log()
    torch.testing.assert_close(lse, torch.logaddexp(keys, layer.sinks))
    assert not out.any()


def test_conventions_of_the_library(calls):
    """A window counts the tokens before the query's own; sinks are bf16; out is filled in place."""
    layer = replace(LAYER, sliding_window=17, logit_cap=3.0, sinks=torch.randn(4))
    out = torch.empty(2, 4, 64, dtype=torch.bfloat16)
    backend, (actual, lse), _ = decode(layer, out=out, return_lse=True)
    [kwargs] = calls
    assert kwargs["window_size_left"] == 16
    assert kwargs["causal"]
    assert kwargs["learnable_sink"].dtype == torch.bfloat16
    assert kwargs["score_mod"].softcap_val == 3.0
    assert actual is kwargs["out"] is out
    assert lse.shape == (2, 4)
    decode(layer, backend=backend)
    assert calls[1]["score_mod"] is kwargs["score_mod"]  # made once: the library hashes it


def test_no_keys_leave_the_sink():
    """The kernels give NaN there: exp(sink + inf)."""
    layer = replace(LAYER, sinks=torch.randn(4), is_causal=False)
    backend, *_ = decode(replace(layer, is_causal=True))
    q, k, v = (torch.randn(n, h, 64).bfloat16() for n, h in ((3, 4), (5, 2), (5, 2)))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 3], [0, 0, 5]))
    out, lse = backend.forward_ragged(
        q, k, v, layer, cu_q, cu_k, 2, 5, causal=False, return_lse=True
    )
    assert (out[0] == 0).all()
    torch.testing.assert_close(lse[0], layer.sinks)
    assert out.isfinite().all()
    assert (lse[1:] > layer.sinks).all()


def test_only_pages_of_several_tiles_are_split(calls):
    _, _, metadata = decode(LAYER)
    [plan_] = metadata.values()
    assert plan_.arguments["page_table"].tolist() == [[3, 1], [2, 0]]
    decode(LAYER, page_size=256)
    assert calls[1]["page_table"].tolist() == [[6, 7, 2, 3], [4, 5, 0, 1]]
    assert calls[1]["max_seqlen_k"] == 4 * 128


def test_a_long_first_call_is_logged_as_built(caplog, monkeypatch):
    monkeypatch.setattr("attn_nvidia.common.jit_log.SILENT_S", -1.0)
    with caplog.at_level(logging.INFO, logger="attn_nvidia"):
        backend, _, _ = decode(LAYER)
        assert "built a kernel of fa4" in caplog.text
        caplog.clear()
        decode(LAYER, backend=backend)
        assert not caplog.text
        decode(LAYER, backend=backend, return_lse=True)  # another kernel
        assert "built a kernel of fa4" in caplog.text


def test_refusals():
    with pytest.raises(UnsupportedError, match="window of 4 without causal order"):
        decode(replace(LAYER, sliding_window=4, is_causal=False))
    with pytest.raises(UnsupportedError, match=r"head_dim 256 \(supports 16, 32"):
        decode(replace(LAYER, head_dim=256, v_head_dim=256))
    backend, _, _ = decode(LAYER)
    with pytest.raises(BackendError, match="was not planned"):
        decode(replace(LAYER, view="window"), backend=backend)
    with pytest.raises(UnsupportedError, match="topk_indices"):
        decode(LAYER, topk_indices=torch.zeros(2, 4, dtype=torch.int32))


def paged(d, dv, page_size, **more):
    """Call the emulated library itself over pages."""
    from flash_attn.cute.interface import _flash_attn_fwd

    def numbers(*shape):
        return torch.randn(shape).bfloat16()

    kwargs = {
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "seqused_k": torch.tensor([3], dtype=torch.int32),
        "page_table": torch.tensor([[1, 0]], dtype=torch.int32),
        "max_seqlen_q": 1,
        "max_seqlen_k": 2 * page_size,
        "causal": True,
    }
    k, v = numbers(2, page_size, 2, d), numbers(2, page_size, 2, dv)
    return _flash_attn_fwd(numbers(1, 4, d), k, v, **kwargs | more)[0]


def test_where_a_page_is_no_tile():
    """Pages of 128 that are no tile are undefined for some dims, and refused for irregular ones."""
    assert paged(64, 64, 16).isfinite().all()
    with pytest.raises(AssertionError, match="does not support irregular head dim"):
        paged(72, 72, 16)
    assert paged(80, 80, 128).isfinite().all()
    assert paged(80, 80, 128, causal=False).isnan().all()  # tiles of 144 keys
    assert paged(192, 128, 128).isfinite().all()
    assert paged(192, 128, 128, window_size_left=5).isnan().all()  # of 96
    assert paged(256, 256, 128).isnan().all()  # of 80


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learnable_sink": torch.zeros(4)}, "learnable_sink must be bfloat16"),
        ({"page_table": torch.zeros(1, 2, dtype=torch.int64)}, "page_table must be int32"),
        ({"seqused_k": torch.ones(1, dtype=torch.int64)}, "must be int32"),
        ({"cu_seqlens_k": torch.zeros(2, dtype=torch.int32)}, "not supported with cu_seqlens_k"),
        ({"out": torch.empty(1, 4, 64)}, "out dtype"),
        ({"num_splits": 4}, "SplitKV not supported on SM 9.0"),
    ],
)
def test_the_emulation_refuses_what_the_library_refuses(change, message):
    with pytest.raises(AssertionError, match=message):
        paged(64, 64, 128, **change)


def _window_too_wide(monkeypatch):
    from flash_attn.cute import interface

    real = interface._flash_attn_fwd

    def wide(*tensors, **named):
        if "window_size_left" in named:
            named["window_size_left"] += 1
        return real(*tensors, **named)

    monkeypatch.setattr(interface, "_flash_attn_fwd", wide)


def _stale_pages(monkeypatch):
    from attn_nvidia.fa4 import FA4

    monkeypatch.setattr(FA4, "init_forward_metadata_replay_cuda_graph", lambda *a: None)


def _pages_not_split(monkeypatch):
    monkeypatch.setattr("attn_nvidia.fa4.split_pages", lambda table, *_: table.repeat(1, 2))


@pytest.mark.parametrize(
    ("mistake", "wanted"),
    [
        (_window_too_wide, ("window-4-", "window-decode-")),
        (_stale_pages, ("graph-decode-bf16-page256", "graph-chain-bf16-page256")),
        (_pages_not_split, ("decode-long-bf16-page256",)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_mistake_in_the_wrapper_is_seen(mistake, wanted, monkeypatch):
    device = parse_device("cuda:sm90")
    result = plan(spec(), device, FOUND, kinds=("mha",), passes=10)
    requested = [p for p in result if p.row and p.check.id.startswith(wanted)]
    assert len(requested) >= len(wanted)
    for planned in requested:
        run_check(planned, spec(), torch.device("cpu"), arch="sm90")
    mistake(monkeypatch)
    for planned in requested:
        with pytest.raises(CheckFailed):
            run_check(planned, spec(), torch.device("cpu"), arch="sm90")


HEADS = 4
LATENT = replace(
    LAYER, num_q_heads=HEADS, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5
)
WIDE = replace(LATENT, num_kv_heads=HEADS, head_dim=192, v_head_dim=128)


@pytest.fixture
def deepseek():
    """Prefill a DeepSeek model by fa4 and decode it by fa3, on Hopper."""
    needs = LayerRequirements(
        kind="mla", head_dim=576, v_head_dim=512, num_q_heads=HEADS, num_kv_heads=1
    )
    registry, result = load_plugins(), FOUND | {"sglang-kernel": "0.4.5"}
    selection = select(
        Requirements(layers=(needs,)),
        parse_device("cuda:sm90"),
        registry,
        result,
        Overrides(prefill_attention_backend="fa4", decode_attention_backend="fa3"),
        simulated=True,
    )
    assert (selection.backend("prefill"), selection.backend("decode")) == ("fa4", "fa3")
    assert "fa4 prefills MLA without its cache: write new" in notes_of(selection)
    pool = KVPool([LATENT], num_pages=80, page_size=1, kv_cache_dtype="bf16", kind="mla")
    dispatcher = HybridDispatcher.from_selection(selection, registry, [LATENT], pool)
    return dispatcher, pool


def test_an_absorbed_prefill_is_refused_on_hopper_before_anything_is_written(deepseek):
    dispatcher, pool = deepseek
    batch = ForwardBatch.build(
        ForwardMode.EXTEND,
        query_lens=[3],
        seq_lens=[3],
        page_table=pad_page_table([[1, 2, 3]]),
        page_size=1,
    )
    metadata = dispatcher.init_forward_metadata(batch)  # every pass is planned
    q, k = torch.ones(3, HEADS, 576).bfloat16(), torch.ones(3, 1, 576).bfloat16()
    message = "extend: the chosen row of fa4 has no absorbed attention, .* call forward_ragged"
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=message):
            dispatcher.forward(q, k, None, LATENT, batch, metadata)
    backend = dispatcher.backend("prefill")
    with pytest.raises(UnsupportedError, match=message):
        backend.forward(q, k, None, LATENT, pool.layer(0), batch, metadata)
    assert not pool.layer(0).k.any()


def test_a_prompt_is_prefilled_ragged_in_chunks_and_decoded_from_the_cache(deepseek):
    """What an engine does, with real up-projections: the last token's two ways agree."""
    dispatcher, pool = deepseek
    rng = torch.Generator().manual_seed(0)
    length, cut = 70, 41
    latent = torch.randn(length, 576, generator=rng).bfloat16()
    up_k = torch.randn(HEADS, 128, 512, generator=rng) * 512**-0.5
    up_v = torch.randn(HEADS, 128, 512, generator=rng) * 512**-0.5
    q = torch.randn(length, HEADS, 192, generator=rng).bfloat16()

    def project(tokens):
        low, rope = tokens.float().split_with_sizes((512, 64), -1)
        k = torch.einsum("hdl,tl->thd", up_k, low)
        k = torch.cat([k, rope[:, None].expand(-1, HEADS, -1)], -1)
        return k.bfloat16(), torch.einsum("hdl,tl->thd", up_v, low).bfloat16()

    def ragged(n, keys, causal):
        ends = [torch.tensor([0, x], dtype=torch.int32) for x in (n, len(keys))]
        return dispatcher.forward_ragged(
            q[length - n :], *project(keys), WIDE, *ends, n, len(keys),
            causal=causal, return_lse=True,
        )  # fmt: skip

    slots = torch.arange(1, length + 1)
    write_kv(pool.layer(0), latent[:, None], None, slots)
    prefix, new = read_kv(pool.layer(0), slots, torch.bfloat16)[0].squeeze(1).split([cut, 29])
    parts = [ragged(29, prefix, False), ragged(29, new, True)]
    prefilled, _ = merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))

    absorbed = torch.einsum("hd,hdl->hl", q[-1, :, :128].float(), up_k)
    absorbed = torch.cat([absorbed, q[-1, :, 128:].float()], -1)[None].bfloat16()
    batch = ForwardBatch.build(
        ForwardMode.DECODE,
        query_lens=[1],
        seq_lens=[length],
        page_table=slots[None].int(),
        page_size=1,
    )
    metadata = dispatcher.init_forward_metadata(batch)
    out = dispatcher.forward(absorbed, None, None, LATENT, batch, metadata)
    decoded = torch.einsum("hl,hdl->hd", out[0].float(), up_v)
    torch.testing.assert_close(prefilled[-1].float(), decoded, rtol=0, atol=2e-2)
