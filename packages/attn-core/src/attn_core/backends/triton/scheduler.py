"""Plans passes: the schedule of each group of layers, without a look at the device."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.backends.triton.kernel import Choice, Pass, Shape
from attn_core.backends.triton.masks import MASK_TREE
from attn_core.backends.triton.portable.arguments import Requests
from attn_core.backends.triton.schedule import (
    TILE_ROWS,
    Schedule,
    SplitKV,
    Tiles,
    fill_order,
    fill_split,
)
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
from attn_core.runtime.backend import BackendConfig
from attn_core.runtime.batch import EVEN_MODES, ForwardBatch, ForwardMode
from attn_core.runtime.layer import LayerGroup

KEYS_PER_PARTIAL = 1024  # in deterministic mode, where no split depends on other requests
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
        self._unsplit_keys = unsplit_keys_on(config.device)
        self._scratch: dict[int, tuple[Tensor, Tensor]] = {}
        self._no_order = torch.empty(0, dtype=torch.int32, device=config.device)
        self._counter = torch.zeros(2, dtype=torch.int32, device=config.device)

    def buffer(self, requests: int) -> Tensor:
        """Return two rows for the plan of a batch, aligned alike for every batch size."""
        columns = -(-(requests + 1) // 4) * 4
        return torch.empty(2, columns, dtype=torch.int32, device=self.config.device)

    def plan(self, group: LayerGroup, batch: ForwardBatch, static: Tensor | None) -> Schedule:
        """Return the filled schedule of a pass. static: the buffer of a graph's plans."""
        config, view = self.config, batch.views[group.view]
        even, longest = batch.forward_mode in EVEN_MODES, view.max_seq_len
        inputs = Pass.of(group, batch)
        size, tokens = batch.batch_size, batch.num_tokens
        shape = self._shape(group, size, tokens, longest, inputs.mask, config.page_size)
        # where prompts have a kernel of their own, tiles win sooner over keys that are not split
        own = len(self._kernels.prefill) > 1
        unsplit = own and not even and longest <= self._unsplit_keys
        latent = config.row.kind != "mha"
        split = use_split_kv(
            batch.max_q_len, group.num_queries_per_kv, latent=latent, unsplit=unsplit
        )
        if split and (even or not config.deterministic):
            part = self._split(shape, size, longest, batch.max_q_len, static)
            schedule = Schedule(inputs=inputs, longest=longest, split=part)
        elif static is None and self._decodes(batch, longest):
            one = self._split(shape, size, longest, 1, None, max_queries=1)
            rest = self._tiles(shape, size, longest, None, min_queries=2)
            schedule = Schedule(inputs=inputs, longest=longest, split=one, tiles=rest)
        else:
            tiles = self._tiles(shape, size, longest, static)
            schedule = Schedule(inputs=inputs, longest=longest, tiles=tiles)
        self.fill(schedule, group, batch)
        return schedule

    def plan_ragged(
        self, group: LayerGroup, q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, longest: int
    ) -> tuple[Pass, Tiles]:
        """Return what a call over plain K and V reads, and the filled order of its tiles."""
        requests = Requests(cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)
        inputs = Pass(requests, q, causal=group.causal)
        shape = self._shape(group, inputs.size, q.shape[0], longest, inputs.mask, 0)
        tiles = self._tiles(shape, inputs.size, longest, None)
        if tiles.ordered:
            fill_order(tiles, cu_seqlens_q, cu_seqlens_k, group.num_queries_per_kv, paged=False)
        return inputs, tiles

    def fill(self, schedule: Schedule, group: LayerGroup, batch: ForwardBatch) -> None:
        """Fill a schedule for the lengths of a batch: one small launch for each of its parts."""
        cu_seqlens_q, seq_lens = batch.cu_seqlens_q, batch.views[group.view].seq_lens
        if schedule.split is not None:
            fill_split(schedule.split, cu_seqlens_q, seq_lens, group.window, causal=group.causal)
        if schedule.tiles is not None and schedule.tiles.ordered:
            fill_order(schedule.tiles, cu_seqlens_q, seq_lens, group.num_queries_per_kv, paged=True)

    def _shape(
        self, group: LayerGroup, size: int, tokens: int, longest: int, mask: int, page_size: int
    ) -> Shape:
        config = self.config
        return Shape(
            arch=self._arch,
            processors=self._processors,
            group=group,
            dtype=config.dtype,
            kv_cache_dtype=config.kv_cache_dtype if page_size else config.dtype,
            page_size=page_size,
            mask=mask,
            # in deterministic mode the tile must not depend on the neighbours of a request
            longest=LONG if config.deterministic else longest,
            tiles=(tokens * group.num_queries_per_kv // TILE_ROWS + size) * group.num_kv_heads,
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
        self,
        shape: Shape,
        size: int,
        longest: int,
        queries: int,
        static: Tensor | None,
        *,
        max_queries: int = 0,
    ) -> SplitKV:
        config, group = self.config, shape.group
        rows, batch_invariant = queries * group.num_queries_per_kv, config.deterministic
        short = not batch_invariant and longest <= self._unsplit_keys
        launch = decode_launch(
            self._arch,
            rows,
            group.head_dim,
            group.v_head_dim,
            TORCH_DTYPES[config.kv_cache_dtype].itemsize,
            page_size=config.page_size,
            short=short,
            tree=shape.mask == MASK_TREE.value,
            fp4=config.kv_cache_dtype == "fp4_e2m1",
        )
        keys_per_unit = KEYS_PER_PARTIAL if batch_invariant else self._unsplit_keys if short else 0
        blocks_per_unit = max(1, keys_per_unit // launch.block_n)
        row_blocks = -(-rows // launch.block_m)
        programs = self._processors * launch.ctas_per_sm
        partials = 2 * programs
        if batch_invariant:
            partials = size * group.num_kv_heads * row_blocks * (longest // KEYS_PER_PARTIAL + 2)
        width, tile_rows = power_of_two(group.v_head_dim), min(rows, launch.block_m)
        tiles = size * group.num_kv_heads * row_blocks
        partial_out, partial_lse = self._partials(partials * launch.block_m, width)
        buffer = self.buffer(size) if static is None else static
        kernels = self._kernels.decode
        return SplitKV(
            choices=tuple(Choice(k, launch) for k in kernels if k.choose(shape, launch)),
            launch=launch,
            max_queries=max_queries,
            row_blocks=row_blocks,
            tile_rows=tile_rows,
            programs=programs,
            batch_invariant=batch_invariant,
            blocks_per_unit=blocks_per_unit,
            unsplit=longest <= blocks_per_unit * launch.block_n,
            overlap=has_pdl(self._arch),
            work_indptr=buffer[0, : size + 1],
            partial_out=partial_out,
            partial_lse=partial_lse,
            merge_tile=merge_tile(tiles, tile_rows, programs, width),
        )

    def _tiles(
        self,
        shape: Shape,
        size: int,
        longest: int,
        static: Tensor | None,
        *,
        min_queries: int = 0,
    ) -> Tiles:
        choices, order, offsets = [], self._no_order, self._no_order
        for kernel in self._kernels.prefill:
            launch = kernel.choose(shape, None)
            if launch is not None:
                choices.append(Choice(kernel, launch))
        if choices[0].kernel.takes_order:
            buffer = self.buffer(size) if static is None else static
            offsets, order = buffer[0, : size + 1], buffer[1, :size]
        return Tiles(
            choices=tuple(choices),
            min_queries=min_queries,
            tile_offsets=offsets,
            request_order=order,
            counter=self._counter,
            longest=longest,
            tiles=shape.tiles,
            processors=self._processors,
        )

    def _partials(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Return scratch for partials [rows, width] and their LSE [rows], shared by all layers."""
        scratch = self._scratch.get(width)
        if scratch is None or scratch[0].shape[0] < rows:
            flat = torch.empty(rows * (width + 1), dtype=torch.float32, device=self.config.device)
            scratch = flat[: rows * width].view(rows, width), flat[rows * width :]
            self._scratch[width] = scratch
        return scratch
