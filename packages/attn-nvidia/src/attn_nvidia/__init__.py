"""NVIDIA attention backends for attn-core: their rows; the kernels are declared, not built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attn_core.capabilities import BackendSpec, Capabilities, Phase
from attn_core.hookspecs import hookimpl

from attn_nvidia import rows_mha, rows_mla
from attn_nvidia.pins import attn_register_pins

__all__ = ["attn_register_backends", "attn_register_pins"]


def _cutedsl() -> Sequence[Capabilities]:
    """Return the CuTe DSL kernel of GDN layers: decode only, heads of 128."""
    return [
        Capabilities(
            kind="gdn",
            device="cuda",
            archs=rows_mha.AMPERE | rows_mha.HOPPER | rows_mha.BLACKWELL | {"sm120"},
            requires=["nvidia-cutlass-dsl"],
            dtypes={"bf16"},
            kv_dtypes={"fp32", "bf16"},
            priority=5,
            phases={Phase.DECODE},
            head_dims={128},
            cuda_graph="full",
        )
    ]


def _spec(
    name: str,
    *rows: Sequence[Capabilities],
    create: str | None = None,
    aliases: Sequence[str] = (),
    departures: Mapping[str, str] | None = None,
) -> BackendSpec:
    return BackendSpec(
        name=name,
        capabilities=[row for group in rows for row in group],
        create=create or "attn_core.backend:DeclaredBackend",
        implemented=create is not None,
        aliases=aliases,
        departures=departures or {},
    )


@hookimpl
def attn_register_backends() -> Sequence[BackendSpec]:
    """Return every CUDA backend of the documented system that is not Triton or PyTorch."""
    return [
        _spec(
            "flashinfer",
            rows_mha.flashinfer(),
            rows_mla.flashinfer(),
            aliases=["flashinfer_cudnn"],
            departures={
                "mha.multimodal": "the documented matrix says no, while its option "
                "--mm-attention-backend takes flashinfer_cudnn, which is this family's cuDNN path"
            },
        ),
        _spec("fa3", rows_mha.fa3(), rows_mla.fa3()),
        _spec(
            "fa4",
            rows_mha.fa4(),
            rows_mla.fa4(),
            departures={
                "mha.sliding_window": "FA4's kernels take a window (they compile with one for sm90 "
                "and sm100); later revisions of the documented matrix say yes too",
                "mla.chunked_prefix_cache": "FA4 returns the log-sum-exp that merging chunks "
                "needs; later revisions of the documented matrix say yes too",
            },
        ),
        _spec("trtllm_mha", rows_mha.trtllm_mha()),
        _spec("trtllm_mla", rows_mla.trtllm_mla()),
        _spec("cutlass_mla", rows_mla.cutlass_mla()),
        _spec("flashmla", rows_mla.flashmla()),
        _spec("dual_chunk_flash_attn", rows_mha.dual_chunk_flash_attn()),
        _spec("nsa", rows_mla.nsa()),
        _spec("cutedsl", _cutedsl()),
    ]
