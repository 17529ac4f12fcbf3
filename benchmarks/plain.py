"""FlashInfer's public plan() as its users call it: a plain wrapper, for our batch and kernel."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.page_table import to_csr
from attn_core.runtime.batch import DECODE_MODES
from torch import Tensor

from benchmarks.cases import LATENT, ROPE, Inputs

_WORKSPACE = 128 << 20  # bytes, what the library's documentation recommends
_MLA = "BatchMLAPagedAttentionWrapper"
_WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper", _MLA)


@dataclass(frozen=True, eq=False)
class Plain:
    """A wrapper of the library, and its plan() of a batch with arguments that are there already.

    plan: all tensors are on the device, as in the library's examples; it copies the lengths to the
    host and waits for them. from_host: the page list alone is on the device.
    """

    wrapper: Any
    plan: Callable[[], object]
    from_host: Callable[[], object]


def plain(call: functools.partial[Any], inputs: Inputs) -> Plain | None:
    """Return what a user of FlashInfer plans for these inputs, None for another library's plan.

    call: the plan() that a backend made for them; its wrapper says the kernel. Where that is a
    prefill wrapper and the pass decodes, it is here the decode wrapper on tensor cores.
    """
    ours: Any = call.args[0] if call.args else None
    kind, case = type(ours).__name__, inputs.case
    if kind not in _WRAPPERS:
        return None
    library, kernel = importlib.import_module("flashinfer"), ours._backend  # no public name has it
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=inputs.q.device)
    csr = to_csr(inputs.page_table, inputs.seq_lens, case.page_size)
    pages, last = (csr.indptr, csr.indices), csr.last_page_len
    queries, decodes = inputs.batch.cu_seqlens_q, inputs.batch.forward_mode in DECODE_MODES
    dims: tuple[int, ...] = (case.q_heads, case.kv_heads, case.head_dim, case.page_size)
    tensors: tuple[Tensor, ...]
    options: dict[str, Any] = {}
    if kind == _MLA:
        wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend=kernel)
        tensors, options = (queries, *pages, inputs.seq_lens), {"causal": not decodes}
        dims = (case.q_heads, LATENT, ROPE, case.page_size)
    elif decodes:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores="Prefill" in kind, backend=kernel
        )
        tensors = (*pages, last)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel)
        tensors, options = (queries, *pages, last), {"causal": True, "head_dim_vo": case.v_head_dim}
    options |= {"q_data_type": inputs.q.dtype, "kv_data_type": TORCH_DTYPES[case.kv_dtype]}
    options["sm_scale"] = case.scale
    host = tuple(t if t is csr.indices else t.cpu() for t in tensors)
    return Plain(
        wrapper=wrapper,
        plan=functools.partial(wrapper.plan, *tensors, *dims, **options),
        from_host=functools.partial(wrapper.plan, *host, *dims, **options),
    )
