"""The Hopper kernels against float64, over every feature they take; NaN in all that is nobody's."""

import itertools
import random

import pytest
import torch
from attn_core.backends.triton import backend, scheduler, shared
from attn_core.backends.triton.tuning import Launch
from attn_core.cache.page_table import slot_table
from attn_core.cache.pool import KVPool
from attn_core.ops.kv import write_kv
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer
from sharers import Sharers, expected_spans, planned_spans, random_trees, verify
from triton_passes import launches, make_layer, oracle

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

KINDS = ("extend", "decode", "chain", "tree", "cross", "ragged", "mla", "mla-chain", "mla-extend")
FEATURES = ("plain", "window", "cap", "sinks", "window-cap-sinks")
PAGES = (1, 8, 16, 64, 128, 256)


def case_list():
    """Every kind with every feature and every page size; the rest turns along."""
    rng = random.Random(0)
    for kind, feature, page in itertools.product(KINDS, FEATURES, PAGES):
        windowed = "window" in feature and kind in ("cross", "ragged")
        if windowed or (kind.startswith("mla") and (feature not in ("plain", "cap") or page == 1)):
            continue
        if kind == "tree" and "window" in feature:
            continue
        if rng.random() < 0.5 and feature != "plain":
            continue
        yield (
            kind,
            feature,
            page,
            rng.choice((64, 128) if kind in ("decode", "chain", "tree") else (64, 128, 256)),
            rng.choice((1, 4, 7)),
            rng.choice((torch.bfloat16, torch.float16)),
            rng.choice(("NHD", "HND")),
            rng.random() < 0.3 and kind != "mla-extend",  # fixed, which has the portable kernel
        )


