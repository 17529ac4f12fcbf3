"""The adapter with SGLang's own pools, layers and passes on a CPU, against a dense softmax."""

import pytest
import torch
from attn_core import AttnError, NoBackendError, UnsupportedError, UsageError
from attn_core.integrations import choice
from attn_core.integrations.sglang import page_tables, passes
from attn_core.integrations.sglang.backend import AttnCoreBackend
from engine_passes import (
    Pass,
    attention,
    error,
    mha_pool,
    mla_pool,
    runner,
    swa_pool,
)
from interpreted import interpreted
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sharers import queries_of

N = 5  # drafts of a request


def random_tree(requests):
    own = torch.eye(N, dtype=torch.bool)
    tree = torch.stack([own | (torch.rand(N, N) > 0.5).tril() for _ in range(requests)])
    tree[:, :, 0] = True
    return tree


def speculation(topk):
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": N,
    }


def decode():
    return Pass(ForwardMode.DECODE, (3, 1, 7), (17, 40, 1), (1, 1, 1))


def extend(**changed):
    return Pass(ForwardMode.EXTEND, (3, 1, 7), (17, 0, 33), (6, 19, 1), **changed)


def verify(tree=None, **changed):
    return Pass(ForwardMode.TARGET_VERIFY, (3, 1, 7), (17, 40, 1), (N, N, N), tree, **changed)


PASSES = {
    "decode": (decode, {}),
    "extend": (extend, {}),
    "mixed": (lambda: Pass(ForwardMode.MIXED, (2, 5, 3), (0, 30, 9), (21, 1, 1)), {}),
    "padded": (lambda: extend(padding=7), {}),
    "chain": (verify, speculation(1)),
    "tree": (lambda: verify(random_tree(3)), speculation(3)),
}


def build(module, pool, page, args):
    run = runner([module] if not isinstance(module, list) else module, pool, page, **args)
    return run, AttnCoreBackend(run)


@pytest.mark.parametrize("given_back", [False, True])
def test_the_memory_saver_asks_for_rows_that_need_no_finite_padding(given_back):
    module = attention()
    made = runner([module], mha_pool(page=16), 16, enable_memory_saver=given_back)
    backend = AttnCoreBackend(made)
    assert backend.selection.requirements.finite_padding is not given_back


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_a_dense_softmax(name, page):
    torch.manual_seed(page)
    make, args = PASSES[name]
    module, made = attention(), make()
    run, backend = build(module, mha_pool(page=page), page, args)
    assert error(backend, run, made, module) < 1e-5


@pytest.mark.parametrize("name", ["decode", "extend", "tree"])
def test_windows_read_the_pool_of_their_own(name):
    torch.manual_seed(0)
    make, args = PASSES[name]
    window, plain = attention(0, sliding_window_size=7), attention(1)
    run, backend = build([window, plain], swa_pool(page=16), 16, args)
    assert error(backend, run, make(), window, window=8) < 1e-5  # SGLang's 7 is the token and 7
    assert error(backend, run, make(), plain) < 1e-5


def test_sinks_and_cap_come_with_the_model():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.randn(4))
            self.attn = attention(logit_cap=5.0)

    torch.manual_seed(0)
    layer = Layer()
    run, backend = build(layer, mha_pool(page=16), 16, {})
    assert error(backend, run, extend(), layer.attn, sinks=layer.sinks.detach()) < 1e-5


def latent(dim=80, v=64, kv_heads=1, **changed):
    return attention(heads=4, kv_heads=kv_heads, dim=dim, v_head_dim=v, **changed)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", ["decode", "extend", "chain"])
def test_absorbed_latents(name, page):
    torch.manual_seed(0)
    make, args = PASSES[name]
    module = latent()
    run, backend = build(module, mla_pool(page=page), page, args)
    assert error(backend, run, make(), module) < 1e-5


def test_scales_of_a_checkpoint_are_for_an_fp8_cache():
    module = attention()
    module.k_scale_float = module.v_scale_float = 0.5
    _run, backend = build(module, mha_pool(), 1, {})
    assert backend.pool.layer(0).k_scale == 1.0
    eight = mha_pool(dtype=torch.float8_e4m3fn)
    _run, backend = build(module, eight, 1, {})
    assert (backend.pool.layer(0).k_scale, backend.pool.layer(0).v_scale) == (0.5, 0.5)
    absorbed = latent()
    absorbed.k_scale_float = 0.5
    with pytest.raises(UnsupportedError, match="k_scale"):
        build(absorbed, mla_pool(dtype=torch.float8_e4m3fn), 1, {})


