"""trtllm_mha over emulated FlashInfer: XQA on sm90 and sm120, trtllm-gen on sm100."""

import dataclasses
import importlib
import logging

import pytest
import torch
from attn_core.errors import BackendError, UnsupportedError
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.case_catalog import PAGED, RELATED
from attn_core.testing.cases import Case
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point, clone_cache
from attn_core.testing.passes import attend, create, prepared, run_case
from attn_core.testing.plan import usable_rows
from attn_core.testing.replay import replayed
from attn_core.testing.tolerance import CheckFailed
from attn_nvidia.common import workspace_bytes
from attn_nvidia.trtllm.gen import TrtllmGen
from attn_nvidia.trtllm.xqa import Xqa, chain_mask

SPEC = load_plugins().get("trtllm_mha")
LIBRARIES = {"flashinfer-python": "0.6.14"}
CASES = {case.feature: case for case in PAGED}
POINT = Point(dtype="bf16", page_size=16)
FP8 = {"kv_dtype": "fp8_e4m3", "k_scale": 0.37, "v_scale": 1.7}


def emulate(arch):
    """Say which GPU flashinfer finds: "sm90"."""
    importlib.import_module("flashinfer.xqa").compute_capability = (int(arch[2:-1]), int(arch[-1]))


class Emulated(BackendSuite):
    name = "trtllm_mha"
    on = "cpu"
    libraries = LIBRARIES
    passes = 30
    reduced = True

    @pytest.fixture(autouse=True)
    def gpu(self, vendor):
        emulate(self.device.removeprefix("cuda:"))


class TestHopper(Emulated):
    device = "cuda:sm90"


@pytest.mark.long  # the same wrapper again
class TestSm120(Emulated):
    device = "cuda:sm120"


class TestBlackwell(Emulated):
    device = "cuda:sm100"


def bench(arch, case=None, **row):
    """Return a bench of the first row of `arch` whose window, store and sinks a case needs."""
    emulate(arch)
    store = case.kv_dtype if case and case.kv_dtype != "auto" else "bf16"
    rows = usable_rows(SPEC, "mha", parse_device(f"cuda:{arch}"), LIBRARIES)
    fits = (
        r
        for r in rows
        if store in r.kv_dtypes and (r.sliding_window or not case or case.window is None)
    )
    row = dataclasses.replace(next(fits), **row)
    return Bench(spec=SPEC, row=row, torch_device=torch.device("cpu"), arch=arch)


def run(arch, case, point=POINT):
    return run_case(bench(arch, case), case, point)


def test_the_queries_of_an_fp8_cache_stay_in_16_bits_on_hopper(monkeypatch):
    case = dataclasses.replace(CASES["fp8-e4m3-decode"], scale_by=4.0, k_scale=1.0)
    run("sm90", case)
    # the public function rounds them to e4m3 there
    monkeypatch.setattr(Xqa, "_attend_exactly", public)
    with pytest.raises(CheckFailed, match="error"):
        run("sm90", case)
    run("sm120", case)


def test_pages_that_move_are_read_where_they_lie_now():
    """As those of an engine that gave its memory back meanwhile."""
    case = CASES["fp8-e4m3-decode"]
    on, point = bench("sm90", case), Point(dtype="bf16", page_size=256)  # kept as views
    inputs, _ = prepared(on, case, point)
    backend, cache = create(on, case, inputs, point), clone_cache(inputs.cache)
    first, _ = attend(backend, inputs, cache=cache)
    old, cache.k.data = cache.k.data, cache.k.data.clone()
    old.view(torch.uint8).zero_()
    again, _ = attend(backend, inputs, cache=cache)
    assert torch.equal(again[: inputs.real_tokens], first[: inputs.real_tokens])


def public(self, q, this, plan, out):
    self._exact = False
    self._attend(q, this, None, plan, out, False)


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120"])
def test_no_row_takes_a_release_that_nobody_tried(arch):
    device = parse_device(f"cuda:{arch}")
    assert usable_rows(SPEC, "mha", device, {"flashinfer-python": "0.6.14"})
    with pytest.raises(UnsupportedError, match=r"flashinfer-python 0\.7\.2 \(needs .*<0\.7\)"):
        usable_rows(SPEC, "mha", device, {"flashinfer-python": "0.7.2"})


