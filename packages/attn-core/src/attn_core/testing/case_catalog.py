"""The cases of the suite, as data; a row is asked for those whose needs it declares."""

from __future__ import annotations

import random
from dataclasses import replace

from attn_core.runtime.batch import ForwardMode
from attn_core.spec.kinds import Phase
from attn_core.testing import dual_chunk_cases
from attn_core.testing.cases import Case, Parents, RaggedCase

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
CHAIN: Parents = (-1, 0, 1, 2)
TREE_A: Parents = (-1, 0, 0, 1, 1, 2, 5)
TREE_B: Parents = (-1, 0, 1, 1, 0, 4, 4)
FOREST: Parents = (-1, -1, 0, 1, 1, 2, 4)
BACKWARDS: Parents = (1, 2, -1, 2, 3, 1, 5)  # children are named before their parents
EDGES = (1, 15, 16, 17, 63, 64, 65)


def random_tree(drafts: int, seed: int) -> Parents:
    """Draw the parents of a tree, or of several trees, of drafts."""
    rng = random.Random(seed)
    return tuple(rng.randrange(-1, i) if i else -1 for i in range(drafts))


def renamed(parents: Parents, seed: int) -> Parents:
    """Name the drafts of a tree in another order, so that a child may come before its parent."""
    order = list(range(len(parents)))
    random.Random(seed).shuffle(order)  # draft i is now called order[i]
    parents_by_order = {order[i]: -1 if p < 0 else order[p] for i, p in enumerate(parents)}
    return tuple(parents_by_order[i] for i in range(len(parents)))


def _case(
    feature: str, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], **fields: object
) -> Case:
    return replace(Case(feature=feature, query_lens=query_lens, seq_lens=seq_lens), **fields)  # type: ignore[arg-type]  # names and types are Case's, checked by replace


def _decode(feature: str, *seq_lens: int, **fields: object) -> Case:
    return _case(feature, (1,) * len(seq_lens), seq_lens, mode=DECODE, **fields)


_AFTER_VERIFY = {"mode": ForwardMode.DRAFT_EXTEND, "leftover_spec": True, "sweep": False}


