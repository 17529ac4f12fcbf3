"""The sparse MLA (DSA) and dual chunk cases of SGLang's attention tests, and what they need."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

Case = tuple[str, str, Callable[[], None]]  # group, name, test
PATTERNS = ("trailing", "strided", "head_tail")  # which keys a query of the kit selects
# The kit's own of sparse MLA, 0.16, is more than its largest output: zeros would pass.
TOLERANCE: dict[str, Any] = {"DSA_SPARSE_ATOL": 5e-3, "DSA_SPARSE_RTOL": 2e-2}


def cases(backend: str, device: str) -> Iterator[Case]:
    """Yield both kinds, eager and as a graph replays them.

    Left out: the dual chunk case that watches inner functions of SGLang's own backend.
    """
    yield from _dsa(backend, device)
    yield from _dual_chunk(backend, device)


def _dsa(backend: str, device: str) -> Iterator[Case]:
    from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as dsa
    from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as graph

    test = unittest.TestCase()
    for case in dsa.make_dsa_dense_fallback_cases(backend):
        dense = functools.partial(dsa.run_dsa_attention_case, test, case, device=device)
        yield "dsa unfolded", case.name, dense
    for case in dsa.make_dsa_sparse_cases(backend):
        for pattern in PATTERNS:
            how = {"device": device, "index_pattern": pattern}
            eager = functools.partial(dsa.run_dsa_sparse_attention_case, test, case, **how)
            yield "dsa", f"{case.name} {pattern}", _closely(dsa, eager)
        if case.forward_mode.is_decode():
            run = graph.run_dsa_sparse_cuda_graph_decode_case
            replay = _in_order(functools.partial(run, test, case, device=device))
            yield "dsa graph", case.name, _closely(graph, replay)


def _dual_chunk(backend: str, device: str) -> Iterator[Case]:
    from sglang.test.kits.attention_unittest.attention_methods import dual_chunk_attention as dual
    from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as graph

    test, on = unittest.TestCase(), {"device": device}
    for case in dual.make_dual_chunk_cases(backend):
        run = functools.partial(dual.run_dual_chunk_attention_case, test, case, **on)
        yield "dual chunk", case.name, run
        if case.forward_mode.is_decode():
            replay = functools.partial(
                graph.run_dual_chunk_cuda_graph_decode_case, test, case, **on
            )
            yield "dual chunk graph", case.name, _in_order(replay)
    for case in dual.make_dual_chunk_sparse_cases(backend):
        run = functools.partial(dual.run_dual_chunk_sparse_attention_case, test, case, **on)
        yield "dual chunk sparse", case.name, run
    for case in dual.make_dual_chunk_sparse_threshold_gated_cases(backend):
        gated = functools.partial(dual.run_dual_chunk_sparse_threshold_gated_case, test, case, **on)
        yield "dual chunk sparse", case.name, gated


def _closely(module: Any, run: Callable[[], None]) -> Callable[[], None]:
    """Compare with TOLERANCE, which the module has under names of its own."""

    def close() -> None:
        with mock.patch.multiple(module, **TOLERANCE):
            run()

    return close


def _in_order(run: Callable[[], None]) -> Callable[[], None]:
    """The kit's replays write prefixes in order, over slots that it shuffled."""
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense

    layout = dense.make_loc_fn

    def ordered() -> None:
        with mock.patch.object(dense, "make_loc_fn", lambda _, **m: layout("contiguous", **m)):
            run()

    return ordered


def as_files_have_it(config: Any) -> None:
    """Put the lines of sparse prompts, which the kit has by layer and in tuples, into lists."""
    chunks = getattr(config, "dual_chunk_attention_config", None) or {}
    lines = chunks.get("sparse_attention_config")
    if isinstance(lines, dict):
        listed = [{head: list(x) for head, x in lines[layer].items()} for layer in sorted(lines)]
        config.dual_chunk_attention_config = {**chunks, "sparse_attention_config": listed}


class Sparse:
    """What the kit's module of sparse MLA hands over in another form than SGLang's models.

    A model's indexer is attn-core's own here and returns token slots; the kit has none and passes
    positions, as SGLang's backends take them with SGLANG_DSA_FUSE_TOPK=0. Latents come in two
    parts, as they do for SGLang's own backends; a model hands attn_core whole ones.
    """

    use_mha = False  # heads of sparse MLA are absorbed in every pass

    def forward_extend(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: Any = None,
        k_rope: Any = None,
        topk_indices: Any = None,
        **more: Any,
    ) -> Any:
        import torch

        if q_rope is not None:
            q = torch.cat([q.view(*q_rope.shape[:2], -1), q_rope], -1).flatten(1)
            k = torch.cat([k.view(*k_rope.shape[:2], -1), k_rope], -1)
        if topk_indices is not None:
            more["topk_indices"] = slots_of(topk_indices, self.planned[0])  # type: ignore[attr-defined]
        forward = super().forward_extend  # type: ignore[misc]
        return forward(q, k, v, layer, forward_batch, save_kv_cache, **more)

    forward_decode = forward_extend


def slots_of(positions: Any, batch: Any) -> Any:
    """Return the token slots, int32 [T, K], of positions in the queries' requests; -1 stays."""
    import torch

    view = batch.views["full"]
    counts = batch.cu_seqlens_q.diff().long()
    requests = torch.arange(len(counts), device=counts.device)
    rows = requests.repeat_interleave(counts, output_size=batch.num_tokens)
    own = positions.clamp(min=0).long()
    pages = view.page_table[rows].gather(1, own // PAGE_SIZE)
    return torch.where(positions < 0, -1, pages * PAGE_SIZE + own % PAGE_SIZE).int()


PAGE_SIZE = 64  # of every case of sparse MLA, here and in SGLang's pool
