"""Why a row, or the format itself, cannot store a model's keys and values in a dtype."""

from __future__ import annotations

from collections.abc import Iterator

from attn_core.dtypes import FP4_BLOCK, LATENT_BLOCK, PLAIN_DTYPES
from attn_core.selection.mismatch import Fix, FixCost, Mismatch
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.requirements import LayerRequirements, Requirements


def store_gaps(row: Capabilities, needs: Requirements) -> Iterator[Mismatch]:
    """List what `row` lacks for the dtype of the KV cache, and the dims that a block divides."""
    store = needs.store_dtype
    mixed = store in PLAIN_DTYPES and store != needs.dtype and not row.kv_dtype_may_differ
    follows = needs.kv_cache_dtype == "auto" and needs.dtype not in row.dtypes  # said already
    if (store not in row.kv_dtypes or mixed) and not follows:
        fixes = _other_stores(row, needs)
        if needs.dtype in row.dtypes:
            fixes += [
                Fix("requirements", (("dtype", d),), FixCost.DTYPE, f"--dtype {d}")
                for d in sorted(row.dtypes & row.kv_dtypes - {needs.dtype})
            ]
        requested = f"{store} of a {needs.dtype} model" if mixed else store
        supported = ", ".join(_options(row, needs) if mixed else sorted(row.kv_dtypes))
        supports = f"supports {supported}" if supported else "not supported"
        yield Mismatch("kv_cache_dtype", f"kv_cache_dtype {requested}", supports, tuple(fixes))
    layers = [x for x in needs.softmax_layers if not x.encoder] if store in row.kv_dtypes else []
    for d, dv, expected in dict.fromkeys(
        (x.head_dim, x.v_head_dim, _blocks(x, store)) for x in layers
    ):
        if expected is not None:
            dims = d if dv in (None, d) else f"{d}/{dv}"
            requested, supports = f"head_dim {dims} in {store}", f"supports {expected}"
            yield Mismatch("head_dim", requested, supports, tuple(_other_stores(row, needs)))


def _blocks(layer: LayerRequirements, store: str) -> str | None:
    """Return the dims that a store takes, if it does not take a layer's: blocks share a scale."""
    d = layer.head_dim
    if d is None:
        return None
    dv = d if layer.v_head_dim is None else layer.v_head_dim
    stored = (d, dv) if layer.kind == "mha" else (d,)
    if store == "fp4_e2m1" and any(x % FP4_BLOCK for x in stored):
        return f"multiples of {FP4_BLOCK}"
    if layer.kind == "dsa" and store == "fp8_e4m3" and (dv % LATENT_BLOCK or (d - dv) % 2):
        return f"latents by {LATENT_BLOCK} and an even rope part"
    return None


def _options(row: Capabilities, needs: Requirements) -> list[str]:
    options = sorted(d for d in row.kv_dtypes if d not in PLAIN_DTYPES or row.kv_dtype_may_differ)
    if needs.dtype in row.kv_dtypes or needs.dtype not in row.dtypes:
        options.append("auto")  # it follows the dtype, which has to change where it is refused
    return options


def _other_stores(row: Capabilities, needs: Requirements) -> list[Fix]:
    options, store = _options(row, needs), needs.store_dtype
    costs = {d: FixCost.FLAG if d[:3] == store[:3] else FixCost.FLAG + 1 for d in options}
    return [  # FP8 stays FP8
        Fix("requirements", (("kv_cache_dtype", d),), costs[d], f"--kv-cache-dtype {d}")
        for d in sorted(options, key=costs.__getitem__)
        if d != needs.kv_cache_dtype
    ]
