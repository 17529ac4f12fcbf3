"""Calls of a layer through the dispatcher, of every backend that runs here: for layer_calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.spec.kinds import Role

from benchmarks.cases import LATENT, ROPE, Case, build
from benchmarks.dual_chunk import QWEN_1M, in_chunks
from benchmarks.ours import device_kind, row_of

Calls = Iterator[tuple[str, Callable[[], object]]]
_MLA: dict[str, Any] = {
    "batch": 16, "length": 1024, "q_heads": 128, "kv_heads": 1, "head_dim": LATENT + ROPE,
    "v_head_dim": LATENT,
}  # fmt: skip
DECODE = Case(phase="decode", batch=16, length=1024)
EXTEND = Case(phase="extend", batch=16, length=1024, queries=16)
MLA = Case(phase="mla", **_MLA)
MLA_VERIFY = Case(phase="mla-verify", queries=4, **_MLA)
QWEN: dict[str, Any] = {"q_heads": 28, "kv_heads": 4}


@dataclass(frozen=True)
class TimedCase:
    """A case, the backends that are timed in it, and what of it differs.

    extends: new tokens of the case count as a prompt's, not as drafts. dual_chunk: its layer is
    Qwen2.5-1M's.
    """

    case: Case
    backends: tuple[str, ...]
    extends: bool = False
    dual_chunk: bool = False

    @property
    def name(self) -> str:
        """Say the case, and what of it is another."""
        name = self.case.name.replace("mla-verify", "mla-extend" if self.extends else "mla-verify")
        return name.replace(" ", " dual chunk ", 1) if self.dual_chunk else name


TIMED = (
    TimedCase(DECODE, ("triton", "fa3", "flashinfer", "trtllm_mha")),
    TimedCase(EXTEND, ("triton", "fa3", "flashinfer")),
    TimedCase(MLA, ("flashmla", "fa3", "flashinfer")),  # triton's is layer_calls' own
    TimedCase(MLA_VERIFY, ("triton", "flashmla", "fa3", "flashinfer")),
    TimedCase(MLA_VERIFY, ("triton", "fa3", "flashinfer"), extends=True),
    TimedCase(replace(DECODE, **QWEN), ("triton", "dual_chunk_flash_attn"), dual_chunk=True),
    TimedCase(replace(EXTEND, **QWEN), ("triton", "dual_chunk_flash_attn"), dual_chunk=True),
    TimedCase(DECODE, ("flex_attention",)),  # these compile for long
    TimedCase(EXTEND, ("flex_attention",)),
    TimedCase(replace(DECODE, page_size=128), ("fa4",)),
    TimedCase(replace(EXTEND, page_size=128), ("fa4",)),
)


def backend_calls(device: torch.device) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """Yield each backend's call by its name; what a backend cannot serve says so when it is made.

    A call writes new keys and values. What a case's pages are is the same for all.
    """
    for timed in TIMED:
        for name in timed.backends:
            yield f"{name} {timed.name}", partial(_call, name, timed, device)


def _call(name: str, timed: TimedCase, device: torch.device) -> Calls:
    """Yield one call, or nothing and a line on standard error."""
    label = f"{name} {timed.name}"
    try:
        run = _made(name, timed, device)
        run()
    except Exception as error:  # another project's code may raise anything
        message = " ".join(str(error).split())
        print(f"{label}: {type(error).__name__}: {message[:200]}", file=sys.stderr, flush=True)
        return
    yield label, run


def _made(name: str, timed: TimedCase, device: torch.device) -> Callable[[], object]:
    case, registry, kind = timed.case, load_plugins(), device_kind(device)
    x, chunks = build(case, device), QWEN_1M if timed.dual_chunk else None
    if chunks is not None:
        x = in_chunks(x, chunks)
    batch, layer, pool = x.batch, x.layer, x.pool
    if timed.extends:
        batch = replace(batch, forward_mode=ForwardMode.EXTEND, spec=None)
    config = BackendConfig(
        name=name, row=row_of(name, case, registry, kind, chunks), layers=(layer,),
        page_size=case.page_size, dtype=case.dtype, kv_cache_dtype=case.kv_dtype, device=device,
        arch=kind.arch, max_bs=case.batch, max_num_tokens=case.tokens, max_seq_len=case.longest,
        topk=1, num_draft_tokens=max(case.query_lens),
    )  # fmt: skip
    backend = create_backend(registry.get(name), config)
    roles: tuple[Role, ...] = ("prefill", "decode", "verify")
    serve = HybridDispatcher(dict.fromkeys(roles, backend), pool)
    plan = serve.init_forward_metadata(batch)
    return partial(serve.forward, x.q, x.k, x.v, layer, batch, plan)
