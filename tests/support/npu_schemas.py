"""The recorded schemas of the operators of torch-npu that we call: (namespace, name) → schema."""

from __future__ import annotations

from leaves import LIBRARIES, read

_NPU = next(x for x in LIBRARIES if x.distribution == "torch-npu")
# inferred from C++ functions, so that no text of them is in a library
_INFERRED = {
    ("atb", "_npu_paged_attention_mla"): "_npu_paged_attention_mla(Tensor query, Tensor key_cache, "
    "int num_kv_heads, int num_heads, float scale_value, Tensor block_table, Tensor context_lens, "
    "int mla_vheadsize, Tensor(a!) out) -> ()"
}
SCHEMAS = {(_NPU.namespace, name): schema for name, schema in read(_NPU).items()} | _INFERRED


def leaf_of(name: str) -> str:
    """Return the name of what emulates an operator, or an overload of one."""
    return name.replace(".", "_")
