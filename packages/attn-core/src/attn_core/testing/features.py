"""The cases of the suite, as data; a row is asked for those whose needs it declares."""

from __future__ import annotations

import random
from dataclasses import replace

from attn_core.capabilities import Phase
from attn_core.forward import ForwardMode
from attn_core.testing.cases import Case, Parents, RaggedCase

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
CHAIN: Parents = (-1, 0, 1, 2)
TREE_A: Parents = (-1, 0, 0, 1, 1, 2, 5)
TREE_B: Parents = (-1, 0, 1, 1, 0, 4, 4)
FOREST: Parents = (-1, -1, 0, 1, 1, 2, 4)
ANY_ORDER: Parents = (1, -1, 1, 0, 2, 6, 2)  # children are named before their parents
EDGES = (1, 15, 16, 17, 63, 64, 65)


def random_tree(drafts: int, seed: int) -> Parents:
    """Draw the parents of a tree, or of several trees, of drafts."""
    rng = random.Random(seed)
    return tuple(rng.randrange(-1, i) if i else -1 for i in range(drafts))


def _case(
    feature: str, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], **more: object
) -> Case:
    return replace(Case(feature=feature, query_lens=query_lens, seq_lens=seq_lens), **more)  # type: ignore[arg-type]  # names and types are Case's, checked by replace


def _decode(feature: str, *seq_lens: int, **more: object) -> Case:
    return _case(feature, (1,) * len(seq_lens), seq_lens, mode=DECODE, **more)


def _verify(feature: str, seq_lens: tuple[int, ...], *trees: Parents, **more: object) -> Case:
    drafts = len(trees[0]) if trees else 4
    more = {"mode": VERIFY, "trees": trees or None, **more}
    return _case(feature, (drafts,) * len(seq_lens), seq_lens, **more)


