"""The cases of dual chunk attention: lengths around the borders of chunks of 64 tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_core.runtime.batch import ForwardMode
from attn_core.spec.dual_chunk import DualChunk
from attn_core.testing.cases import Case

CHUNKS = DualChunk(chunk_size=80, local_size=16)  # pages of up to 64 tokens divide its chunks
_SHORT = DualChunk(chunk_size=56, local_size=8)  # 48: no power of two, a kernel's block
_BORDERS = (1, 63, 64, 65, 128, 129, 200)


def _case(
    feature: str, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], **fields: Any
) -> Case:
    fields = {"sweep": False, "dual_chunk": CHUNKS, **fields}
    name = f"dual-chunk-{feature}"
    return Case(feature=name, query_lens=query_lens, seq_lens=seq_lens, **fields)


def _decode(feature: str, *seq_lens: int, **fields: Any) -> Case:
    return _case(feature, (1,) * len(seq_lens), seq_lens, mode=ForwardMode.DECODE, **fields)


_CHAIN = {"mode": ForwardMode.TARGET_VERIFY}

DUAL_CHUNK: tuple[Case, ...] = (
    _case("prefill", _BORDERS, _BORDERS, all_dtypes=True, sweep=True),
    _case("prefix", (5, 64, 70, 1, 130, 2), (70, 128, 200, 129, 330, 65), sweep=True),
    _case("padded", (1, 7, 66), (1, 70, 140), padding=2),
    _case("mixed", (19, 1, 1, 4), (80, 129, 50, 66), mode=ForwardMode.MIXED),
    _case("empty", (0, 5, 0, 65), (130, 67, 0, 65)),
    _decode("decode", *_BORDERS, 193, 330, all_dtypes=True, sweep=True),
    _decode("decode-one", 1),
    _decode("decode-padded", 140, 1, padding=3),
    _decode("decode-long", 1025, heads=(2, 1), dims=(16, 16)),
    _case("strided", (20, 1), (141, 65), strides="fused"),
    _decode("strided-decode", 141, 65, strides="heads-first"),
    _case("device-lengths", (5, 64, 1), (66, 140, 129), device_lengths=True),
    _decode("device-lengths-decode", 66, 1, 129, device_lengths=True),
    _case("scale-large", (20, 1), (141, 130), scale_by=40.0),
    _case("softcap", (17, 1), (140, 65), logit_cap=2.0),
    _case("heads", (17, 1), (140, 65), heads=(3, 3)),
    _decode("heads-decode", 140, 65, heads=(8, 1)),
    _case("dim-128", (17, 1), (140, 65), dims=(128, 128)),
    _case("borders-in-blocks", (60, 1), (150, 97), dual_chunk=_SHORT),
    _decode("borders-in-blocks-decode", 150, 97, 48, dual_chunk=_SHORT),
    _case("verify-chain", (4, 4, 4), (4, 66, 131), **_CHAIN),
    _case("draft-extend", (1, 3), (66, 129), mode=ForwardMode.DRAFT_EXTEND),
    _case("fp8", (18, 1), (133, 70), kv_dtype="fp8_e4m3", k_scale=0.37, v_scale=1.7),
)

# Long enough for keys beyond the nearest slashes, which are always listed. L = 320.
_SPARSE = DualChunk(336, 16, sparse_threshold=300, sparse_last_queries=20)
_ONE_CHUNK = replace(_SPARSE, chunk_size=1040)
_FEW = ((34, 103), (31, 101), (40, 105), (45, 110))  # verticals and slashes of a head


def _sparse(
    feature: str, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], **fields: Any
) -> Case:
    fields = {"heads": (1, 1), "dims": (32, 32), "dual_chunk": _SPARSE, **fields}
    fields["vertical_slash"] = _FEW[: fields["heads"][0]]
    fixed = frozenset({"heads"})
    return _case(f"sparse-{feature}", query_lens, seq_lens, fixed=fixed, **fields)


SPARSE_PROMPTS: tuple[Case, ...] = (
    _sparse("chunks", (700,), (700,)),
    _sparse("threshold", (300, 301), (300, 301), dual_chunk=_ONE_CHUNK),
    _sparse("heads", (310,), (310,), heads=(2, 2)),
    _sparse("dense-beside", (5, 310, 0, 81), (70, 310, 340, 81)),
    _sparse("mixed", (1, 310, 1), (350, 310, 60), mode=ForwardMode.MIXED),
    _sparse("padded", (310,), (310,), padding=2),
    _sparse("strided", (310,), (310,), heads=(2, 1), strides="fused"),
    _sparse("device-lengths", (6, 310), (70, 310), device_lengths=True),
    _sparse("decode", (1, 1), (350, 66), mode=ForwardMode.DECODE),
    _sparse("fp8", (310,), (310,), kv_dtype="fp8_e4m3", k_scale=0.5, v_scale=2.0),
)

# What is captured in CUDA graphs, and what is put beside each other.
GRAPH_DECODE = _decode("decode", 70, 3, 141, 330, 1, 64)
GRAPH_CHAIN = _case("chain", (4,) * 6, (70, 9, 133, 330, 4, 66), **_CHAIN)
WHOLE = _case("whole", (150, 70), (150, 70))
