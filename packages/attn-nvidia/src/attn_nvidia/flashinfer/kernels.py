"""Which of FlashInfer's kernels runs a pass, and how it splits the keys."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from attn_core import DECODE_MODES, BackendConfig, ForwardMode, LayerGroup, num_pages_for
from numpy.typing import NDArray

from attn_nvidia.common.workspace_bytes import MIB

# "decode" runs on CUDA cores, one query per request; "fa2" and "fa3" run on tensor cores.
Kernel = Literal["decode", "fa2", "fa3"]
Lengths = NDArray[np.int32]  # numpy, whose calls cost a tenth of torch's on a few numbers

FA3_DIMS: Final = frozenset({(64, 64), (128, 128), (256, 256), (192, 128)})
_FA3_SPEED: Final = 1.6  # fa2's time for fa3's, long queries with and without a prefix (H200)
_TILE: Final = 128  # query rows of a block
_FIXED_SPLIT: Final = 2048  # tokens, the least
_MOST_PARTIALS: Final = 1024 * MIB  # of a deterministic plan


def choose(
    config: BackendConfig,
    group: LayerGroup,
    mode: ForwardMode,
    queries: Lengths,
    keys: Lengths,
    *,
    masked: bool,
    processors: int,
) -> Kernel:
    """Choose the kernel of a pass; the same for every batch of decode and verify passes.

    queries, keys: int32 [B]. masked: the pass has a tree mask, which only fa2 takes. In the
    deterministic mode the lengths, which are also the neighbours', have no say.
    """
    if mode in DECODE_MODES:
        # Four queries for one load of K and V are worth tensor cores, FP8 needs their conversion,
        # and only they split at fixed places.
        few_heads = group.num_queries_per_kv < 4 and not fp8(config) and not config.deterministic
        return "decode" if few_heads else "fa2"
    if masked or mode is ForwardMode.TARGET_VERIFY or not fa3_takes(config, group):
        return "fa2"
    if config.deterministic:
        return "fa3"
    return faster_prefill(group, queries, keys, processors)


def fp8(config: BackendConfig) -> bool:
    """Say whether the cache stores FP8."""
    return config.kv_cache_dtype.startswith("fp8")


def fa3_takes(config: BackendConfig, group: LayerGroup) -> bool:
    """Say whether the Hopper kernel serves a class of layers.

    It wants FP8 queries with FP8 keys. With a window it loads the first tile of V from the start
    of the request and not of the window (attention/hopper/sparse_mainloop.cuh, flashinfer 0.6.14).
    """
    dims = (group.head_dim, group.v_head_dim) in FA3_DIMS
    return config.arch == "sm90" and dims and group.window is None and not fp8(config)


def faster_prefill(
    group: LayerGroup, queries: Lengths, keys: Lengths, processors: int
) -> Literal["fa2", "fa3"]:
    """Compare blocks · keys of both tensor-core kernels.

    A block of fa3 holds 128 queries of one head, all keys: short queries leave it empty, few
    blocks leave processors idle. A block of fa2 holds 128 rows of a group of heads, keys split.
    """
    length = keys.astype(np.int64)
    fa3 = int((-(-queries // _TILE) * length).sum()) * group.num_q_heads / processors
    fa3 = max(fa3, int(length.max(initial=0)))
    fa2 = int((-(-queries * group.num_queries_per_kv // _TILE) * length).sum()) * group.num_kv_heads
    return "fa3" if fa3 < _FA3_SPEED * fa2 / processors else "fa2"


def tile_rows(rows: int, head_dim: int) -> int:
    """Return fa2's query rows of a block for `rows` = queries · group of a request.

    FA2DetermineCtaTileQ in utils.cuh of flashinfer 0.6.14.
    """
    if rows > 64 and head_dim < 256:
        return 128
    return 64 if rows > 16 else 16


def partials(group: LayerGroup, tile: int, blocks: int) -> int:
    """Return the bytes of the partial results of split keys: an output and an LSE in float32."""
    return group.num_q_heads * tile * blocks * (group.v_head_dim + 1) * 4 + 32


def graph_splits(group: LayerGroup, batch: int, tokens: int, processors: int, nbytes: int) -> bool:
    """Say whether a captured plan may split keys: its partial results must fit `nbytes`.

    A graph has room for the worst case: all tokens in one request (PrefillSplitQOKVIndptr).
    """
    tile = tile_rows((tokens - batch + 1) * group.num_queries_per_kv, group.v_head_dim)
    tiles = -(-tokens * group.num_queries_per_kv // tile) + batch - 1
    blocks = max(2 * processors // group.num_kv_heads, tiles)
    return partials(group, tile, blocks) <= nbytes


def schedule_bytes(group: LayerGroup, batch: int, tokens: int, processors: int) -> int:
    """Return the bytes of a captured plan's schedule, at most.

    Per block of fa2 or of decode three indices and a flag, per token and request an offset, per
    block of fa3 seven numbers (the plans in attention/scheduler.cuh of flashinfer 0.6.14).
    """
    rows = tokens * group.num_queries_per_kv
    blocks = 32 * processors // group.num_kv_heads + rows // 16 + batch + 1
    works = group.num_q_heads * (tokens // _TILE + batch + 1)
    return 13 * blocks + 8 * (tokens + batch + processors) + 28 * works + 4096


def fixed_split(config: BackendConfig, group: LayerGroup) -> int | None:
    """Return the pages of a split that does not depend on the batch, None: do not split.

    The partial results of the largest batch must fit the workspace; without limits in `config`
    that is not known.
    """
    if not config.max_bs or not config.max_seq_len:
        return None
    longest = num_pages_for(config.max_seq_len, config.page_size)
    split = max(1, _FIXED_SPLIT // config.page_size)
    while _split_bytes(config, group, split) > _MOST_PARTIALS:
        if split >= longest:
            return None
        split *= 2
    return split


def fixed_bytes(config: BackendConfig, group: LayerGroup) -> int:
    """Return the bytes of partial results that plans of the fixed split take at most."""
    split = fixed_split(config, group)
    return 0 if split is None else _split_bytes(config, group, split)


def _split_bytes(config: BackendConfig, group: LayerGroup, split: int) -> int:
    rows = max(config.num_draft_tokens, 1) * group.num_queries_per_kv
    tile = tile_rows(rows, group.v_head_dim)
    chunks = -(-num_pages_for(config.max_seq_len, config.page_size) // split)
    return partials(group, tile, config.max_bs * -(-rows // tile) * chunks)
