"""What captured graphs read: a batch of the largest size, whose first rows smaller ones share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_core.errors import BatchError
from attn_core.runtime.backend import BackendConfig
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo


@dataclass(frozen=True, eq=False)
class Static:
    """A tensor that graphs read, of the largest batch, and what one padded request has in it."""

    tensor: Tensor
    padding: Tensor

    @classmethod
    def of(cls, padding: Tensor, requests: int) -> Static:
        """Create the tensor of so many padded requests."""
        return cls(padding.repeat(requests, *[1] * (padding.dim() - 1)), padding)

    def first(self, requests: int) -> Tensor:
        return self.tensor[: requests * self.padding.shape[0]]

    def pad(self) -> None:
        self.tensor.view(-1, *self.padding.shape).copy_(self.padding)


class StaticBatch:
    """The static batch and the static inputs of one kind of pass, all requests padding at first.

    inputs: of each only the dtype and the dims after the first count. columns: view → columns of
    its page table, which create_table(requests, columns) makes. fill_len: the length that the
    backend gives padded requests; one with more queries is as long as these. state_slots: the
    fields of a batch with the slots of linear layers; padding has none, -1.
    """

    def __init__(
        self,
        mode: ForwardMode,
        config: BackendConfig,
        inputs: Sequence[Tensor],
        *,
        requests: int,
        query_len: int,
        columns: Mapping[str, int],
        create_table: Callable[[int, int], Tensor],
        fill_len: int,
        state_slots: Sequence[str] = (),
    ) -> None:
        device = config.device
        self.query_len, self.padded_len = query_len, max(fill_len, query_len)

        def static(padding: Tensor) -> Static:
            return Static.of(padding.to(device), requests)

        self._tables, self._other_tensors, views = dict[str, Static](), list[Static](), {}
        for name, new in cached_views(config, query_len).items():
            table = create_table(requests, columns[name])
            lengths = static(torch.tensor([self.padded_len], dtype=torch.int32, device="cpu"))
            slots = static(torch.zeros(new, dtype=torch.int64, device="cpu"))
            self._tables[name] = Static(table, table.new_zeros(1, table.shape[1]))
            self._other_tensors += [lengths, slots] if new else [lengths]
            views[name] = CacheView(
                page_table=table,
                seq_lens=lengths.tensor,
                out_cache_loc=slots.tensor,
                max_seq_len=table.shape[1] * config.page_size,
                page_size=config.page_size,
            )
        positions = static(torch.arange(self.padded_len - query_len, self.padded_len, device="cpu"))
        self._other_tensors.append(positions)
        spec = None
        if mode is ForwardMode.TARGET_VERIFY:
            spec = SpecInfo(topk=max(config.topk, 1), num_draft_tokens=query_len)
        if spec is not None and spec.topk > 1:
            chain = static(
                torch.ones(1, query_len, query_len, dtype=torch.bool, device="cpu").tril()
            )
            self._other_tensors.append(chain)
            spec = replace(spec, tree_mask=chain.tensor)
        slot_statics: dict[str, Static] = {}
        for name in state_slots:
            no_slot, not_fresh = (
                torch.tensor([-1], dtype=torch.int32, device="cpu"),
                torch.tensor([False], device="cpu"),
            )
            slot_statics[name] = static(not_fresh if name == "state_fresh" else no_slot)
        self._other_tensors += slot_statics.values()
        slot_tensors = {name: x.tensor for name, x in slot_statics.items()}
        self.batch = ForwardBatch(
            forward_mode=mode,
            cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32, device=device) * query_len,
            positions=positions.tensor,
            max_q_len=query_len,
            views=views,
            spec=spec,
            state_slots=slot_tensors.get("state_slots"),
            state_slots_out=slot_tensors.get("state_slots_out"),
            state_fresh=slot_tensors.get("state_fresh"),
        )
        self._not_fresh = torch.zeros(requests, dtype=torch.bool, device=device)
        self._inputs = [static(x.new_zeros(query_len, *x.shape[1:], device=device)) for x in inputs]
        self._used: tuple[int, ...] = ()  # requests, and columns of tables, that are no padding

    def first(self, requests: int) -> tuple[ForwardBatch, list[Tensor]]:
        """Return the batch and the inputs of the first requests, in the same memory."""
        batch, tokens = self.batch, requests * self.query_len
        views = {}
        for name, view in batch.views.items():
            slots = None if view.out_cache_loc is None else view.out_cache_loc[:tokens]
            table, lengths = view.page_table[:requests], view.seq_lens[:requests]
            views[name] = replace(view, page_table=table, seq_lens=lengths, out_cache_loc=slots)
        spec = batch.spec
        if spec is not None and spec.tree_mask is not None:
            spec = replace(spec, tree_mask=spec.tree_mask[:requests])

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:requests]

        batch_part = replace(
            batch,
            cu_seqlens_q=batch.cu_seqlens_q[: requests + 1],
            positions=batch.positions[:tokens],
            views=views,
            spec=spec,
            state_slots=cut(batch.state_slots),
            state_slots_out=cut(batch.state_slots_out),
            state_fresh=cut(batch.state_fresh),
        )
        return batch_part, [x.first(requests) for x in self._inputs]

    def fill(self, batch: ForwardBatch, inputs: Sequence[Tensor]) -> None:
        """Copy a pass into the first rows, with padding behind them. Never syncs.

        Raises BatchError for inputs of another number or shape.
        """
        size = batch.batch_size
        if len(inputs) != len(self._inputs):
            raise BatchError(f"{len(inputs)} inputs, the captured step takes {len(self._inputs)}")
        for i, (static, x) in enumerate(zip(self._inputs, inputs, strict=True)):
            expected = static.first(size).shape
            if x.shape != expected:
                raise BatchError(f"input {i} is {list(x.shape)} (expected {list(expected)})")
        tables = [
            batch.views[name].page_table[:, : static.tensor.shape[1]]
            for name, static in self._tables.items()
        ]
        extent = (size, *(x.shape[1] for x in tables))
        if any(new_size < old_size for new_size, old_size in zip(extent, self._used, strict=False)):
            for static in (*self._tables.values(), *self._other_tensors, *self._inputs):
                static.pad()
        self._used = extent
        for static, x in zip(self._tables.values(), tables, strict=True):
            static.tensor[:size, : x.shape[1]].copy_(x, non_blocking=True)
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        new = [*self._tensors(batch), *inputs]
        for static, x in zip((*self._other_tensors, *self._inputs), new, strict=True):
            targets, sources = by_dtype.setdefault(static.tensor.dtype, ([], []))
            targets.append(static.first(size))
            sources.append(x)
        for targets, sources in by_dtype.values():  # a launch for each dtype
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def described(self, static: ForwardBatch, batch: ForwardBatch) -> ForwardBatch:
        """Return a static batch with what the host knows of a pass: lengths, and the longest."""
        padded = (self.padded_len,) * (static.batch_size - batch.batch_size)
        views = {}
        for name, padded_view in static.views.items():
            view = batch.views[name]
            host = None if view.seq_lens_host is None else (*view.seq_lens_host, *padded)
            longest = max(view.max_seq_len, *padded[:1], 0)
            views[name] = replace(padded_view, max_seq_len=longest, seq_lens_host=host)
        query_lens = (self.query_len,) * static.batch_size
        return replace(static, views=views, query_lens_host=query_lens)

    def refusal(self, batch: ForwardBatch) -> str | None:
        """Say why this memory cannot hold a pass of this mode and query length, if so."""
        for name, static in self.batch.views.items():
            if name not in batch.views:
                return f"the batch has no view {name!r} (has {sorted(batch.views)})"
            if batch.views[name].out_cache_loc is None:
                return f"view {name!r} has no out_cache_loc: a captured step writes new K and V"
            pages = batch.views[name].page_size
            if pages not in (None, static.page_size):
                return f"view {name!r} was built for pages of {pages}, not of {static.page_size}"
            longest, limit = batch.views[name].max_seq_len, static.max_seq_len
            if longest > limit:
                table = f"the static page table holds {limit}"
                return f"view {name!r}: lengths up to {longest}, {table}"
        if has_tree(batch) != has_tree(self.batch):
            drafts = "trees" if has_tree(self.batch) else "chains, without a tree_mask,"
            return f"verification of {drafts} was captured, as it was selected"
        if (batch.state_slots is None) != (self.batch.state_slots is None):
            missing = batch.state_slots is None
            return "the batch has no state_slots" if missing else "state_slots are not captured"
        if batch.checkpoint_slots is not None:
            return "checkpoint_slots are not captured: a captured pass writes no checkpoints"
        if batch.state_slots_out is not None and self.batch.state_slots_out is None:
            return "state_slots_out are not captured: the backend writes where it has read"
        return None

    def _tensors(self, batch: ForwardBatch) -> Iterator[Tensor]:
        """Yield what a replay copies besides tables and inputs."""
        for name, static in self.batch.views.items():
            yield batch.views[name].seq_lens
            slots = batch.views[name].out_cache_loc
            if (
                slots is not None
                and static.out_cache_loc is not None
                and static.out_cache_loc.numel()
            ):
                yield slots
        yield batch.positions
        if batch.spec is not None and batch.spec.tree_mask is not None:
            yield batch.spec.tree_mask
        slots, state_fresh = batch.state_slots, batch.state_fresh
        if slots is not None:
            yield slots
            if self.batch.state_slots_out is not None:
                yield slots if batch.state_slots_out is None else batch.state_slots_out
            yield self._not_fresh[: batch.batch_size] if state_fresh is None else state_fresh


def cached_views(config: BackendConfig, query_len: int) -> dict[str, int]:
    """Return the views of the layers with a cache → the slots that each request writes."""
    cached = [x for x in config.layers if x.is_causal or x.is_cross]
    cached_names = {x.view for x in cached if not x.is_cross}
    return {x.view: query_len if x.view in cached_names else 0 for x in cached}


def has_tree(batch: ForwardBatch) -> bool:
    return batch.spec is not None and batch.spec.tree_mask is not None
