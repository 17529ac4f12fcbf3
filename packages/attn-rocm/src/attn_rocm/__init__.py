"""AMD ROCm attention backends for attn-core: their rows; the kernels are declared, not built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from attn_core import ANY_TOPK, BackendSpec, Capabilities, Phase, hookimpl

from attn_rocm.versions import attn_register_pins

__all__ = ["attn_register_backends", "attn_register_pins"]

HALF: Final = frozenset({"fp16", "bf16"})


def _aiter() -> BackendSpec:
    mha = Capabilities(
        kind="mha",
        device="rocm",
        archs={"gfx942", "gfx950"},
        requires=["amd-aiter>=0.1.7.dev0"],
        dtypes=HALF,
        kv_dtypes=HALF | {"fp8_e4m3"},
        priority=30,
        head_dims={64, 80, 96, 112, 120, 128, 192, 256},  # what paged decode was built for
        group_sizes=set(range(1, 33)),
        sliding_window=True,
        logit_cap=True,
        sinks=True,
        max_verify_topk=1,
        cuda_graph="uniform",
        needs_host_lengths=True,
    )
    # CDNA 2 has no prebuilt kernels and no FP8; RDNA (gfx1100) has no kernels at all.
    cdna2 = replace(
        mha,
        archs=frozenset({"gfx90a"}),
        kv_dtypes=HALF,
        note="aiter has prebuilt kernels for gfx942 and gfx950 only: Composable Kernel builds "
        "them on gfx90a at first use",
    )
    chains = (mha, cdna2)
    trees = [replace(row, max_verify_topk=ANY_TOPK, max_page_size=1) for row in chains]
    vision = replace(
        mha, phases=frozenset({Phase.ENCODE}), head_dims=frozenset(range(8, 257, 8)), encoder=True
    )
    mla = replace(  # assembly kernels: one latent head, 16 or 128 query heads
        mha,
        kind="mla",
        dtypes=frozenset({"bf16"}),
        kv_dtypes=frozenset({"bf16", "fp8_e4m3"}),
        head_dims=frozenset({576}),
        head_dim_pairs=frozenset({(576, 512)}),
        q_heads=frozenset({16, 128}),
        group_sizes=frozenset(),
        sliding_window=False,
        logit_cap=False,
        sinks=False,
    )
    return BackendSpec(
        name="aiter",
        capabilities=[*chains, *trees, vision, mla],
        aliases=["aiter_attn"],
        matrix_deviations={
            "mha.sliding_window": "aiter's unified_attention takes a window; later revisions of "
            "the documented matrix say yes too",
            "mla.backend": "the documented MLA matrix has no row for aiter, its automatic choice "
            "takes it for 16 or 128 heads",
        },
    )


def _wave() -> BackendSpec:
    row = Capabilities(  # no windows, sinks, LSE or FP8; tokens are addressed one by one
        kind="mha",
        device="rocm",
        archs={"gfx942", "gfx950"},
        requires=["wave-lang>=3.9"],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=5,
        head_dims={64, 128},
        logit_cap=True,
        cuda_graph="decode",
        needs_host_lengths=True,
    )
    return BackendSpec(name="wave", capabilities=[row])


@hookimpl
def attn_register_backends() -> Sequence[BackendSpec]:
    """Return aiter, the default on ROCm, and wave, by name."""
    return [_aiter(), _wave()]
