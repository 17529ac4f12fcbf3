"""transformers' generate_batch() on attn-core gives the tokens of each prompt alone."""

from __future__ import annotations

import copy
import gc
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.generation.continuous_batching")

from attn_core.errors import UnsupportedError, UsageError  # noqa: E402
from attn_core.integrations.transformers import enable, enable_batches  # noqa: E402
from attn_core.integrations.transformers.batch_passes import Batches  # noqa: E402
from attn_core.integrations.transformers.batch_pool import BatchPool  # noqa: E402
from attn_core.integrations.transformers.batch_requests import Requests  # noqa: E402
from attn_core.plugins.registry import load_plugins  # noqa: E402
from attn_core.runtime.batch import ForwardMode  # noqa: E402
from attn_core.selection.result import NoBackendError, Overrides  # noqa: E402
from tiny_models import tiny  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
)
from transformers.generation.continuous_batching.cache import PagedAttentionCache  # noqa: E402
from transformers.generation.continuous_batching.offloading_manager import (  # noqa: E402
    OffloadingManager,
)
from transformers.generation.continuous_batching.requests import RequestState  # noqa: E402

NEW = 12
SIZE = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
LENGTHS = (5, 12, 30, 9, 1, 17)


def prompts_of(*lengths: int) -> list[list[int]]:
    torch.manual_seed(3)
    return [torch.randint(2, 110, (n,)).tolist() for n in lengths]


PROMPTS = prompts_of(*LENGTHS)


def options(size: int = 4, tokens: int = 64, blocks: int = 64, **more: Any) -> Any:
    return ContinuousBatchingConfig(
        **{SIZE: size, "num_blocks": blocks, "max_batch_tokens": tokens, **more}
    )


def sampling(**more: Any) -> Any:
    fixed = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return GenerationConfig(**{**fixed, **more})


def ours(name: str, **changes: Any) -> Any:
    model = tiny(name, **changes)
    model.set_attn_implementation("paged|attn_core")
    return model


def batch(model: Any, prompts: list[list[int]] = PROMPTS, **more: Any) -> list[list[int]]:
    """Return the new tokens of each prompt by generate_batch()."""
    outputs = model.generate_batch(
        prompts, generation_config=sampling(), continuous_batching_config=options(**more)
    )
    assert [x.error for x in outputs.values()] == [None] * len(prompts)
    return [x.generated_tokens for x in outputs.values()]


_ALONE: dict[str, list[list[int]]] = {}