def test_scales_of_a_file_are_read():
    module = attention()
    module.k_scale, module.v_scale = 0.25, 0.5  # as --quantization-param-path leaves them
    eight = mha_pool(dtype=torch.float8_e4m3fn)
    _run, backend = build(module, eight, 1, {})
    assert (backend.pool.layer(0).k_scale, backend.pool.layer(0).v_scale) == (0.25, 0.5)
    module.k_scale_float = module.v_scale_float = 2.0  # the checkpoint's own come first
    _run, backend = build(module, eight, 1, {})
    assert (backend.pool.layer(0).k_scale, backend.pool.layer(0).v_scale) == (2.0, 2.0)


def test_fp8_caches_are_read_with_the_scales_of_their_layer():
    torch.manual_seed(0)
    module = attention()
    module.k_scale_float, module.v_scale_float = 0.25, 0.5
    run, backend = build(module, mha_pool(dtype=torch.float8_e4m3fn), 1, {})
    made = Pass(ForwardMode.EXTEND, (3,), (0,), (1,))
    batch = made.batch(run)
    backend.init_forward_metadata(batch)
    q, k, v = torch.randn(1, 128), torch.randn(1, 2, 32), torch.randn(1, 2, 32)
    out = backend.forward_extend(q, k, v, module, batch).view(2, 2, 32)
    torch.testing.assert_close(out[:, 0], v[0], atol=0.15, rtol=0.07)  # one token sees itself


@pytest.mark.parametrize(("page", "asked"), [(1, "1"), (16, "1"), (16, "0")])
def test_what_requests_share_is_read_once_if_asked(page, asked, monkeypatch):
    """ATTN_SHARED_PREFIX: the tables that SGLang's prefix cache makes are all that is needed."""
    triton = pytest.importorskip("attn_core.backends.triton.shared")
    monkeypatch.setattr(triton, "shared_granule", lambda *args: 64)
    monkeypatch.setattr(choice, "load_plugins", interpreted)
    monkeypatch.setenv("ATTN_SHARED_PREFIX", asked)
    monkeypatch.setenv("ATTN_DECODE_ATTENTION_BACKEND", "triton")
    torch.manual_seed(0)
    module = attention()
    made = Pass(ForwardMode.DECODE, (3, 1, 7), (90, 100, 70), (1, 1, 1))
    run, backend = build(module, mha_pool(page=page), page, {})
    table = run.req_to_token_pool.req_to_token
    table[1, :64] = table[7, :64] = table[3, :64]
    assert error(backend, run, made, module, shared=64) < 1e-5
    [schedule] = backend.planned[1].values()
    split = schedule.split
    assert (split.buffer is not None) == (asked == "1")
    if asked == "1":
        groups = split.work_indptr.diff()[3:] > 0
        assert queries_of(split, 3)[groups].tolist() == [3]


def test_what_cannot_be_read_once_is_refused(monkeypatch):
    monkeypatch.setenv("ATTN_SHARED_PREFIX", "1")
    with pytest.raises(NoBackendError, match="shared_prefix asked"):
        build(attention(), mha_pool(), 1, {})
    monkeypatch.setenv("ATTN_SHARED_PREFIX", "yes")
    with pytest.raises(UsageError, match=r"ATTN_SHARED_PREFIX=yes .expected 1"):
        build(attention(), mha_pool(), 1, {})


def test_prefill_is_not_captured():
    run, backend = build(attention(), mha_pool(), 1, {})
    backend.init_cuda_graph_state(4, 4)
    with pytest.raises(UnsupportedError, match="cuda-graph-backend-prefill"):
        backend.init_forward_metadata_out_graph(extend().batch(run), in_capture=True)


