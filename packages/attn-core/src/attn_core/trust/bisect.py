"""Make a reproducer smaller, step by step, as long as the same backend stays wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.errors import AttnError, UsageError
from attn_core.ops.kv import read_pages
from attn_core.plugins.registry import Registry
from attn_core.runtime.batch import DECODE_MODES, ForwardMode
from attn_core.spec.device import Device
from attn_core.trust.judge import Answer, judge
from attn_core.trust.replay import replay
from attn_core.trust.reproducer import Reproducer, repaged, some_requests, some_tokens
from attn_core.trust.rerun import bench_for, rerun

Run = Callable[[Reproducer], Answer]
Step = tuple[str, Reproducer]  # what is left out, in words, and the smaller call


@dataclass(frozen=True)
class Bisected:
    """The smallest failing call that was found, what was left out in turn, and calls tried."""

    smallest: Reproducer
    steps: tuple[str, ...]
    tried: int


def bisect(
    r: Reproducer,
    run: Run,
    reference_run: Run | None = None,
    *,
    max_runs: int = 2000,
    step: Callable[[str], None] = lambda text: None,
) -> Bisected:
    """Leave out all that the fault does not need: layers, requests, tokens, heads, features.

    run: runs the wrong backend. reference_run: runs another one; the oracle checks the request in
    which the two differ most. max_runs: calls to try. With fewer, the result is minimal: no single
    step is left that keeps the backend wrong. A call that the backend refuses is no failure.
    Raises UsageError if the backend is right from the start, and what `run` raises.
    """
    tried = 0

    def wrong(candidate: Reproducer) -> bool:
        outputs = {"it": run(candidate)}
        with contextlib.suppress(AttnError):
            if reference_run is not None:
                outputs["reference"] = reference_run(candidate)
        verdicts = judge(candidate, outputs)
        return "it" in verdicts and verdicts["it"].wrong

    def fails(candidate: Reproducer) -> bool:
        nonlocal tried
        tried += 1
        try:
            return wrong(candidate)
        except AttnError:
            return False

    r = replace(r, recorded={})
    if not wrong(r):
        raise UsageError(
            "the backend is right here, so there is nothing to make smaller; `attn replay` says "
            "which backend is wrong; a fault that comes and goes cannot be bisected"
        )
    steps: list[str] = []
    changed = True
    while changed and tried < max_runs:
        changed = False
        for name, smaller in smaller_calls(r):
            if tried >= max_runs:
                break
            step(name)
            if fails(smaller):
                r, changed = smaller, True
                steps.append(name)
                break
    return Bisected(r, tuple(steps), tried)


def smaller_calls(r: Reproducer) -> Iterator[Step]:
    """Yield smaller calls, those that leave out most first."""
    yield from _fewer_layers(r)
    yield from _fewer_requests(r)
    yield from _fewer_queries(r)
    yield from _fewer_keys(r)
    yield from _fewer_heads(r)
    yield from _fewer_features(r)


def _fewer_layers(r: Reproducer) -> Iterator[Step]:
    n = len(r.others)
    for size in _halves(n):
        for first in range(0, n, size):
            remaining = r.others[:first] + r.others[first + size :]
            yield f"{n - len(remaining)} other layers", replace(r, others=remaining)


def _fewer_requests(r: Reproducer) -> Iterator[Step]:
    n = len(r.seq_lens)
    for size in _halves(n - 1):
        for first in range(0, n, size):
            remaining = [b for b in range(n) if not first <= b < first + size]
            if remaining:
                yield f"{n - len(remaining)} of {n} requests", some_requests(r, remaining)


def _fewer_queries(r: Reproducer) -> Iterator[Step]:
    """Leave out first or last queries of a request; of the last also their keys."""
    if r.mode in DECODE_MODES or r.mode is ForwardMode.TARGET_VERIFY or r.layer.is_cross:
        return
    for b, n in enumerate(r.query_lens):
        rows = r.rows[b]
        for cut in _halves(n - 1):
            for last in (True, False):
                first = rows.stop - cut if last else rows.start
                tokens = torch.arange(len(r.q), device="cpu")
                remaining = tokens[(tokens < first) | (tokens >= first + cut)]
                lens = _changed(r.query_lens, b, n - cut)
                keys = _changed(r.seq_lens, b, r.seq_lens[b] - cut * last)
                fields = some_tokens(r, remaining)
                fewer = replace(r, query_lens=lens, seq_lens=keys, **fields)
                yield f"{cut} of {n} queries of request {b}", repaged(fewer)


def _fewer_keys(r: Reproducer) -> Iterator[Step]:
    """Shorten a request at its end; its queries are then the last of what is left."""
    size = r.cache.page_size
    for b, s in enumerate(r.seq_lens):
        prefix = s if r.layer.is_cross else s - r.query_lens[b]
        for cut in _halves(prefix):
            shorter = replace(r, seq_lens=_changed(r.seq_lens, b, s - cut))
            yield f"{cut} of {s} tokens of request {b}", repaged(shorter)
        for pages in _halves(prefix // size):  # at its front, where the fault lies behind
            table = r.page_table.clone()
            table[b] = torch.cat([table[b, pages:], table[b, :pages]])
            shorter = replace(
                r, seq_lens=_changed(r.seq_lens, b, s - pages * size), page_table=table
            )
            yield f"{pages} first pages of request {b}", repaged(shorter)


def _fewer_heads(r: Reproducer) -> Iterator[Step]:
    layer, kv = r.layer, r.layer.num_kv_heads
    group = layer.num_q_heads // kv
    for cut in _halves(kv - 1):
        for first in (0, cut):
            head_slice = slice(first, first + kv - cut)
            heads = torch.arange(head_slice.start * group, head_slice.stop * group, device="cpu")
            yield f"{cut} of {kv} KV heads", _with_heads(r, head_slice, heads)
    for cut in _halves(group - 1):
        heads = torch.arange(kv * group, device="cpu").view(kv, group)[:, cut:].flatten()
        yield f"{cut} of {group} query heads per KV head", _with_heads(r, slice(0, kv), heads)


def _with_heads(r: Reproducer, head_slice: slice, heads: Tensor) -> Reproducer:
    """Keep some KV heads and query heads."""
    axis = 2 if r.cache.layout == "NHD" else 1

    def picked(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        raw = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
        return (
            raw.narrow(axis, head_slice.start, head_slice.stop - head_slice.start)
            .contiguous()
            .view(x.dtype)
        )

    blocks, k = r.cache.block_scales, picked(r.cache.k)
    assert k is not None  # a cache has keys
    cache = replace(r.cache, k=k, v=picked(r.cache.v))
    if blocks is not None:
        k_blocks = picked(blocks[0])
        assert k_blocks is not None
        cache = replace(cache, block_scales=(k_blocks, picked(blocks[1])))
    q, sinks = r.q[:, heads].contiguous(), r.layer.sinks
    shape = {"num_q_heads": q.shape[1], "num_kv_heads": head_slice.stop - head_slice.start}
    return replace(
        r,
        layer=replace(r.layer, **shape, sinks=None if sinks is None else sinks[heads].contiguous()),
        others=tuple(replace(x, **shape) for x in r.others),
        cache=cache,
        q=q,
        k=None if r.k is None else r.k[:, head_slice].contiguous(),
        v=None if r.v is None else r.v[:, head_slice].contiguous(),
    )


def _fewer_features(r: Reproducer) -> Iterator[Step]:
    layer = r.layer
    for name in ("sliding_window", "logit_cap", "sinks"):
        disabled: dict[str, Any] = {name: None}
        if getattr(layer, name) is not None:
            yield name, repaged(replace(r, layer=replace(layer, **disabled)))
    window = layer.sliding_window
    for cut in _halves((window or 1) - 1):
        narrower = replace(layer, sliding_window=(window or 1) - cut)
        yield f"{cut} of a window of {window}", repaged(replace(r, layer=narrower))
    if r.mode is ForwardMode.TARGET_VERIFY:
        if r.spec is not None and r.spec.tree_mask is not None:
            yield "the tree of drafts", replace(r, spec=replace(r.spec, topk=1, tree_mask=None))
        yield "drafts", replace(r, mode=ForwardMode.EXTEND, spec=None)
    store = r.setting.kv_cache_dtype
    if store != r.setting.dtype:
        yield f"a cache in {store}", _plain(r)
    if r.k is not None:
        yield "the new keys and values beside the cache", replace(r, k=None, v=None)
    if r.lse:
        yield "the log-sum-exp", replace(r, lse=False)
    if not r.host_lengths:
        yield "lengths on the device alone", replace(r, host_lengths=True)


def _plain(r: Reproducer) -> Reproducer:
    """Store the numbers of a quantised cache in the dtype of the queries."""
    pages = torch.arange(r.cache.num_pages, device="cpu")
    k, v = read_pages(r.cache, pages, TORCH_DTYPES[r.setting.dtype])

    def laid(x: Tensor) -> Tensor:
        return (x if r.cache.layout == "NHD" else x.transpose(1, 2)).contiguous()

    cache = LayerCache(k=laid(k), v=None if v is None else laid(v), layout=r.cache.layout)
    return replace(r, cache=cache, setting=replace(r.setting, kv_cache_dtype=r.setting.dtype))


def _halves(n: int) -> list[int]:
    """Return n, n / 2, n / 4 … 1: what is left out at a time; nothing of n below 1."""
    sizes = []
    while n > 0:
        sizes.append(n)
        n //= 2
    return sizes


def _changed(lens: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*lens[:index], value, *lens[index + 1 :])


def smallest(
    r: Reproducer,
    backend: str | None,
    registry: Registry,
    device: Device,
    *,
    step: Callable[[str], None] = lambda text: None,
) -> Bisected:
    """Bisect the call of a named backend, or of the recorded one that is wrong on this device.

    The answers of all recorded backends to the smallest call are recorded with it.
    """
    if backend is None:
        replayed = replay(r, [], registry, device)
        wrong_names = [x.name for x in replayed if x.now and x.now.wrong]
        if not wrong_names:
            run_names = ", ".join(x.name for x in replayed if x.now) or "the recorded backends"
            missing = [f"{x.name} was not run: {x.refused}" for x in replayed if x.refused]
            raise UsageError(
                "; ".join(
                    (
                        f"none of {run_names} is wrong here",
                        *missing,
                        "name one with --backend, or run it on the device where it was recorded",
                    )
                )
            )
        backend = wrong_names[0]

    def run_of(name: str) -> Run:
        return lambda call: rerun(call, bench_for(call, name, registry, device))

    other_names = [name for name in r.recorded if name != backend]
    reference_run = run_of(other_names[0]) if other_names else None
    result = bisect(r, run_of(backend), reference_run, step=step)
    recorded = {}
    for name in (backend, *other_names):
        with contextlib.suppress(AttnError):
            outputs = run_of(name)(result.smallest)
            recorded[name] = (outputs.out, outputs.lse)
    return replace(result, smallest=replace(result.smallest, recorded=recorded))
