"""Kernels of sparse MLA (DSA) on the same inputs: ours, and each library's own call.

A contestant does one part of the chain. What it returns is checked: scores float32 [T, L], slots
int32 [T, K], outputs [T, 128, 512], or outputs and slots of the whole chain. What a library wants
besides (gathered keys, page tables of single tokens, schedules) is given to it untimed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from attn_core.ops.index import write_index
from torch import Tensor

from benchmarks.sparse_cases import (
    DIM,
    LATENT,
    PAGE,
    STORES,
    TOPK,
    Part,
    SparseCase,
    SparseInputs,
    Store,
    backend_of,
)

Call = Callable[[], Any]
Prepare = Callable[[SparseInputs, Any], Call]
OWN = ("triton", "nsa", "nsa:flashmla_kv", "nsa:flashmla_sparse")
LAUNCH = "attn_core.backends.triton.sparse.launch"
MODULES = {"triton": "attn_core", "nsa": "attn_nvidia.nsa"}
DISTRIBUTIONS = {
    "attn_core": "attn-core", "attn_nvidia": "attn-nvidia", "deep_gemm": "sgl-deep-gemm",
    "sgl_kernel": "sglang-kernel", "flashinfer": "flashinfer-python",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SparseContestant:
    """One way to compute a part of a case. takes: the cases that it can do."""

    name: str
    part: Part
    store: Store = "bf16"
    module: str
    prepare: Callable[[SparseInputs, Any], Call]
    takes: Callable[[SparseCase], bool] = lambda case: True

    @property
    def label(self) -> str:
        """Name its part, and the store of those that read latents."""
        return f"{self.part} {self.store}" if self.part in ("attend", "chain") else self.part

    @property
    def distribution(self) -> str:
        """Name what its module is installed by."""
        return DISTRIBUTIONS[self.module.partition(".")[0]]

    @property
    def ours(self) -> bool:
        """Say whether it is not a peer."""
        return self.distribution in ("attn-core", "attn-nvidia")

    def available(self) -> bool:
        """Say whether its package can be found; nothing is imported."""
        return importlib.util.find_spec(self.module.partition(".")[0]) is not None

    def load(self) -> Any:
        """Import its module. Raises ImportError."""
        return importlib.import_module(self.module)


def _write(x: SparseInputs, _: Any, store: Store = "bf16") -> Call:
    """Writes what is there already, so that the keys of all stay the same."""
    slots, cache = x.view.out_cache_loc, x.caches[store]
    assert slots is not None
    return lambda: write_index(cache, x.k_index, slots)


def _score(x: SparseInputs, launch: Any) -> Call:
    """Score all queries into one tensor, as the peers do; index_topk takes some at a time."""
    backend, plan = backend_of("triton", x, "bf16")
    scores = torch.empty(x.case.tokens, x.case.length, dtype=torch.float32, device=x.q.device)
    inputs = launch.SparsePass(
        x.view, x.batch.cu_seqlens_q, plan.requests, queries=x.batch.max_q_len
    )
    requested = (x.q_index, x.weights, x.caches["bf16"], inputs, scores)

    def call() -> Tensor:
        launch.score(*requested, 0, x.case.tokens, TOPK, arch=backend.config.arch)
        return scores

    return call


def _select(x: SparseInputs, _: Any) -> Call:
    backend, plan = backend_of("triton", x, "bf16")
    scores, chosen = x.drawn_scores, torch.empty_like(x.chosen)

    def call() -> Tensor:
        backend.select(scores, 0, chosen, x.layer, x.caches["bf16"], x.batch, plan)  # type: ignore[attr-defined]
        return chosen

    return call


def _index_topk(name: str, store: Store) -> Callable[[SparseInputs, Any], Call]:
    def prepare(x: SparseInputs, _: Any) -> Call:
        backend, plan = backend_of(name, x, store)
        requested = (x.q_index, x.weights, x.layer, x.caches[store], x.batch, plan)
        return lambda: backend.index_topk(*requested)

    return prepare


def _attend(name: str, store: Store) -> Callable[[SparseInputs, Any], Call]:
    def prepare(x: SparseInputs, _: Any) -> Call:
        backend, plan = backend_of(name, x, store)
        pass_ = (x.q, None, None, x.layer, x.caches[store], x.batch, plan)
        chosen = x.chosen
        return lambda: backend.forward(*pass_, topk_indices=chosen)

    return prepare


def _chain(name: str, store: Store) -> Callable[[SparseInputs, Any], Call]:
    def prepare(x: SparseInputs, _: Any) -> Call:
        backend, plan = backend_of(name, x, store)
        write, pass_ = _write(x, None, store), (x.layer, x.caches[store], x.batch, plan)

        def call() -> tuple[Any, Tensor]:
            write()
            chosen = backend.index_topk(x.q_index, x.weights, *pass_)
            return backend.forward(x.q, None, None, *pass_, topk_indices=chosen), chosen

        return call

    return prepare


def _deep_gemm(x: SparseInputs, library: Any) -> Call:
    """fp8_mqa_logits over a request's keys, gathered; one request."""
    values, scales = x.caches["bf16"].index_keys
    assert scales is not None
    pages = x.view.page_table[0]
    raw = values.view(torch.uint8)[pages.long()].flatten(0, 1)
    keys = (raw.view(values.dtype), scales[pages.long()].flatten())
    starts = torch.zeros_like(x.visible)
    return lambda: library.fp8_mqa_logits(x.q_index, keys, x.weights, starts, x.visible)


