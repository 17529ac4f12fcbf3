"""Plans passes: the schedule of each group of layers, without a look at the device."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from attn_core.backends.triton.cut_tiles import may_cut
from attn_core.backends.triton.kernel import Choice, Pass, Shape
from attn_core.backends.triton.latent_prompts import chunk_queries, in_chunks
from attn_core.backends.triton.masks import MASK_TREE
from attn_core.backends.triton.new_tokens import are_all_keys, new_tokens
from attn_core.backends.triton.portable.arguments import LEVELS, KeyParts, Requests
from attn_core.backends.triton.portable.plan_tiles import most_slots
from attn_core.backends.triton.schedule import (
    PLANNED_REQUESTS,
    TILE_ROWS,
    Cuts,
    Schedule,
    SplitKV,
    Tiles,
    fill_order,
    fill_split,
)
from attn_core.backends.triton.shared import buffer_shape, sharing_of
from attn_core.backends.triton.tuning import (
    LONG,
    decode_launch,
    has_pdl,
    merge_tile,
    power_of_two,
    use_split_kv,
)
from attn_core.backends.triton.variants import kernels_of
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.costs.shared_prefix import MAX_REQUESTS, fits_tile, largest_tile, shared_tile_rows
from attn_core.runtime.backend import BackendConfig
from attn_core.runtime.batch import EVEN_MODES, ForwardBatch, ForwardMode
from attn_core.runtime.layer import LayerGroup

KEYS_PER_PARTIAL = 1024  # in deterministic mode, where no split depends on other requests
MERGED_AT_ONCE = 16  # of these partials: the order of a request's sums depends on no other either
UNSPLIT_KEYS = 256  # requests with at most so many keys are not split
MIXED_MODES = (ForwardMode.MIXED, ForwardMode.EXTEND)


def unsplit_keys_on(device: torch.device) -> int:
    """Return the longest KV length that is never split; 0 in the interpreter, so that it splits."""
    return UNSPLIT_KEYS if device.type == "cuda" else 0


class Scheduler:
    """Makes and fills schedules. Their scratch and their counter are shared by all passes."""

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        self._arch = "interpreter" if config.device.type == "cpu" else config.arch or "interpreter"
        self._kernels = kernels_of(self._arch)
        self._processors = config.multiprocessors or 3  # few, so that short requests are split too
        # beside the portable ones; tiles of prompts then win sooner over keys that are not split
        self._own_kernels = len(self._kernels.prefill) > 1
        self._latent = config.row.kind != "mha"
        self._unsplit_keys = unsplit_keys_on(config.device)
        self._cuts: dict[Hashable, Cuts] = {}
        self._scratch: dict[int, tuple[Tensor, Tensor]] = {}
        self._lse: dict[int, Tensor] = {}
        self._no_order = torch.empty(0, dtype=torch.int32, device=config.device)
        self._counter = torch.zeros(2, dtype=torch.int32, device=config.device)

    def buffer(self, requests: int) -> Tensor:
        """Return rows for the plan of a batch, each aligned to 128 bytes, a line of the cache."""
        shape = buffer_shape(requests, self._processors if self.config.shared_prefix else 0)
        return torch.empty(shape, dtype=torch.int32, device=self.config.device)

    def plan(self, group: LayerGroup, batch: ForwardBatch, static: Tensor | None) -> Schedule:
        """Return the filled schedule of a pass. static: the buffer of a graph's plans."""
        even, longest = batch.forward_mode in EVEN_MODES, batch.views[group.view].max_seq_len
        inputs, queries = Pass.of(group, batch), batch.max_q_len
        unsplit = self._own_kernels and not even and longest <= self._unsplit_keys
        per_kv = group.num_queries_per_kv
        split = use_split_kv(queries, per_kv, latent=self._latent, unsplit=unsplit)
        part, tiles, new, chunk = None, None, None, 0
        is_decode = split and (even or queries == 1)
        if self._latent and not (is_decode or static is not None or self.config.deterministic):
            shape = self._shape(group, inputs, longest)
            chunk = chunk_queries(self._kernels.decode, shape, inputs.tokens)
        if chunk:
            inputs = in_chunks(inputs, chunk, -(-longest // self.config.page_size))
            part = self._split(group, inputs, longest, chunk, None, max_queries=chunk)
        elif split and (even or not self.config.deterministic):
            part = self._split(group, inputs, longest, queries, static)
        elif static is None and self._decodes(batch, longest):
            part = self._split(group, inputs, longest, 1, None, max_queries=1)
            tiles = self._tiles(group, inputs, longest, None, min_queries=2)
        else:
            tiles = self._tiles(group, inputs, longest, static)
            if static is None and are_all_keys(self.config, group, batch):
                unpaged = self._shape(group, inputs, longest)._replace(page_size=0)
                new = new_tokens(self._kernels.new_tokens, unpaged, batch, tiles)
        lse = self._unread_lse(inputs.tokens, group.num_q_heads)
        schedule = Schedule(inputs=inputs, longest=longest, unread_lse=lse, split=part, tiles=tiles)
        schedule.new, schedule.chunk = new, chunk
        self.fill(schedule, group, batch)
        return schedule

    def plan_ragged(
        self, group: LayerGroup, q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, longest: int
    ) -> tuple[Pass, Tiles]:
        """Return what a call over plain K and V reads, and the filled order of its tiles."""
        requests = Requests(cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)
        inputs = Pass(requests, q, causal=group.causal)
        tiles = self._tiles(group, inputs, longest, None)
        if tiles.ordered:
            fill_order(tiles, cu_seqlens_q, cu_seqlens_k, group, paged=False)
        return inputs, tiles

    def fill(self, schedule: Schedule, group: LayerGroup, batch: ForwardBatch) -> None:
        """Fill a schedule for the lengths of a batch: one small launch for each of its parts."""
        view, cu_seqlens_q = batch.views[group.view], batch.cu_seqlens_q
        seq_lens = view.seq_lens
        if schedule.split is not None:
            requests = Requests(cu_seqlens_q, seq_lens, view.page_table)
            requests = schedule.inputs.requests if schedule.chunk else requests
            fill_split(schedule.split, requests, group.window, causal=group.causal)
        if schedule.tiles is not None and schedule.tiles.ordered:
            fill_order(schedule.tiles, cu_seqlens_q, seq_lens, group, paged=True)

    def _shape(self, group: LayerGroup, inputs: Pass, longest: int) -> Shape:
        config, tokens = self.config, inputs.positions.shape[0]
        tiles = tokens * group.num_queries_per_kv // TILE_ROWS + inputs.size
        return Shape(
            arch=self._arch,
            processors=self._processors,
            group=group,
            dtype=config.dtype,
            kv_cache_dtype=config.kv_cache_dtype if inputs.paged else config.dtype,
            page_size=config.page_size if inputs.paged else 0,
            mask=inputs.mask,
            # in deterministic mode the tile must not depend on the neighbours of a request
            longest=LONG if config.deterministic else longest,
            tiles=tiles * group.num_kv_heads,
        )

    def _decodes(self, batch: ForwardBatch, longest: int) -> bool:
        """Say whether a pass of prompts also has requests of one query whose keys are split."""
        if self.config.deterministic or longest <= self._unsplit_keys:
            return False
        if batch.forward_mode not in MIXED_MODES:
            return False
        if batch.query_lens_host is None:
            return batch.forward_mode is ForwardMode.MIXED
        return 1 in batch.query_lens_host

    def _split(
        self, group: LayerGroup, inputs: Pass, longest: int, queries: int, static: Tensor | None, *,
        max_queries: int = 0,
    ) -> SplitKV:  # fmt: skip
        size, batch_invariant = inputs.size, self.config.deterministic
        short = not batch_invariant and longest <= self._unsplit_keys
        key = (group, size, inputs.mask, queries, short, max_queries)
        cuts = self._cuts.get(key)
        if cuts is None:
            shape = self._shape(group, inputs, longest)
            shares = not (max_queries or short) and self._shares(group, size)
            cuts = self._cuts[key] = self._cut(
                shape, size, queries, short, max_queries, shares=shares
            )
        partials = 2 * cuts.programs
        if batch_invariant:
            partials = cuts.tiles * (longest // KEYS_PER_PARTIAL + 2)
        rows, width = partials * cuts.launch.block_m, power_of_two(group.v_head_dim)
        plan, indptrs = static, size + 1
        if cuts.sharing is not None:
            rows += (1 + LEVELS.value) * inputs.tokens * group.num_q_heads
            plan, indptrs = self.buffer(size) if static is None else static, 2 * size + 1
        elif cuts.planned_quota:
            indptrs += 2
        partial_out, partial_lse = self._partials(rows, width)
        if plan is None:
            indptr = torch.empty(indptrs, dtype=torch.int32, device=self.config.device)
        else:
            indptr = plan[0, :indptrs]
        return SplitKV(
            choices=cuts.choices,
            cuts=cuts,
            unsplit=longest <= cuts.blocks_per_unit * cuts.launch.block_n,
            work_indptr=indptr,
            partial_out=partial_out,
            partial_lse=partial_lse,
            buffer=None if cuts.sharing is None else plan,
            counter=self._counter,
        )

    def _shares(self, group: LayerGroup, size: int) -> bool:
        """Say whether the requests of a pass of short queries may read keys together.

        Windows move the keys of each request, and a deterministic one depends on no other.
        """
        config = self.config
        alone = config.deterministic or group.window is not None or group.dual_chunk is not None
        return config.shared_prefix and not alone and group.causal and 1 < size <= MAX_REQUESTS

    def _cut(
        self, shape: Shape, size: int, queries: int, short: bool, max_queries: int, *, shares: bool
    ) -> Cuts:
        """Return what of a split no length decides but whether all keys are short."""
        config, group, arch = self.config, shape.group, self._arch
        rows, batch_invariant = queries * group.num_queries_per_kv, config.deterministic
        store, tree = config.kv_cache_dtype, shape.mask == MASK_TREE.value
        store_bytes, query_bytes = (TORCH_DTYPES[x].itemsize for x in (store, shape.dtype))
        sizes = (group.head_dim, group.v_head_dim, store_bytes)
        largest = largest_tile(arch if self._own_kernels else None, *sizes, config.page_size, size)
        shares = shares and fits_tile(rows, largest)
        launch = decode_launch(
            arch,
            shared_tile_rows(rows, group.v_head_dim, store, tree, largest) if shares else rows,
            *sizes,
            page_size=config.page_size,
            short=short,
            tree=tree,
            fp4=store == "fp4_e2m1",
            shared=shares,
            requests=LONG if batch_invariant or short else size,
            query_bytes=query_bytes,
        )
        keys_per_unit = KEYS_PER_PARTIAL if batch_invariant else self._unsplit_keys if short else 0
        row_blocks, tile_rows = -(-rows // launch.block_m), min(rows, launch.block_m)
        parts = max(1, self._processors * launch.ctas_per_sm // row_blocks)
        programs = parts * row_blocks  # those of a part of the keys run side by side
        tiles, width = size * group.num_kv_heads * row_blocks, power_of_two(group.v_head_dim)
        merged = (1, 1, MERGED_AT_ONCE - 2) if batch_invariant else (tiles, tile_rows, programs)
        kernels, of_launch = self._kernels.decode, (config.page_size, store_bytes, launch)
        sharing = sharing_of(group, queries, *of_launch) if shares and row_blocks == 1 else None
        in_turn = sharing is not None and sharing.tile_units > 0  # drafts: one head after the other
        planned = self._latent and not (batch_invariant or short or sharing is not None)
        return Cuts(
            choices=tuple(Choice(k, launch) for k in kernels if k.choose(shape, launch)),
            launch=launch,
            max_queries=max_queries,
            tiles=tiles,
            kv_heads=group.num_kv_heads,
            row_blocks=row_blocks,
            heads_at_once=1 if in_turn else math.gcd(parts, group.num_kv_heads),
            tile_rows=tile_rows,
            programs=programs,
            batch_invariant=batch_invariant,
            blocks_per_unit=max(1, keys_per_unit // launch.block_n),
            overlap=has_pdl(arch),
            merge_tile=merge_tile(*merged, width),
            sharing=sharing,
            planned_quota=planned and group.num_kv_heads == 1 and size <= PLANNED_REQUESTS,
        )

    def _tiles(
        self, group: LayerGroup, inputs: Pass, longest: int, static: Tensor | None, *,
        min_queries: int = 0,
    ) -> Tiles:  # fmt: skip
        shape, size = self._shape(group, inputs, longest), inputs.size
        order, offsets, parts = self._no_order, self._no_order, None
        choices = [Choice(k, x) for k in self._kernels.prefill if (x := k.choose(shape, None))]
        if choices[0].kernel.takes_order:
            buffer = self.buffer(size) if static is None else static
            offsets, order = buffer[0, : size + 1], buffer[1, :size]
            batch, fixed = inputs.batch, self.config.deterministic
            if batch is not None and not fixed and may_cut(shape, batch, longest, min_queries):
                scratch = self._partials(most_slots(self._processors) * TILE_ROWS, group.v_head_dim)
                parts = KeyParts(buffer[2, :size], buffer[3, :size], *scratch)
        return Tiles(
            choices=tuple(choices),
            min_queries=min_queries,
            tile_offsets=offsets,
            request_order=order,
            counter=self._counter,
            longest=longest,
            tiles=shape.tiles,
            processors=self._processors,
            parts=parts,
        )

    def _unread_lse(self, tokens: int, heads: int) -> Tensor:
        """Return what layers fill and nobody reads [tokens, heads]; a graph's plan keeps its own.

        It is that of the last pass with as many tokens.
        """
        lse = self._lse.get(heads)
        if lse is None or lse.shape[0] != tokens:
            lse = torch.empty(tokens, heads, dtype=torch.float32, device=self.config.device)
            self._lse[heads] = lse
        return lse

    def _partials(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Return scratch for partials [rows, width] and their LSE [rows], shared by all layers."""
        scratch = self._scratch.get(width)
        if scratch is None or scratch[0].shape[0] < rows:
            flat = torch.empty(rows * (width + 1), dtype=torch.float32, device=self.config.device)
            self._scratch[width] = flat[: rows * width].view(rows, width), flat[rows * width :]
        return self._scratch[width]
