"""What a row lacks for dual chunk attention: the layers themselves, pages, trees of drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attn_core.formatting import listing
from attn_core.selection.mismatch import Fix, FixCost, Mismatch, Target
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.dual_chunk import DualChunk
from attn_core.spec.page_size import page_limit
from attn_core.spec.requirements import LayerRequirements, Requirements


def chunk_layer_gaps(
    row: Capabilities, layer: LayerRequirements, target: Target
) -> Iterator[Mismatch]:
    """List what `row` lacks for one layer, with dual chunk attention or without it."""
    chunks = layer.dual_chunk
    if chunks is not None and row.dual_chunk is False:
        yield Mismatch("dual_chunk", f"dual_chunk {chunks}", "not supported", (_without(target),))
    elif chunks is not None and chunks.sparse_threshold is not None and not row.sparse_prefill:
        requested = f"sparse prompts of more than {chunks.sparse_threshold} tokens"
        yield Mismatch("sparse_prefill", requested, "not supported", (_dense(chunks, target),))
    elif chunks is None and row.dual_chunk:
        yield Mismatch("dual_chunk", "no dual_chunk", "supports layers of dual chunk attention")


def chunk_page_gaps(row: Capabilities, needs: Requirements) -> Iterator[Mismatch]:
    """List why no page of `row`, or not the page asked for, divides the model's chunks."""
    limit, page = page_limit(needs), needs.page_size
    if page is not None and limit % page:
        free = Fix("requirements", (("page_size", None),), FixCost.FLAG, "no --page-size")
        supported = f"divides the {limit} tokens of a chunk"
        yield Mismatch(
            "page_size", f"page_size {page}", f"expected a size that {supported}", (free,)
        )
    elif page is None and row.page_sizes and all(limit % p for p in row.page_sizes):
        requested = f"pages that divide a chunk of {limit} tokens"
        sizes = f"supports {listing(row.page_sizes)} and multiples"
        yield Mismatch("page_size", requested, sizes, (_without(row.family),))


def most_drafts(needs: Requirements, topk: int) -> int:
    """Return the largest topk of `topk` and below that the model's layers can verify.

    Drafts of a tree have positions that do not follow their order, and chunks are cut by order.
    """
    return min(topk, 1) if any(x.dual_chunk for x in needs.layers) else topk


def _dense(chunks: DualChunk, target: Target) -> Fix:
    dense = replace(chunks, sparse_threshold=None)
    text = "dual_chunk_attention_config.sparse_attention_enabled false"
    return Fix(target, (("dual_chunk", dense),), FixCost.MODEL, text)


def _without(target: Target) -> Fix:
    return Fix(target, (("dual_chunk", None),), FixCost.MODEL, "a model without dual_chunk")
