"""The two operators of intel-extension-for-pytorch that we call, held to their schemas."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from attn_core import BackendError

MODULE: Final = "intel_extension_for_pytorch"

# the operators name no parameter (_0, _1, …): their order in 2.8.0, by its C++ and its Python
DECODE: Final = (
    *("Tensor out", "Tensor query", "Tensor key_cache", "Tensor value_cache"),
    *("Tensor head_mapping", "float scale", "Tensor block_tables", "Tensor context_lens"),
    *("int block_size", "int max_context_len", "Optional[Tensor] alibi_slopes", "int window_size"),
    *("float k_scale", "float v_scale", "float softcap"),
)
PREFILL: Final = (
    *("Tensor out", "Tensor query", "Tensor key_cache", "Tensor value_cache"),
    *("Tensor cu_seqlens_q", "Tensor cu_seqlens_kv", "int max_seqlen_q", "int max_seqlen_kv"),
    *("float scale", "bool is_causal", "Tensor block_tables", "Optional[Tensor] alibi_slopes"),
    *("int window_size_left", "int window_size_right", "str kv_cache_dtype"),
    *("float k_scale", "float v_scale", "float softcap"),
)


class Operators(NamedTuple):
    """decode: single_query_cached_kv_attention. prefill: flash_attn_varlen_func."""

    decode: Callable[..., Any]
    prefill: Callable[..., Any]


def load() -> Operators:
    """Import the library and return its operators, which take positional arguments alone.

    Raises BackendError where it does not import, as beside a torch that it was not built for, or
    where the types of an operator's parameters are others.
    """
    try:
        importlib.import_module(MODULE)
    except Exception as error:  # beside another torch it calls os.exit, which does not exist
        raise BackendError(
            f"ipex: {MODULE} does not import beside torch {torch.__version__}: {error}; install "
            "intel-extension-for-pytorch 2.8.0 beside torch 2.8, or choose intel_amx"
        ) from error
    return Operators(
        _operator("single_query_cached_kv_attention", DECODE),
        _operator("flash_attn_varlen_func", PREFILL),
    )


def _operator(name: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    """Return an operator that has parameters of these types, in this order."""
    packet: Any = getattr(torch.ops.torch_ipex, name, None)
    if packet is None:
        raise BackendError(f"ipex: {MODULE} has no operator {name}; install 2.8.0")
    has = [str(x.type) for x in packet.default._schema.arguments]
    wants = [x.partition(" ")[0] for x in parameters]
    if has != wants:
        raise BackendError(
            f"ipex: {name} of the installed {MODULE} takes ({', '.join(has)}), expected "
            f"({', '.join(parameters)}); install 2.8.0"
        )
    operator: Callable[..., Any] = packet.default
    return operator
