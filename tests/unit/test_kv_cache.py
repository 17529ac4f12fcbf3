"""Pools store what was written where it was written, in every store and layout."""

import dataclasses
import functools
import importlib.util
import sys
import types

import pytest
import torch
from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.cache.pool import KVPool
from attn_core.errors import UnsupportedError, UsageError
from attn_core.ops import kv
from attn_core.ops.index import write_index
from attn_core.ops.kv import copy_slots, read_kv, read_pages, write_kv
from attn_core.runtime.layer import AttentionLayer

PAGE, PAGES = 4, 6


def layer(layer_id=0, view="full", heads=2, d=32, dv=16):
    return AttentionLayer(
        layer_id=layer_id,
        num_q_heads=4,
        num_kv_heads=heads,
        head_dim=d,
        v_head_dim=dv,
        scale=1.0,
        view=view,
    )


def pool(store="fp32", layout="NHD", **more):
    heads = 2 if more.get("kind", "mha") == "mha" else 1  # a latent serves all heads
    more = {"layers": [layer(heads=heads)], "num_pages": PAGES, "page_size": PAGE, **more}
    return KVPool(more.pop("layers"), kv_cache_dtype=store, layout=layout, **more)


def tokens(n, *tail, seed=0):
    return torch.randn(n, *tail, generator=torch.Generator().manual_seed(seed))


SLOTS = torch.tensor([17, 4, 23, 5, 8])
ERROR = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("store", TORCH_DTYPES)
def test_what_is_written_is_read_and_nothing_else_is_touched(store, layout):
    scales = {0: (0.5, 2.0)} if TORCH_DTYPES[store].itemsize == 1 else None
    cache = pool(store, layout, scales=scales).layer(0)
    k, v = tokens(5, 2, 32), tokens(5, 2, 16, seed=1)
    write_kv(cache, k, v, SLOTS)
    got = read_kv(cache, SLOTS, torch.float32)
    for x, y in zip((k, v), got, strict=True):
        if store == "fp4_e2m1":  # the widest gap is 4 … 6; blocks are rounded by 2^-4
            top = x.view(5, 2, -1, 16).abs().amax(-1).repeat_interleave(16, -1)
            assert ((x - y).abs() <= top / 6 * (1 + 2**-3)).all()
        else:
            assert ((x - y).abs() <= x.abs() * ERROR[store] + 2**-9).all()
    rest = torch.tensor([s for s in range(PAGES * PAGE) if s not in SLOTS.tolist()])
    assert not any(t.any() for t in read_kv(cache, rest, torch.float32))
    # whole pages hold the same tokens, whatever the layout
    pages = torch.tensor([[4, 1], [5, 2]], dtype=torch.int32)
    slots = pages[..., None].long() * PAGE + torch.arange(PAGE)
    paged = read_pages(cache, pages, torch.float32)
    for x, y in zip(paged, read_kv(cache, slots, torch.float32), strict=True):
        assert x.shape == (2, 2, PAGE, 2, x.shape[-1])
        assert torch.equal(x, y)


