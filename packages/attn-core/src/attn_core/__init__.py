"""One contract for LLM attention over a paged KV cache. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "dtypes": "KV_DTYPES PLAIN_DTYPES",
    "errors": (
        "AttnError BackendError BackendNotImplementedError BackendRunError BatchError "
        "ContextLengthError ModelConfigError OutOfPagesError UnknownBackendError "
        "UnsupportedError UsageError"
    ),
    "spec.kinds": "Family GraphLevel Kind Phase Role",
    "spec.device": "Device parse_device probe_device",
    "spec.dual_chunk": "DualChunk",
    "spec.requirements": "LayerRequirements Requirements Speculation",
    "spec.capabilities": "ANY_TOPK BackendSpec Capabilities KnownBad",
    "plugins.dependencies": "Pin chosen_distribution",
    "plugins.hookspecs": "hookimpl",
    "plugins.registry": "Registry load_plugins",
    "costs.profile": "Profile",
    "costs.store": "read_profile tuned_profile",
    "costs.workload": "Workload",
    "selection.mismatch": "Fix Mismatch",
    "selection.result": "Choice NoBackendError Overrides Selection Verdict",
    "selection.solver": "select",
    "tools.probes": "probed",
    "selection.diagnosis": "WhyNot",
    "model_config": "context_length read_config read_vertical_slash requirements_from_config",
    "cache.layer_cache": "TORCH_DTYPES LayerCache",
    "cache.pool": "CachePool KVPool",
    "cache.state_pool": "CHUNK_SIZE StateCache StatePool",
    "cache.page_table": (
        "PageCsr kernel_pages num_pages_for pad_batch pad_page_table reusable_prefix slot_table "
        "split_cache split_pages to_csr"
    ),
    "cache.allocator": "PageAllocator",
    "ops.conv": "ConvPlan conv_commit conv_decode conv_extend conv_verify",
    "ops.dual_chunk": "ChunkKeys ChunkPass cut_at_chunks rotary_positions",
    "ops.index": "read_index to_fp8_queries write_index",
    "ops.kv": "copy_slots read_kv read_pages write_kv",
    "ops.merge": "merge_states",
    "ops.vertical_slash": "kernels_on",
    "runtime.batch": "DECODE_MODES EVEN_MODES CacheView ForwardBatch ForwardMode SpecInfo",
    "runtime.layer": "AttentionLayer LayerGroup",
    "runtime.linear": "Gate LinearLayer gated",
    "runtime.linear_routes": "LinearRoutes",
    "runtime.backend": "AttentionBackend LinearAttentionBackend Metadata Output create_backend",
    "runtime.backend_config": "BackendConfig",
    "runtime.contract_checks": (
        "refuse_call refuse_layer refuse_mode refuse_unplanned refuse_window"
    ),
    "runtime.kernel_tensors": (
        "ScaleTensors align16 contiguous16 contiguous_out copy_to_out empty_attention "
        "to_e4m3_saturating"
    ),
    "runtime.vision": "VisionBackend",
    "runtime.workspace": "workspace",
    "runtime.dispatcher": "HybridDispatcher",
    "runtime.sparse": "every_slot gather_pages",
    "runtime.sparse_prompts": "SparsePrompts attend_sparse plan_sparse",
    "runtime.graphs": "GraphRunner",
    "runtime.shared_keys": "SharedKeys",
    "runtime.trace": "PassKind",
    "runtime.torch_ops": "CompiledAttention",
    "trust.shadow": "Shadow",
}
_NAMES = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'attn_core' has no attribute {name!r}")
    return getattr(importlib.import_module(f"attn_core.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
