"""The built-in rows of linear attention (GDN, KDA)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from attn_core.dtypes import PLAIN_DTYPES
from attn_core.spec.capabilities import ANY_TOPK, BackendSpec, Capabilities

TORCH_LINEAR: Final = "attn_core.backends.torch_native.linear:TorchNativeLinear"


def _torch_linear() -> Capabilities:
    return Capabilities(
        kind="gdn",
        device="any",
        dtypes=PLAIN_DTYPES,
        kv_dtypes={"fp32", "bf16"},
        priority=0,
        head_dim_pairs="any",
        max_verify_topk=ANY_TOPK,
        deterministic=True,
        needs_host_lengths=True,
        separate_write_slots=True,
        checkpoints=True,
    )


def torch_native_linear() -> BackendSpec:
    """Return the reference, on every device."""
    row = _torch_linear()
    rows = (row, replace(row, device="cpu", priority=20))  # as for softmax: on a CPU it is tuned
    return BackendSpec(
        name="torch_native",
        capabilities=[*rows, *(replace(row, kind="kda") for row in rows)],
        create=TORCH_LINEAR,
        matrix_deviations={
            "gdn.backend": "the documented system has no linear layers in plain torch; here they "
            "are the reference on every device, and on a CPU what runs by default",
        },
    )


# K has a power of two, V whole tiles of 16 rows.
LINEAR_DIMS: Final = frozenset({16, 32, 64, 128, 256})
LINEAR_PAIRS: Final = frozenset((k, v) for k in LINEAR_DIMS for v in range(16, 513, 16) if k != v)


def triton_linear() -> BackendSpec:
    """Return triton, with what the documented system calls so on an NPU and a CPU."""
    cuda = Capabilities(
        kind="gdn",
        device="cuda",
        archs={"sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120"},
        requires=["triton>=3.4"],
        dtypes=PLAIN_DTYPES,
        kv_dtypes={"fp32", "bf16"},
        priority=10,
        head_dims=LINEAR_DIMS,
        head_dim_pairs=LINEAR_PAIRS,
        max_verify_topk=ANY_TOPK,
        deterministic=True,
        cuda_graph="uniform",
        separate_write_slots=True,
        checkpoints=True,
        create="attn_core.backends.triton.linear.backend:TritonLinear",
    )
    rocm = replace(
        cuda,
        device="rocm",
        archs=frozenset(),
        requires=("triton>=3.4 or pytorch-triton-rocm>=3.4",),
    )
    # Documented without target verification. The documented kernels, in Triton, are on no index:
    # under their name attn-ascend runs the operators of torch-npu, which have no KDA.
    npu = Capabilities(
        kind="gdn",
        device="npu",
        archs={"910b", "910c"},
        requires=["torch-npu>=2.11", "attn-ascend>=0.1"],
        dtypes={"bf16"},
        kv_dtypes={"bf16"},
        priority=10,
        head_dims={128},
        q_heads={1, 2, 4, 8, 16, 32},
        cuda_graph="decode",
        needs_host_lengths=True,
        requires_finite_padding=True,  # nothing says that a chunk ends where its request does
        separate_write_slots=True,
        create="attn_ascend.gdn:AscendGDN",
    )
    # Documented is compiled code, not Triton, that does not verify: here torch runs it.
    cpu = _torch_linear()
    cpu = replace(cpu, device="cpu", priority=10, max_verify_topk=0, create=TORCH_LINEAR)
    # KDA's prefill at K 256 takes 123 KiB of shared memory, and these have 99.
    small, dims = frozenset({"sm86", "sm89", "sm120"}), LINEAR_DIMS - {256}
    pairs = frozenset((k, v) for k, v in LINEAR_PAIRS if k in dims)
    kda = (
        replace(cuda, archs=cuda.archs - small),
        replace(cuda, archs=small, head_dims=dims, head_dim_pairs=pairs),
        *(rocm, cpu),
    )
    return BackendSpec(
        name="triton",
        capabilities=[cuda, rocm, npu, cpu, *(replace(row, kind="kda") for row in kda)],
    )
