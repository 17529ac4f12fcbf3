"""The built-in rows of sparse MLA (DSA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attn_core.dtypes import PLAIN_DTYPES
from attn_core.spec.capabilities import Capabilities

# "fp8_e4m3" are latents with a scale per 128 values and a rope part in bf16 (656 bytes a token).
STORES = PLAIN_DTYPES | {"fp8_e4m3"}


def torch_native_sparse() -> Sequence[Capabilities]:
    """Return the rows of the reference, on every device."""
    row = Capabilities(
        kind="dsa",
        device="any",
        dtypes=PLAIN_DTYPES,
        kv_dtypes=STORES,
        priority=0,
        kv_dtype_may_differ=True,
        head_dim_pairs="any",
        chunked_prefix=True,
        max_verify_topk=1,
        lse=True,
        deterministic=True,
        needs_host_lengths=True,
        create="attn_core.backends.torch_native.sparse:TorchNativeSparse",
    )
    return [row, replace(row, device="cpu", priority=20)]


def triton_sparse() -> Sequence[Capabilities]:
    """Return the rows of our own kernels."""
    cuda = Capabilities(
        kind="dsa",
        device="cuda",
        archs={"sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120"},
        requires=["triton>=3.4"],
        dtypes=PLAIN_DTYPES,
        kv_dtypes=STORES,
        priority=10,
        head_dim_pairs="any",
        chunked_prefix=True,
        max_verify_topk=1,
        lse=True,
        deterministic=True,
        cuda_graph="uniform",
        create="attn_core.backends.triton.sparse.backend:TritonSparse",
    )
    needs = ("triton>=3.4 or pytorch-triton-rocm>=3.4",)
    return [cuda, replace(cuda, device="rocm", archs=frozenset(), requires=needs)]
