"""Names of dtypes, shared by rows, requirements and pools."""

from __future__ import annotations

PLAIN_DTYPES: frozenset[str] = frozenset({"fp32", "fp16", "bf16"})
KV_DTYPES: frozenset[str] = PLAIN_DTYPES | {"fp8_e4m3", "fp8_e5m2", "fp4_e2m1"}
