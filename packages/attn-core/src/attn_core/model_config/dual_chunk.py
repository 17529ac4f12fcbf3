"""Dual chunk attention in a config of Qwen2.5-1M: its chunks, and the lines of sparse prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from attn_core.errors import ModelConfigError, UsageError
from attn_core.model_config.keys import Keys, brief
from attn_core.spec.dual_chunk import DualChunk

_NAME = "dual_chunk_attention_config"
_LINES = f"{_NAME}.sparse_attention_config"
# The model's own code takes 100 verticals more where the list says 30.
_FEW, _MORE = 30, 100


def dual_chunk(keys: Keys) -> DualChunk | None:
    """Return the dual chunk attention of a model; sizes that are left out are its code's.

    None where the config has none. Prompts are sparse where there is a list of lines that is not
    turned off; the lists of all layers are checked.
    """
    if keys.get(_NAME) is None:
        return None
    sizes = ("chunk_size", "local_size", "original_max_position_embeddings")
    size, local, trained = (keys.count(f"{_NAME}.{part}") for part in sizes)
    threshold = last = None
    if keys.get(_LINES) and keys.get(f"{_NAME}.sparse_attention_enabled") is not False:
        threshold = _threshold(keys)
        last = keys.count(f"{_NAME}.sparse_attention_last_q")
        (heads,) = keys.need("num_attention_heads")
        for layer in range(len(keys.layers(_LINES) or [])):
            _sizes(keys, layer, range(heads))
    try:
        return DualChunk(size or 8192, local or 1024, trained or 0, threshold, last or 64)
    except UsageError as error:
        raise ModelConfigError(f"the config of {keys.owner} has {_NAME}: {error}") from error


def _threshold(keys: Keys) -> int:
    """Return how many tokens a prompt that attends to all of them has at most; 0: none does."""
    name = f"{_NAME}.sparse_attention_threshold"
    value = keys.get(name)
    return 0 if value == 0 and value is not False else keys.count(name) or 32768


def read_vertical_slash(
    config: Mapping[str, object], layer_id: int, *, tp: int = 1, rank: int = 0
) -> tuple[tuple[int, int], ...]:
    """Return how many verticals and slashes each query head of a layer has, for one rank.

    config: a model's whose prompts are sparse, as read_config returns it. Raises ModelConfigError
    where the list lacks the layer or a head of it, UsageError where heads do not divide by tp.
    """
    keys = Keys(config, str(config.get("model_type") or "a model without model_type"))
    (heads,) = keys.need("num_attention_heads")
    if heads % tp or not 0 <= rank < tp:
        raise UsageError(f"rank {rank} of tp {tp} for {heads} query heads (expected a divisor)")
    local_heads = heads // tp
    return _sizes(keys, layer_id, range(rank * local_heads, (rank + 1) * local_heads))


def _sizes(keys: Keys, layer_id: int, heads: range) -> tuple[tuple[int, int], ...]:
    lists = keys.layers(_LINES) or []
    entries = lists[layer_id] if layer_id < len(lists) else None
    if not isinstance(entries, Mapping):
        raise ModelConfigError(
            f"the config of {keys.owner} has {_LINES} of {len(lists)} layers, and nothing for the "
            f"heads of layer {layer_id}; download the file again, or set "
            f"{_NAME}.sparse_attention_enabled to false"
        )
    return tuple(_size(keys, layer_id, head, entries.get(str(head))) for head in heads)


def _size(keys: Keys, layer_id: int, head: int, entry: object) -> tuple[int, int]:
    values: list[object] = entry if isinstance(entry, list) else []
    kind, verticals, slashes, *_ = [*values, None, None, None]
    if kind != "vertical_and_slash" or not (_is_count(verticals) and _is_count(slashes)):
        raise ModelConfigError(
            f"the config of {keys.owner} has {_LINES} with {brief(entry)} for head {head} of layer "
            f'{layer_id} (expected ["vertical_and_slash", verticals, slashes, score]); set '
            f"{_NAME}.sparse_attention_enabled to false, and prompts attend to all tokens"
        )
    return verticals + _MORE * (verticals == _FEW), slashes


def _is_count(x: object) -> TypeGuard[int]:
    return isinstance(x, int) and not isinstance(x, bool) and 0 < x < 1 << 31
