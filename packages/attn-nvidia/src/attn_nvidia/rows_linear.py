"""The rows of NVIDIA's backends for linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attn_core import Capabilities, Phase

from attn_nvidia.rows_mha import BLACKWELL, FLASHINFER, HALF, HOPPER

NO_DRAFTS: Final = (
    "drafts in linear layers are verified by another backend, as gated_delta_rule_mtp returns no "
    "updates for a commit"
)


def flashinfer() -> Sequence[Capabilities]:
    """Return FlashInfer's rows for GDN layers, by name: prefill and decode.

    Its prefill for Blackwell waits without end on ragged tails and empty sequences (flashinfer
    3536 and 3565). No row verifies: docs/explanation/linear-attention.md says what
    gated_delta_rule_mtp lacks for it.
    """
    row = Capabilities(
        kind="gdn",
        create="attn_nvidia.flashinfer.linear:FlashInferLinear",
        device="cuda",
        archs=HOPPER,
        requires=[FLASHINFER, "nvidia-cutlass-dsl>=4.5", "triton>=3.4"],  # Triton moves states
        dtypes=HALF,
        kv_dtypes={"fp32", "bf16"},
        priority=5,
        phases={Phase.PREFILL},
        head_dims={128},
        needs_host_lengths=True,
        requires_finite_padding=True,  # a tile of the next request's tokens has the weight 0
        separate_write_slots=True,
        note=NO_DRAFTS,
    )
    return [row, *cutedsl()]


def cutedsl() -> Sequence[Capabilities]:
    """Return the documented name of a decode kernel in CuTe DSL: here FlashInfer's.

    Its kernel for states in bf16 takes padding, -1, for slot 0, and writes there.
    The softplus of its gate has the GPU's fast logarithm, which is off by 2^-22 near 1 (lg2.approx
    of the PTX ISA): the log decay of a token is off by up to exp(A_log) · ln 2 · 2^-22.
    """
    return [
        Capabilities(
            kind="gdn",
            create="attn_nvidia.flashinfer.linear:FlashInferLinear",
            device="cuda",
            archs=HOPPER | BLACKWELL | {"sm120"},
            requires=[FLASHINFER, "nvidia-cutlass-dsl>=4.5", "triton>=3.4"],
            dtypes={"bf16"},
            kv_dtypes={"fp32"},
            priority=5,
            phases={Phase.DECODE},
            head_dims={128},
            deterministic=True,  # one kernel for every batch
            cuda_graph="decode",
            separate_write_slots=True,
            note=NO_DRAFTS,
        )
    ]
