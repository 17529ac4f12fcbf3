"""The adapter with vLLM's own layers, builders and passes on a CPU, against a dense softmax."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attn_core import AttnError, NoBackendError, UnsupportedError
from attn_core.integrations import vllm as adapter
from attn_core.integrations.vllm import backend, layers, passes, register, server
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm_on_cpu import register_on_cpu
from vllm_passes import (
    BLOCK,
    Pass,
    attention,
    builder,
    engine,
    error,
    forward_context,
    run,
)

DRAFTS = 3


@pytest.fixture(autouse=True)
def _registered():
    register_on_cpu()


PASSES = {
    "prefill": (lambda: Pass((21, 5, 1), (0, 0, 0)), 0),
    "chunk": (lambda: Pass((6, 19, 1), (17, 0, 33)), 0),
    "decode": (lambda: Pass((1, 1, 1), (16, 40, 0)), 0),
    "mixed": (lambda: Pass((1, 1, 18, 3), (30, 15, 16, 0)), 0),
    "padded": (lambda: Pass((6, 19), (17, 0), padding=7), 0),
    "chain": (lambda: Pass((4, 4, 4), (16, 40, 1)), DRAFTS),
    "chain and prefill": (lambda: Pass((4, 4, 20), (16, 33, 2)), DRAFTS),
    "short chains": (lambda: Pass((2, 2, 3), (16, 33, 2)), DRAFTS),
    "decode with drafts": (lambda: Pass((1, 1), (16, 33)), DRAFTS),
    "uneven and idle": (lambda: Pass((1, 7), (16, 33), idle=2), 0),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_a_dense_softmax(name):
    torch.manual_seed(0)
    make, drafts = PASSES[name]
    config = engine(drafts)
    module = attention(config)
    assert error(config, builder(config, module), make(), module) < 1e-5


def build(config=None, **changed):
    config = engine() if config is None else config
    module = attention(config, **changed)
    return config, module, builder(config, module)


@pytest.mark.parametrize("name", ["chunk", "decode", "chain"])
def test_windows_sinks_and_caps_are_the_layers(name):
    torch.manual_seed(0)
    make, drafts = PASSES[name]
    config, module, plan = build(engine(drafts), per_layer_sliding_window=8)
    assert error(config, plan, make(), module, window=8) < 1e-5
    sinks = torch.randn(4)
    config, module, plan = build(engine(drafts), sinks=sinks, logits_soft_cap=5.0)
    assert error(config, plan, make(), module, sinks=sinks, cap=5.0) < 1e-5


def test_sleep_mode_asks_for_rows_that_need_no_finite_padding(monkeypatch):
    asked, choose = [], backend.choose

    def spied(needs, *args, **more):
        asked.append(needs.finite_padding)
        return choose(needs, *args, **more)

    monkeypatch.setattr(backend, "choose", spied)
    for sleeps in (False, True):
        config = engine()
        monkeypatch.setattr(config.model_config, "enable_sleep_mode", sleeps, raising=False)
        build(config)
    assert asked == [True, False]


def test_a_group_has_layers_of_its_own_caches():
    torch.manual_seed(0)
    config = engine()
    modules = [attention(config, f"layers.{i}.attn") for i in (3, 5)]
    plan = builder(config, *modules)
    made = Pass((1, 9), (30, 0))
    for module in modules:
        assert error(config, plan, made, module) < 1e-5


def test_a_layer_attends_to_the_cache_of_another(monkeypatch):
    torch.manual_seed(0)
    config = engine()
    first = attention(config, "layers.0.attn")
    second = attention(config, "layers.1.attn", kv_sharing_target_layer_name="layers.0.attn")
    second.kv_cache = first.kv_cache  # as vLLM binds them
    plan = builder(config, first, second)
    made = Pass((1, 9), (30, 0))
    common = made.common()
    metadata = plan.build(0, common)
    assert run(config, metadata, common, made, first) < 1e-5
    q, before = torch.randn(10, 128), first.kv_cache.clone()
    handed, attend = [], metadata.dispatcher.forward

    def forward(q, k, v, *args, **more):
        handed.append(k)
        return attend(q, k, v, *args, **more)

    monkeypatch.setattr(metadata.dispatcher, "forward", forward)
    with forward_context(config, metadata, common, first, second):
        outs = [module(q, x, x) for module, x in ((second, torch.randn(10, 64)),)]
    assert outs[0].isfinite().all()
    assert handed == [None, None]  # its own keys are not those of the cache
    torch.testing.assert_close(first.kv_cache, before, rtol=0, atol=0, equal_nan=True)


def test_prompts_are_handed_the_keys_of_their_pass(monkeypatch):
    torch.manual_seed(0)
    config, module, plan = build()
    dispatcher, seen = plan.passes.dispatcher, []
    attend = dispatcher.forward

    def forward(q, k, v, layer, batch, metadata, **more):
        seen.append((len(q), k, v, batch.views["full"].seq_lens_host))
        return attend(q, k, v, layer, batch, metadata, **more)

    monkeypatch.setattr(dispatcher, "forward", forward)
    assert error(config, plan, Pass((1, 1, 18, 3), (30, 15, 0, 0)), module) < 1e-5
    (decodes, *none, _), (prompts, k, v, lengths) = seen
    assert (decodes, none) == (2, [None, None])
    assert (prompts, lengths) == (21, (18, 3))
    cache = dispatcher.caches.layer(0)  # the pass wrote what it hands over
    assert len(k) == len(v) == 21
    assert (cache.k.view(-1, 2, 32)[:, None] == k).all((2, 3)).any(0).all()
    seen.clear()
    assert error(config, plan, Pass((6, 19), (17, 0)), module) < 1e-5
    assert seen[0][3] == ((23, 19) if plan.passes.host_lengths else None)


def test_requests_without_tokens_pad_a_pass_of_even_ones():
    torch.manual_seed(0)
    config, module, plan = build(engine(DRAFTS))
    made = Pass((4, 4), (16, 40), idle=2)
    plan.passes.host_lengths = True
    assert error(config, plan, made, module) < 1e-5


def test_fp8_caches_are_read_with_the_scales_of_their_layer():
    torch.manual_seed(0)
    config, module, plan = build(engine(kv_cache_dtype="fp8"))
    module._k_scale_float, module._v_scale_float = 0.25, 0.5
    made = Pass((1,), (0,), padding=1)
    common = made.common()
    metadata = plan.build(0, common)
    q, k, v = torch.randn(2, 128), torch.randn(2, 64), torch.randn(2, 64)
    with forward_context(config, metadata, common, module):
        out = module(q, k, v).view(2, 2, 2, 32)
    # one token sees itself
    torch.testing.assert_close(out[0, :, 0], v[0].view(2, 32), atol=0.15, rtol=0.07)
    cache = metadata.dispatcher.caches.layer(0)
    assert cache.k.dtype == torch.float8_e4m3fn
    assert cache.k.untyped_storage().data_ptr() == module.kv_cache.untyped_storage().data_ptr()
    assert (cache.k_scale, cache.v_scale) == (0.25, 0.5)


FAULTS = {
    "lengths without the drafts": ("chain", lambda view: {"seq_lens": view.seq_lens - 4}),
    "another request's pages": ("decode", lambda view: {"page_table": view.page_table.flip(0)}),
    "blocks before": ("chunk", lambda view: {"page_table": view.page_table.roll(1, 1)}),
    "another's length": ("mixed", lambda view: {"seq_lens": view.seq_lens.flip(0)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_planted_faults_of_a_view(fault, monkeypatch):
    torch.manual_seed(0)
    name, broken = FAULTS[fault]
    right = passes.PassBuilder._view

    def view(self, common, rows, queries, **more):
        found = replace(right(self, common, rows, queries, **more), seq_lens_host=None)
        changed = replace(found, **broken(found))
        return replace(changed, seq_lens_host=tuple(changed.seq_lens.clamp(min=1).tolist()))

    monkeypatch.setattr(passes.PassBuilder, "_view", view)
    make, drafts = PASSES[name]
    config, module, plan = build(engine(drafts))
    with pytest.raises((AssertionError, AttnError)):
        assert error(config, plan, make(), module) < 1e-3


@pytest.mark.parametrize("off", [-1, 1])
def test_the_comparison_sees_a_window_that_is_off_by_one(off):
    torch.manual_seed(0)
    config, module, plan = build(per_layer_sliding_window=8 + off)
    assert error(config, plan, PASSES["chunk"][0](), module, window=8) > 1e-3


def test_the_comparison_sees_tokens_in_another_slot(monkeypatch):
    torch.manual_seed(0)
    config, module, plan = build()
    right = module.impl.do_kv_cache_update
    broken = lambda layer, k, v, cache, slots: right(layer, k, v, cache, slots.roll(1))  # noqa: E731
    monkeypatch.setattr(module.impl, "do_kv_cache_update", broken)
    with pytest.raises(AssertionError):
        error(config, plan, PASSES["chunk"][0](), module)


def test_padding_that_is_written_is_seen(monkeypatch):
    torch.manual_seed(0)
    config, module, plan = build()
    right = module.impl.do_kv_cache_update
    broken = lambda layer, k, v, cache, slots: right(layer, k, v, cache, slots.clamp(min=0))  # noqa: E731
    monkeypatch.setattr(module.impl, "do_kv_cache_update", broken)
    with pytest.raises(AssertionError):
        error(config, plan, PASSES["padded"][0](), module)


def test_a_run_that_measures_memory_has_no_plan():
    config, module, _plan = build()
    common = PASSES["decode"][0]().common()
    common.slot_mapping = torch.full((3,), -1)
    with forward_context(config, None, common, module):
        out = module(torch.randn(3, 128), torch.randn(3, 64), torch.randn(3, 64))
    assert not out.any()


class Graphs:
    """Captured passes of a dispatcher whose backend captures nothing: a plan that is refilled."""

    def __init__(self, dispatcher, monkeypatch):
        self.sizes, self.replayed = [], []
        plan, attend = dispatcher.init_forward_metadata, dispatcher.forward

        def replay(batch, captured):
            self.replayed.append(batch)
            captured[:] = [plan(batch)]

        def forward(q, k, v, layer, batch, metadata, **more):
            metadata = metadata[0] if isinstance(metadata, list) else metadata
            return attend(q, k, v, layer, batch, metadata, **more)

        replaced = {
            "init_cuda_graph_state": lambda *sizes: self.sizes.append(sizes),
            "init_forward_metadata_capture_cuda_graph": lambda batch: [plan(batch)],
            "init_forward_metadata_replay_cuda_graph": replay,
            "forward": forward,
        }
        for name, function in replaced.items():
            monkeypatch.setattr(dispatcher, name, function)


@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_passes_of_a_captured_size_refill_its_plan(drafts, monkeypatch):
    torch.manual_seed(0)
    config, module, plan = build(engine(drafts))
    graphs = Graphs(plan.passes.dispatcher, monkeypatch)
    q = drafts + 1
    made = Pass((q, q), (16, 40))
    common = made.common()
    captured = plan.build_for_cudagraph_capture(common)
    assert graphs.sizes == [(8, 8 * q)]
    assert captured.parts[0].batch.views["full"].max_seq_len == made.tables.shape[1] * BLOCK
    again = plan.build_for_cudagraph_capture(common)  # for another graph of the same tensors
    assert again.parts[0].plan is captured.parts[0].plan
    later = plan.build(0, common)
    assert later.parts[0].plan is captured.parts[0].plan
    assert run(config, later, common, made, module) < 1e-5
    other = plan.build(0, Pass((q, q), (16, 40)).common())  # not the tensors that a graph reads
    assert other.parts[0].plan is not captured.parts[0].plan
    assert len(graphs.replayed) == 2
    uneven = Pass((q, q + 1), (16, 40)).common()
    with pytest.raises(UnsupportedError, match="cudagraph_mode"):
        plan.build_for_cudagraph_capture(uneven)


REFUSED = {
    "parallel_config__decode_context_parallel_size": (2, "decode-context-parallel-size 2"),
    "parallel_config__enable_dbo": (True, "leave out --enable-dbo"),
    "cache_config__calculate_kv_scales": (True, "calculate-kv-scales"),
    "cache_config__kv_sharing_fast_prefill": (True, "kv-sharing-fast-prefill"),
    "model_config__rswa_window": (64, "rswa_window"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name):
    value, text = REFUSED[name]
    config = engine()
    module = attention(config)
    part, _, attribute = name.partition("__")
    object.__setattr__(getattr(config, part), attribute, value)
    with pytest.raises(UnsupportedError, match=text):
        server.check_config(config, module.get_kv_cache_spec(config))


def test_other_layers_passes_caches_and_versions_are_refused():
    config, module, plan = build()
    with pytest.raises(UnsupportedError, match="ALiBi"):
        attention(engine(), alibi_slopes=[0.1] * 4)
    with pytest.raises(UnsupportedError, match="encoder_only"):
        attention(engine(), attn_type="encoder_only")
    with pytest.raises(UnsupportedError, match="ChunkedLocalAttentionSpec"):
        server.check_config(config, type("ChunkedLocalAttentionSpec", (), {})())
    spec = replace(module.get_kv_cache_spec(config), head_size_v=16)
    with pytest.raises(UnsupportedError, match=r"keys of 32 and values of 16.*another --attention"):
        server.check_config(config, spec)
    with pytest.raises(UnsupportedError, match="nvfp4"):
        server.stored_dtype("nvfp4", torch.bfloat16)
    common = PASSES["decode"][0]().common()
    with pytest.raises(UnsupportedError, match="disable_cascade_attn"):
        plan.build(16, common)
    common.causal = False
    with pytest.raises(UnsupportedError, match="causal"):
        plan.build(0, common)
    with pytest.raises(UnsupportedError, match="output quantised"):
        module.impl.forward(module, None, None, None, None, None, None, output_scale=1.0)


def test_another_release_is_refused_where_the_flag_names_attn_core(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.27.1")
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.27\.1.*install a tested release"):
        _ = adapter.Backend


def test_a_model_that_nothing_serves_is_explained(monkeypatch):
    monkeypatch.setenv("ATTN_DECODE_ATTENTION_BACKEND", "triton")
    config = engine()
    module = attention(config)
    with pytest.raises(NoBackendError, match="device cpu"):
        builder(config, module)


def test_the_name_is_taken_once_and_left_to_others(monkeypatch):
    custom = AttentionBackendEnum.CUSTOM
    register()
    register()
    assert custom.get_path() == "attn_core.integrations.vllm.Backend"
    register_backend(custom, "another.plugin.Backend")
    register()
    assert custom.get_path() == "another.plugin.Backend"
    custom.clear_override()
    register()


def test_a_cache_that_vllm_replaces_is_viewed_anew():
    pages = layers.CachedPages("fp32")
    module = SimpleNamespace(layer_name="x")
    first, second = torch.zeros(2, 3, 16, 2, 8), torch.zeros(2, 5, 16, 2, 8)
    assert pages.of(module, first) is pages.of(module, first)
    assert pages.of(module, second).num_pages == 5