def alone(name: str, prompts: list[list[int]] = PROMPTS, **changes: Any) -> list[list[int]]:
    """Return the new tokens of each prompt alone, by generate() on the model's eager attention."""
    key = repr((name, prompts, changes))
    if key not in _ALONE:
        model = tiny(name, **changes)
        rows = [
            model.generate(torch.tensor([p]), generation_config=sampling())[0, len(p) :].tolist()
            for p in prompts
        ]
        assert len(set(rows[0])) > 5  # a model that says one word proves nothing
        _ALONE[key] = rows
    return _ALONE[key]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The batches of each pass, in order."""
    passes: list[tuple[Any, ...]] = []
    plan = Batches._plan

    def spied(self: Batches, *args: Any) -> Any:
        parts = plan(self, *args)
        passes.append(tuple(part.batch for part in parts))
        return parts

    monkeypatch.setattr(Batches, "_plan", spied)
    return passes


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("llama", 64),
        *((name, 10) for name in ("mistral", "gemma3_text", "gpt_oss")),  # prompts in chunks
        pytest.param("llama", 10, marks=pytest.mark.long),
        *(
            pytest.param(name, tokens, marks=pytest.mark.long)
            for name in ("qwen3", "gemma2")
            for tokens in (64, 10)
        ),
        *(
            pytest.param(name, 64, marks=pytest.mark.long)
            for name in ("mistral", "gemma3_text", "gpt_oss")
        ),
    ],
)
def test_tokens_equal_those_of_each_prompt_alone(
    name: str, tokens: int, planned: list[tuple[Any, ...]]
) -> None:
    assert batch(ours(name), tokens=tokens) == alone(name)
    batches = [x for parts in planned for x in parts]
    assert {x.forward_mode for x in batches} == {ForwardMode.EXTEND, ForwardMode.DECODE}
    mixed = [x for x in batches if len(set(x.query_lens_host)) > 1 and 1 in x.query_lens_host]
    assert mixed  # prompts beside requests that decode
    assert any("chunk" in x.views for x in batches) == (name != "llama")


@pytest.mark.parametrize(
    ("name", "window", "size", "tokens"),
    [
        ("mistral", 8, 16, 23),
        ("gemma3_text", 7, 4, 10),
        *(
            pytest.param(name, window, size, 10, marks=pytest.mark.long)
            for window, size in ((8, 8), (6, 4), (12, 8), (5, 32))
            for name in ("mistral", "gemma3_text")
        ),
    ],
)
def test_a_window_need_not_be_whole_blocks(name: str, window: int, size: int, tokens: int) -> None:
    actual = batch(ours(name, sliding_window=window), size=size, tokens=tokens)
    assert actual == alone(name, sliding_window=window)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_memory_that_nobody_wrote_may_hold_anything(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, reserve = BatchPool.__init__, BatchPool.reserve

    def created(self: BatchPool, *args: Any) -> None:
        create(self, *args)
        for x in self.layers.values():
            poison(self, x.layer)

    def reserved(self: BatchPool, num_pages: int) -> None:
        reserve(self, num_pages)
        for x in self.layers.values():
            poison(self, x.chunk)

    def poison(self: BatchPool, layer: Any) -> None:
        if layer is not None:
            cache = self.layer(layer.layer_id)
            cache.k.fill_(torch.nan)
            cache.v.fill_(torch.nan)

    monkeypatch.setattr(BatchPool, "__init__", created)
    monkeypatch.setattr(BatchPool, "reserve", reserved)
    prompts = prompts_of(4, 8, 9, 16, 7)  # blocks and windows that are full, or one token off
    assert batch(ours(name), prompts, tokens=10) == alone(name, prompts)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral"])
def test_many_requests_of_uneven_lengths(name: str) -> None:
    prompts = prompts_of(*(1 + 7 * i % 41 for i in range(40)))
    assert batch(ours(name), prompts, tokens=24, blocks=90) == alone(name, prompts)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_triton_reads_rings_and_chunks(name: str, planned: list[tuple[Any, ...]]) -> None:
    pytest.importorskip("triton")
    registry = load_plugins()
    spec = registry.backends["softmax", "triton"]
    rows = [
        replace(row, device="cpu", archs=frozenset(), min_runtime=None, requires=())
        for row in spec.capabilities
        if (row.kind, row.device) == ("mha", "cuda")
    ]  # Triton's interpreter takes the place of the GPU
    backends = {**registry.backends, ("softmax", "triton"): replace(spec, capabilities=rows)}
    model, prompts = tiny(name), prompts_of(5, 12, 17)
    enable_batches(
        model,
        overrides=Overrides(attention_backend="triton"),
        registry=replace(registry, backends=backends),
    )
    assert batch(model, prompts, tokens=10) == alone(name, prompts)
    assert any("chunk" in x.views for parts in planned for x in parts)


def test_one_plan_per_pass_over_transformers_own_memory(
    monkeypatch: pytest.MonkeyPatch, planned: list[tuple[Any, ...]]
) -> None:
    calls: list[int] = []
    attend, seen = Batches.attend, []

    def spied(self: Batches, q: Any, k: Any, v: Any, layer_id: int, *rest: Any) -> Any:
        calls.append(layer_id)
        seen.append(self.pool)
        return attend(self, q, k, v, layer_id, *rest)

    monkeypatch.setattr(Batches, "attend", spied)
    caches: list[Any] = []
    create = PagedAttentionCache.__init__
    monkeypatch.setattr(
        PagedAttentionCache,
        "__init__",
        lambda self, *a, **k: (create(self, *a, **k), caches.append(self))[0],
    )
    batch(ours("llama"))
    assert calls == [0, 1] * len(planned)
    assert [len(parts) for parts in planned] == [1] * len(planned)
    lengths = [parts[0].views["group 0"].seq_lens_host for parts in planned]
    assert {n for lens in lengths for n in lens if n >= max(LENGTHS)} == set(
        range(max(LENGTHS), max(LENGTHS) + NEW)
    )
    [cache] = caches
    stores = cache.key_cache if hasattr(cache, "key_cache") else [cache.cache_tensor]
    known = {x.untyped_storage().data_ptr() for x in stores}
    assert {seen[0].layer(i).k.untyped_storage().data_ptr() for i in (0, 1)} <= known


def test_cache_is_freed_with_its_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[weakref.ref[BatchPool]] = []
    create = BatchPool.__init__

    def spied(self: BatchPool, *args: Any) -> None:
        create(self, *args)
        pools.append(weakref.ref(self))

    monkeypatch.setattr(BatchPool, "__init__", spied)
    model = ours("gemma3_text")
    batch(model, PROMPTS[:2])
    gc.collect()
    assert [x() for x in pools] == [None]


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3_text", marks=pytest.mark.long)])
def test_requests_that_were_evicted_start_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: list[int] = []
    evict = OffloadingManager.offload_requests

    def spied(self: Any, *args: Any, **kwargs: Any) -> int:
        evicted.append(evict(self, *args, **kwargs))
        return evicted[-1]

    monkeypatch.setattr(OffloadingManager, "offload_requests", spied)
    blocks = 16 if name == "llama" else 22
    assert batch(ours(name), blocks=blocks, tokens=32, safety_margin=0.0) == alone(name)
    assert any(evicted)


def test_prefixes_and_forks_share_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    result: list[int] = []
    search = PagedAttentionCache.search_prefix_match
    monkeypatch.setattr(
        PagedAttentionCache,
        "search_prefix_match",
        lambda self, *a: (result.append(search(self, *a)), result[-1])[1],
    )
    forked: list[int] = []
    fork = RequestState.fork
    monkeypatch.setattr(
        RequestState, "fork", lambda self, name: (forked.append(name), fork(self, name))[1]
    )
    prompts = [[*PROMPTS[2], 7, 8], [*PROMPTS[2], 9], PROMPTS[2]]
    model = ours("llama")
    assert batch(model, prompts, tokens=12) == alone("llama", prompts)
    assert max(result) >= 24
    how = sampling(num_return_sequences=3, do_sample=True, top_k=1)
    outputs = model.generate_batch(
        prompts[:1], generation_config=how, continuous_batching_config=options()
    )
    assert outputs
    assert all(x.generated_tokens == alone("llama", prompts)[0] for x in outputs.values())
    assert len(forked) == 2


def test_streams_and_cancels() -> None:
    model, expected = ours("gemma3_text"), alone("gemma3_text")
    how = {"generation_config": sampling(), "continuous_batching_config": options(tokens=10)}
    with model.continuous_batching_context_manager(**how) as manager:
        assert manager.selection.backend("decode")
        endless = manager.add_request(PROMPTS[0], max_new_tokens=150, streaming=True)
        others = manager.add_requests(PROMPTS[1:], max_new_tokens=NEW, streaming=True)
        done: dict[str, list[int]] = {}
        streamed = dict.fromkeys(others, 0)
        while len(done) < len(others):
            result = manager.get_result(timeout=30)
            assert result is not None
            if result.request_id == endless:
                manager.cancel_request(endless)
                continue
            streamed[result.request_id] += 1
            if result.is_finished():
                done[result.request_id] = result.generated_tokens
        assert min(streamed.values()) >= NEW
    assert [done[x] for x in others] == expected[1:]


def test_a_manager_that_is_kept_is_refused_under_enable() -> None:
    model, expected = ours("llama"), alone("llama", PROMPTS[:1])
    how = {"generation_config": sampling(), "continuous_batching_config": options()}
    ids = torch.tensor(PROMPTS[:1])

    def answer() -> list[list[int]]:
        outputs = model.generate_batch(PROMPTS[:1], persistent_manager=True, **how)
        return [x.generated_tokens for x in outputs.values()]

    assert answer() == expected
    with enable(model):
        with pytest.raises(UsageError, match="call disable"):
            answer()
        got = model.generate(ids, generation_config=sampling())
        assert got[:, ids.shape[1] :].tolist() == expected
    assert answer() == expected
    for before, name in (("'paged.attn_core'", "paged|sdpa"), ("another", "paged|attn_core")):
        model.set_attn_implementation(name)
        with pytest.raises(UsageError, match=f"kept is for {before}"):
            answer()
        model.destroy_cached_continuous_batching_manager()
        assert answer() == expected
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.long
def test_managers_in_threads_share_a_model() -> None:
    model, results = ours("gpt_oss"), {}

    def run(i: int) -> None:
        results[i] = batch(model, tokens=10 + i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(2), alone("gpt_oss"))


def _next_page(f: Callable[..., Any]) -> Callable[..., Any]:
    def faulty(self: Requests, *args: Any) -> Any:
        table = f(self, *args)
        table[-1] = table[-1].roll(1)
        return table

    return faulty


def _one_less(f: Callable[..., Any]) -> Callable[..., Any]:
    def faulty(self: Requests, *args: Any) -> Any:
        view = f(self, *args)
        keep = tuple(max(n - 1, q) for n, q in zip(self.ends, self.host[0], strict=True))
        vars(view)["seq_lens_host"] = keep
        view.seq_lens.copy_(torch.tensor(keep))
        return view

    return faulty


def _nothing(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: None


@pytest.mark.parametrize(
    ("owner", "method", "fault", "name"),
    [
        (Requests, "table", _next_page, "llama"),
        (Requests, "view", _one_less, "llama"),
        pytest.param(Requests, "view", _one_less, "mistral", marks=pytest.mark.long),
        (BatchPool, "copy_beside", _nothing, "mistral"),
    ],
)
def test_a_planted_fault_changes_the_tokens(
    owner: type, method: str, fault: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, fault(getattr(owner, method)))
    assert batch(ours(name), tokens=10) != alone(name)


def test_backends_are_chosen_by_name_or_refused() -> None:
    model = tiny("gemma3_text")
    enable_batches(copy.deepcopy(model), overrides=Overrides(attention_backend="flex_attention"))
    enable_batches(model, overrides=Overrides(attention_backend="torch_native"))
    manager = copy.deepcopy(model).init_continuous_batching(sampling(), options())
    assert manager.selection.backend("prefill") == "torch_native"
    assert manager.selection.page_size == 4  # divides the blocks of 4 and the window of 8
    assert batch(model) == alone("gemma3_text")
    sinks = tiny("gpt_oss")
    enable_batches(sinks, overrides=Overrides(attention_backend="flex_attention"))
    with pytest.raises(NoBackendError, match="flex_attention cannot run"):
        batch(sinks)


def test_loads_by_name(tmp_path: Any) -> None:
    tiny("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="paged|attn_core", dtype=torch.bfloat16
    )
    assert len(batch(model)[0]) == NEW
    with pytest.raises(UnsupportedError, match=r"call enable\(model\)"):
        model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=2)
    with enable(model):
        model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=2)
        with pytest.raises(UsageError, match="disable"):
            batch(model)
    model.set_attn_implementation("sdpa")
    assert len(batch(model)[0]) == NEW


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deepseek_v3", "latents"),
        ("deepseek_v32", "latents"),
        ("qwen3_next", "linear layers"),
        ("qwen2_vl", "a vision tower"),
    ],
)
def test_refuses_models_before_any_request(name: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        enable_batches(tiny(name))
    model = tiny(name)
    model.set_attn_implementation({"": "paged|attn_core"})
    with pytest.raises(UnsupportedError, match=why):
        batch(model)


@pytest.mark.parametrize(
    ("how", "why"),
    [({"use_async_batching": True}, "use_async"), ({"default_compile_level": 1}, "compile")],
)
def test_refuses_options_before_any_request(how: dict[str, Any], why: str) -> None:
    model = ours("llama")
    with pytest.raises(UnsupportedError, match=why):
        batch(model, **how)
    assert batch(model) == alone("llama")


@pytest.mark.long
def test_benchmark_records_both_implementations(tmp_path: Any) -> None:
    from benchmarks.generate_batch import main

    path = tmp_path / "record.json"
    shape = "--requests 3 --prompt 24 --new 4 --block 16 --blocks 200 --tokens 32 --rounds 1"
    more = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--out", str(path)]
    assert main([*shape.split(), *more]) == 0
    ours_, theirs = json.loads(path.read_text())["entries"].values()
    assert ours_["tokens_per_s"] > 0
    assert ours_["first_tokens"] == theirs["first_tokens"]
