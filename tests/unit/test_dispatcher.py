"""The dispatcher sends every mode to its backend, writes the cache first, refuses, and no more."""

import dataclasses
import inspect
import sys
import types

import pytest
import torch
from attn_core.backend import AttentionBackend, BackendConfig
from attn_core.capabilities import TREES, BackendSpec, Capabilities, Device, Phase
from attn_core.dispatcher import HybridDispatcher
from attn_core.errors import (
    BackendNotImplementedError,
    BatchError,
    UnsupportedError,
    UsageError,
)
from attn_core.forward import AttentionLayer, CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.kv_cache import KVPool, read_kv
from attn_core.plugins import Registry
from attn_core.selection import Selection

M = ForwardMode
TABLE = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
HQ, HKV, D, DV = 4, 2, 8, 4


class Recorder(AttentionBackend):
    """Records each call, and what the cache held at that moment."""

    def __init__(self, config):
        super().__init__(config)
        self.calls = []

    def _record(self, name, *args, **kwargs):
        self.calls.append((name, args, kwargs))
        return f"{self.config.name}.{name}"

    def init_forward_metadata(self, batch):
        return self._record("init_forward_metadata", batch)

    def forward_extend(self, q, k, v, layer, cache, batch, metadata, **kwargs):
        stored = None
        if layer.view in batch.views:
            stored = read_kv(cache, batch.views[layer.view].out_cache_loc, torch.float32)
        return self._record("forward_extend", q, k, v, layer, stored, batch, metadata, **kwargs)

    def forward_decode(self, q, k, v, layer, cache, batch, metadata, **kwargs):
        stored = read_kv(cache, batch.views[layer.view].out_cache_loc, torch.float32)
        return self._record("forward_decode", q, k, v, layer, stored, batch, metadata, **kwargs)

    def forward_ragged(self, *args, **kwargs):
        return self._record("forward_ragged", *args, **kwargs)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self._record("init_cuda_graph_state", max_bs, max_num_tokens)

    def init_forward_metadata_capture_cuda_graph(self, batch):
        return self._record("init_forward_metadata_capture_cuda_graph", batch)

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        self._record("init_forward_metadata_replay_cuda_graph", batch, metadata)

    def get_cuda_graph_seq_len_fill_value(self):
        self._record("get_cuda_graph_seq_len_fill_value")
        return 3


ROW = Capabilities(
    kind="mha",
    device="any",
    dtypes={"fp32"},
    kv_dtypes={"fp32"},
    priority=1,
    lse=True,
    max_topk=TREES,
    cuda_graph="full",
)
LAYERS = tuple(
    AttentionLayer(
        layer_id=i,
        num_q_heads=HQ,
        num_kv_heads=HKV,
        head_dim=D,
        v_head_dim=DV,
        scale=1.0,
        view=view,
    )
    for i, view in enumerate(("full", "window"))
)
CONFIG = BackendConfig(
    name="prefiller",
    row=ROW,
    layers=LAYERS,
    page_size=4,
    dtype="fp32",
    kv_cache_dtype="fp32",
    device=torch.device("cpu"),
)


def recorder(name, *, layers=LAYERS, **row):
    row = dataclasses.replace(ROW, **row)
    return Recorder(dataclasses.replace(CONFIG, name=name, row=row, layers=layers))


def make(mode="prefill", prefill=None, decode=None, **more):
    """Two backends; `mode` is the one that verifies and drafts, None without speculation."""
    pre, dec = prefill or recorder("prefiller"), decode or recorder("decoder")
    routes = {"prefill": pre, "decode": dec, **more}
    if mode:
        routes["verify"] = routes["draft"] = pre if mode == "prefill" else dec
    pool = KVPool(LAYERS, num_pages=5, page_size=4, kv_cache_dtype="fp32")
    return HybridDispatcher(routes, pool), pre, dec


def batch(mode, **changes):
    decodes = mode in (M.DECODE, M.DRAFT_DECODE)
    n, rows = (1 if decodes else 2), (0 if mode is M.IDLE else 2)
    spec = SpecInfo(topk=1, num_draft_tokens=2) if mode is M.TARGET_VERIFY else None
    lens, new = [6, 3][:rows], [n, n][:rows]
    window = CacheView.build(
        page_table=TABLE[:rows].flip(0), page_size=4, seq_lens=lens, new_lens=new
    )
    return ForwardBatch.build(
        mode,
        query_lens=new,
        seq_lens=lens,
        page_table=TABLE[:rows],
        page_size=4,
        **{"spec": spec, "views": {"window": window}, **changes},
    )