def _verify(feature: str, seq_lens: tuple[int, ...], *trees: Parents, **fields: object) -> Case:
    drafts = len(trees[0]) if trees else 4
    fields = {"mode": VERIFY, "trees": trees or None, **fields}
    return _case(feature, (drafts,) * len(seq_lens), seq_lens, **fields)


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
    _case("prefill-one", (1,), (1,), sweep=False),
    _case("prefill-empty", (0, 5, 0, 33, 0), (17, 20, 0, 33, 64), sweep=False),
    _case(
        "prefill-many", tuple(1 + (i % 9 == 4) for i in range(70)), tuple(range(2, 72)), sweep=False
    ),
    _decode("decode-one", 65, sweep=False),
    _decode("decode-many", *range(1, 132, 2), heads=(2, 1), sweep=False),
    _decode("decode-longest", 3000, heads=(2, 1), dims=(16, 16), sweep=False),
    _decode("decode-padded", 40, 1, padding=3),
    _case("shared-kv", (20, 1), (41, 30), shared_kv=True, sweep=False),
    _case("strided", (20, 1), (41, 30), strides="fused", sweep=False),
    _decode("strided-decode", 41, 30, strides="fused", sweep=False),
    _case("strided-heads-first", (20, 1), (41, 30), strides="heads-first", sweep=False),
    _decode("strided-heads-first-decode", 41, 30, strides="heads-first", sweep=False),
    _case("strided-heads-apart", (20, 1), (41, 30), strides="apart", sweep=False),
    _case("device-lengths", (5, 64, 1), (37, 64, 65), device_lengths=True, sweep=False),
    _decode("device-lengths-decode", 37, 1, 65, device_lengths=True, sweep=False),
    _case("scale-large", (20, 1), (41, 130), scale_by=40.0, sweep=False),
    _decode("scale-large-decode", 41, 130, scale_by=40.0, sweep=False),
    _case("scale-small", (20, 1), (41, 30), scale_by=0.3, sweep=False),
    _case("window-1", (9, 1), (30, 17), window=1),
    _decode("window-1-decode", 30, 1, 17, window=1, sweep=False),
    _case("window-queries-less-1", (90, 90), (90, 130), window=89, sweep=False),
    _case("window-of-all", (9, 1), (30, 17), window=1000, sweep=False),
    _decode("window-of-all-decode", 30, 1, 70, window=1000, sweep=False),
    _case("window-4", (3, 4, 5, 2, 2, 2), (3, 4, 5, 5, 6, 7), window=4),
    _case("window-prefill", (90, 17), (90, 100), window=20),
    _case("window-half", (80,), (160,), window=100),
    _case("window-blocks", (600,), (640,), window=33, heads=(2, 1), dims=(16, 16)),
    _decode("window-decode", 16, 17, 18, 300, window=17),
    _case("softcap", (17, 1), (40, 65), logit_cap=2.0),
    _decode("softcap-decode", 17, 65, logit_cap=2.0),
    _case("softcap-window", (70,), (70,), logit_cap=2.0, window=30),
    _decode("softcap-sinks-window", 70, 9, 70, logit_cap=2.0, window=30, sinks=True),
    _case("sinks", (17, 1, 70, 17), (40, 65, 70, 40), sinks=True),
    _decode("sinks-decode", 40, 65, 40, sinks=True),
    _decode("sinks-longest", 3000, 9, sinks=True, heads=(2, 1), dims=(16, 16), sweep=False),
    _decode("sinks-window-decode", 150, 9, window=100, sinks=True),
    _case("cross", (3, 1, 3, 70), (9, 8, 3, 70), encoder_lens=(20, 1, 20, 130)),
    _decode("cross-decode", 9, 8, encoder_lens=(33, 0)),
    _case("cross-no-keys", (70, 3, 1), (70, 9, 8), encoder_lens=(0, 20, 0), sweep=False),
    _decode("cross-no-keys-sinks", 9, 8, 7, encoder_lens=(0, 33, 0), sinks=True, sweep=False),
    _decode("cross-no-encoder", 9, 8, encoder_lens=(0, 0), sweep=False),
    _case("draft-extend", (1, 3, 2, 3), (18, 33, 129, 33), mode=ForwardMode.DRAFT_EXTEND),
    _case("draft-decode", (1,) * 4, (21, 21, 48, 48), mode=ForwardMode.DRAFT_DECODE),
    _case("draft-extend-spec", (1, 3, 2, 3), (18, 33, 129, 33), **_AFTER_VERIFY),
    _verify("verify-chain", (4, 21, 68)),
    _verify("verify-chain-padded", (21, 68), padding=2),
    _verify("verify-chain-window", (4, 21, 68), window=3),
    _verify("verify-chain-as-tree", (20, 68), CHAIN, CHAIN),
    _verify("verify-tree", (70, 7, 70, 150), TREE_A, TREE_B, FOREST, TREE_A),
    _verify("verify-tree-padded", (70, 9), TREE_A, TREE_B, padding=2),
    _verify("verify-tree-window", (70, 9, 70), TREE_A, TREE_B, TREE_B, window=3, padding=1),
    _verify("verify-tree-sinks-window", (90, 200), TREE_A, TREE_B, window=66, sinks=True),
    _verify("verify-tree-backwards", (9, 40), BACKWARDS, renamed(FOREST, 1), sweep=False),
    _verify(
        "verify-tree-backwards-window",
        (70, 9),
        BACKWARDS,
        renamed(TREE_B, 2),
        window=3,
        sweep=False,
    ),
    _verify("verify-tree-window-1", (9, 40), TREE_A, BACKWARDS, window=1, sweep=False),
    _verify("verify-tree-long", (90,), renamed(random_tree(70, 7), 7), sweep=False),
    _verify("verify-strided", (70, 9), TREE_A, TREE_B, strides="apart", sweep=False),
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
        (4, _case("mla-strided", (1, 9), (50, 12), strides="fused", sweep=False)),
        (4, _decode("mla-heads-first", 50, 12, strides="heads-first", sweep=False)),
        (4, _decode("mla-one", 65, sweep=False)),
        (4, _case("mla-empty", (0, 9, 0), (17, 12, 64), sweep=False)),
        (4, _decode("mla-longest", 1025, sweep=False)),
        (4, _decode("mla-device-lengths", 37, 64, device_lengths=True, sweep=False)),
        (4, _decode("mla-scale-large", 41, 130, scale_by=40.0, sweep=False)),
        (4, _verify("mla-verify-chain", (4, 21, 68))),
        (4, _verify("mla-verify-tree", (40, 66), TREE_A, TREE_B)),
        (4, _verify("mla-verify-random", (9, 49), random_tree(9, 5), random_tree(9, 6))),
        (4, _verify("mla-verify-backwards", (9, 40), BACKWARDS, renamed(FOREST, 1), sweep=False)),
        (4, _case("mla-draft-extend", (1, 3), (18, 33), mode=ForwardMode.DRAFT_EXTEND)),
        (4, _case("mla-draft-decode", (1, 1), (21, 48), mode=ForwardMode.DRAFT_DECODE)),
        (4, _decode("mla-fp8-e4m3", 33, 64, kv_dtype="fp8_e4m3", k_scale=0.4)),
        (4, _case("mla-fp8-e4m3-prefill", (9, 3), (9, 40), kv_dtype="fp8_e4m3", k_scale=0.4)),
        (4, _decode("mla-fp8-e5m2", 33, 64, kv_dtype="fp8_e5m2", k_scale=0.4)),
        (4, _decode("mla-fp4", 33, 64, kv_dtype="fp4_e2m1", k_scale=0.3)),
    )
)

