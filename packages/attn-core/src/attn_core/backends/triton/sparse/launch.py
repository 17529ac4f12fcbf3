"""Launch the kernels of sparse MLA; nothing is read to the host."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_core.backends.triton.sparse.attend import attend_selected
from attn_core.backends.triton.sparse.passes import SparsePass
from attn_core.backends.triton.sparse.scoring import Scores, Scoring
from attn_core.backends.triton.sparse.selecting import VECTOR, Step, selecting, steps
from attn_core.backends.triton.tuning import is_hopper, multiplies_e4m3, power_of_two
from attn_core.cache.layer_cache import LayerCache, split_latents
from attn_core.ops.forms import same_form
from attn_core.ops.new_tensor import new_tensor
from attn_core.ops.triton.launcher import (
    Grid,
    Launcher,
    Pointers,
    alike,
    moved,
    numbered,
    pointers,
)
from attn_core.ops.triton.merge import Merge
from attn_core.runtime.layer import AttentionLayer

MOST_SCORES = 1 << 26  # float32 numbers that exist at once: 256 MiB
FEWEST_KEYS = 128  # of a query that a program attends to, where they are cut


class AttendConstants(NamedTuple):
    """What attend_selected is compiled for: latents of DV + DR columns, BM heads by BN keys.

    The strides are those of latents, of their rope parts and of FP8's scales. Compiled in, an odd
    one is known to be a multiple of what a load takes at once.
    """

    HEADS: int
    DV: int
    DR: int
    PAGE: int
    TOPK: int
    BM: int
    BN: int
    BDV: int
    BDR: int
    FP8: bool
    NATIVE: bool
    PAGE_STRIDE: int
    TOKEN_STRIDE: int
    ROPE_PAGE: int
    ROPE_TOKEN: int
    SCALES_PAGE: int
    SCALES_TOKEN: int


class _Selection(NamedTuple):
    """How a pass selects for queries of one form: the launches of some queries at a time.

    scored_by: the key of Scoring in a cache. form: that of Scoring; -1 without scores.
    """

    scored_by: tuple[str, int]
    form: int
    parts: list[tuple[Scores | None, list[Step]]]


def index_topk(
    q_index: Tensor,
    weights: Tensor,
    cache: LayerCache,
    inputs: SparsePass,
    topk: int,
    *,
    arch: str | None = None,
) -> Tensor:
    """Score and select, some queries at a time; see AttentionBackend.index_topk.

    arch: of the device, as in BackendConfig.
    """
    scoring: Scoring | None = None
    aligned = not (q_index.data_ptr() | weights.data_ptr()) % 16
    last = inputs.last.get(topk) if aligned else None
    key: Hashable
    selection: _Selection | None
    if last is not None and last[0](q_index, weights):
        key, selection = last[1]
    else:
        key = (
            "index_topk", topk, q_index.shape, q_index.stride(), alike(q_index), weights.stride(),
            alike(weights),
        )  # fmt: skip
        selection = inputs.kept.get(key)
        if aligned and selection is not None:
            inputs.last[topk] = (same_form(q_index, weights), (key, selection))
    chosen = new_tensor(q_index, (q_index.shape[0], topk), (topk, 1), torch.int32)
    if selection is not None and selection.form >= 0:
        scoring = cache.launchers.get(selection.scored_by)
        if scoring is None or moved(scoring.pointers) or scoring.form != selection.form:
            selection = None
            inputs.last.pop(topk, None)
    if selection is None:
        selection, scoring = _selection(key, q_index, weights, cache, inputs, chosen, arch)
    for scores, selects in selection.parts:
        if scores is not None and scoring is not None:
            scoring.run(scores, q_index, weights)
        for select in selects:
            select.run(chosen)
    return chosen


def _selection(
    key: Hashable,
    q_index: Tensor,
    weights: Tensor,
    cache: LayerCache,
    inputs: SparsePass,
    chosen: Tensor,
    arch: str | None,
) -> tuple[_Selection, Scoring | None]:
    """Return the launches for queries of one form, and how they are scored in this cache.

    The pass keeps them with their scratch, unless that is large.
    """
    (tokens, topk), longest = chosen.shape, inputs.longest
    columns = -(-max(1, longest) // 64) * 64  # whole cache lines
    rows = max(1, min(tokens, MOST_SCORES // columns))
    shape = (rows, columns) if longest > topk else (1, VECTOR)
    scores = torch.empty(shape, dtype=torch.float32, device=chosen.device)
    selector, scoring, parts = selecting(inputs.queries), None, []
    scored_by = ("", 0)
    if longest > topk:
        scored_by, scoring = Scoring.of(q_index, weights, cache, inputs, scores, topk, arch)
    for first in range(0, tokens, rows):
        span = (first, min(rows, tokens - first))
        launch = scoring and scoring.scores(q_index, weights, inputs, scores, *span)
        selects = steps(scores, *span, inputs, chosen, selector, page_size=cache.page_size)
        parts.append((launch, selects))
    selection = _Selection(scored_by, -1 if scoring is None else scoring.form, parts)
    inputs.keep(key, selection, scores.nbytes)
    return selection, scoring


def score(
    q_index: Tensor,
    weights: Tensor,
    cache: LayerCache,
    inputs: SparsePass,
    scores: Tensor,
    first: int,
    count: int,
    topk: int,
    *,
    arch: str | None = None,
) -> None:
    """Write the scores of some queries from `first` on into scores float32 [count, L].

    Of queries that see at most topk keys there are none.
    """
    _, x = Scoring.of(q_index, weights, cache, inputs, scores, topk, arch)
    x.run(x.scores(q_index, weights, inputs, scores, first, count), q_index, weights)


class _Attending(NamedTuple):
    """attend_selected for queries and outputs of one form, over one cache at these pointers."""

    launcher: Launcher
    pointers: Pointers


class Attention(NamedTuple):
    """How queries of one form attend in a pass: the cut of their selections, and its scratch.

    attending: the key of _Attending in a cache; the next three make one. numbers: the arguments of
    attend_selected behind its tensors. partial: outputs and LSE of the parts, where there are
    several; merge: what merges them.
    """

    attending: tuple[str, int]
    v_dim: int
    arch: str | None
    tile: tuple[int, int, int]
    grid: Grid
    numbers: tuple[float, ...]
    partial: tuple[Tensor, Tensor] | None
    merge: Merge | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        topk_indices: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        processors: int,
        launchers: dict[Any, Any],
        arch: str | None = None,
    ) -> Attention:
        """Return it for tensors like these.

        processors: programs that run at once; the keys of a query are cut until there are as many.
        0 cuts in the same way for every number of queries. launchers: what is kept, of one device.
        arch: of the device, as in BackendConfig.
        """
        (tokens, heads, dim), v_dim = q.shape, layer.v_head_dim
        topk, row = topk_indices.shape[1], topk_indices.stride(0)
        block_m, block_n, _ = tile = _tile(heads, q.dtype, arch, fp8=cache.latent_dim > 0)
        blocks, max_parts = -(-heads // block_m), max(1, topk // FEWEST_KEYS)
        programs = max(1, tokens * blocks)
        num_parts = max_parts if not processors else min(max_parts, -(-2 * processors // programs))
        keys = (topk + num_parts - 1) // num_parts
        keys = -(-keys // block_n) * block_n
        parts = -(-topk // keys)
        partial, merge = None, None
        written = (out, lse)
        of_out, of_states = (0, *out.stride()), (0, *lse.stride())
        if parts > 1:
            partial = written = (
                torch.empty(parts, *out.shape, dtype=torch.float32, device=q.device),
                torch.empty(parts, *lse.shape, dtype=torch.float32, device=q.device),
            )
            of_out, of_states = partial[0].stride(), partial[1].stride()
            like = tuple(map(alike, (*partial, out, lse)))
            strides = (*of_out, *of_states, *out.stride(), *lse.stride())
            merge = Merge.of(like, (parts, tokens, heads, v_dim), strides, launchers)
        token, head, _ = q.stride()
        key = (
            dim, v_dim, heads, topk, arch, token, head, row >> 31, of_out[0] >> 31, of_out[1:3],
            of_states[0] >> 31, of_states[1], *map(alike, (q, topk_indices, *written)),
        )  # fmt: skip
        numbers = (token, head, row, keys, layer.scale, *of_out[:3], *of_states[:2])
        grid = (tokens, blocks, parts)
        return cls(("attend", numbered(key)), v_dim, arch, tile, grid, numbers, partial, merge)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its scratch."""
        return 0 if self.partial is None else self.partial[0].nbytes

    def run(
        self, q: Tensor, cache: LayerCache, topk_indices: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        """Attend to the selected slots, into out [T, H, Dv] and lse float32 [T, H]."""
        x: _Attending | None = cache.launchers.get(self.attending)
        if x is None or moved(x.pointers):
            x = _attending(q, self.v_dim, cache, topk_indices.shape[1], self.arch, self.tile)
            cache.launchers[self.attending] = x
        partial_out, states = self.partial or (out, lse)
        tensors, numbers = (q, topk_indices, partial_out, states), self.numbers
        out_ptr, lse_ptr = partial_out.data_ptr(), states.data_ptr()
        args = (q.data_ptr(), topk_indices.data_ptr(), out_ptr, lse_ptr, *numbers)
        x.launcher.launch(self.grid, args, tensors, numbers)
        if self.merge is not None:
            addresses = (out_ptr, lse_ptr, out.data_ptr(), lse.data_ptr())
            self.merge.run(addresses, lambda: (partial_out, states, out, lse))


def _attending(
    q: Tensor,
    v_dim: int,
    cache: LayerCache,
    topk: int,
    arch: str | None,
    tile: tuple[int, int, int],
) -> _Attending:
    _, heads, dim = q.shape
    block_m, block_n, warps = tile
    fp8 = cache.latent_dim > 0
    native = fp8 and multiplies_e4m3(arch)
    if fp8:
        values, scales, rope = split_latents(cache.k, cache.latent_dim)
    else:
        values, scales, rope = cache.k, cache.k, cache.k[..., v_dim:]
    constants = AttendConstants(
        *(heads, v_dim, dim - v_dim, cache.page_size, topk, block_m, block_n),
        *(power_of_two(v_dim), power_of_two(dim - v_dim), fp8, native),
        *(x.stride(axis) for x in (values, rope, scales) for axis in (0, 1)),
    )
    stored = values.view(torch.uint8) if fp8 and not native else values
    stages = 1 if q.dtype == torch.float32 else 2
    last = (stored, rope, scales, constants)
    launcher = Launcher(attend_selected, *last, num_warps=warps, num_stages=stages)
    return _Attending(launcher, pointers(cache.k))


def _tile(heads: int, dtype: torch.dtype, arch: str | None, *, fp8: bool) -> tuple[int, int, int]:
    """Return heads and keys of a tile, and its warps."""
    if is_hopper(arch) and heads > 16 and dtype != torch.float32:  # fills its shared memory
        return 64, 64, 8
    fp32_values = fp8 or dtype == torch.float32  # values of FP8 are multiplied in float32, too
    return 16, 16 if fp32_values else 32, 4
