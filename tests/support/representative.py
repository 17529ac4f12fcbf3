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


def words(planned: PlannedCheck) -> set[Hashable]:
    """Return what a check shows of its kind: each word of its feature, each of its factors.

    Words count apart for prompts, steps, chains and trees, which are other kernels. Head dims and
    groups of heads count by the block of a kernel that they fill, or not.
    """
    feature, asked = planned.check.feature, {**factors(planned.check)}
    layer = planned.check.needs.vision or planned.check.needs.layers[0]
    d = layer.head_dim or 1
    block = next(1 << n for n in range(4, 16) if d <= 1 << n)
    asked["dims"] = (block, d == block, layer.head_dim == layer.v_head_dim)
    group = (layer.num_q_heads or 1) // (layer.num_kv_heads or 1)
    asked["heads"] = (group > 1, group & (group - 1) == 0, layer.num_kv_heads == 1)
    mode = "" if feature.startswith(("dim-", "heads-")) else asked["mode"]
    return {(planned.kind, *item) for item in asked.items()} | {
        (planned.kind, mode, word) for word in feature.split("-") if not word.isdigit()
    }


def representative(checks: Sequence[PlannedCheck]) -> set[int]:
    """Return indices of checks with each feature of each kind, and each pair of two factors."""
    return {*covering([{*pairs(factors(p.check))} | {(p.kind, p.check.feature)} for p in checks])}


def few(checks: Sequence[PlannedCheck]) -> set[int]:
    """Return indices of fewer checks: with each word of a feature, and each of the factors."""
    return {*covering([words(p) for p in checks])}
