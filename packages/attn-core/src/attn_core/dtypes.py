"""Names of dtypes, shared by rows, requirements and pools."""

from __future__ import annotations

PLAIN_DTYPES: frozenset[str] = frozenset({"fp32", "fp16", "bf16"})
KV_DTYPES: frozenset[str] = PLAIN_DTYPES | {"fp8_e4m3", "fp8_e5m2", "fp4_e2m1"}
FP4_BLOCK = 16  # values that share one e4m3 scale
LATENT_BLOCK = 128  # values of a latent of sparse MLA in FP8 that share one float32 scale
