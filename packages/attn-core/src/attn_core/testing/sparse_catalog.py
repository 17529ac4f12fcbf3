"""The cases of sparse MLA (DSA), as data; most queries see more keys than they attend to."""

from __future__ import annotations

from dataclasses import replace

from attn_core.runtime.batch import ForwardMode
from attn_core.testing.cases import Case

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
_BASE = Case(
    feature="dsa", query_lens=(), seq_lens=(), kind="dsa", heads=(4, 1), dims=(576, 512),
    index_topk=16,
)  # fmt: skip


def _case(
    feature: str, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], **fields: object
) -> Case:
    changes = {"feature": feature, "query_lens": query_lens, "seq_lens": seq_lens, **fields}
    return replace(_BASE, **changes)  # type: ignore[arg-type]  # names and types are Case's


def _decode(feature: str, *seq_lens: int, **fields: object) -> Case:
    return _case(feature, (1,) * len(seq_lens), seq_lens, mode=DECODE, **fields)


def _chain(feature: str, *seq_lens: int, **fields: object) -> Case:
    return _case(feature, (4,) * len(seq_lens), seq_lens, mode=VERIFY, **fields)


_FP8 = {"index_dtype": "fp8_e4m3"}
_V32 = {**_FP8, "fp8_queries": True, "index_shape": (32, 128)}  # heads as GLM-5 has them
_EXACT = {"exact_index": True}
_LATENTS = {"kv_dtype": "fp8_e4m3"}  # a scale per 128 values of a token

SPARSE: tuple[Case, ...] = (
    _case("dsa-prefill", (9, 70), (40, 70), all_dtypes=True),
    _decode("dsa-decode", 65, 15, 16, 17, 130, all_dtypes=True),
    _case("dsa-prefill-fp8-index", (9, 70), (40, 70), **_FP8),
    _decode("dsa-decode-fp8-index", 65, 15, 130, **_FP8),
    _case("dsa-prefill-fp8-queries", (9, 40), (90, 40), **_V32),
    _decode("dsa-decode-fp8-queries", 65, 15, 130, **_V32, **_EXACT, sweep=False),
    _chain("dsa-verify-fp8-queries", 21, 68, **_V32, padding=1, sweep=False),
    _case("dsa-prefill-fp8", (9, 70), (40, 70), **_LATENTS),
    _decode("dsa-decode-fp8", 65, 15, 16, 17, 130, all_dtypes=True, **_LATENTS),
    _case("dsa-ties", (9, 22), (40, 30), **_EXACT),
    _decode("dsa-ties-decode", 65, 16, 17, 130, **_EXACT),
    _decode("dsa-ties-fp8-index", 65, 130, **_FP8, **_EXACT),
    _decode("dsa-decode-128-heads", 65, 1, heads=(128, 1), sweep=False),
    _decode("dsa-decode-128-heads-fp8", 65, 1, heads=(128, 1), sweep=False, **_LATENTS),
    _decode("dsa-decode-padded", 40, 1, padding=2),
    _case("dsa-prefill-padded", (1, 7), (30, 40), padding=2, sweep=False),
    _case("dsa-mixed", (19, 1, 1), (19, 50, 33), mode=ForwardMode.MIXED, sweep=False),
    _case("dsa-empty", (0, 9, 0), (17, 32, 64), sweep=False),
    _case("dsa-strided", (1, 9), (50, 32), strides="fused", sweep=False),
    _decode("dsa-one", 65, sweep=False),
    _decode("dsa-device-lengths", 37, 64, device_lengths=True, sweep=False),
    _decode("dsa-scale-large", 41, 130, scale_by=40.0, sweep=False),
    _decode("dsa-many-selected", 700, 90, index_topk=200, sweep=False),
    _decode("dsa-longest", 4200, index_topk=2048, sweep=False),
    _case("dsa-odd-number", (9, 2), (40, 70), index_topk=13, sweep=False),
    _case("dsa-few-keys", (9, 5), (9, 12), sweep=False),
    _case("dsa-all-keys", (9, 70), (20, 70), index_topk=0, sweep=False),
    _decode("dsa-all-keys-decode", 65, 17, index_topk=0, sweep=False),
    _case("dsa-all-keys-fp8", (9, 18, 0), (20, 18, 4), index_topk=0, sweep=False, **_LATENTS),
    _decode("dsa-all-keys-decode-fp8", 65, 17, 1, index_topk=0, sweep=False, **_LATENTS),
    _chain("dsa-verify-chain", 4, 21, 68),
    _chain("dsa-verify-chain-fp8", 4, 21, 68, padding=1, sweep=False, **_LATENTS),
    _chain("dsa-verify-ties", 21, 68, **_EXACT, sweep=False),
    _chain("dsa-verify-padded", 21, 68, padding=2, sweep=False),
    _case("dsa-draft-extend", (1, 3), (18, 33), mode=ForwardMode.DRAFT_EXTEND),
    _case("dsa-draft-decode", (1, 1), (21, 48), mode=ForwardMode.DRAFT_DECODE, sweep=False),
)

# Scores are exact in what is put side by side, so that each selection is the oracle's.
RELATED: dict[str, Case] = {
    case.feature: replace(case, exact_index=True)
    for case in (
        _case("whole", (90, 33), (90, 33)),
        _decode("decode", 70, 3, 41),
        _decode("decode-equal", 256, 3, 256),
        _chain("chain", 70, 9, 33),
    )
}
# Where an index that is NaN must leave the other request's selection: a pass for each of the two.
BESIDE_NAN = {
    "whole": replace(RELATED["whole"], query_lens=(9, 33), seq_lens=(41, 33)),
    "decode": RELATED["decode"],
}
RELATED["decode-fp8"] = replace(RELATED["decode"], **_LATENTS)  # type: ignore[arg-type]
GRAPHS: dict[str, Case] = {
    "decode": _decode("decode", 70, 3, 41, 130, 1, 16, **_EXACT),
    "decode-fp8-index": _decode("decode", 70, 3, 41, 130, 1, 16, **_EXACT, **_FP8),
    "decode-fp8": _decode("decode", 70, 3, 41, 130, 1, 16, **_EXACT, **_LATENTS),
    "chain": _chain("chain", 70, 9, 33, 130, 4, 16, **_EXACT),
}
# Heads and stores of a session; its passes are random.
SESSIONS: dict[str, Case] = {
    "bf16-index": _decode("session", 1),
    "fp8_e4m3-index": _decode("session", 1, **_FP8),
    "fp8_e4m3": _decode("session", 1, **_LATENTS),
}
