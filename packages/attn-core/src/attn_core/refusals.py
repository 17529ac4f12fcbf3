"""Refuse what the chosen row of a backend does not honour: nothing is dropped silently."""

from __future__ import annotations

from attn_core.backend import BackendConfig
from attn_core.errors import UnsupportedError
from attn_core.forward import AttentionLayer, ForwardBatch, ForwardMode


def refuse_layer(config: BackendConfig, layer: AttentionLayer) -> None:
    """Raise UnsupportedError for a field of a layer that the row does not honour."""
    row, bidirectional = config.row, not (layer.is_causal or layer.is_cross)
    for asked, honoured, what in (
        (layer.sinks is not None, row.sinks, "attention sinks"),
        (layer.logit_cap is not None, row.logit_cap, f"logit_cap {layer.logit_cap}"),
        (layer.sliding_window is not None, row.sliding_window, f"window {layer.sliding_window}"),
        (layer.is_cross, row.cross_attention, "cross attention"),
        (bidirectional, row.encoder, "attention that is not causal"),
    ):
        if asked and not honoured:
            raise UnsupportedError(
                f"layer {layer.layer_id} needs {what}, the chosen row of {config.name} does not "
                "honour it; state it in the Requirements, so that select() finds a backend that "
                "does"
            )


def refuse_call(config: BackendConfig, *, return_lse: bool, sparse: bool = False) -> None:
    """Raise UnsupportedError for an LSE, or for topk_indices (sparse), that the row has not."""
    if return_lse and not config.row.lse:
        raise UnsupportedError(
            f"return_lse: the chosen row of {config.name} returns no log-sum-exp; select with "
            "Requirements(lse=True)"
        )
    if sparse and config.row.kind != "dsa":
        raise UnsupportedError(
            f"topk_indices: the chosen row of {config.name} is of kind {config.row.kind!r} (only "
            "'dsa' takes them); select with layers of kind 'dsa'"
        )


def refuse_drafts(config: BackendConfig, batch: ForwardBatch) -> None:
    """Raise UnsupportedError for a verify pass whose drafts the row cannot verify."""
    if batch.forward_mode is not ForwardMode.TARGET_VERIFY or batch.spec is None:
        return
    limit, topk, tree = config.row.max_topk, batch.spec.topk, batch.spec.tree_mask is not None
    if topk <= limit and (limit > 1 or not tree):
        return
    chains = "chains, topk 1 without a tree_mask" if limit == 1 else "no drafts"
    possible = f"trees up to topk {limit}" if limit > 1 else chains
    raise UnsupportedError(
        f"{config.name} asked to verify topk {topk}{' with a tree_mask' * tree}, its chosen row "
        f"verifies {possible}; select with this speculation in the Requirements"
    )
