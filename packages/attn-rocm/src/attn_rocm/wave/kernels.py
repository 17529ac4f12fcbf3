"""Wave's kernels of one shape of layers, compiled at first use and kept by the process."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

SPLITS: Final = 8  # parts of a request's keys in decode
SHORT: Final = 128  # up to so many new tokens the extend kernel has tiles of 64, else of 128

Kernel = Callable[..., Any]


class LayerShape(NamedTuple):
    """What is compiled into a kernel; logit_cap 0 is none."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    scale: float
    logit_cap: float


@functools.cache
def decode_kernels(shape: LayerShape) -> tuple[Kernel, Kernel]:
    """Compile decode: a kernel of parts and the one that merges them.

    parts(q, k, v, indptr, indices, partial outputs, their log-sum-exp to base 2), then
    merge(partial outputs, their log-sum-exp, indptr, out).
    """
    constraints: Any = importlib.import_module("wave_lang.kernel.wave.constraints")
    template: Any = importlib.import_module(
        "wave_lang.kernel.wave.templates.paged_decode_attention"
    )
    mma = constraints.MMAType.F32_16x16x16_F16
    variant: Any = (mma, mma)
    if shape.num_q_heads == shape.num_kv_heads:  # one query row: no matrix instruction fits
        along = constraints.MMAOperand.M
        variant = (
            constraints.GenericDot(along_dim=along, k_vec_size=4, k_mult=1),
            constraints.GenericDot(along_dim=along, k_vec_size=1, k_mult=64),
        )
    parts, merge, of_parts, of_merge, dynamic, dynamic_merge = (
        template.get_paged_decode_attention_kernels(
            template.paged_decode_attention_shape(
                num_query_heads=shape.num_q_heads,
                num_kv_heads=shape.num_kv_heads,
                head_size=shape.head_dim,
                head_size_kv=shape.v_head_dim,
                block_size=1,
                num_seqs=1,  # of any number: it is a symbol of the kernel
            ),
            variant,
            SPLITS,
            input_dtype=shape.dtype,
            output_dtype=shape.dtype,
            layer_scaling=shape.scale,
            logit_cap=shape.logit_cap,
        )
    )
    return (
        _compiled(parts, of_parts, dynamic, use_buffer_ops=True, waves_per_eu=2),
        _compiled(merge, of_merge, dynamic_merge, waves_per_eu=4),
    )


@functools.cache
def extend_kernel(shape: LayerShape, max_new: int) -> Kernel:
    """Compile extend in causal order, for passes of up to `max_new` new tokens per request.

    extend(q, k, v, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, longest, out).
    """
    constraints: Any = importlib.import_module("wave_lang.kernel.wave.constraints")
    template: Any = importlib.import_module("wave_lang.kernel.wave.templates.extend_attention")
    heads, kv_heads = shape.num_q_heads, shape.num_kv_heads
    # the first dimension is a symbol of the kernel
    q_shape, o_shape = (1, heads, shape.head_dim), (1, heads, shape.v_head_dim)
    k_shape, v_shape = (1, kv_heads, shape.head_dim), (1, kv_heads, shape.v_head_dim)
    mma = constraints.MMAType
    kernel, symbols, dynamic = template.get_extend_attention_kernel(
        template.AttentionShape(
            num_query_heads=heads,
            num_kv_heads=kv_heads,
            head_size=shape.head_dim,
            head_size_kv=shape.v_head_dim,
            max_seq_len=max_new,
        ),
        (mma.F32_16x16x32_K8_F16, mma.F32_16x16x16_F16),
        q_shape,
        k_shape,
        v_shape,
        k_shape,
        v_shape,
        o_shape,
        input_dtype=shape.dtype,
        output_dtype=shape.dtype,
        is_causal=True,
        logit_cap=shape.logit_cap,
        layer_scaling=shape.scale,
    )
    options = {"use_buffer_ops": True, "waves_per_eu": 2, "denorm_fp_math_f32": "preserve-sign"}
    return _compiled(kernel, symbols, dynamic, **options)


def _compiled(kernel: Any, symbols: dict[Any, Any], dynamic: list[Any], **options: Any) -> Kernel:
    compile_: Any = importlib.import_module("wave_lang.kernel.wave.compile")
    general: Any = importlib.import_module("wave_lang.kernel.wave.utils.general_utils")
    run: Any = importlib.import_module("wave_lang.kernel.wave.utils.run_utils")
    compiled: Kernel = compile_.wave_compile(
        run.set_default_run_config(
            compile_.WaveCompileOptions(
                subs={**symbols, **general.get_default_scheduling_params()},
                dynamic_symbols=dynamic,
                canonicalize=True,
                wave_runtime=True,
                **options,
            )
        ),
        kernel,
    )
    return compiled
