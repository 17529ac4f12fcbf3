"""The rows of ascend: what the operators of torch-npu take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from attn_core import Capabilities, Phase

HALF: Final = frozenset({"fp16", "bf16"})
BF16: Final = frozenset({"bf16"})


def mha() -> Sequence[Capabilities]:
    """Return the rows of npu_fused_infer_attention_score: over pages, and for vision towers.

    Its lengths are numbers of the call, which a graph would repeat: no graphs.
    """
    paged = Capabilities(
        kind="mha",
        create="attn_ascend.paged:AscendPaged",
        device="npu",
        archs={"910b", "910c"},
        requires=["torch-npu>=2.11"],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=30,
        page_sizes={128},
        head_dims=set(range(16, 257, 16)),
        group_sizes=set(range(1, 17)) | {20, 24, 32, 40, 48, 64},  # up to 64
        sliding_window=True,
        sinks=True,
        encoder=True,
        max_verify_topk=1,
        lse=True,
        needs_host_lengths=True,
        requires_finite_padding=True,  # nothing says that masked values are not multiplied by 0
        fused_kv_write=True,
    )
    vision = replace(
        paged,
        create="attn_ascend.ragged:AscendVision",
        phases=frozenset({Phase.ENCODE}),
        page_sizes=frozenset(),
        head_dims=frozenset(range(8, 257, 8)),  # padded to the operator's
        sliding_window=False,
        sinks=False,
        max_verify_topk=0,
        fused_kv_write=False,
    )
    return [paged, vision]


def latent() -> Sequence[Capabilities]:
    """Return the rows of MLA and sparse MLA, declared."""
    mla = replace(
        mha()[0],
        kind="mla",
        create=None,
        head_dims=frozenset({576}),
        head_dim_pairs=frozenset({(576, 512)}),
        group_sizes=frozenset(),
        sliding_window=False,
        sinks=False,
        encoder=False,
        max_verify_topk=0,
        fused_kv_write=False,
    )
    dsa = replace(mla, kind="dsa", dtypes=BF16, kv_dtypes=BF16)
    return [mla, dsa]