def qkv(n):
    g = torch.Generator().manual_seed(n)
    return [torch.randn(n, h, d, generator=g) for h, d in ((HQ, D), (HKV, D), (HKV, DV))]


ROUTES = [
    (M.EXTEND, "prefiller", "prefiller", "forward_extend"),
    (M.MIXED, "prefiller", "prefiller", "forward_extend"),
    (M.DECODE, "decoder", "decoder", "forward_decode"),
    (M.TARGET_VERIFY, "prefiller", "decoder", "forward_extend"),
    (M.DRAFT_DECODE, "prefiller", "decoder", "forward_decode"),
    (M.DRAFT_EXTEND, "prefiller", "decoder", "forward_extend"),
]


def test_the_table_of_routes_is_whole():
    assert {m for m, *_ in ROUTES} | {M.IDLE} == set(ForwardMode)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("speculation", ["prefill", "decode"])
@pytest.mark.parametrize(("mode", "by_prefill", "by_decode", "method"), ROUTES)
def test_each_mode_goes_to_one_backend_with_the_cache_written(
    mode, by_prefill, by_decode, method, speculation, layer
):
    dispatcher, pre, dec = make(speculation)
    b = batch(mode)
    q, k, v = qkv(b.num_tokens)
    out = torch.empty(b.num_tokens, HQ, DV)
    name = by_prefill if speculation == "prefill" else by_decode
    chosen, other = (pre, dec) if name == "prefiller" else (dec, pre)
    metadata = dispatcher.init_forward_metadata(b)
    assert metadata == f"{name}.init_forward_metadata"
    got = dispatcher.forward(q, k, v, layer, b, metadata, out=out, return_lse=True)
    assert got == f"{name}.{method}"
    assert not other.calls
    (plan, (planned,), _), (called, args, kwargs) = chosen.calls
    assert (plan, called) == ("init_forward_metadata", method)
    assert planned is b
    for have, want in zip((*args[:4], *args[5:]), (q, k, v, layer, b, metadata), strict=True):
        assert have is want
    assert kwargs == {"out": out, "return_lse": True, "topk_indices": None}
    # what the backend saw in the slots of this layer's view
    assert torch.equal(args[4][0], k)
    assert torch.equal(args[4][1], v)


def test_idle_asks_nobody_and_gives_empty_outputs():
    dispatcher, pre, dec = make()
    b = batch(M.IDLE)
    q, k, v = qkv(0)
    assert dispatcher.init_forward_metadata(b) is None
    out = dispatcher.forward(q.bfloat16(), k, v, LAYERS[0], b, None)
    assert (out.shape, out.dtype) == ((0, HQ, DV), torch.bfloat16)
    given = torch.empty(0, HQ, DV)
    out, lse = dispatcher.forward(q, k, v, LAYERS[0], b, None, out=given, return_lse=True)
    assert out is given
    assert (lse.shape, lse.dtype) == ((0, HQ), torch.float32)
    assert dispatcher.init_forward_metadata_capture_cuda_graph(b) is None
    dispatcher.init_forward_metadata_replay_cuda_graph(b, None)
    assert not pre.calls + dec.calls


def test_nothing_is_written_without_k_or_where_the_kernel_writes():
    for decode, k_given in ((recorder("d"), False), (recorder("d", fused_kv_write=True), True)):
        dispatcher, _, dec = make(decode=decode)
        b = batch(M.DECODE)
        q, k, v = qkv(2)
        k, v = (k, v) if k_given else (None, None)
        dispatcher.forward(q, k, v, LAYERS[0], b, None)
        args = dec.calls[-1][1]
        assert args[1] is k
        assert not args[4][0].any()