@pytest.mark.parametrize("case", case_list(), ids=lambda c: "-".join(map(str, c)))
def test_equals_float64(case, monkeypatch):
    kind, feature, page, dim, group, dtype, layout, fixed = case
    torch.manual_seed(0)
    rng, latent = random.Random(str(case)), kind.startswith("mla")
    heads = 1 if latent else 2
    group = rng.choice((24, 64, 128)) if latent else group
    layer = AttentionLayer(
        layer_id=0,
        num_q_heads=heads * group,
        num_kv_heads=heads,
        head_dim=576 if latent else dim,
        v_head_dim=512 if latent else dim,
        scale=dim**-0.5,
        logit_cap=3.0 if "cap" in feature else None,
        sliding_window=100 if "window" in feature else None,
        sinks=torch.randn(heads * group, device="cuda") if "sinks" in feature else None,
        is_cross=kind == "cross",
        view="full",
    )
    drafts = 5
    lengths = [1, page + 1, 300, 1023, 77, 640]
    lengths = [n + drafts for n in lengths]
    if kind in ("decode", "mla"):
        queries = [1] * 6
    elif kind in ("chain", "tree", "mla-chain"):
        queries = [drafts] * 6
    else:
        queries = [rng.choice((1, n // 2 or 1, n)) for n in lengths]
        queries[3] = lengths[3]  # many enough that no keys are split
    mode = {"decode": ForwardMode.DECODE, "mla": ForwardMode.DECODE}.get(kind, ForwardMode.EXTEND)
    spec = None
    if kind in ("chain", "tree", "mla-chain"):
        mode = ForwardMode.TARGET_VERIFY
        tree = torch.rand(6, drafts, drafts, device="cuda") < 0.5
        tree = (tree | torch.eye(drafts, dtype=torch.bool, device="cuda")).tril()
        spec = SpecInfo(
            topk=2 if kind == "tree" else 1,
            num_draft_tokens=drafts,
            tree_mask=tree if kind == "tree" else None,
        )
    pages = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(pages), device="cuda").int() + 1
    table = torch.zeros(6, max(pages), dtype=torch.int32, device="cuda")
    for b, n in enumerate(pages):
        table[b, :n] = order[sum(pages[:b]) : sum(pages[:b]) + n]
    pool = KVPool(
        [layer],
        num_pages=1 + sum(pages),
        page_size=page,
        kv_cache_dtype={torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype],
        device="cuda",
        kind="mla" if latent else "mha",
        layout="NHD" if latent else layout,
    )
    cache = pool.layer(0)
    for store in (cache.k, cache.v):
        if store is not None:
            store.fill_(float("nan"))
    keys, values, starts = [], [], [0]
    window = layer.sliding_window
    for b, n in enumerate(lengths):
        k = torch.randn(n, heads, layer.head_dim, device="cuda", dtype=dtype)
        v = torch.randn(n, heads, dim, device="cuda", dtype=dtype)
        v = k[..., :512] if latent else v
        slots = slot_table(table[b : b + 1], page, n)[0].long()
        seen_from = 0 if window is None else max(0, n - queries[b] - window + 1)
        write_kv(cache, k[seen_from:], None if latent else v[seen_from:], slots[seen_from:])
        keys.append(k)
        values.append(v)
        starts.append(starts[-1] + queries[b])
    q = torch.randn(starts[-1], heads * group, layer.head_dim, device="cuda", dtype=dtype)
    batch = ForwardBatch.build(
        mode,
        query_lens=queries,
        seq_lens=lengths,
        page_table=table,
        page_size=page,
        spec=spec,
    )
    row = next(
        r
        for r in load_plugins().get("triton").capabilities
        if r.device == "cuda"
        and r.kind == ("mla" if latent else "mha")
        and (not r.archs or "sm90" in r.archs)
    )
    config = BackendConfig(
        name="triton",
        row=row,
        layers=(layer,),
        page_size=page,
        dtype=pool.kv_cache_dtype,
        kv_cache_dtype=pool.kv_cache_dtype,
        device=torch.device("cuda"),
        deterministic=fixed,
    )
    if kind in ("decode", "chain", "tree"):  # whatever the heuristics prefer
        launch = Launch(block_m=64, block_n=64, warps=4, stages=2, ctas_per_sm=2)
        monkeypatch.setattr(scheduler, "decode_launch", lambda *a, **k: launch)
    made = backend.Triton(config)
    with launches() as names:
        if kind == "ragged":
            cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
            plain = (torch.cat(keys), torch.cat(values))
            actual = made.forward_ragged(
                q, *plain, layer, batch.cu_seqlens_q, cu, max(queries), max(lengths),
                causal=False, return_lse=True,
            )  # fmt: skip
        else:
            plan = made.init_forward_metadata(batch)
            actual = made.forward(q, None, None, layer, cache, batch, plan, return_lse=True)
    hopper = {"extend_hopper", "decode_hopper", "decode_mla_hopper"}
    assert hopper & {*names}, "the portable kernel ran"
    for b, n in enumerate(lengths):
        i = torch.arange(queries[b], device="cuda")[:, None] + n - queries[b]
        j = torch.arange(n, device="cuda")[None, :]
        seen = j <= i
        if kind in ("cross", "ragged"):
            seen = torch.ones_like(seen)
        elif window is not None:
            seen = seen & (j > i - window)
        if kind == "tree":
            seen = seen.clone()
            seen[:, n - drafts :] = tree[b]
        mine = slice(starts[b], starts[b + 1])
        want, lse = oracle(layer, q[mine], keys[b], values[b], seen)
        error = (actual[0][mine].double() - want).norm() / want.norm()
        assert error < (6e-3 if dtype == torch.bfloat16 else 1e-3), (b, float(error))
        torch.testing.assert_close(actual[1][mine].double(), lse, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_deterministic_prompt_does_not_depend_on_its_neighbour(dim):
    """The tiles of a launch follow the longest request, but not where that would change bits."""
    torch.manual_seed(0)
    layer = AttentionLayer(
        layer_id=0, num_q_heads=8, num_kv_heads=2, head_dim=dim, v_head_dim=dim, scale=dim**-0.5,
        view="full",
    )  # fmt: skip
    lengths = [100, 3000]
    pool = KVPool(
        [layer], num_pages=200, page_size=16, kv_cache_dtype="bf16", device="cuda", kind="mha"
    )
    cache = pool.layer(0)
    for store in (cache.k, cache.v):
        assert store is not None
        store.normal_()
    table = torch.arange(1, 1 + 2 * 188, dtype=torch.int32, device="cuda").view(2, 188) % 200
    q = torch.randn(sum(lengths), 8, dim, device="cuda", dtype=torch.bfloat16)

    def first(requests, *, fixed):
        batch = ForwardBatch.build(
            ForwardMode.EXTEND,
            query_lens=lengths[:requests],
            seq_lens=lengths[:requests],
            page_table=table[:requests],
            page_size=16,
        )
        rows = load_plugins().get("triton").capabilities
        row = next(r for r in rows if r.device == "cuda" and "sm90" in (r.archs or ("sm90",)))
        config = BackendConfig(
            name="triton", row=row, layers=(layer,), page_size=16, dtype="bf16",
            kv_cache_dtype="bf16", device=torch.device("cuda"), deterministic=fixed,
        )  # fmt: skip
        made = backend.Triton(config)
        plan = made.init_forward_metadata(batch)
        out = made.forward(q[: sum(lengths[:requests])], None, None, layer, cache, batch, plan)
        return out[: lengths[0]]

    assert torch.equal(first(1, fixed=True), first(2, fixed=True))
    assert not torch.equal(first(1, fixed=False), first(2, fixed=False)), "one tile for both"


@pytest.mark.parametrize("page", [16, 64, 128, 256])
@pytest.mark.parametrize("kind", ["tree", "chain", "extend"])
def test_tiles_of_128_rows_that_requests_share(kind, page, monkeypatch):
    """Of 19 requests all but one share; NaN lies in the pages that are nobody's."""
    monkeypatch.setattr(shared, "shared_granule", lambda *args: 256)
    rng = random.Random(f"{kind} {page}")
    sinks = torch.randn(28, device="cuda")
    layer = make_layer(4, 7, 128, sinks=sinks, logit_cap=rng.choice((None, 3.0)))
    lengths = [rng.randint(800, 1500) for _ in range(19)]
    common = [0, *[768 // page] * 7, 0, *[512 // page] * 5, *[768 // page] * 5]
    dtype, layout = rng.choice(("bf16", "fp16")), rng.choice(("NHD", "HND"))
    sharers = Sharers(layer, lengths, common, page=page, dtype=dtype, layout=layout)
    rows = [rng.randint(1, 8) for _ in lengths] if kind == "extend" else [8] * 19
    rows[3] = 8
    trees = random_trees(19, 8) if kind == "tree" else None
    spec = None if kind == "extend" else verify(8, trees)
    mode = ForwardMode.EXTEND if kind == "extend" else ForwardMode.TARGET_VERIFY
    batch, q = sharers.batch(rows, mode=mode, spec=spec), sharers.draw(sum(rows))
    made = sharers.backend(shared_prefix=True)
    [schedule] = (plan := made.init_forward_metadata(batch)).values()
    assert schedule.split.cuts.launch.block_m == 128
    got = made.forward(q, None, None, layer, sharers.cache, batch, plan, return_lse=True)
    sharers.check(got, q, rows, trees=trees)
    groups = planned_spans(schedule.split, 19)[0]
    assert groups == expected_spans(sharers, rows, 256)
    assert groups