PAGED: tuple[Case, ...] = (
    _case("prefill-edges", EDGES, EDGES, all_dtypes=True),
    _case("prefill-equal", (33, 9, 33, 33), (33, 9, 33, 33)),
    _case("prefill-prefix", (5, 64, 1, 5, 80), (37, 64, 65, 37, 210)),
    _case("prefill-long", (300,), (333,), heads=(2, 1), dims=(16, 16)),
    _case("prefill-padded", (1, 7), (1, 20), padding=2),
    _case("mixed", (19, 1, 1, 4), (19, 50, 50, 66), mode=ForwardMode.MIXED),
    _decode("decode-edges", *EDGES, all_dtypes=True),
    _decode("decode-equal", 70, 70, 31, 70, 70),
    _decode("decode-long", 1025, 300),
    _decode("decode-many", *range(1, 90, 5)),
    _decode("decode-padded", 40, 1, padding=3),
    _case("shared-kv", (20, 1), (41, 30), shared_kv=True, sweep=False),
    _case("strided", (20, 1), (41, 30), strided=True, sweep=False),
    _decode("strided-decode", 41, 30, strided=True, sweep=False),
    _case("device-lengths", (5, 64, 1), (37, 64, 65), device_lengths=True, sweep=False),
    _decode("device-lengths-decode", 37, 1, 65, device_lengths=True, sweep=False),
    _case("scale-large", (20, 1), (41, 130), scale_by=40.0, sweep=False),
    _decode("scale-large-decode", 41, 130, scale_by=40.0, sweep=False),
    _case("scale-small", (20, 1), (41, 30), scale_by=0.3, sweep=False),
    _case("window-1", (9, 1), (30, 17), window=1),
    _case("window-4", (3, 4, 5, 2, 2, 2), (3, 4, 5, 5, 6, 7), window=4),
    _case("window-prefill", (90, 17), (90, 100), window=20),
    _case("window-half", (80,), (160,), window=100),
    _case("window-blocks", (1100,), (1200,), window=33, heads=(2, 1), dims=(16, 16)),
    _decode("window-decode", 16, 17, 18, 300, window=17),
    _case("softcap", (17, 1), (40, 65), logit_cap=2.0),
    _decode("softcap-decode", 17, 65, logit_cap=2.0),
    _case("softcap-window", (70,), (70,), logit_cap=2.0, window=30),
    _decode("softcap-sinks-window", 70, 9, 70, logit_cap=2.0, window=30, sinks=True),
    _case("sinks", (17, 1, 70, 17), (40, 65, 70, 40), sinks=True),
    _decode("sinks-decode", 40, 65, 40, sinks=True),
    _decode("sinks-window-decode", 150, 9, window=100, sinks=True),
    _case("cross", (3, 1, 3, 70), (9, 8, 3, 70), encoder_lens=(20, 1, 20, 130)),
    _decode("cross-decode", 9, 8, encoder_lens=(33, 0)),
    _case("draft-extend", (1, 3, 2, 3), (18, 33, 129, 33), mode=ForwardMode.DRAFT_EXTEND),
    _case("draft-decode", (1,) * 4, (21, 21, 48, 48), mode=ForwardMode.DRAFT_DECODE),
    _verify("verify-chain", (4, 21, 68)),
    _verify("verify-chain-padded", (21, 68), padding=2),
    _verify("verify-chain-window", (4, 21, 68), window=3),
    _verify("verify-chain-as-tree", (20, 68), CHAIN, CHAIN),
    _verify("verify-tree", (70, 7, 70, 150), TREE_A, TREE_B, FOREST, TREE_A),
    _verify("verify-tree-padded", (70, 9), TREE_A, TREE_B, padding=2),
    _verify("verify-tree-window", (70, 9, 70), TREE_A, TREE_B, TREE_B, window=3, padding=1),
    _verify("verify-tree-any-order", (70, 9), ANY_ORDER, ANY_ORDER, window=3, padding=1),
    _verify("verify-tree-sinks-window", (90, 200), TREE_A, TREE_B, window=66, sinks=True),
    *(
        _verify(
            f"verify-random-{seed}",
            (n, n + 40, 3 * n),
            *(random_tree(n, 10 * seed + i) for i in range(3)),
            sweep=False,
        )
        for seed, n in enumerate((2, 9, 17))
    ),
    _case("fp8-e4m3", (18, 1), (33, 70), kv_dtype="fp8_e4m3"),
    _case(
        "fp8-e4m3-scaled",
        (18, 1),
        (33, 70),
        kv_dtype="fp8_e4m3",
        k_scale=0.37,
        v_scale=1.7,
        all_dtypes=True,
    ),
    _decode("fp8-e4m3-decode", 33, 70, kv_dtype="fp8_e4m3", k_scale=0.37, v_scale=1.7),
    _case("fp8-e5m2", (18, 1), (33, 70), kv_dtype="fp8_e5m2", k_scale=0.37, v_scale=1.7),
    _decode("fp8-e5m2-decode", 33, 70, kv_dtype="fp8_e5m2", k_scale=0.37, v_scale=1.7),
    _case(
        "fp8-e5m2-softcap",
        (18, 1),
        (33, 70),
        kv_dtype="fp8_e5m2",
        k_scale=0.37,
        v_scale=1.7,
        logit_cap=3.0,
    ),
    _case(
        "fp4",
        (18, 1),
        (33, 70),
        kv_dtype="fp4_e2m1",
        k_scale=0.21,
        v_scale=0.6,
        all_dtypes=True,
    ),
    _decode("fp4-decode", 33, 70, kv_dtype="fp4_e2m1", k_scale=0.21, v_scale=0.6),
    *(
        _case(f"kv-{d}", (5, 1), (33, 17), kv_dtype=d, sweep=False)
        for d in ("fp32", "fp16", "bf16")
    ),
)

