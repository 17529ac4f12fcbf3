"""A small case of every phase, with everything that its kind can have."""

from __future__ import annotations

from benchmarks.cases import Case

HEADS = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "v_head_dim": 32}
LATENT = {"q_heads": 2, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512}

CASES = (
    Case(phase="decode", batch=3, length=100, ragged=True, page_size=16, **HEADS),
    Case(phase="decode", batch=2, length=130, page_size=128, **HEADS),
    Case(
        phase="verify", batch=3, length=90, queries=5, tree=True, ragged=True, page_size=1, **HEADS
    ),
    Case(phase="verify", batch=2, length=200, queries=4, page_size=128, **HEADS),
    Case(phase="prefill", batch=2, length=70, queries=None, **HEADS),
    Case(phase="prefill", batch=3, length=70, queries=None, ragged=True, **HEADS),
    Case(phase="extend", batch=2, length=150, queries=40, ragged=True, page_size=128, **HEADS),
    Case(phase="mla", batch=3, length=140, ragged=True, **LATENT),
    Case(phase="mla-verify", batch=2, length=70, queries=4, **LATENT),
    Case(phase="fp8", batch=2, length=150, ragged=True, kv_dtype="fp8_e4m3", **HEADS),
    Case(phase="decode", batch=5, length=30, sigma=1.5, page_size=16, **HEADS),
    Case(phase="mla-extend", batch=3, length=40, queries=12, sigma=1.0, **LATENT),
)  # fmt: skip