_VISION = {"phase": Phase.ENCODE, "heads": (3, 3), "dims": (72, 72)}
_MLA: dict[str, object] = {"kind": "mla", "causal": True, "heads": (4, 4), "dims": (192, 128)}

_CHUNK = {**_MLA, "causal": False}


def _ragged(
    feature: str, query_lens: tuple[int, ...], key_lens: tuple[int, ...], **fields: object
) -> RaggedCase:
    base = RaggedCase(feature=feature, query_lens=query_lens, key_lens=key_lens)
    return replace(base, **fields)  # type: ignore[arg-type]  # names and types are RaggedCase's


RAGGED: tuple[RaggedCase, ...] = (
    _ragged("encoder", (9, 9, 1, 33), (9, 9, 1, 33)),
    _ragged("encoder-mha", (20, 31), (20, 31), heads=(3, 3)),
    _ragged("encoder-long", (130,), (130,), heads=(2, 1), dims=(16, 16)),
    _ragged("encoder-many", (1, 2) * 33, (1, 2) * 33, heads=(2, 1)),
    _ragged("encoder-no-queries", (0, 9, 0, 33, 0), (4, 9, 0, 33, 7)),
    _ragged("encoder-no-keys", (70, 9, 3), (0, 20, 0)),
    _ragged("encoder-no-keys-sinks", (70, 9, 3), (0, 20, 0), sinks=True),
    _ragged("vision", (80, 80), (80, 80), **_VISION),
    _ragged("vision-ragged", (80, 1, 33, 16), (80, 1, 33, 16), **_VISION, strides="apart"),
    _ragged("mla-ragged", (9, 70, 1), (9, 100, 30), **_MLA),
    _ragged("mla-ragged-prefix", (9, 20), (30, 4), **_CHUNK),
    _ragged("mla-ragged-no-keys", (9, 70, 20), (30, 0, 4), **_CHUNK),
    _ragged("mla-ragged-strided", (9, 20), (9, 20), **_MLA, strides="apart"),
    _ragged("mla-ragged-values-apart", (9, 20), (9, 20), **_MLA, strides="values-apart"),
    *(
        _ragged(f"{name}-{strides}", (9, 4, 9), (9, 4, 9), **shape, strides=strides)
        for name, shape, ways in (
            ("encoder", {}, ("fused", "apart", "heads-first")),
            ("vision", _VISION, ("fused", "heads-first")),
            ("mla-ragged", _MLA, ("fused", "heads-first")),
        )
        for strides in ways
    ),
)