LATENT: tuple[Case, ...] = tuple(
    replace(case, kind="mla", heads=(h, 1), dims=(576, 512))
    for h, case in (
        (4, _case("mla-prefill", (9, 70), (20, 70), all_dtypes=True)),
        (16, _decode("mla-decode", 65, 17, 65, all_dtypes=True)),
        (128, _decode("mla-decode-128-heads", 65, 1, sweep=False)),
        (4, _decode("mla-decode-padded", 40, 1, padding=2)),
        (4, _case("mla-mixed", (1, 9), (50, 12), mode=ForwardMode.MIXED, sweep=False)),
        (4, _case("mla-strided", (1, 9), (50, 12), strided=True, sweep=False)),
        (4, _decode("mla-device-lengths", 37, 64, device_lengths=True, sweep=False)),
        (4, _decode("mla-scale-large", 41, 130, scale_by=40.0, sweep=False)),
        (4, _verify("mla-verify-chain", (4, 21, 68))),
        (4, _verify("mla-verify-tree", (40, 66), TREE_A, TREE_B)),
        (4, _verify("mla-verify-random", (9, 49), random_tree(9, 5), random_tree(9, 6))),
        (4, _case("mla-draft-extend", (1, 3), (18, 33), mode=ForwardMode.DRAFT_EXTEND)),
        (4, _case("mla-draft-decode", (1, 1), (21, 48), mode=ForwardMode.DRAFT_DECODE)),
        (4, _decode("mla-fp8-e4m3", 33, 64, kv_dtype="fp8_e4m3", k_scale=0.4)),
        (4, _case("mla-fp8-e4m3-prefill", (9, 3), (9, 40), kv_dtype="fp8_e4m3", k_scale=0.4)),
        (4, _decode("mla-fp8-e5m2", 33, 64, kv_dtype="fp8_e5m2", k_scale=0.4)),
        (4, _decode("mla-fp4", 33, 64, kv_dtype="fp4_e2m1", k_scale=0.3)),
    )
)

_VISION = {"phase": Phase.ENCODE, "heads": (3, 3), "dims": (72, 72)}
_MLA = {"kind": "mla", "causal": True, "heads": (4, 4), "dims": (192, 128)}


def _ragged(
    feature: str, query_lens: tuple[int, ...], key_lens: tuple[int, ...], **more: object
) -> RaggedCase:
    base = RaggedCase(feature=feature, query_lens=query_lens, key_lens=key_lens)
    return replace(base, **more)  # type: ignore[arg-type]  # names and types are RaggedCase's


RAGGED: tuple[RaggedCase, ...] = (
    _ragged("encoder", (9, 9, 1, 33), (9, 9, 1, 33)),
    _ragged("encoder-apart", (9, 4, 9), (9, 4, 9), strided=True),
    _ragged("encoder-mha", (20, 31), (20, 31), heads=(3, 3)),
    _ragged("vision", (80, 80), (80, 80), **_VISION),
    _ragged("vision-ragged", (80, 1, 33, 16), (80, 1, 33, 16), **_VISION, strided=True),
    _ragged("mla-ragged", (9, 70, 1), (9, 100, 30), **_MLA),
    _ragged("mla-ragged-prefix", (9, 20), (30, 4), **{**_MLA, "causal": False}),
    _ragged("mla-ragged-strided", (9, 20), (9, 20), **_MLA, strided=True),
)

# A long prefix in chunks, merged by log-sum-exp.
PREFIX = _ragged("prefix-in-chunks", (20,), (90,), **_MLA)

_WHOLE = _case("whole", (90, 33), (90, 33))
_DECODE = _decode("decode", 70, 3, 41)
_TREE = _verify("tree", (70, 9, 70), TREE_A, TREE_B, FOREST)
_CHAIN = _verify("chain", (70, 9, 33))
_LATENT = {"kind": "mla", "heads": (4, 1), "dims": (576, 512)}

# The cases that are put beside each other, per kind.
RELATED: dict[str, dict[str, Case]] = {
    "mha": {c.feature: c for c in (_WHOLE, _DECODE, _TREE, _CHAIN)}
    | {"whole-window-sinks": replace(_WHOLE, window=40, sinks=True)},
    "mla": {c.feature: replace(c, **_LATENT) for c in (_WHOLE, _DECODE, _TREE, _CHAIN)},  # type: ignore[arg-type]  # as above
}