def test_drafts_in_a_window_are_rows_of_one_token(monkeypatch):
    case = CASES["verify-chain-window"]
    run("sm90", case)
    plan = Xqa._plan

    def together(self, key, batch):
        other = (key[0], None)
        self._shapes[other] = self._shapes[key]
        return plan(self, other, batch)

    monkeypatch.setattr(Xqa, "_plan", together)
    with pytest.raises(CheckFailed, match="error"):
        run("sm90", case)


def test_a_chain_of_drafts_is_one_row(monkeypatch):
    """More queries than a tile has rows, more drafts than a word of the mask has bits."""
    seen = []
    plan = Xqa._plan

    def spy(self, key, batch):
        seen.append(plan(self, key, batch))
        return seen[-1]

    monkeypatch.setattr(Xqa, "_plan", spy)
    case = Case(
        feature="long-chain",
        query_lens=(35, 35),
        seq_lens=(35, 90),
        mode=CASES["verify-chain"].mode,
        sinks=True,
    )
    run("sm90", case)
    assert [p.q_len for p in seen] == [35] * len(seen)
    assert seen[0].mask.shape == (2, 35, 4)


def test_the_mask_of_a_chain():
    mask = chain_mask(34, 2, torch.device("cpu"))
    assert (mask.dtype, mask.shape) == (torch.uint16, (2, 34, 4))
    assert mask.is_contiguous()
    rows = mask[1].tolist()
    assert rows[0] == [1, 0, 0, 0]
    assert rows[16] == [0xFFFF, 1, 0, 0]
    assert rows[33] == [0xFFFF, 0xFFFF, 3, 0]


WRONG = {
    "window_left": lambda this: {"window_left": this.window_left + 1},
    "k_scale": lambda this: {"bmm1_scale": this.layer.scale},
    "v_scale": lambda this: {"bmm2_scale": 1.0},
    "scales": lambda this: {"bmm1_scale": this.bmm1_scale * this.bmm2_scale},
    "sinks": lambda this: {"layer": dataclasses.replace(this.layer, sinks=None)},
}
CASE = dataclasses.replace(CASES["sinks-window-decode"], **FP8)


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120"])
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_convention_is_found(monkeypatch, arch, fault):
    run(arch, CASE)
    prepare = {"sm100": TrtllmGen}.get(arch, Xqa)._prepare

    def wrong(self, layer, cache):
        this = prepare(self, layer, cache)
        return dataclasses.replace(this, **WRONG[fault](this))

    monkeypatch.setattr(Xqa, "_prepare", wrong)
    monkeypatch.setattr(TrtllmGen, "_prepare", wrong)
    with pytest.raises(CheckFailed, match="error"):
        run(arch, CASE)


def test_the_lse_of_trtllm_gen_is_base_2(monkeypatch):
    case = CASES["sinks"]
    run("sm100", case)
    monkeypatch.setattr("attn_nvidia.flashinfer.lse._LN2", 1.0)
    with pytest.raises(CheckFailed, match="LSE"):
        run("sm100", case)


@pytest.mark.parametrize(("arch", "page_size"), [("sm90", 16), ("sm90", 128), ("sm100", 128)])
def test_a_replay_refills_what_it_captured(monkeypatch, arch, page_size):
    """A table that is split, or has a row per token, is a copy."""
    case = dataclasses.replace(RELATED["mha"]["chain"], window=5)
    point = dataclasses.replace(POINT, page_size=page_size)
    replayed(bench(arch, case), case, point)
    monkeypatch.setattr({"sm90": Xqa, "sm100": TrtllmGen}[arch], "_refill", lambda *_: None)
    with pytest.raises(CheckFailed):
        replayed(bench(arch, case), case, point)