def test_a_shared_kv_layer_needs_no_view_to_write():
    dispatcher, pre, _ = make()
    b = batch(M.EXTEND, views={})
    q, k, v = qkv(4)
    dispatcher.forward(q, None, None, LAYERS[1], b, None)
    with pytest.raises(BatchError, match=r"layer 1 needs view 'window', the batch has \['full'\]"):
        dispatcher.forward(q, k, v, LAYERS[1], b, None)
    assert len(pre.calls) == 1


@pytest.mark.parametrize("mode", [M.TARGET_VERIFY, M.DRAFT_DECODE, M.DRAFT_EXTEND])
def test_without_speculation_nobody_drafts(mode):
    dispatcher, _, _ = make(None)
    with pytest.raises(UnsupportedError, match=r"without speculation.*--speculative-eagle-topk"):
        dispatcher.init_forward_metadata(batch(mode))


def test_every_public_method_of_the_contract_is_routed():
    dispatcher, pre, dec = make("prefill", encode=recorder("encoder"))
    q, k, v = qkv(2)
    cu = torch.tensor([0, 2], dtype=torch.int32)
    extend, decode = batch(M.EXTEND), batch(M.DECODE)
    dispatcher.init_forward_metadata(extend)
    dispatcher.forward(*qkv(4), LAYERS[0], extend, None)
    dispatcher.forward(q, k, v, LAYERS[0], decode, None)
    dispatcher.forward_ragged(q, k, v, LAYERS[0], cu, cu, 2, 2, causal=True)
    dispatcher.init_cuda_graph_state(8, 16)
    dispatcher.init_forward_metadata_capture_cuda_graph(decode)
    dispatcher.init_forward_metadata_replay_cuda_graph(decode, "plan")
    assert dispatcher.get_cuda_graph_seq_len_fill_value() == 3
    contract = {
        name
        for name, _ in inspect.getmembers(AttentionBackend, inspect.isfunction)
        if not name.startswith("_")
    }
    assert {name for name, *_ in pre.calls + dec.calls} == contract
    # and the dispatcher offers each under its own name, with the contract's parameters
    for name in contract - {"forward_extend", "forward_decode"}:
        theirs = list(inspect.signature(getattr(AttentionBackend, name)).parameters)
        ours = list(inspect.signature(getattr(HybridDispatcher, name)).parameters)
        assert ours[: len(theirs)] == theirs, name


def test_ragged_goes_to_prefill_or_to_the_encoder():
    encoder = recorder("encoder")
    dispatcher, pre, _ = make(encode=encoder)
    q, k, v = qkv(2)
    cu, out = torch.tensor([0, 2], dtype=torch.int32), torch.empty(2, HQ, DV)
    args = (q, k, v, LAYERS[0], cu, cu, 2, 2)
    more = {"causal": False, "out": out, "return_lse": True}
    assert dispatcher.forward_ragged(*args, **more) == "prefiller.forward_ragged"
    assert dispatcher.forward_ragged(*args, **more, role="encode") == "encoder.forward_ragged"
    for b in (pre, encoder):
        ((_, got, kwargs),) = b.calls
        assert all(x is y for x, y in zip(got, args, strict=True))
        assert kwargs == more
    with pytest.raises(UnsupportedError, match=r"no backend for encode: .*vision config"):
        make()[0].forward_ragged(*args, causal=True, role="encode")


@pytest.mark.parametrize(
    ("speculation", "prefill", "decode", "captured"),
    [
        (None, "full", "full", ["decoder"]),
        (None, "full", "none", []),
        ("prefill", "full", "full", ["decoder", "prefiller"]),
        ("prefill", "none", "full", ["decoder"]),
        ("prefill", "full", "none", []),  # no graphs for the pair
        ("decode", "full", "full", ["decoder"]),
        ("decode", "full", "decode", ["decoder"]),
    ],
)
def test_what_is_captured(speculation, prefill, decode, captured):
    dispatcher, pre, dec = make(
        speculation,
        recorder("prefiller", cuda_graph=prefill),
        recorder("decoder", cuda_graph=decode),
    )
    assert [b.config.name for b in dispatcher.captured] == captured
    dispatcher.init_cuda_graph_state(8, 16)
    for b in (pre, dec):
        want = [("init_cuda_graph_state", (8, 16), {})] if b.config.name in captured else []
        assert b.calls == want


def test_one_backend_for_both_is_captured_once():
    one = recorder("one")
    dispatcher, _, _ = make("prefill", one, one)
    assert dispatcher.captured == (one,)


