"""Ascend NPU attention backends for attn-core: the rows; the kernels are declared, not built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from attn_core import BackendSpec, Capabilities, Phase, hookimpl

from attn_ascend.versions import attn_register_pins

__all__ = ["attn_register_backends", "attn_register_pins"]

HALF: Final = frozenset({"fp16", "bf16"})


def _rows() -> Sequence[Capabilities]:
    mha = Capabilities(
        kind="mha",
        device="npu",
        archs={"910b", "910c"},
        requires=["torch-npu>=2.8"],
        dtypes=HALF,
        kv_dtypes=HALF,
        priority=30,
        page_sizes={128},
        head_dims=set(range(16, 257, 16)),
        sliding_window=True,
        sinks=True,
        encoder=True,
        max_verify_topk=1,
        lse=True,
        deterministic=True,
        cuda_graph="decode",
        needs_host_lengths=True,
    )
    vision = replace(
        mha,
        phases=frozenset({Phase.ENCODE}),
        page_sizes=frozenset(),
        head_dims=frozenset(range(8, 257, 8)),  # padded to the kernel's
    )
    mla = replace(
        mha,
        kind="mla",
        head_dims=frozenset({576}),
        head_dim_pairs=frozenset({(576, 512)}),
        sliding_window=False,
        sinks=False,
        encoder=False,
        max_verify_topk=0,
    )
    dsa = replace(mla, kind="dsa", dtypes=frozenset({"bf16"}), kv_dtypes=frozenset({"bf16"}))
    return [mha, vision, mla, dsa]


@hookimpl
def attn_register_backends() -> Sequence[BackendSpec]:
    """Return ascend, the one backend of an NPU."""
    return [
        BackendSpec(
            name="ascend",
            capabilities=_rows(),
            aliases=["ascend_attn"],
            matrix_deviations={
                "mha.page_sizes": "the documented matrix says any, its text says that the page "
                "size is fixed at 128; the kernels take 128",
                "mha.sliding_window": "the fused attention operator has a band mask; later "
                "revisions of the documented matrix say yes too",
            },
        )
    ]