def test_masks_over_the_context_are_refused_and_short_ones_padded():
    torch.manual_seed(0)
    module = attention()
    run, backend = build(module, mha_pool(), 1, speculation(3))
    batch = verify(random_tree(3), full_mask=True).batch(run)
    with pytest.raises(UnsupportedError, match="over the context"):
        backend.init_forward_metadata(batch)
    made = verify(random_tree(3))
    batch = made.batch(run)
    batch.spec_info.custom_mask = made.tree[:2].flatten()
    backend.init_forward_metadata(batch)
    mask = backend._pass[0].spec.tree_mask
    assert mask[:2].equal(made.tree[:2])
    assert mask[2].equal(torch.ones(N, N, dtype=torch.bool).tril())


def test_idle_passes_have_no_tokens():
    module = attention()
    _run, backend = build(module, mha_pool(), 1, {})
    batch = type("Idle", (), {"forward_mode": ForwardMode.IDLE, "batch_size": 0})()
    backend.init_forward_metadata(batch)
    empty = torch.zeros(0, 128)
    assert backend.forward_extend(empty, None, None, module, batch).shape == (0, 128)


FAULTS = {
    "lengths without the drafts": ("tree", lambda f: lambda t, r, s, n, *a: f(t, r, s, 0, *a)),
    "slots for pages": ("extend", lambda f: lambda t, r, s, n, page, *a: f(t, r, s, n, 1, *a)),
    "another request's row": ("decode", lambda f: lambda t, r, *a: f(t, r.flip(0), *a)),
    "an untranslated window": ("window", lambda f: lambda *a: f(*a[:-1], None)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_planted_faults(fault, monkeypatch):
    torch.manual_seed(0)
    name, broken = FAULTS[fault]
    monkeypatch.setattr(passes, "fill_page_table", broken(page_tables.fill_page_table))
    make, args = PASSES["decode" if name == "window" else name]
    if name == "window":
        module, pool, window = attention(0, sliding_window_size=7), swa_pool(page=16), 8
        run, backend = build([module, attention(1)], pool, 16, args)
    else:
        module, pool, window = attention(), mha_pool(page=16), None
        run, backend = build(module, pool, 16, args)
    with pytest.raises((AssertionError, AttnError)):
        assert error(backend, run, make(), module, window=window) < 1e-5


def test_a_transposed_tree_is_seen():
    torch.manual_seed(0)
    module, made = attention(), verify(random_tree(3))
    run, backend = build(module, mha_pool(), 1, speculation(3))
    right = backend.passes._tree
    backend.passes._tree = lambda *args: right(*args).mT.contiguous()
    assert error(backend, run, made, module) > 1e-2


REFUSED = {
    "use_irope": ({"use_irope": True}, "chunked local"),
    "cap": ({"logit_cap": 3.0, "logit_capping_method": "sigmoid"}, "the cap sigmoid"),
    "bidirectional": ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "bidirectional"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_served_are_refused_at_the_start(name):
    changed, text = REFUSED[name]
    with pytest.raises(UnsupportedError, match=text):
        build(attention(**changed), mha_pool(), 1, {})


def test_other_versions_pools_and_servers_are_refused(monkeypatch):
    from attn_core.integrations.sglang import server

    class PageMajorMHATokenToKVPool(type(mha_pool())):
        def __init__(self):
            self.dtype = torch.float32

    with pytest.raises(UnsupportedError, match="PageMajorMHATokenToKVPool"):
        build(attention(), PageMajorMHATokenToKVPool(), 1, {})
    with pytest.raises(UnsupportedError, match="two-batch-overlap"):
        build(attention(), mha_pool(), 1, {"enable_two_batch_overlap": True})
    mixed = {"get_attention_backends": lambda: ("fa3", "attn_core")}
    with pytest.raises(UnsupportedError, match="ATTN_DECODE_ATTENTION_BACKEND"):
        build(attention(), mha_pool(), 1, speculation(3) | mixed)
    monkeypatch.setattr(server.importlib.metadata, "version", lambda name: "0.6.1")
    with pytest.raises(UnsupportedError, match=r"SGLang 0\.6\.1"):
        build(attention(), mha_pool(), 1, {})
    monkeypatch.setattr(server.importlib.metadata, "version", lambda name: "0.5.17")
    build(attention(), mha_pool(), 1, speculation(1))
    with pytest.raises(UnsupportedError, match="draft trees"):
        build(attention(), mha_pool(), 1, speculation(3))