def test_capture_and_replay_go_to_the_backend_of_the_mode():
    dispatcher, pre, dec = make("prefill")
    for mode, owner in ((M.DECODE, dec), (M.TARGET_VERIFY, pre), (M.DRAFT_DECODE, pre)):
        b = batch(mode)
        metadata = dispatcher.init_forward_metadata_capture_cuda_graph(b)
        assert metadata.startswith(owner.config.name)
        dispatcher.init_forward_metadata_replay_cuda_graph(b, metadata)
        replayed = owner.calls[-1]
        assert replayed == ("init_forward_metadata_replay_cuda_graph", (b, metadata), {})
    dispatcher, pre, _ = make("prefill", recorder("prefiller", cuda_graph="none"))
    with pytest.raises(
        UnsupportedError, match=r"target_verify passes run on prefiller.*captured: decoder"
    ):
        dispatcher.init_forward_metadata_capture_cuda_graph(batch(M.TARGET_VERIFY))
    assert not pre.calls


@pytest.mark.parametrize(
    ("change", "flag", "message"),
    [
        ({"sinks": torch.zeros(HQ)}, "sinks", "attention sinks"),
        ({"logit_cap": 30.0}, "logit_cap", "logit_cap 30.0"),
        ({"sliding_window": 128}, "sliding_window", "window 128"),
        ({"is_cross": True, "is_causal": False}, "cross_attention", "cross attention"),
        ({"is_causal": False}, "encoder", "attention that is not causal"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_field_that_a_row_does_not_honour_is_refused_at_construction(role, change, flag, message):
    layers = (LAYERS[0], dataclasses.replace(LAYERS[1], **change))
    with pytest.raises(UnsupportedError, match=f"layer 1 needs {message}, .* of picky"):
        make(**{role: recorder("picky", layers=layers)})
    make(**{role: recorder("able", layers=layers, **{flag: True})})


def test_an_lse_is_refused_where_the_row_has_none():
    dispatcher, pre, _ = make(prefill=recorder("p", lse=False))
    q, k, v = qkv(4)
    with pytest.raises(UnsupportedError, match="row of p returns no log-sum-exp"):
        dispatcher.forward(q, k, v, LAYERS[0], batch(M.EXTEND), None, return_lse=True)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="row of p returns no log-sum-exp"):
        dispatcher.forward_ragged(q, k, v, LAYERS[0], cu, cu, 4, 4, causal=True, return_lse=True)
    assert not pre.calls
    assert not dispatcher.caches.layer(0).k.any()
    dispatcher.forward(q, k, v, LAYERS[0], batch(M.EXTEND), None)


def test_topk_indices_are_for_sparse_rows():
    indices = torch.zeros(4, 2, dtype=torch.int32)
    q, k, v = qkv(4)
    dispatcher, _, _ = make()
    with pytest.raises(UnsupportedError, match="topk_indices: the chosen row of prefiller is of"):
        dispatcher.forward(q, k, v, LAYERS[0], batch(M.EXTEND), None, topk_indices=indices)
    dispatcher, pre, _ = make(prefill=recorder("sparse", kind="dsa"))
    dispatcher.forward(q, k, v, LAYERS[0], batch(M.EXTEND), None, topk_indices=indices)
    assert pre.calls[-1][2]["topk_indices"] is indices


@pytest.mark.parametrize(
    ("limit", "topk", "tree", "message"),
    [
        (0, 1, False, "asked to verify topk 1, its chosen row verifies no drafts"),
        (1, 1, False, None),
        (1, 1, True, "topk 1 with a tree_mask, .* chains, topk 1 without"),
        (1, 2, True, "topk 2 with a tree_mask, .* chains"),
        (4, 4, True, None),
        (4, 5, True, "trees up to topk 4"),
        (TREES, 64, True, None),
    ],
)
def test_drafts_that_a_row_cannot_verify_are_refused(limit, topk, tree, message):
    dispatcher, pre, _ = make(prefill=recorder("p", max_topk=limit))
    mask = torch.ones(2, 2, 2).tril().bool() if tree else None
    b = batch(M.TARGET_VERIFY, spec=SpecInfo(topk=topk, num_draft_tokens=2, tree_mask=mask))
    for plan in (
        dispatcher.init_forward_metadata,
        dispatcher.init_forward_metadata_capture_cuda_graph,
    ):
        if message is None:
            plan(b)
        else:
            with pytest.raises(UnsupportedError, match=message):
                plan(b)
    assert len(pre.calls) == (0 if message else 2)


def test_prefill_and_decode_are_required():
    with pytest.raises(UsageError, match=r"no backend for 'decode' \(routes: \['prefill'\]\)"):
        HybridDispatcher(
            {"prefill": recorder("p")}, KVPool([], num_pages=1, page_size=1, kv_cache_dtype="fp32")
        )


# from a selection

DECODE_ROW = dataclasses.replace(ROW, priority=2, phases={Phase.DECODE})
ENCODE_ROW = dataclasses.replace(ROW, phases={Phase.ENCODE}, encoder=True)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setitem(sys.modules, "recording", types.SimpleNamespace(Recorder=Recorder))
    specs = [
        BackendSpec(
            name=name, capabilities=[ROW, DECODE_ROW, ENCODE_ROW], create="recording:Recorder"
        )
        for name in ("a", "b")
    ]
    return Registry(backends={("softmax", s.name): s for s in specs}, origins={}, broken=())


def selection(prefill="a", decode="b", verify=None, multimodal=None, decode_row=DECODE_ROW):
    rows = {"prefill": ROW, "decode": decode_row}
    if verify:
        rows["verify"] = rows["draft"] = ROW if verify == prefill else decode_row
    if multimodal:
        rows["multimodal"] = ENCODE_ROW
    return Selection(
        prefill=prefill,
        decode=decode,
        verify=verify,
        draft=verify,
        multimodal=multimodal,
        page_size=4,
        kv_cache_dtype="fp32",
        device=Device("cpu"),
        rows=rows,
    )


def from_selection(chosen, registry, **more):
    pool = KVPool(LAYERS, num_pages=3, page_size=4, kv_cache_dtype="fp32")
    return HybridDispatcher.from_selection(chosen, registry, LAYERS, pool, dtype="fp32", **more)


def test_from_a_selection_each_role_gets_its_backend(registry):
    vision = (dataclasses.replace(LAYERS[0], is_causal=False),)
    d = from_selection(
        selection(verify="a", multimodal="a"), registry, vision_layers=vision, max_bs=7, topk=2
    )
    assert {r: b.config.name for r, b in d.routes.items()} == {
        "prefill": "a",
        "decode": "b",
        "verify": "a",
        "draft": "a",
        "encode": "a",
    }
    assert d.routes["prefill"] is d.routes["verify"] is d.routes["draft"]
    assert d.routes["encode"] is not d.routes["prefill"]
    config = d.routes["decode"].config
    assert (config.row, config.layers) == (DECODE_ROW, LAYERS)
    assert (config.max_bs, config.topk, config.page_size) == (7, 2, 4)
    assert (config.dtype, config.kv_cache_dtype, config.device.type) == ("fp32", "fp32", "cpu")
    assert d.routes["encode"].config.layers == vision


def test_roles_with_the_same_row_of_the_same_backend_share_an_instance(registry):
    same = from_selection(selection("a", "a", decode_row=ROW), registry).routes
    assert same["prefill"] is same["decode"]
    assert "verify" not in same
    split = from_selection(selection("a", "a"), registry).routes
    assert split["prefill"] is not split["decode"]


def test_the_pool_must_be_the_selections(registry):
    pool = KVPool(LAYERS, num_pages=3, page_size=8, kv_cache_dtype="fp32")
    with pytest.raises(UsageError, match=r"the pool is \(8, 'fp32', 'NHD'\), the selection \(4,"):
        HybridDispatcher.from_selection(selection(), registry, LAYERS, pool, dtype="fp32")


def test_a_declared_backend_says_that_it_is_not_built():
    spec = BackendSpec(name="a", capabilities=[ROW], create="attn_core.backend:DeclaredBackend")
    declared = Registry(backends={("softmax", "a"): spec}, origins={}, broken=())
    with pytest.raises(BackendNotImplementedError, match="a is declared"):
        from_selection(selection("a", "a", decode_row=ROW), declared)
