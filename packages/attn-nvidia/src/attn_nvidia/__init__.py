"""NVIDIA attention backends for attn-core: their specs; the modules rows_… have the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attn_core import BackendSpec, Capabilities, KnownBad, hookimpl

from attn_nvidia import rows_linear, rows_mha, rows_mla
from attn_nvidia.versions import attn_register_pins

__all__ = ["attn_register_backends", "attn_register_pins"]


def _spec(
    name: str,
    *rows: Sequence[Capabilities],
    aliases: Sequence[str] = (),
    matrix_deviations: Mapping[str, str] | None = None,
    refused_sub_backends: Mapping[str, str] | None = None,
    optional: Sequence[str] = (),
    known_bad: Sequence[KnownBad] = (),
) -> BackendSpec:
    return BackendSpec(
        name=name,
        capabilities=[row for group in rows for row in group],
        aliases=aliases,
        matrix_deviations=matrix_deviations or {},
        refused_sub_backends=refused_sub_backends or {},
        optional=optional,
        known_bad=known_bad,
    )


# Head dims above 192 run in the kernels for 256, which split keys in tiles of 128 x 48
_NO_LAUNCH = KnownBad(
    why="keys that are split need 106752 bytes of shared memory at this head dim, and the chip has "
    "101376: the launch fails",
    source="https://github.com/sgl-project/sglang/issues/38980",
    libraries=["sglang-kernel<=0.4.5"],
    kinds={"mha"},
    archs={"sm86", "sm89"},
    head_dims=frozenset(range(200, 257, 8)),
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
            matrix_deviations={
                "mha.multimodal": "the documented matrix says no, while its option "
                "--mm-attention-backend takes flashinfer_cudnn, which is this family's cuDNN path",
                "mla.page_sizes": "the MLA kernels divide a slot by any page size, so the pool's "
                "pages are theirs and need not be split into slots",
                "mla.fp8_kv": "the fa3 kernels read an e4m3 latent cache on Hopper with bfloat16 "
                "queries, since FlashInfer 0.6.14",
            },
        ),
        _spec("fa3", rows_mha.fa3(), rows_mla.fa3(), known_bad=[_NO_LAUNCH]),
        _spec(
            "fa4",
            rows_mha.fa4(),
            rows_mla.fa4(),
            matrix_deviations={
                "mha.sliding_window": "FA4's kernels take a window (they compile with one for sm90 "
                "and sm100); later revisions of the documented matrix say yes too",
                "mha.spec_topk1": "a chain of drafts is an extend in causal order, which FA4 takes",
                "mla.chunked_prefix_cache": "FA4 returns the log-sum-exp that merging chunks "
                "needs; later revisions of the documented matrix say yes too",
            },
        ),
        _spec("trtllm_mha", rows_mha.trtllm_mha()),
        _spec("trtllm_mla", rows_mla.trtllm_mla()),
        _spec("cutlass_mla", rows_mla.cutlass_mla()),
        _spec("flashmla", rows_mla.flashmla()),
        _spec("dual_chunk_flash_attn", rows_mha.dual_chunk_flash_attn()),
        _spec(
            "nsa",
            rows_mla.nsa(),
            refused_sub_backends=rows_mla.NSA_REFUSED,
            optional=["sgl-deep-gemm"],  # the indexer's scores
        ),
        _spec(
            "flashinfer",
            rows_linear.flashinfer(),
            matrix_deviations={
                "gdn.backend": "the documented matrix has no row of FlashInfer's kernels for GDN, "
                "while the documented system takes flashinfer as --linear-attn-backend",
            },
        ),
        _spec("cutedsl", rows_linear.cutedsl()),
    ]
