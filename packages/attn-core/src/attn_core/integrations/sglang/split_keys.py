"""Decode context parallelism: each rank holds a share of a request's keys, and all heads' queries.

Token p lies on rank p mod n. SGLang keeps the ranks' pages side by side: a page of its token table
has n times the tokens of a page of the pool, and slot s of it is slot s // n of rank s mod n.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_core.errors import UnsupportedError
from attn_core.integrations.sglang.page_tables import Tables
from attn_core.integrations.sglang.passes import PassBuilder, StaticTables
from attn_core.integrations.sglang.pool import EnginePool
from attn_core.integrations.sglang.server import SPLIT, has_version
from attn_core.ops.kv import write_kv
from attn_core.ops.merge import merge_states
from attn_core.runtime.backend import Metadata
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer

VIEW = "cross"  # a query sees all keys of its rank, wherever it stands, and there may be none


class SplitPasses(PassBuilder):
    """Builds passes over the keys of one rank.

    A decode step's own token is among them. A prefill has the keys before its new tokens, which
    attend to one another apart from them.
    """

    def __init__(
        self, rank: int, size: int, req_to_token: Tensor, page_size: int, **more: Any
    ) -> None:
        super().__init__(req_to_token, page_size * size, **more)
        self.rank = rank
        self.size = size

    def views(self) -> tuple[str, ...]:
        """Return the names of a batch's views."""
        return (VIEW,)

    def static(self, max_bs: int, max_num_tokens: int) -> StaticTables:
        """Create the buffers of captured passes of up to `max_bs` requests."""
        tables = super().static(max_bs, max_num_tokens)
        slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.req_to_token.device)
        return replace(tables, window_slots=slots)

    def share(self, tokens: Any) -> Any:
        """Return how many of a request's first tokens lie on this rank; a tensor or a number."""
        return (tokens + self.size - 1 - self.rank) // self.size

    def lengths_host(self, engine_batch: Any, mode: ForwardMode) -> tuple[int, ...] | None:
        """Return the lengths of a pass on the host; None if no row plans with them."""
        lengths = super().lengths_host(engine_batch, mode)
        if lengths is not None and mode is not ForwardMode.DECODE:
            lengths = tuple(map(int, engine_batch.extend_prefix_lens_cpu))
        return None if lengths is None else tuple(map(self.share, lengths))

    def _fill(self, engine_batch: Any, mode: ForwardMode, views: Mapping[str, Tables]) -> None:
        super()._fill(engine_batch, mode, views)  # pages and lengths of all ranks
        lengths = views[VIEW].lengths
        if mode is not ForwardMode.DECODE:
            lengths.copy_(engine_batch.extend_prefix_lens)
        lengths.copy_(self.share(lengths))

    def _window_slots(
        self, engine_batch: Any, num_tokens: int, static: StaticTables | None = None
    ) -> Tensor:
        """Return the new tokens' slots on this rank; those of other ranks write the dummy slot."""
        slots = engine_batch.out_cache_loc[:num_tokens].long()
        slots = torch.where(slots % self.size == self.rank, slots // self.size, 0)
        slots = pad(slots, (0, num_tokens - len(slots)))  # padded requests write it, too
        if static is None or static.window_slots is None:
            return slots
        return static.window_slots[:num_tokens].copy_(slots)

    def _batch(
        self, engine_batch: Any, mode: ForwardMode, tables: Mapping[str, Tables], cu: Tensor,
        max_q_len: int, num_tokens: int, longest: int, *more: Any,
    ) -> ForwardBatch:  # fmt: skip
        # SGLang's models leave the writing of keys to a backend where a batch has this
        engine_batch.dcp_kv_mask = engine_batch.positions % self.size == self.rank
        most = -(-longest // self.size)  # of any rank, so that all ranks plan alike
        return super()._batch(engine_batch, mode, tables, cu, max_q_len, num_tokens, most, *more)


class SplitKeys:
    """Attends to the keys of all ranks: each rank attends to its own, and all merge the results.

    layers: those of this rank's heads, which attend to the new tokens of a prefill.
    group: SGLang's group of the ranks that share a request's keys.
    """

    def __init__(self, layers: Mapping[int, AttentionLayer], group: Any) -> None:
        self.group = group
        self.own = layers
        self.wide = {number: widened(layer, group.world_size) for number, layer in layers.items()}

    def passes(self, *args: Any, **more: Any) -> SplitPasses:
        """Return what builds the passes of this rank."""
        return SplitPasses(self.group.rank_in_group, self.group.world_size, *args, **more)

    def forward(
        self, dispatcher: HybridDispatcher, q: Tensor, k: Tensor | None, v: Tensor | None,
        number: int, engine_batch: Any, batch: ForwardBatch, metadata: Metadata, out: Tensor,
    ) -> None:  # fmt: skip
        """Write what this rank keeps of k and v, attend, and fill out [T, Hq, Dv].

        q: [T, Hq, D], this rank's heads. k, v: perhaps with padding behind. number: of the layer.
        Raises UnsupportedError for a call that does not leave the writing of new keys to this.
        """
        if k is None or v is None:
            raise UnsupportedError(
                f"layer {number}: --dcp-size with a model that writes its keys itself, or has none "
                "of its own; leave out --dcp-size"
            )
        k, v, slots = k[: len(q)], v[: len(q)], batch.views[VIEW].out_cache_loc
        assert slots is not None
        write_kv(dispatcher.caches.layer(number), k.contiguous(), v.contiguous(), slots)
        extends = batch.forward_mode is not ForwardMode.DECODE
        prefixes = engine_batch.extend_prefix_lens_cpu if extends else None
        cached = prefixes is None or any(prefixes)  # all ranks know the same
        if cached:
            every = self.group.all_gather(q.contiguous(), dim=1)
            wide = self.wide[number]
            output = dispatcher.forward(every, None, None, wide, batch, metadata, return_lse=True)
            assert isinstance(output, tuple)
            outs, lses = self._of_my_heads(*output)
        if extends:
            cu, longest = batch.cu_seqlens_q, batch.max_q_len
            output = dispatcher.forward_ragged(
                q, k, v, self.own[number], cu, cu, longest, longest, causal=True, return_lse=True
            )
            assert isinstance(output, tuple)
            if not cached:
                out.copy_(output[0])
                return
            outs, lses = (
                torch.cat([x, new[None]]) for x, new in zip((outs, lses), output, strict=True)
            )
        out.copy_(merge_states(outs, lses)[0])

    def _of_my_heads(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange the ranks' results: all that is known of this rank's heads, of n ranks.

        Returns [n, T, Hq, Dv] and [n, T, Hq]. One exchange takes both: the LSE's bits lie behind
        the numbers of each head.
        """
        tokens, heads, dim = out.shape
        size, mine = self.group.world_size, heads // self.group.world_size
        behind = lse.contiguous()[..., None].view(out.dtype)
        packed = self.group.all_gather(torch.cat([out, behind], -1), dim=0)
        first = mine * self.group.rank_in_group
        packed = packed.view(size, tokens, heads, -1)[:, :, first : first + mine]
        lses = packed[..., dim:].contiguous().view(torch.float32)[..., 0]
        return packed[..., :dim], lses


def widened(layer: AttentionLayer, size: int) -> AttentionLayer:
    """Return a layer with the heads of all ranks, whose queries see every key of one rank."""
    heads = layer.num_q_heads * size
    return replace(layer, num_q_heads=heads, view=VIEW, is_cross=True, is_causal=False)


def split_keys(
    runner: Any, layers: Mapping[int, AttentionLayer], pool: EnginePool, linear: bool
) -> SplitKeys | None:
    """Return what attends where a request's keys are split over ranks; None where they are not.

    linear: the model has linear layers. Raises UnsupportedError for what is not served so.
    """
    size = getattr(runner.server_args, "dcp_size", 1)
    if size == 1:
        return None
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    check_split(size, layers.values(), pool, linear)
    check_heads(size, runner.model_config.get_total_num_kv_heads(), parallel.attn_tp_size)
    return SplitKeys(layers, parallel.dcp_group)


def check_split(
    size: int, layers: Iterable[AttentionLayer], pool: EnginePool, linear: bool
) -> None:
    """Raise UnsupportedError for layers whose keys are not split over ranks."""
    layers = tuple(layers)
    refused = {
        f"another SGLang than {SPLIT}": not has_version(SPLIT),
        "MLA": pool.is_latent,
        "linear layers": linear,
        "sliding windows": any(x.sliding_window is not None or x.view == "window" for x in layers),
        "sinks": any(x.sinks is not None for x in layers),
        "layers that are not causal": not all(x.is_causal for x in layers),
    }
    for what, present in refused.items():
        if present:
            raise UnsupportedError(
                f"--dcp-size {size} with {what} on attn_core (serves plain causal layers with K "
                f"and V, SGLang {SPLIT}); leave out --dcp-size"
                + ", or choose --attention-backend flashinfer"
                * (what == "MLA")
            )


def check_heads(size: int, kv_heads: int, ranks: int) -> None:
    """Raise UnsupportedError where the ranks that share keys hold different KV heads.

    A rank keeps its share of the tokens for its own KV heads alone. Only where SGLang repeats a KV
    head on all of the ranks are the keys of each head complete.
    """
    if ranks % (kv_heads * size):
        raise UnsupportedError(
            f"--dcp-size {size} with {kv_heads} KV heads over {ranks} ranks: each rank would keep "
            "its tokens for other KV heads, and attention would miss keys (needs a KV head that is "
            f"repeated on {size} ranks); choose --tp-size {kv_heads * size} or a multiple of it, "
            "or leave out --dcp-size"
        )
