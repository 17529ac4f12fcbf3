"""The recorded schemas of the operators of torch-npu that we call: (namespace, name) → schema."""

from __future__ import annotations

from leaves import LIBRARIES, read

_NPU = next(x for x in LIBRARIES if x.distribution == "torch-npu")
SCHEMAS = {(_NPU.namespace, name): schema for name, schema in read(_NPU).items()}
