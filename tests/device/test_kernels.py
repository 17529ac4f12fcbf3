"""Every kernel of the Triton backend once, over little memory: short under a memory checker."""

import pytest
import torch
from attn_core.cache.paged_tensor import take_pages
from attn_core.cache.pool import KVPool
from attn_core.ops import kv
from attn_core.ops.index import read_index, write_index, write_latents_and_index
from attn_core.ops.kv import read_kv, write_kv
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.batch import ForwardMode, SpecInfo
from attn_core.spec.device import parse_device
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from prompt_scores import check_scores
from selections import check, rows
from sparse_routes import ROUTES
from triton_passes import DEVICE, Requests, launches, make_layer

if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("no CUDA device", allow_module_level=True)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# Keys of the longest request: more than 256, so that it is cut; of the shortest: one page ends.
LENGTHS, PROMPTS = (300, 17, 64, 5), (200, 17, 0, 1)
DRAFTS = 5
PORTABLE = {"extend_hopper": "extend_tiles", "decode_hopper": "decode_splits"}
PORTABLE |= {"decode_mla_hopper": "decode_splits", "order_requests": "_write"}
PORTABLE |= {"merge_tiles": "_write", "cut_prompts": "extend_tiles"}
ORDERED, CUT = ("_write", "order_requests"), ("_write", "plan_splits", "merge_splits")
LATENT = {"layer": {"heads": 1, "group": 64, "dim": 576, "v_dim": 512}}
# name → what runs on Hopper, and the pass: prompts, drafts or, by default, one query a request
PASSES = {
    "prompts": ((*ORDERED, "extend_hopper"), {"prompts": True}),
    "prompts-page-1": ((*ORDERED, "extend_hopper"), {"prompts": True, "page": 1}),
    "prompts-page-64-hnd": (
        (*ORDERED, "extend_hopper"),
        {"prompts": True, "page": 64, "layout": "HND", "layer": {"dim": 64, "sliding_window": 50}},
    ),
    "prompts-256": ((*ORDERED, "extend_hopper"), {"prompts": True, "layer": {"dim": 256}}),
    "prompts-cut": (
        (*ORDERED, "extend_hopper", "merge_tiles"),
        {"prompts": True, "lengths": (1500, *LENGTHS[1:])},
    ),
    "prompts-80": (("_write", "extend_tiles"), {"prompts": True, "layer": {"dim": 80}}),
    "prompts-fp8": (("_write", "extend_tiles"), {"prompts": True, "store": "fp8_e4m3"}),
    "prompts-fp4": (("_write", "extend_tiles"), {"prompts": True, "store": "fp4_e2m1"}),
    "prompts-latent": (("_write", "cut_prompts"), {"prompts": True, **LATENT}),
    "decode-page-64": ((*CUT, "decode_hopper"), {"page": 64}),
    "decode-page-1": ((*CUT, "decode_splits"), {"page": 1}),
    "decode-fp8": ((*CUT, "decode_splits"), {"store": "fp8_e4m3"}),
    "decode-fp4": ((*CUT, "decode_splits"), {"store": "fp4_e2m1"}),
    "decode-fp32": ((*CUT, "decode_splits"), {"dtype": "fp32"}),
    "decode-latent": ((*CUT, "decode_mla_hopper"), {"page": 64, **LATENT}),
    "decode-latent-page-1": ((*CUT, "decode_splits"), {"page": 1, **LATENT}),
    "tree": ((*CUT, "decode_hopper"), {"drafts": True}),
    "tree-page-1": ((*CUT, "decode_hopper"), {"drafts": True, "page": 1}),
    "tree-window": ((*CUT, "decode_splits"), {"drafts": True, "layer": {"sliding_window": 50}}),
}
# what stands beside attention
OTHERS = ("_merge", "write_index_rows", "write_both", "write_latent")
SPARSE = ("index_scores", "select_topk")  # of sparse MLA
SELECTED = {  # way → what attends to a selection on Hopper; elsewhere "portable" serves all
    "portable": ("attend_selected",),
    "gathered": ("count_slots", "decode_mla_hopper"),
    "cut": ("count_slots", "decode_mla_hopper", "_merge"),
    "decoded": ("decode_selected", "decode_mla_hopper"),
    "pages": ("decode_pages", "place_slots", "decode_mla_hopper"),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_stays_in_its_memory(name):
    kernels, made = PASSES[name]
    made = {"page": 16, **made}
    prompts, drafts = made.pop("prompts", False), made.pop("drafts", False)
    layer, lengths = make_layer(**made.pop("layer", {})), made.pop("lengths", LENGTHS)
    with launches() as names:
        requests = Requests(layer, lengths, **made)
        queries = [*PROMPTS] if prompts else [DRAFTS if drafts else 1] * len(LENGTHS)
        mode, spec, trees = ForwardMode.EXTEND, None, None
        if drafts:
            mode = ForwardMode.TARGET_VERIFY
            parts = torch.rand(len(LENGTHS), DRAFTS, DRAFTS) < 0.5
            trees = (parts | torch.eye(DRAFTS, dtype=torch.bool)).tril().to(DEVICE)
            spec = SpecInfo(topk=2, num_draft_tokens=DRAFTS, tree_mask=trees)
        elif not prompts:
            mode = ForwardMode.DECODE
        q = requests.draw(sum(queries))
        actual = requests.attend(requests.batch(queries, mode=mode, spec=spec), q)
    assert {kernel if HOPPER else PORTABLE.get(kernel, kernel) for kernel in kernels} <= {*names}
    requests.check(actual, q, queries, trees=trees)


def test_plain_keys_and_values_stay_in_their_memory():
    """The parts of one projection, the last token at the end of its memory."""
    layer = make_layer(heads=4, group=1)
    cu = torch.tensor([0, 200, 200, 301], dtype=torch.int32, device=DEVICE)
    q, k, v = torch.randn(301, 3, 4, 128, device=DEVICE, dtype=torch.bfloat16).unbind(1)
    backend = Requests(layer, (1,), page=16).backend()
    with launches() as names:
        actual = backend.forward_ragged(q, k, v, layer, cu, cu, 200, 200, causal=False)
        plain = (x.contiguous() for x in (q, k, v))
        want = backend.forward_ragged(*plain, layer, cu, cu, 200, 200, causal=False)
    assert ("extend_hopper" if HOPPER else "extend_tiles") in names
    assert torch.equal(actual, want)


def test_what_stands_beside_attention_stays_in_its_memory():
    from attn_core.ops.triton.merge import merge_states

    out, lse = torch.ones(2, 7, 3, 80, device=DEVICE), torch.zeros(2, 7, 3, device=DEVICE)
    keys, slots = torch.randn(9, 128, device=DEVICE), torch.arange(39, 48, device=DEVICE)
    k = torch.randn(9, 1, 576, device=DEVICE, dtype=torch.bfloat16)
    alone, both, packed = (
        KVPool(
            [make_layer(**LATENT["layer"])], num_pages=3, page_size=16, kv_cache_dtype=store,
            kind="dsa", index_dim=128, index_dtype="fp8_e4m3", device=DEVICE,
        ).layer(0)
        for store in ("bf16", "bf16", "fp8_e4m3")
    )  # fmt: skip
    with launches() as names:
        merged, _ = merge_states(out, lse)
        write_index(alone, keys, slots)
        write_latents_and_index(both, keys, k, slots)
        write_kv(packed, k, None, slots)
    assert {*OTHERS} <= {*names} or DEVICE.type == "cpu"
    assert torch.allclose(merged, torch.ones_like(merged))
    for cache in (alone, both):
        read = read_index(cache, slots, torch.float32)
        assert (read - keys).abs().max() <= keys.abs().max() / 28  # half a step of e4m3's largest
    assert torch.equal(read_kv(both, slots, torch.bfloat16)[0], k)
    scaled_by_two = k.abs().max() / 14  # the scale of 128 values is a power of two
    assert (read_kv(packed, slots, torch.float32)[0] - k).abs().max() <= scaled_by_two


def run_suite_check(kind, feature, dtype=None):
    """Run one check of the suite on triton, by default in float32 if that goes with its store."""
    spec, device = load_plugins().get("triton"), parse_device("cuda:sm90")
    result = plan(spec, device, {"triton": "3.6"}, kinds=(kind,), passes=1, reduced=dtype is None)
    rows = (p for p in result if p.row is not None and p.check.feature == feature)
    planned = next(p for p in rows if dtype in (None, p.check.needs.dtype))
    with launches() as names:
        run_check(planned, spec, DEVICE)
    return names


@pytest.mark.parametrize(("name", "dtype"), ROUTES)
def test_a_selection_stays_in_its_memory(name, dtype):
    names = run_suite_check("dsa", name, dtype)
    attend = SELECTED[ROUTES[name, dtype] if HOPPER else "portable"]
    assert {*SPARSE, *attend} <= {*names} or DEVICE.type == "cpu"


def test_rows_that_are_selected_from_stay_in_their_memory():
    """Their candidates fill up, and a row ends where its memory does."""
    from attn_core.backends.triton.sparse.selecting import NARROW, WIDE

    names = ["ties", "ascending", "bits"]
    for how in (WIDE, NARROW):
        with launches() as launched:
            check(names, rows(names, 9000, DEVICE), 2048, [9000, 8999, 2049], how)
        assert "select_topk" in launched or DEVICE.type == "cpu"


@pytest.mark.skipif(not HOPPER, reason="other chips score by the portable kernel")
def test_scores_of_a_prompt_stay_in_their_memory():
    with launches() as names:
        check_scores(64, (2100, 300, 2049), (70, 20, 1))
    assert {"score_prompts_hopper", "index_scores"} <= {*names}


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("dual-chunk-prefill", "extend_tiles"),
        ("dual-chunk-prefix", "extend_tiles"),
        ("dual-chunk-decode-long", "decode_splits"),
        ("dual-chunk-verify-chain", "decode_splits"),
        ("dual-chunk-fp8", "decode_splits"),
        ("dual-chunk-sparse-chunks", "list_keys"),
        ("dual-chunk-sparse-heads", "attend_rows"),
    ],
)
def test_dual_chunk_attention_stays_in_its_memory(name, kernel):
    names = run_suite_check("mha", name)
    assert kernel in names or DEVICE.type == "cpu"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("mha", "shared-prefix-decode"),
        ("mha", "shared-prefix-tree"),
        ("mla", "shared-prefix-decode"),
    ],
)
def test_shared_prefixes_stay_in_their_memory(kind, name):
    assert "plan_shared" in run_suite_check(kind, name) or DEVICE.type == "cpu"


@pytest.mark.parametrize("name", ["mla-fp8-e4m3", "mla-fp8-e4m3-prefill"])
def test_fp8_latents_stay_in_their_memory(name):
    names = run_suite_check("mla", name)  # short prompts are split as decode is
    assert {"decode_splits", "extend_tiles"} & {*names} or DEVICE.type == "cpu"


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("store", ["fp8_e4m3", "fp4_e2m1"])
def test_pages_that_are_read_stay_in_their_memory(store, layout):
    from attn_core.ops.triton.read import read_pages

    layer = make_layer(heads=3, group=1, dim=80)
    more = {"page_size": 7, "kv_cache_dtype": store, "layout": layout, "device": DEVICE}
    cache = KVPool([layer], num_pages=5, **more).layer(0)
    for part, _ in cache.parts():
        part.view(torch.uint8).random_(0, 127)
    pages = torch.tensor([4, 1, 4], device=DEVICE)
    with launches() as names:
        actual = read_pages(cache, pages, torch.bfloat16)
    want = kv._read(cache, pages, torch.bfloat16, take_pages)
    assert "dequantize_pages" in names or DEVICE.type == "cpu"
    assert all(torch.equal(a, b) for a, b in zip(actual, want, strict=True))
