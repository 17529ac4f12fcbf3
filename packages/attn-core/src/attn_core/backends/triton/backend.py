"""triton: our own kernels, portable over NVIDIA and AMD GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attn_core.backends.triton.device import hopper_on, unsplit_keys_on
from attn_core.backends.triton.masks import mask_mode
from attn_core.backends.triton.portable.launch import decode, extend, plan
from attn_core.backends.triton.split_kv import KEYS_PER_PARTIAL, Splits
from attn_core.backends.triton.tile_order import TILE_ROWS, Order, fill_order
from attn_core.backends.triton.tuning import (
    LONG,
    decode_launch,
    extend_launch,
    hopper_block,
    hopper_launch,
    power_of_two,
    use_split_kv,
)
from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.errors import UsageError
from attn_core.runtime.backend import AttentionBackend, BackendConfig, Output
from attn_core.runtime.batch import EVEN_MODES, ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.contract_checks import (
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    refuse_window,
)
from attn_core.runtime.layer import AttentionLayer, LayerGroup

Plans = Mapping[LayerGroup, Splits | Order | None]  # None: many queries, taken as they come


class Triton(AttentionBackend):
    """Requests with many queries use tiled attention; those with few use split-KV.

    Lengths stay on the device: a plan is one small launch per group of layers. An instance is not
    safe for concurrent streams: the split-KV scratch and the tile counter are shared.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
            refuse_window(config.name, layer)
        self._groups = {LayerGroup.of(layer) for layer in config.layers}
        arch = None if config.device.type == "cpu" else config.arch
        self._arch = arch or "interpreter"
        self._processors = config.multiprocessors or 3  # few, so that short requests are cut too
        self._hopper = hopper_on(self._arch)
        self._unsplit_keys = unsplit_keys_on(config.device)
        self._scratch: dict[int, tuple[Tensor, Tensor]] = {}
        self._graph_buffers: dict[LayerGroup, Tensor] = {}  # of CUDA graphs
        self._counter = torch.zeros(2, dtype=torch.int32, device=config.device)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plans:
        """Plan every group of layers of the model, without asking the device for a length."""
        return self._plan(batch, {})

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create the buffers that the plans of captured passes fill."""
        for group in self._groups:
            self._graph_buffers[group] = self._plan_buffer(max_bs)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> Plans:
        """Plan into the static buffers; a graph serves every length of this batch size."""
        return self._plan(batch, self._graph_buffers)

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch, metadata: Plans) -> None:
        """Plan again for the lengths of a replay: one small launch per group of layers."""
        for group, schedule in metadata.items():
            self._fill(schedule, group, batch)

    def _plan(self, batch: ForwardBatch, graph_buffers: Mapping[LayerGroup, Tensor]) -> Plans:
        plans: dict[LayerGroup, Splits | Order | None] = {}
        even, spec = batch.forward_mode in EVEN_MODES, _spec(batch)
        latent = self.config.row.kind != "mha"
        for group in self._groups:
            if group.view not in batch.views or not batch.num_tokens:
                continue
            buffer = graph_buffers.get(group)
            longest = batch.views[group.view].max_seq_len
            if buffer is not None:  # of a graph's replays: what the table has room for
                longest = batch.views[group.view].page_table.shape[1] * self.config.page_size
            unsplit = self._hopper is not None and not even and longest <= self._unsplit_keys
            split = use_split_kv(batch.max_q_len, group.group, latent=latent, unsplit=unsplit)
            tree = group.causal and spec is not None and spec.tree_mask is not None
            if split and (even or not self.config.deterministic):
                plans[group] = self._splits(group, batch, longest, buffer, tree)
            else:
                shape = (batch.batch_size, batch.num_tokens, longest, self.config.page_size)
                plans[group] = None if tree else self._order(group, *shape, buffer)
            self._fill(plans[group], group, batch)
        return plans

    def _splits(
        self,
        group: LayerGroup,
        batch: ForwardBatch,
        longest: int,
        buffer: Tensor | None,
        tree: bool,
    ) -> Splits:
        size = batch.batch_size
        rows, batch_invariant = batch.max_q_len * group.group, self.config.deterministic
        short = not batch_invariant and longest <= self._unsplit_keys
        launch = decode_launch(
            self._arch,
            rows,
            group.head_dim,
            group.v_head_dim,
            TORCH_DTYPES[self.config.kv_cache_dtype].itemsize,
            page_size=self.config.page_size,
            short=short,
            tree=tree,
            fp4=self.config.kv_cache_dtype == "fp4_e2m1",
        )
        keys_per_unit = KEYS_PER_PARTIAL if batch_invariant else self._unsplit_keys if short else 0
        unit = max(1, keys_per_unit // launch.block_n)
        row_blocks = -(-rows // launch.block_m)
        programs = self._processors * launch.ctas_per_sm
        tiles = size * group.num_kv_heads * row_blocks
        partials = 2 * programs
        if batch_invariant:
            partials = tiles * (longest // KEYS_PER_PARTIAL + 2)
        partial_out, partial_lse = self._partials(
            partials * launch.block_m, power_of_two(group.v_head_dim)
        )
        return Splits(
            launch=launch,
            row_blocks=row_blocks,
            tile_rows=min(rows, launch.block_m),
            programs=programs,
            batch_invariant=batch_invariant,
            blocks_per_unit=unit,
            unsplit=longest <= unit * launch.block_n,
            overlap=self._arch in ("sm90", "sm100", "sm103"),
            work_indptr=(self._plan_buffer(size) if buffer is None else buffer)[0, : size + 1],
            partial_out=partial_out,
            partial_lse=partial_lse,
        )

    def _partials(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Return scratch for partials [rows, width] and their LSE [rows], shared by all layers."""
        scratch = self._scratch.get(width)
        if scratch is None or scratch[0].shape[0] < rows:
            flat = torch.empty(rows * (width + 1), dtype=torch.float32, device=self.config.device)
            scratch = flat[: rows * width].view(rows, width), flat[rows * width :]
            self._scratch[width] = scratch
        return scratch

    def _order(
        self,
        group: LayerGroup,
        size: int,
        tokens: int,
        longest: int,
        page: int,
        buffer: Tensor | None,
    ) -> Order | None:
        """Return the order of `size` requests; None where the kernel that reads it does not run.

        page: 0 for plain K and V.
        """
        config, block = self.config, hopper_block(group.head_dim, group.v_head_dim)
        if not self._hopper or block is None or config.dtype not in ("bf16", "fp16"):
            return None
        if page and (config.kv_cache_dtype != config.dtype or (page % block and block % page)):
            return None
        buffer = self._plan_buffer(size) if buffer is None else buffer
        tiles = (tokens * group.group // TILE_ROWS + size) * group.num_kv_heads
        # in deterministic mode the tile must not depend on the neighbours of a request
        keys = LONG if self.config.deterministic else longest
        return Order(
            tile_offsets=buffer[0, : size + 1],
            request_order=buffer[1, :size],
            longest=longest,
            launch=hopper_launch(group.head_dim, keys, tiles, self._processors),
            tiles=tiles,
        )

    def _plan_buffer(self, size: int) -> Tensor:
        """Return two rows for the plan of a batch, aligned alike for every batch size."""
        columns = -(-(size + 1) // 4) * 4
        return torch.empty(2, columns, dtype=torch.int32, device=self.config.device)

    def _fill(self, made: Splits | Order | None, group: LayerGroup, batch: ForwardBatch) -> None:
        lengths = batch.views[group.view].seq_lens
        if isinstance(made, Splits):
            plan(made, batch.cu_seqlens_q, lengths, group.window, causal=group.causal)
        elif made is not None and made.is_read:
            fill_order(made, batch.cu_seqlens_q, lengths, group.group, paged=True)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Plans,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the cache, in which k and v lie already."""
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        group = LayerGroup.of(layer)
        if batch.num_tokens and group not in metadata:
            refuse_unplanned(layer, metadata)
        q, out, lse = _outputs(q, layer, out)
        if batch.num_tokens:
            view = batch.views[layer.view]
            spec, made = _spec(batch), metadata[group]
            where = (batch.cu_seqlens_q, view.seq_lens, view.page_table, batch.positions, spec)
            if isinstance(made, Splits):
                decode(q, layer, cache, *where, made, out, lse, self._hopper)
            else:
                self._extend(q, layer, cache, *where, made, out, lse)
        return (out, lse) if return_lse else out

    def forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        causal: bool,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Output:
        """Attend without a cache; no length is read on the host."""
        refuse_call(self.config, return_lse=return_lse)
        refuse_window(self.config.name, layer, causal=causal)
        q, out, lse = _outputs(q, layer, out)
        if q.shape[0]:
            k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
            tokens = LayerCache(k=k.unsqueeze(0), v=v.unsqueeze(0))  # one page of all tokens
            lengths = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
            size = cu_seqlens_q.shape[0] - 1
            order = self._order(LayerGroup.of(layer), size, q.shape[0], max_k, 0, None)
            where = (*lengths, None, q, None, order)
            self._extend(q, layer, tokens, *where, out, lse, causal=causal)
        return (out, lse) if return_lse else out

    def _extend(
        self,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        cu_seqlens_q: Tensor,
        lengths: Tensor,
        page_table: Tensor | None,
        positions: Tensor,
        spec: SpecInfo | None,
        order: Order | None,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool | None = None,
    ) -> None:
        where = (cu_seqlens_q, lengths, page_table)
        mask = mask_mode(layer, spec) if causal is None else int(causal)
        hopper, paged = self._hopper, page_table is not None
        dims = (layer.head_dim, layer.v_head_dim)
        launch = extend_launch(self._arch, *dims, cache.k.element_size())
        if hopper and order and hopper.extend_fits(q, layer, cache, paged=paged):
            launch = order.launch
            if order.is_read:
                if not paged:  # a call of its own, which nobody planned
                    group = layer.num_q_heads // layer.num_kv_heads
                    fill_order(order, cu_seqlens_q, lengths, group, paged=False)
                run = (order, min(order.tiles, self._processors), self._counter, out, lse)
                hopper.extend_on_hopper(q, layer, cache, *where, *run, mask)
                return
        extend(q, layer, cache, *where, positions, spec, launch, out, lse, mask)


def _spec(batch: ForwardBatch) -> SpecInfo | None:
    """Return the drafts that a pass verifies."""
    return batch.spec if batch.forward_mode is ForwardMode.TARGET_VERIFY else None


def _outputs(q: Tensor, layer: AttentionLayer, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q with adjacent columns, and what is to be filled."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    if out is None:
        out = q.new_empty(q.shape[0], layer.num_q_heads, layer.v_head_dim)
    elif out.stride(-1) != 1:
        raise UsageError(
            f"out with stride {out.stride(-1)} in its last dimension (supports 1); give a "
            "contiguous tensor"
        )
    return q, out, q.new_empty(q.shape[0], layer.num_q_heads, dtype=torch.float32)
