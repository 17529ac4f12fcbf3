"""AMD ROCm attention backends for attn-core: their specs; the module rows has the rows."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core import BackendSpec, hookimpl

from attn_rocm import rows
from attn_rocm.versions import attn_register_pins

__all__ = ["attn_register_backends", "attn_register_pins"]


@hookimpl
def attn_register_backends() -> Sequence[BackendSpec]:
    """Return aiter, the default on ROCm, and wave, by name."""
    return [
        BackendSpec(
            name="aiter",
            capabilities=[*rows.aiter_mha(), *rows.aiter_mla()],
            aliases=["aiter_attn"],
            matrix_deviations={
                "mha.sliding_window": "aiter's unified_attention takes a window; later revisions "
                "of the documented matrix say yes too",
                "mla.backend": "the documented MLA matrix has no row for aiter, its automatic "
                "choice takes it for 16 or 128 heads",
            },
        ),
        BackendSpec(name="wave", capabilities=rows.wave()),
    ]
