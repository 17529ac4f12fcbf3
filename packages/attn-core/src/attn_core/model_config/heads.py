"""One tensor-parallel rank's share of a layer's heads."""

from __future__ import annotations

from attn_core.errors import ModelConfigError
from attn_core.model_config.keys import Keys


def rank_heads(keys: Keys, q: int, kv: int, tp: int) -> tuple[int, int]:
    """Return one rank's query and KV heads: q / tp, and kv / tp or, replicated, one.

    Raises ModelConfigError, with the sizes that do divide, for any other `tp`, and where the query
    heads are no multiple of the KV heads.
    """
    if q % kv:
        raise ModelConfigError(f"{keys.owner}: {q} query heads are no multiple of {kv} KV heads")

    def divides(size: int) -> bool:
        return q % size == 0 and (kv % size == 0 or size % kv == 0)

    if not divides(tp):
        fit = ", ".join(str(size) for size in range(1, min(q, 1024) + 1) if divides(size))
        raise ModelConfigError(
            f"{keys.owner}: {q} query and {kv} KV heads do not divide over tp {tp} "
            f"(possible: {fit})"
        )
    if tp > kv:
        keys.assume(f"tp {tp} is above the {kv} KV heads: each rank holds one, replicated")
    return q // tp, max(1, kv // tp)


def even_heads(keys: Keys, heads: int, tp: int, noun: str) -> int:
    """Return heads / tp. Raises ModelConfigError, with the sizes that do divide, for a rest."""
    if heads % tp:
        fit = ", ".join(str(size) for size in range(1, min(heads, 1024) + 1) if heads % size == 0)
        raise ModelConfigError(
            f"{keys.owner}: {heads} {noun} do not divide over tp {tp} (possible: {fit})"
        )
    return heads // tp
