"""The built-in plugin: the rows of torch_native, flex_attention and both triton backends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from attn_core.backends.rows_linear import torch_native_linear, triton_linear
from attn_core.backends.rows_sparse import torch_native_sparse, triton_sparse
from attn_core.dtypes import PLAIN_DTYPES
from attn_core.plugins.hookspecs import hookimpl
from attn_core.spec.capabilities import ANY_TOPK, BackendSpec, Capabilities
from attn_core.spec.kinds import Phase

FP8: Final = frozenset({"fp8_e4m3", "fp8_e5m2"})
FP4: Final = frozenset({"fp4_e2m1"})
ENCODE: Final = frozenset({Phase.ENCODE})

# The documented system restricts full attention beside GDN layers on two platforms: data-centre
# Blackwell runs triton, trtllm_mha or fa4, Ascend runs ascend. Everything else is free there.
FREE_BESIDE_GDN: Final = (
    ("cuda", ("sm75", "sm80", "sm86", "sm89", "sm90", "sm120")),
    ("rocm", ()),
    ("xpu", ()),
    ("cpu", ()),
)


def _everywhere(row: Capabilities) -> Iterable[Capabilities]:
    """Put a row on every device, and beside linear layers only where that is not restricted."""
    yield replace(row, device="any", with_linear_layers=False)
    for device, archs in FREE_BESIDE_GDN:
        # On a CPU the embedded default is tuned; elsewhere it is the reference.
        priority = 20 if device == "cpu" and row.priority == 0 else row.priority
        yield replace(row, device=device, archs=frozenset(archs), priority=priority)


def _torch_native() -> BackendSpec:
    row = Capabilities(  # torch comes with attn-core, so nothing is required
        kind="mha",
        device="any",
        dtypes=PLAIN_DTYPES,
        kv_dtypes=PLAIN_DTYPES | FP8 | FP4,
        priority=0,
        kv_dtype_may_differ=True,
        head_dim_pairs="any",
        sliding_window=True,
        logit_cap=True,
        sinks=True,
        cross_attention=True,
        encoder=True,
        dual_chunk=None,
        sparse_prefill=True,
        max_verify_topk=ANY_TOPK,
        lse=True,
        deterministic=True,
        needs_host_lengths=True,
        tensor_scales=True,
    )
    adds = "this implementation does more than the documented one: "
    return BackendSpec(
        name="torch_native",
        capabilities=[
            *_everywhere(row),
            *_everywhere(
                replace(
                    row, kind="mla", dual_chunk=False, sparse_prefill=False, chunked_prefix=True
                )
            ),
            *torch_native_sparse(),
            replace(row, phases=ENCODE, dual_chunk=False, sparse_prefill=False),
        ],
        create="attn_core.backends.torch_native.backend:TorchNative",
        aliases=["sdpa"],
        matrix_deviations={
            "mha.spec_topk1": adds + "a chain of drafts is verified by a causal mask",
            "mha.spec_topk_gt1": adds + "a tree of drafts is verified by its mask",
            "mha.sliding_window": adds + "the window is part of the mask",
            "mla.backend": adds + "MLA, absorbed and ragged, where the documented one has MHA only",
        },
    )


def _flex_attention() -> BackendSpec:
    row = Capabilities(  # causal only: no cross attention, no encoder layers, no masks of drafts
        kind="mha",
        device="any",
        dtypes=PLAIN_DTYPES,
        kv_dtypes=PLAIN_DTYPES | FP8 | FP4,
        priority=5,
        kv_dtype_may_differ=True,
        head_dim_pairs="any",
        sliding_window=True,
        logit_cap=True,
        max_session_topk=0,
        needs_host_lengths=True,
        tensor_scales=True,  # quantised tokens are dequantised when they are gathered
        requires_finite_padding=True,  # a block is read as a whole, and 0 times NaN is NaN
        note="flex_attention reads pages of a multiple of 16 tokens in place; smaller pages and "
        "quantised stores are gathered first",
    )
    adds = "this implementation does more than the documented one: "
    return BackendSpec(
        name="flex_attention",
        capabilities=list(_everywhere(row)),
        create="attn_core.backends.flex_attention.backend:FlexAttention",
        matrix_deviations={
            "mha.fp8_kv": adds + "quantised tokens are gathered and dequantised first",
            "mha.sliding_window": adds + "the window is part of the mask and of the block list",
        },
    )


def _triton_mha() -> Sequence[Capabilities]:
    cuda = Capabilities(
        kind="mha",
        device="cuda",
        archs={"sm89", "sm90", "sm100", "sm103", "sm110", "sm120"},
        requires=["triton>=3.4"],
        dtypes=PLAIN_DTYPES,
        kv_dtypes=PLAIN_DTYPES | FP8 | FP4,
        priority=10,
        head_dims=frozenset(range(1, 513)),  # fp32 tiles of more do not fit every shared memory
        head_dim_pairs="any",
        sliding_window=True,
        logit_cap=True,
        sinks=True,
        cross_attention=True,
        encoder=True,
        dual_chunk=None,
        sparse_prefill=True,
        max_verify_topk=ANY_TOPK,
        lse=True,
        deterministic=True,
        shared_prefix=True,
        cuda_graph="uniform",
        layouts={"NHD", "HND"},
    )
    old = replace(  # Triton refuses e4m3 below sm89, and the block scales of FP4 are e4m3
        cuda,
        archs=frozenset({"sm80", "sm86"}),
        kv_dtypes=cuda.kv_dtypes - {"fp8_e4m3"} - FP4,
    )
    turing = replace(old, archs=frozenset({"sm75"}), head_dims=frozenset(range(1, 257)))
    rocm = replace(
        cuda,
        device="rocm",
        archs=frozenset(),
        requires=("triton>=3.4 or pytorch-triton-rocm>=3.4",),
        kv_dtypes=cuda.kv_dtypes - FP4,  # the documented system stores FP4 on CUDA only
    )
    # Documented for GDN hybrids on ROCm: triton is recommended, so it ranks above aiter there.
    hybrid = replace(rocm, with_linear_layers=True, priority=31)
    vision = [
        replace(cuda, archs=frozenset(), phases=ENCODE, dual_chunk=False, sparse_prefill=False),
        replace(rocm, phases=ENCODE, dual_chunk=False, sparse_prefill=False),
    ]
    return [cuda, old, turing, rocm, hybrid, *vision]


def _tree(row: Capabilities) -> Capabilities:
    """Verify trees of drafts, which the documented system does with page size 1 only."""
    return replace(row, max_verify_topk=ANY_TOPK, max_page_size=1)


def _triton_mla() -> Sequence[Capabilities]:
    cuda = Capabilities(  # a latent of 576 columns does not fit the shared memory of sm75
        kind="mla",
        device="cuda",
        archs={"sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120"},
        requires=["triton>=3.4"],
        dtypes=PLAIN_DTYPES,
        kv_dtypes=PLAIN_DTYPES,
        priority=10,
        head_dim_pairs="any",
        logit_cap=True,
        chunked_prefix=True,
        max_verify_topk=1,
        lse=True,
        deterministic=True,
        shared_prefix=True,
        cuda_graph="uniform",
    )
    needs = ("triton>=3.4 or pytorch-triton-rocm>=3.4",)
    rocm = replace(cuda, device="rocm", archs=frozenset(), requires=needs)
    fp8 = replace(cuda, kv_dtypes=FP8, priority=5)  # tuned libraries that read it stand above
    ampere = frozenset({"sm80", "sm86"})  # Triton refuses e4m3 there
    rows = (
        *(cuda, rocm, replace(fp8, archs=cuda.archs - ampere)),
        replace(fp8, kv_dtypes=FP4, archs=cuda.archs - ampere),
        replace(fp8, archs=ampere, kv_dtypes=FP8 - {"fp8_e4m3"}),
        replace(rocm, kv_dtypes=FP8, priority=5),
    )
    return [*rows, *map(_tree, rows)]


def _triton() -> BackendSpec:
    return BackendSpec(
        name="triton",
        capabilities=[*_triton_mha(), *_triton_mla(), *triton_sparse()],
        create="attn_core.backends.triton.backend:Triton",
        aliases=["triton_attn"],
        matrix_deviations={
            "mha.fp8_kv": "our kernels read FP8, its scales are part of the softmax scale and of "
            "the last division; later revisions of the documented matrix say yes too",
            "mha.devices": "for CUDA and ROCm, which Triton itself compiles for; the documented "
            "system lets any platform name it. Intel GPUs and Ascend have compilers of their own "
            "(triton-xpu, triton-ascend), by which these kernels were neither compiled nor run; on "
            "a CPU Triton has an interpreter only, for tests",
            "mla.fp8_kv": "our kernels read FP8 latents, whose scale is part of the softmax scale "
            "and of the last division",
            "mla.fp4_kv": "this implementation does more than the documented one: the kernels read "
            "FP4 latents as they are",
            "mla.chunked_prefix_cache": "this implementation does more than the documented one: "
            "forward_ragged returns the log-sum-exp of a chunk, by which merge_states joins them",
        },
    )


@hookimpl
def attn_register_backends() -> Sequence[BackendSpec]:
    """Return the backends that come with attn-core."""
    return [
        _torch_native(),
        _flex_attention(),
        _triton(),
        torch_native_linear(),
        triton_linear(),
    ]
