"""Ascend NPU attention backend for attn-core: its spec; the module rows has the rows."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core import BackendSpec, hookimpl

from attn_ascend import rows
from attn_ascend.versions import attn_register_pins

__all__ = ["attn_register_backends", "attn_register_pins"]


@hookimpl
def attn_register_backends() -> Sequence[BackendSpec]:
    """Return ascend, the one backend of an NPU."""
    return [
        BackendSpec(
            name="ascend",
            capabilities=[*rows.mha(), *rows.mla(), *rows.dsa()],
            aliases=["ascend_attn"],
            matrix_deviations={
                "mha.page_sizes": "the documented matrix says any, its text says that the page "
                "size is fixed at 128; the kernels take 128",
                "mha.sliding_window": "the fused attention operator has a band mask; later "
                "revisions of the documented matrix say yes too",
                "mla.chunked_prefix_cache": "the documented matrix says no; the fused operator "
                "returns the log-sum-exp of a chunk, by which it is merged",
                "mla.spec_topk1": "the documented matrix says no; the drafts of a chain are "
                "requests of their own",
            },
        )
    ]