@pytest.mark.parametrize("store", TORCH_DTYPES)
def test_padding_of_minus_one_is_not_written(store):
    cache, same = (pool(store).layer(0) for _ in range(2))
    k, v = tokens(5, 2, 32), tokens(5, 2, 16, seed=1)
    padded = SLOTS.clone()
    padded[[1, 4]] = -1
    write_kv(cache, k, v, padded)
    real = padded >= 0
    write_kv(same, k[real], v[real], SLOTS[real])
    for (a, _), (b, _) in zip(cache.parts(), same.parts(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_tokens_of_a_known_form_are_written_again_without_checks():
    cache, form = pool().layer(0), 1 << 40
    k, v = tokens(5, 2, 32), tokens(5, 2, 16, seed=1)
    write_kv(cache, k, v, SLOTS, form)
    again = cache.launchers[form]
    assert again(2 * k, 3 * v, SLOTS, 5)
    found = read_kv(cache, SLOTS, torch.float32)
    assert all(map(torch.equal, found, (2 * k, 3 * v)))
    padded = SLOTS.clone()
    padded[1] = -1
    assert not again(k, v, padded, 5)  # it has no way with padding, and writes nothing
    assert all(map(torch.equal, read_kv(cache, SLOTS, torch.float32), found))
    memory = cache.k.clone()
    cache.k.set_(memory.untyped_storage(), 0, memory.shape, memory.stride())
    assert not again(k, v, SLOTS, 5)  # the rows lie elsewhere by now
    write_kv(cache, k, v, SLOTS, form)
    assert cache.launchers[form](4 * k, v, SLOTS, 5)
    assert torch.equal(read_kv(cache, SLOTS, torch.float32)[0], 4 * k)


def test_the_layout_is_what_it_says():
    k, v = tokens(1, 2, 32), tokens(1, 2, 16)
    for layout in ("NHD", "HND"):
        cache = pool(layout=layout).layer(0)
        write_kv(cache, k, v, torch.tensor([2 * PAGE + 3]))
        assert cache.page_size == PAGE
        assert cache.num_pages == PAGES
        stored = cache.k[2, 3] if layout == "NHD" else cache.k[2, :, 3]
        assert torch.equal(stored, k[0])


def test_a_pool_interleaved_with_another_is_written_in_place():
    both = torch.zeros(PAGES, 2, PAGE, 2, 32)
    cache = LayerCache(k=both[:, 0], v=both[:, 1])
    k, v = tokens(5, 2, 32), tokens(5, 2, 32, seed=1)
    write_kv(cache, k, v, SLOTS)
    assert torch.equal(both[SLOTS // PAGE, 1, SLOTS % PAGE], v)
    got = read_kv(cache, SLOTS, torch.float32)
    assert torch.equal(got[0], k)
    pages = read_pages(cache, torch.tensor([1, 4]), torch.float32)
    assert torch.equal(pages[1], both[[1, 4], 1])


def test_only_on_a_cpu_slots_are_looked_at_before_a_write_again():
    cache = pool(device="meta").layer(0)
    k, v = (torch.empty(5, 2, d, device="meta") for d in (32, 16))
    for _ in range(2):  # a look at slots raises there
        write_kv(cache, k, v, torch.empty(5, dtype=torch.int64, device="meta"), 3)
    assert 3 not in cache.launchers


@pytest.mark.parametrize(("store", "top"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_writes_saturate(store, top):
    cache = pool(store, scales={0: (0.5, 1.0)}).layer(0)
    k = torch.full((1, 2, 32), 1e6)
    write_kv(cache, k, -k[..., :16], torch.tensor([5]))
    got = read_kv(cache, torch.tensor([5]), torch.float32)
    assert (got[0] == top * 0.5).all()
    assert (got[1] == -top).all()


@pytest.mark.parametrize("store", TORCH_DTYPES)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_scales_belong_to_fp8_and_fp4(store, kind):
    """Backends that share a cache would disagree on scales that only some of them apply."""
    plain = TORCH_DTYPES[store].itemsize > 1
    for scales in ((0.5, 1.0), (1.0, 3.0), (2.0, 2.0)):
        if plain:
            with pytest.raises(UsageError, match=rf"k_scale {scales[0]} .* only FP8 and FP4"):
                pool(store, kind=kind, scales={0: scales})
            with pytest.raises(UsageError, match="only FP8 and FP4 have scales"):
                dataclasses.replace(pool(store).layer(0), k_scale=scales[0], v_scale=scales[1])
        elif kind == "mla" and scales[1] != 1.0:
            with pytest.raises(UsageError, match=rf"v_scale {scales[1]} for a latent cache"):
                pool(store, kind=kind, scales={0: scales})
        else:
            cache = pool(store, kind=kind, scales={0: scales}).layer(0)
            assert (cache.k_scale, cache.v_scale) == scales
    pool(store, kind=kind, scales={0: (1.0, 1.0)})
    for bad in (0.0, -1.0, float("nan"), float("inf"), None, "1"):
        for name, scales in (("k_scale", (bad, 1.0)), ("v_scale", (1.0, bad))):
            with pytest.raises(UsageError, match=rf"{name} {bad!r} \(expected a finite number ab"):
                pool(store, kind=kind, scales={0: scales})


def test_a_layout_is_one_of_two():
    with pytest.raises(UsageError, match=r"layout 'NDH' \(expected 'NHD' or 'HND'\)"):
        pool(layout="NDH")


QUANTISED = [store for store, dtype in TORCH_DTYPES.items() if dtype.itemsize == 1]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize("store", QUANTISED)
def test_a_scale_in_a_tensor_is_that_of_its_number(store, shape):
    tensors = tuple(torch.full(shape, x) for x in (0.5, 3.0))
    k, v = tokens(5, 2, 32) * 4, tokens(5, 2, 16, seed=1)
    numbers = pool(store, scales={0: (0.5, 3.0)}).layer(0)
    cache = pool(store, scales={0: tensors}).layer(0)
    assert cache.k_scale is tensors[0]
    for each in (numbers, cache):
        write_kv(each, k, v, SLOTS)
    for (a, _), (b, _) in zip(numbers.parts(), cache.parts(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    for a, b in zip(
        read_kv(numbers, SLOTS, torch.float32), read_kv(cache, SLOTS, torch.float32), strict=True
    ):
        assert torch.equal(a, b)
    assert read_kv(cache, SLOTS[0], torch.float32)[0].shape == (2, 32), "it adds no dimension"
    tensors[0].mul_(2)  # calibrated later
    assert torch.equal(
        read_kv(cache, SLOTS, torch.float32)[0], 2 * read_kv(numbers, SLOTS, torch.float32)[0]
    )


def test_a_scale_of_more_dims_than_tokens_have_is_refused():
    scale = torch.ones(1, 1, 1, 1)
    with pytest.raises(UsageError, match=r"k_scale torch.float32 \[1, 1, 1, 1\].*float32 \[1\]"):
        pool(QUANTISED[0], scales={0: (scale, 1.0)})


@pytest.mark.parametrize("store", QUANTISED)
def test_a_scale_in_a_tensor_is_never_read_on_the_host(store):
    meta = torch.device("meta")  # which has no numbers to read
    scales = {0: (torch.ones(1, device=meta), torch.ones(1, device=meta))}
    cache = pool(store, device=meta, scales=scales).layer(0)
    k, v = (torch.empty(5, 2, d, device=meta) for d in (32, 16))
    write_kv(cache, k, v, SLOTS.to(meta))
    assert read_kv(cache, SLOTS.to(meta), torch.float32)[0].shape == (5, 2, 32)


@pytest.mark.parametrize(
    ("store", "scale", "message"),
    [
        ("fp8_e4m3", torch.ones(2), r"k_scale torch.float32 \[2\] on cpu \(expected a number, or"),
        ("fp8_e4m3", torch.ones(1, dtype=torch.float64), r"k_scale torch.float64 \[1\] on cpu"),
        ("fp8_e5m2", torch.ones(1, device="meta"), r"on meta \(.* float32 \[1\] on cpu\)"),
        ("bf16", torch.ones(1), "only FP8 and FP4 have scales"),
    ],
)
def test_a_scale_in_a_tensor_has_one_form(store, scale, message):
    with pytest.raises(UsageError, match=message):
        pool(store, scales={0: (scale, 1.0)})


def test_latents_have_no_scale_of_values_in_a_tensor_either():
    with pytest.raises(UsageError, match="for a latent cache, which stores no V"):
        pool("fp8_e4m3", kind="mla", scales={0: (1.0, torch.ones(1))})


@pytest.mark.parametrize("store", ["bf16", "fp8_e4m3", "fp4_e2m1"])
def test_mla_stores_the_latent_once(store):
    mla = layer(heads=1, d=576, dv=512)
    cache = pool(store, layers=[mla], kind="mla").layer(0)
    assert cache.v is None
    latent = tokens(5, 1, 576)
    write_kv(cache, latent, None, SLOTS)
    k, v = read_kv(cache, SLOTS, torch.float32)
    assert v is None
    assert k.shape == (5, 1, 576)
    assert (k - latent).abs().max() < 1.0
    assert read_pages(cache, torch.tensor([1]), torch.bfloat16)[0].shape == (1, PAGE, 1, 576)


def test_nothing_to_write():
    cache = pool().layer(0)
    write_kv(cache, None, None, SLOTS)
    assert not cache.k.any()


def test_writing_leaves_no_trace_in_autograd():
    cache = pool().layer(0)
    write_kv(cache, tokens(5, 2, 32).requires_grad_(), tokens(5, 2, 16), SLOTS)
    assert not cache.k.requires_grad


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("store", ["fp32", "fp8_e5m2", "fp4_e2m1"])
def test_copy_reads_everything_before_it_writes(store, layout):
    cache = pool(store, layout, index_dim=8).layer(0)
    everywhere = torch.arange(PAGES * PAGE)
    write_kv(cache, tokens(24, 2, 32), tokens(24, 2, 16, seed=1), everywhere)
    write_index(cache, tokens(24, 8), everywhere)
    before = [*read_kv(cache, everywhere, torch.float32), cache.index.flatten(0, 1).clone()]
    src, dst = torch.tensor([8, 9, 10, 11, 20]), torch.tensor([9, 10, 11, 8, 9 + 4])
    copy_slots(cache, src, dst)
    after = [*read_kv(cache, everywhere, torch.float32), cache.index.flatten(0, 1)]
    for was, now in zip(before, after, strict=True):
        want = was.clone()
        want[dst] = was[src]
        assert torch.equal(now, want)


def test_views_own_their_pages():
    layers = [layer(0), layer(1, view="window")]
    p = pool(layers=layers, num_pages={"full": 9, "window": 3})
    assert (p.layer(0).num_pages, p.layer(1).num_pages) == (9, 3)
    with pytest.raises(UsageError, match="layer 1: 0 pages for its view 'window'"):
        pool(layers=layers, num_pages={"full": 9})


@pytest.mark.parametrize(
    ("store", "kind", "index_dim", "bytes_per_token"),
    [
        ("fp32", "mha", 0, 2 * (32 + 16) * 4),
        ("fp8_e5m2", "mha", 0, 2 * (32 + 16)),
        ("fp4_e2m1", "mha", 0, 2 * (16 + 8 + 2 + 1)),
        ("bf16", "mla", 0, 32 * 2),
        ("fp4_e2m1", "dsa", 128, (16 + 2) + 256),
    ],
)
def test_memory_is_known_beforehand(store, kind, index_dim, bytes_per_token):
    layers = [layer(i, heads=2 if kind == "mha" else 1) for i in range(3)]
    asked = {"page_size": 16, "kv_cache_dtype": store, "kind": kind, "index_dim": index_dim}
    page = KVPool.bytes_per_page(layers, **asked)
    assert page == 3 * 16 * bytes_per_token
    fits = KVPool.pages_that_fit(10 * page + page // 2, layers, **asked)
    assert fits == 10
    assert KVPool.pages_that_fit(-page, layers, **asked) == 0  # memory that is spent already
    made = KVPool(layers, num_pages=fits, **asked)
    assert made.nbytes == 10 * page


@pytest.mark.parametrize("latent", [False, True])
def test_v_goes_where_the_cache_stores_one(latent):
    kind = "mla" if latent else "mha"
    cache = pool(kind=kind, layers=[layer(heads=1)]).layer(0)
    k, v = tokens(5, 1, 32), tokens(5, 1, 16)
    message = "stores no values" if latent else "v is required: this cache stores values"
    with pytest.raises(UsageError, match=message):
        write_kv(cache, k, v if latent else None, SLOTS)
    assert not cache.k.any()
    write_kv(cache, k, None if latent else v, SLOTS)


def test_errors_say_what_is_possible():
    with pytest.raises(UsageError, match=r"'fp8_e4m4': known: .*fp8_e4m3"):
        pool("fp8_e4m4")
    with pytest.raises(UsageError, match="page_size 0"):
        pool(page_size=0)
    with pytest.raises(
        UnsupportedError, match=r"head dims \[40, 16\] in fp4_e2m1.*multiples of 16"
    ):
        pool("fp4_e2m1", layers=[layer(d=40)])
    with pytest.raises(UsageError, match=r"layer 7 has no KV cache \(layers: \[0\]\)"):
        pool().layer(7)


@pytest.mark.parametrize("store", TORCH_DTYPES)
def test_nothing_syncs(store):
    """A meta tensor has no values: reading one raises."""
    cache = pool(store, device="meta").layer(0)
    slots = torch.zeros(5, dtype=torch.int64, device="meta")
    write_kv(cache, tokens(5, 2, 32).to("meta"), tokens(5, 2, 16).to("meta"), slots)
    assert read_kv(cache, slots, torch.bfloat16)[0].shape == (5, 2, 32)
    copy_slots(cache, slots, slots)


@pytest.mark.parametrize(
    ("device_type", "triton", "in_one_launch"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False), ("xpu", True, False)],
)
def test_a_gpu_with_triton_writes_in_one_launch(device_type, triton, in_one_launch, monkeypatch):
    asked = []

    def found(name):
        asked.append(name)
        return object() if triton else None

    kernel = types.ModuleType("attn_core.ops.triton.kv")
    kernel.write_kv = object()
    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr("attn_core.ops.kv._writer", functools.cache(kv._writer.__wrapped__))
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    monkeypatch.setattr("attn_core.ops.triton.kv", kernel, raising=False)
    chosen = [kv._writer(device_type, latents=False) for _ in range(3)]
    assert chosen == [kernel.write_kv if in_one_launch else kv._write] * 3
    assert asked == ["triton"] * (device_type == "cuda"), "it is decided once"


@pytest.mark.parametrize(
    ("device_type", "quantised", "by_triton"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_a_gpu_with_triton_reads_quantised_pages_in_one_launch(
    device_type, quantised, by_triton, monkeypatch
):
    kernel = types.ModuleType("attn_core.ops.triton.read")
    kernel.read_pages = object()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    monkeypatch.setattr("attn_core.ops.triton.read", kernel, raising=False)
    chosen = kv._page_reader.__wrapped__(device_type, quantised)
    assert (chosen is kernel.read_pages) == by_triton


def test_what_was_chosen_for_the_device_writes(monkeypatch):
    seen = []
    monkeypatch.setattr(kv, "_writer", lambda kind, latents: seen.append(kind) or kv._write)
    cache = pool().layer(0)
    write_kv(cache, tokens(5, 2, 32), tokens(5, 2, 16), SLOTS)
    write_kv(cache, None, None, SLOTS)
    assert seen == ["cpu"]
    with pytest.raises(UsageError, match="v is required: this cache stores values"):
        write_kv(cache, tokens(5, 2, 32), None, SLOTS)
    assert seen == ["cpu"], "nothing is written"


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("apart", [False, True])
def test_padding_is_not_copied(layout, apart):
    """Of strided pools and of HND, -1 was the last slot."""
    shape = (3, 2, 1, 4) if layout == "NHD" else (3, 1, 2, 4)
    stores = [torch.randn(*shape[:-1], 8)[..., :4] if apart else torch.randn(shape) for _ in "kv"]
    cache = LayerCache(k=stores[0], v=stores[1], layout=layout)
    before = read_kv(cache, torch.arange(6), torch.float32)
    copy_slots(cache, torch.tensor([2, -1, 3]), torch.tensor([-1, 4, 1]))
    for old, new in zip(before, read_kv(cache, torch.arange(6), torch.float32), strict=True):
        assert torch.equal(new, old[[0, 3, 2, 3, 4, 5]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "MHA"}, "kind 'MHA' .expected 'mha', 'mla' or 'dsa'"),
        ({"page_size": 4.0}, "page_size 4.0 .expected an integer"),
        ({"num_pages": 6.0}, "layer 0: 6.0 pages"),
        ({"num_pages": {"full": 6.5}}, "layer 0: 6.5 pages"),
        ({"layers": [layer(), layer(heads=1)]}, "two layers of layer_id 0"),
        ({"store": "fp8_e4m3", "scales": {0: 2.0}}, r"scales of layer 0: 2.0 .expected .k_scale"),
        ({"store": "fp8_e4m3", "scales": {7: (2.0, 2.0)}}, r"scales of layers \[7\] .layers: .0"),
        ({"kind": "dsa", "index_dim": 8, "index_layers": [0, 3]}, r"index_layers of layers \[3\]"),
        ({"kind": "mla", "layers": [layer(heads=2)]}, "layer 0 of 2 KV heads, .* one latent of a"),
        ({"kind": "dsa", "layers": [layer(heads=1, d=16, dv=32)]}, "head_dim 16 and v_head_dim 32"),
    ],
)
def test_a_pool_that_would_be_another_one_is_refused(change, message):
    with pytest.raises(UsageError, match=message):
        pool(**change)


def test_a_pool_takes_the_integers_of_an_array():
    pages = torch.tensor([6, PAGE]).numpy()
    assert pool(num_pages=pages[0], page_size=pages[1]).layer(0).k.shape[:2] == (6, PAGE)


@pytest.mark.parametrize("device", ["cuda:99", "banana", ""])
def test_a_pool_names_a_device_that_torch_does_not_have(device):
    with pytest.raises(UsageError, match=f"device '{device}': torch has no tensors there"):
        KVPool([], num_pages=2, page_size=4, kv_cache_dtype="bf16", device=device)