def _deep_gemm_paged(x: SparseInputs, library: Any) -> Call:
    lengths = x.visible[:, None].contiguous()
    processors = torch.cuda.get_device_properties(x.q.device).multi_processor_count
    schedule = library.get_paged_mqa_logits_metadata(lengths, PAGE, processors)
    index = x.caches["bf16"].index
    assert index is not None
    pages = index.view(-1, PAGE, 1, index.shape[1] // PAGE)
    table, q = x.view.page_table, x.q_index[:, None]
    return lambda: library.fp8_paged_mqa_logits(
        q, pages, x.weights, lengths, table, schedule, x.case.length
    )


def _sgl_topk(x: SparseInputs, library: Any) -> Call:
    """K = 2048 exactly; ties by order of arrival."""
    starts = torch.zeros_like(x.visible) if x.case.phase == "prefill" else None
    passed = (x.drawn_scores, x.visible, x.slot_table, x.batch.cu_seqlens_q, TOPK, starts)
    return lambda: library.fast_topk_transform_fused(*passed)


def _flashinfer_topk(**how: Any) -> Callable[[SparseInputs, Any], Call]:
    def prepare(x: SparseInputs, library: Any) -> Call:
        rows = None if x.case.new == 1 else x.request.int()
        scores, table, seen = x.drawn_scores, x.slot_table, x.visible
        return lambda: library.top_k_page_table_transform(
            scores, table, seen, TOPK, row_to_batch=rows, **how
        )

    return prepare


def compile_topk() -> None:
    """Compile FlashInfer's top-k into its cache on disk. Raises ImportError where it is missing."""
    importlib.import_module("flashinfer.topk").get_topk_module()


def _flashmla_sparse(x: SparseInputs, library: Any) -> Call:
    latents, chosen = x.caches["bf16"].k.view(-1, 1, DIM), x.chosen[:, None]
    return lambda: library.flash_mla_sparse_fwd(x.q, latents, chosen, x.layer.scale, LATENT)[0]


def _flashmla_kv(x: SparseInputs, library: Any) -> Call:
    schedule, _ = library.get_mla_metadata()  # the first call fills it
    pages = (
        x.caches["fp8_e4m3"]
        .k.view(torch.float8_e4m3fn)
        .view(-1, PAGE, 1, x.caches["fp8_e4m3"].k.shape[-1])
    )
    q, chosen = x.q[:, None], x.chosen[:, None]
    return lambda: library.flash_mla_with_kvcache(
        q, pages, None, None, LATENT, schedule,
        softmax_scale=x.layer.scale, is_fp8_kvcache=True, indices=chosen,
    )[0]  # fmt: skip


def _fa3(x: SparseInputs, library: Any) -> Call:
    """Each query is a request over pages of one token."""
    latents = x.caches["bf16"].k.view(-1, 1, 1, DIM)
    tokens, device = x.case.tokens, x.q.device
    arguments = {
        "q": x.q[..., LATENT:], "qv": x.q[..., :LATENT], "k_cache": latents[..., LATENT:],
        "v_cache": latents[..., :LATENT], "page_table": x.chosen,
        "cache_seqlens": torch.full((tokens,), TOPK, dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.arange(tokens + 1, dtype=torch.int32, device=device),
        "max_seqlen_q": 1, "softmax_scale": x.layer.scale, "causal": False,
    }  # fmt: skip
    return lambda: library.flash_attn_with_kvcache(**arguments)


def _prompt(case: SparseCase) -> bool:
    return case.phase == "prefill"


def _single(case: SparseCase) -> bool:
    return case.phase == "decode"


def _ours() -> list[SparseContestant]:
    before: tuple[tuple[Part, Prepare], ...] = (
        ("write", _write), ("score", _score), ("select", _select),
    )  # fmt: skip
    result = [
        SparseContestant(name="triton", part=part, module=LAUNCH, prepare=prepare)
        for part, prepare in before
    ]
    names: dict[Store, tuple[str, ...]] = {
        "bf16": ("triton", "nsa"),
        "fp8_e4m3": ("triton", *OWN[2:]),
    }
    for store, name in ((x, name) for x in STORES for name in names[x]):
        parts: list[tuple[Part, Prepare]] = [
            ("attend", _attend(name, store)),
            ("chain", _chain(name, store)),
        ]
        if store == "bf16":  # selects alike from either
            parts.append(("index_topk", _index_topk(name, store)))
        module = MODULES[name.partition(":")[0]]
        result += [
            SparseContestant(name=name, part=part, store=store, module=module, prepare=prepare)
            for part, prepare in parts
        ]
    return result


CONTESTANTS: tuple[SparseContestant, ...] = (
    *_ours(),
    SparseContestant(
        name="deep_gemm", part="score", module="deep_gemm", prepare=_deep_gemm, takes=_prompt
    ),
    SparseContestant(
        name="deep_gemm", part="score", module="deep_gemm", prepare=_deep_gemm_paged,
        takes=_single,
    ),
    SparseContestant(name="sgl_kernel", part="select", module="sgl_kernel", prepare=_sgl_topk),
    SparseContestant(
        name="flashinfer", part="select", module="flashinfer", prepare=_flashinfer_topk()
    ),
    SparseContestant(
        name="flashinfer, ties", part="select", module="flashinfer",
        prepare=_flashinfer_topk(tie_break=1),
    ),
    SparseContestant(
        name="flashmla_sparse", part="attend", module="sgl_kernel.flash_mla",
        prepare=_flashmla_sparse,
    ),
    SparseContestant(
        name="fa3, pages of 1", part="attend", module="sgl_kernel.flash_attn", prepare=_fa3
    ),
    SparseContestant(
        name="flashmla_kv", part="attend", store="fp8_e4m3", module="sgl_kernel.flash_mla",
        prepare=_flashmla_kv,
    ),
)  # fmt: skip
