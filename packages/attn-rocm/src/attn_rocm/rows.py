"""The rows of aiter and wave: what AMD's kernels do, per architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from attn_core import ANY_TOPK, Capabilities, Phase

HALF: Final = frozenset({"fp16", "bf16"})
BF16: Final = frozenset({"bf16"})
E4M3: Final = frozenset({"fp8_e4m3"})
PREFILL: Final = frozenset({Phase.PREFILL})
CDNA: Final = frozenset({"gfx942", "gfx950"})
AITER: Final = "amd-aiter>=0.1.7.dev0"
LATENT: Final = 512 + 64  # latent + rope
LATENT_PAIR: Final = (LATENT, 512)
RAGGED_PAIR: Final = (192, 128)  # MLA's heads before absorption, in prefill without a cache


def aiter_mha() -> Sequence[Capabilities]:
    """Return AITER's rows for MHA: paged kernels, unified attention, trees, vision towers.

    Batch prefill is compiled for head dims up to 128, and paged decode reads 64 columns at a time,
    for up to 16 query heads per KV head. All else is unified attention, whose pages have at least
    16 tokens, since a page is a tile of keys in decode.
    """
    paged = Capabilities(
        kind="mha",
        create="attn_rocm.aiter.paged:AiterPaged",
        device="rocm",
        archs=CDNA,
        requires=[AITER],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=30,
        head_dims={64, 128},
        group_sizes=set(range(1, 17)),
        logit_cap=True,
        encoder=True,
        max_verify_topk=1,
        lse=True,
        cuda_graph="uniform",
        requires_finite_padding=True,  # whole tiles are loaded, 0 · NaN would leak
    )
    unified = replace(
        paged,
        create="attn_rocm.aiter.unified:AiterUnified",
        kv_dtypes=HALF | E4M3,
        page_sizes=frozenset({16, 32, 64}),
        head_dims=frozenset({64, 80, 96, 112, 120, 128, 192, 256}),
        group_sizes=frozenset(range(1, 33)),
        sliding_window=True,
        sinks=True,
        encoder=False,  # causal order alone
        lse=False,
        tensor_scales=True,
    )
    # its mask has the drafts in one piece; the documented system verifies trees with page size 1
    tree = replace(paged, max_verify_topk=ANY_TOPK, max_page_size=1, lse=False)
    vision = replace(
        paged,
        create="attn_rocm.aiter.ragged:AiterVision",
        phases=frozenset({Phase.ENCODE}),
        head_dims=frozenset(range(8, 257, 8)),
        group_sizes=frozenset(range(1, 33)),
        max_verify_topk=0,
        cuda_graph="never",
    )
    rows = (paged, unified, tree)
    return [*rows, *map(_cdna2, rows), vision]


def _cdna2(row: Capabilities) -> Capabilities:
    """Return a row for CDNA 2, which has no prebuilt kernels and no FP8.

    RDNA (gfx1100) has no kernels at all.
    """
    return replace(
        row,
        archs=frozenset({"gfx90a"}),
        kv_dtypes=HALF,
        tensor_scales=False,
        note="aiter has prebuilt kernels for gfx942 and gfx950 only: Composable Kernel builds "
        "them on gfx90a at first use",
    )


def aiter_mla() -> Sequence[Capabilities]:
    """Return AITER's rows for MLA: assembly for one latent head and 16 or 128 query heads.

    Its FP8 kernels multiply like with like, so the queries are rounded to e4m3. They use the
    chip's own FP8: on gfx942 that is e4m3fnuz, which reads the e4m3 of a cache as half of it.
    """
    row = Capabilities(
        kind="mla",
        create="attn_rocm.aiter.mla:AiterMLA",
        device="rocm",
        archs=CDNA,
        requires=[AITER],
        dtypes=BF16,
        kv_dtypes=BF16,
        priority=30,
        head_dims={LATENT},
        head_dim_pairs={LATENT_PAIR, RAGGED_PAIR},
        q_heads={16, 128},
        max_verify_topk=1,
        cuda_graph="uniform",
        requires_finite_padding=True,
    )
    decode = replace(
        row,
        archs=frozenset({"gfx950"}),
        kv_dtypes=E4M3,
        phases=frozenset({Phase.DECODE}),
        quantizes_q_to_fp8=True,
        tensor_scales=True,
        note="over an FP8 cache its kernels take FP8 queries: they are rounded to e4m3",
    )
    # without a cache: the log-sum-exp of a chunk is there, by which a prefix is merged
    ragged = replace(
        row,
        phases=PREFILL,
        absorbed=False,
        chunked_prefix=True,
        max_verify_topk=0,
        lse=True,
        cuda_graph="never",
    )
    return [row, decode, ragged, replace(ragged, archs=decode.archs, kv_dtypes=E4M3)]


def wave() -> Sequence[Capabilities]:
    """Return wave's row: no windows, sinks, LSE or FP8; tokens are addressed one by one.

    Groups of query heads are those that fill a tile of 16 rows evenly or are one. MLA's shape goes
    to triton. Its extend kernel takes a mask instead of causal order, but no drafts are documented.
    """
    return [
        Capabilities(
            kind="mha",
            create="attn_rocm.wave.backend:Wave",
            device="rocm",
            archs=CDNA,
            requires=["wave-lang>=3.9"],
            dtypes=HALF,
            kv_dtypes=HALF,
            priority=5,
            head_dims={64, 128},
            group_sizes={1, 2, 4, 8, 16},
            logit_cap=True,
            cuda_graph="decode",
            requires_finite_padding=True,  # masked scores are numbers plus a large negative one
        )
    ]