# One request after the other is NaN, and its neighbours stay right.
RAGGED_BESIDE_NAN = tuple(
    replace(case, feature=f"beside-nan-{case.feature}")
    for case in RAGGED
    if case.feature in ("encoder", "vision-ragged", "mla-ragged")
)

# A long prefix in chunks, merged by log-sum-exp.
PREFIX = _ragged("prefix-in-chunks", (20,), (90,), **_MLA)

_WHOLE = _case("whole", (90, 33), (90, 33))
_DECODE = _decode("decode", 70, 3, 41)
_EQUAL = _decode("decode-equal", 256, 3, 256)  # long enough to be cut, alone or together
_TREE = _verify("tree", (70, 9, 70), TREE_A, TREE_B, FOREST)
_CHAIN = _verify("chain", (70, 9, 33))
_LATENT = {"kind": "mla", "heads": (4, 1), "dims": (576, 512)}

_MANY = _decode("decode", 70, 3, 41, 130, 1, 16)
_TREES = (TREE_A, TREE_B, FOREST, BACKWARDS, TREE_A, TREE_B)

# What is captured in CUDA graphs, per kind: a graph holds half of these requests.
GRAPHS: dict[str, dict[str, Case]] = {
    "mha": {
        "decode": _MANY,
        "decode-window": replace(_MANY, window=20),
        "chain": _verify("chain", (70, 9, 33, 130, 4, 16)),
        "tree": _verify("tree", (70, 9, 70, 150, 33, 16), *_TREES),
        "dual-chunk-decode": dual_chunk_cases.GRAPH_DECODE,
        "dual-chunk-chain": dual_chunk_cases.GRAPH_CHAIN,
        "tree-window": _verify("tree", (70, 9, 70, 150, 33, 16), *_TREES, window=5),
    },
}
GRAPHS["mla"] = {
    name: replace(GRAPHS["mha"][name], **_LATENT)  # type: ignore[arg-type]  # as above
    for name in ("decode", "chain", "tree")
}

# Requests that are put behind prefixes which they share, per kind.
_LONG = _decode("decode", 600, 610, 590, 330, 1, heads=(2, 1), dims=(32, 32))
SHARED: dict[str, dict[str, Case]] = {
    "mha": {
        "decode": replace(_LONG, logit_cap=2.0, sinks=True),
        "decode-window": replace(_LONG, window=40),
        "tree": _verify("tree", (1060, 1100, 330), TREE_A, TREE_B, FOREST, heads=(3, 1)),
    },
    "mla": {"decode": replace(_LONG, query_lens=(1,) * 3, seq_lens=(340, 333, 1), **_LATENT)},  # type: ignore[arg-type]  # as above
    "dsa": {},
}

# The cases that are put beside each other, per kind.
RELATED: dict[str, dict[str, Case]] = {
    "mha": {c.feature: c for c in (_WHOLE, _DECODE, _EQUAL, _TREE, _CHAIN)}
    | {"whole-window-sinks": replace(_WHOLE, window=40, sinks=True)}
    | {"whole-dual-chunk": dual_chunk_cases.WHOLE},
    "mla": {c.feature: replace(c, **_LATENT) for c in (_WHOLE, _DECODE, _EQUAL, _TREE, _CHAIN)},  # type: ignore[arg-type]  # as above
}