def test_a_dense_table_is_read_where_it_lies():
    case, here = CASES["decode-equal"], bench("sm90")
    inputs, _ = prepared(here, case, POINT)
    view = inputs.batch.views["full"]
    dense = dataclasses.replace(view, page_table=view.page_table.contiguous())
    batch = dataclasses.replace(inputs.batch, views={"full": dense})
    plans = create(here, case, inputs, POINT).init_forward_metadata(batch)
    requests = plans["full", None].requests
    assert requests.table is dense.page_table
    assert requests.lens is view.seq_lens


def test_an_lse_of_prefill_leaves_the_counters_of_decode_alone():
    full, decode = CASES["prefill-edges"], CASES["decode-edges"]
    for case in (decode, full, decode, CASES["sinks-decode"]):
        run("sm100", case)  # the emulated kernel looks whether its counters are 0


@pytest.mark.parametrize(
    ("heads", "dim", "q_len", "requests"),
    [((32, 8), 128, 1, 1), ((64, 1), 256, 1, 3), ((8, 8), 64, 7, 2), ((40, 8), 128, 16, 40)],
)
def test_the_workspace_holds_what_the_kernel_writes(heads, dim, q_len, requests):
    from flashinfer.xqa import PROCESSORS, _scratch

    q = torch.empty(0, *heads[:1], dim, device="meta")
    wrote = max(_scratch(PROCESSORS, requests, heads[1], q, q_len, n) for n in (64, 4096, 1 << 20))
    need = workspace_bytes.xqa(PROCESSORS, heads[0] // heads[1], dim, q_len)
    assert wrote <= need - 8 * workspace_bytes.MIB


def test_what_xqa_cannot_do_is_refused():
    case, here = CASES["decode-edges"], bench("sm90")
    inputs, _ = prepared(here, case, POINT)
    backend = create(here, case, inputs, POINT)
    with pytest.raises(UnsupportedError, match="return_lse: the chosen row of trtllm_mha"):
        attend(backend, inputs, return_lse=True)
    layer = dataclasses.replace(inputs.layer, layer_id=7, sliding_window=3)
    other = dataclasses.replace(inputs, layer=layer)
    planned = r"not planned: .*; planned: \[\('full', None\)\]"
    with pytest.raises(BackendError, match=rf"layer 7 \(view 'full'\) was {planned}"):
        attend(backend, other)


def test_kernels_are_built_when_planned_and_said(monkeypatch, caplog):
    xqa = importlib.import_module("flashinfer.xqa")
    built = []
    build = xqa.get_xqa_module
    monkeypatch.setattr(xqa, "get_xqa_module", lambda *kind: built.append(kind) or build(*kind))
    monkeypatch.setattr("attn_nvidia.common.jit_log.SILENT_S", 0.0)
    case, here = CASES["decode-edges"], bench("sm90")
    inputs, _ = prepared(here, case, POINT)
    backend = create(here, case, inputs, POINT)
    with caplog.at_level(logging.INFO, "attn_nvidia"):
        metadata = backend.init_forward_metadata(inputs.batch)
        backend.init_forward_metadata(inputs.batch)
    bf16 = torch.bfloat16
    assert built == [(bf16, bf16, 16, 64, 2, False, bf16, 1)]
    assert len(caplog.messages) == 1
    assert "built XQA (head dim 64, group 2, page 16, 1 queries, torch.bfloat16) in" in caplog.text
    attend(backend, inputs, metadata=metadata)


def test_what_is_given_as_out_may_have_gaps():
    case, here = CASES["decode-edges"], bench("sm90")
    inputs, (truth, _) = prepared(here, case, POINT)
    backend = create(here, case, inputs, POINT)
    wide = inputs.q.new_full((*inputs.q.shape[:2], 128), torch.nan)
    out = wide[..., 32:96]
    metadata = backend.init_forward_metadata(inputs.batch)
    actual = backend.forward(
        inputs.q, None, None, inputs.layer, inputs.cache, inputs.batch, metadata, out=out
    )
    assert actual is out
    assert (out.double() - truth[0]).abs().max() < 0.02
    assert wide[..., :32].isnan().all()
