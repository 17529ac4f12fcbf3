"""triton: our own kernels, portable over NVIDIA and AMD GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attn_core.backends.triton.device import hopper_on, short_on
from attn_core.backends.triton.portable.launch import decode, extend, plan, sees
from attn_core.backends.triton.split_kv import UNIT, Splits
from attn_core.backends.triton.tile_order import TILE, Order, fill_order
from attn_core.backends.triton.tuning import (
    LONG,
    decode_launch,
    extend_launch,
    few,
    hopper_block,
    hopper_launch,
    power_of_two,
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
        self._classes = {LayerGroup.of(layer) for layer in config.layers}
        arch = None if config.device.type == "cpu" else config.arch
        self._arch = arch or "interpreter"
        self._processors = config.multiprocessors or 3  # few, so that short requests are cut too
        self._hopper = hopper_on(self._arch)
        self._short = short_on(config.device)
        self._scratch: dict[int, tuple[Tensor, Tensor]] = {}
        self._lines: dict[LayerGroup, Tensor] = {}  # of CUDA graphs
        self._counter = torch.zeros(2, dtype=torch.int32, device=config.device)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plans:
        """Plan every layer class of the model, without asking the device for a length."""
        return self._plan(batch, {})

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create the buffers that the plans of captured passes fill."""
        for which in self._classes:
            self._lines[which] = self._room(max_bs)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> Plans:
        """Plan into the static buffers; a graph serves every length of this batch size."""
        return self._plan(batch, self._lines)

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch, metadata: Plans) -> None:
        """Plan again for the lengths of a replay: one small launch per class of layers."""
        for which, made in metadata.items():
            self._fill(made, which, batch)

    def _plan(self, batch: ForwardBatch, lines: Mapping[LayerGroup, Tensor]) -> Plans:
        plans: dict[LayerGroup, Splits | Order | None] = {}
        even, spec = batch.forward_mode in EVEN_MODES, _spec(batch)
        latent = self.config.row.kind != "mha"
        for which in self._classes:
            if which.view not in batch.views or not batch.num_tokens:
                continue
            room = lines.get(which)
            longest = batch.views[which.view].max_seq_len
            if room is not None:  # of a graph's replays: what the table has room for
                longest = batch.views[which.view].page_table.shape[1] * self.config.page_size
            whole = self._hopper is not None and not even and longest <= self._short
            few_queries = few(batch.max_q_len, which.group, latent=latent, whole=whole)
            tree = which.causal and spec is not None and spec.tree_mask is not None
            if few_queries and (even or not self.config.deterministic):
                plans[which] = self._splits(which, batch, longest, room, tree)
            else:
                shape = (batch.batch_size, batch.num_tokens, longest, self.config.page_size)
                plans[which] = None if tree else self._order(which, *shape, room)
            self._fill(plans[which], which, batch)
        return plans

    def _splits(
        self, which: LayerGroup, batch: ForwardBatch, longest: int, room: Tensor | None, tree: bool
    ) -> Splits:
        size = batch.batch_size
        queries, fixed = batch.max_q_len * which.group, self.config.deterministic
        short = not fixed and longest <= self._short
        launch = decode_launch(
            self._arch,
            queries,
            which.head_dim,
            which.v_head_dim,
            TORCH_DTYPES[self.config.kv_cache_dtype].itemsize,
            page_size=self.config.page_size,
            short=short,
            tree=tree,
            fp4=self.config.kv_cache_dtype == "fp4_e2m1",
        )
        unit = max(1, (UNIT if fixed else self._short if short else 0) // launch.block_n)
        row_blocks = -(-queries // launch.block_m)
        programs = self._processors * launch.programs
        rows = size * which.num_kv_heads * row_blocks
        states = rows * (longest // UNIT + 2) if fixed else 2 * programs
        parts, lse_parts = self._states(states * launch.block_m, power_of_two(which.v_head_dim))
        return Splits(
            launch=launch,
            row_blocks=row_blocks,
            row_lines=min(queries, launch.block_m),
            programs=programs,
            fixed=fixed,
            unit=unit,
            whole=longest <= unit * launch.block_n,
            overlap=self._arch in ("sm90", "sm100", "sm103"),
            lines=(self._room(size) if room is None else room)[0, : size + 1],
            parts=parts,
            lse_parts=lse_parts,
        )

    def _states(self, lines: int, width: int) -> tuple[Tensor, Tensor]:
        """Return room for the states of cut rows; one layer uses it after the other."""
        held = self._scratch.get(width)
        if held is None or held[0].shape[0] < lines:
            room = torch.empty(lines * (width + 1), dtype=torch.float32, device=self.config.device)
            held = room[: lines * width].view(lines, width), room[lines * width :]
            self._scratch[width] = held
        return held

    def _order(
        self,
        which: LayerGroup,
        size: int,
        tokens: int,
        longest: int,
        page: int,
        room: Tensor | None,
    ) -> Order | None:
        """Return the order of `size` requests; None where the kernel that reads it does not run.

        page: 0 for plain K and V.
        """
        config, block = self.config, hopper_block(which.head_dim, which.v_head_dim)
        if not self._hopper or block is None or config.dtype not in ("bf16", "fp16"):
            return None
        if page and (config.kv_cache_dtype != config.dtype or (page % block and block % page)):
            return None
        room = self._room(size) if room is None else room
        tiles = (tokens * which.group // TILE + size) * which.num_kv_heads
        # in deterministic mode the tile must not depend on the neighbours of a request
        keys = LONG if self.config.deterministic else longest
        return Order(
            begins=room[0, : size + 1],
            who=room[1, :size],
            longest=longest,
            launch=hopper_launch(which.head_dim, keys, tiles, self._processors),
            tiles=tiles,
        )

    def _room(self, size: int) -> Tensor:
        """Return two rows for the plan of a batch, as aligned for any batch size as for another."""
        columns = -(-(size + 1) // 4) * 4
        return torch.empty(2, columns, dtype=torch.int32, device=self.config.device)

    def _fill(self, made: Splits | Order | None, which: LayerGroup, batch: ForwardBatch) -> None:
        lengths = batch.views[which.view].seq_lens
        if isinstance(made, Splits):
            plan(made, batch.cu_seqlens_q, lengths, which.window, causal=which.causal)
        elif made is not None and made.is_read:
            fill_order(made, batch.cu_seqlens_q, lengths, which.group, paged=True)

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
        which = LayerGroup.of(layer)
        if batch.num_tokens and which not in metadata:
            refuse_unplanned(layer, metadata)
        q, out, lse = _outputs(q, layer, out)
        if batch.num_tokens:
            view = batch.views[layer.view]
            spec, made = _spec(batch), metadata[which]
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
        which = sees(layer, spec) if causal is None else int(causal)
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
                hopper.extend_on_hopper(q, layer, cache, *where, *run, which)
                return
        extend(q, layer, cache, *where, positions, spec, launch, out, lse, which)


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
