"""Choose the checks of a suite that the default session runs; the others are marked `long`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from attn_core.testing.checks import Check
from attn_core.testing.plan import PlannedCheck
from attn_core.testing.pools import ORDERS
from pairwise import covering, pairs


def factors(check: Check) -> Mapping[str, Hashable]:
    """Return what a check asks of a backend, one value of each factor."""
    needs, spec = check.needs, check.needs.speculation
    layer = needs.vision or needs.layers[0]
    phases = "-".join(phase.value for phase in check.phases)
    return {
        "kind": layer.kind,
        "mode": phases if spec is None else "chain" if spec.topk == 1 else "tree",
        "dtype": needs.dtype,
        "store": needs.kv_cache_dtype,
        "page": needs.page_size,
        "layout": check.layout,
        "order": next((order for order in ORDERS if order in check.id.split("-")), None),
        "dims": (layer.head_dim, layer.v_head_dim),
        "heads": (layer.num_q_heads, layer.num_kv_heads),
        "window": layer.sliding_window is not None,
        "cap": layer.logit_cap is not None,
        "sinks": layer.sinks,
        "cross": layer.cross,
        "encoder": layer.encoder,
        "fixed": needs.deterministic,
    }


def representative(checks: Sequence[PlannedCheck]) -> set[int]:
    """Return indices of checks with each feature of each kind, and each pair of two factors."""
    return {*covering([{*pairs(factors(p.check))} | {(p.kind, p.check.feature)} for p in checks])}
