"""The rows of ascend: what the operators of torch-npu take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from attn_core import Capabilities, Phase

HALF: Final = frozenset({"fp16", "bf16"})
BF16: Final = frozenset({"bf16"})
ARCHS: Final = frozenset({"910b", "910c"})
TORCH_NPU: Final = "torch-npu>=2.11"
LATENT: Final = 512 + 64  # latent + rope


def mha() -> Sequence[Capabilities]:
    """Return the rows of npu_fused_infer_attention_score: over pages, and for vision towers.

    Its lengths are numbers of the call, which each replay of a graph updates.
    """
    paged = Capabilities(
        kind="mha",
        create="attn_ascend.paged:AscendPaged",
        device="npu",
        archs=ARCHS,
        requires=[TORCH_NPU],
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
        cuda_graph="uniform",
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
        cuda_graph="never",
        fused_kv_write=False,
    )
    return [paged, vision]


def mla() -> Sequence[Capabilities]:
    """Return the rows of MLA: decode over the latent cache, prefill without a cache.

    Head counts are those that the documentation of the fused operator lists for the same shape.
    ATB's decode reads its lengths on the host, and torch-npu updates no task of it: no graphs.
    """
    decode = Capabilities(
        kind="mla",
        create="attn_ascend.mla:AscendMLA",
        device="npu",
        archs=ARCHS,
        requires=[TORCH_NPU],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=30,
        phases={Phase.DECODE},
        page_sizes={128},
        head_dims={LATENT},
        head_dim_pairs={(LATENT, 512)},
        q_heads={1, 2, 4, 8, 16, 32, 64, 128},
        max_verify_topk=1,
        needs_host_lengths=True,
        requires_finite_padding=True,
    )
    # packed calls take bf16 alone; the log-sum-exp of a chunk is there, by which a prefix is merged
    prefill = replace(
        decode,
        phases=frozenset({Phase.PREFILL}),
        dtypes=BF16,
        kv_dtypes=BF16,
        head_dim_pairs=frozenset({(LATENT, 512), (192, 128)}),
        absorbed=False,
        chunked_prefix=True,
        max_verify_topk=0,
        lse=True,
    )
    return [decode, prefill]


def dsa() -> Sequence[Capabilities]:
    """Return the row of sparse MLA, npu_sparse_flash_attention over what was selected."""
    return [
        Capabilities(
            kind="dsa",
            create="attn_ascend.sparse:AscendSparse",
            device="npu",
            archs=ARCHS,
            requires=[TORCH_NPU],
            dtypes=BF16,
            kv_dtypes=BF16,
            priority=30,
            page_sizes={128},
            head_dims={LATENT},
            head_dim_pairs={(LATENT, 512)},
            q_heads={1, 2, 4, 8, 16, 32, 64, 128},
            max_verify_topk=1,
            cuda_graph="uniform",  # its lengths are tensors on the device
        )
    ]
