"""The passes of linear attention that the suite asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from attn_core.runtime.batch import ForwardMode
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.kinds import Kind
from attn_core.testing.cases import FINEST_FIRST
from attn_core.testing.linear_cases import LinearCase, LinearPass, LinearPoint

EXTEND, DECODE, MIXED, VERIFY = (
    ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY
)  # fmt: skip
# Of each request, the parents of its drafts.
TREES = (
    (-1, 0, 0, 1, 1, 2, 3),
    (-1, 0, 1, 1, 0, 4, 4),
    (-1, 0, 1, 2, 3, 4, 5),
    (-1, -1, 1, 0, 0, 2, 1),
)
FORESTS = ((-1, -1, 1, 0, 2), (-1, 0, -1, 2, 1), (-1, -1, -1, -1, -1), (-1, 0, 0, 0, 0))

_PREFILL = LinearPass(mode=EXTEND, query_lens=(150, 1, 0, 64, 17), slots=(3, 1, 7, 5, 2))
_DECODE = LinearPass(mode=DECODE, query_lens=(1,) * 5, slots=(3, 1, 7, 5, 2))
_CHAIN = LinearPass(
    mode=VERIFY, query_lens=(4,) * 5, slots=(3, 1, 7, 5, 2), accepted=(3, -1, 0, 2, 1)
)
_TREE = LinearPass(
    mode=VERIFY, query_lens=(7,) * 4, slots=(3, 1, 5, 2), trees=TREES, accepted=(6, -1, 4, 2)
)
_MIXED = LinearPass(mode=MIXED, query_lens=(1, 1, 70, 0, 5), slots=(3, 1, 7, 5, 2))
_SHORT = LinearPass(mode=EXTEND, query_lens=(70, 2), slots=(3, 1))
_OUT = (6, 1, 4, 8, 2)


def _out(p: LinearPass, slots: tuple[int, ...], out: tuple[int, ...]) -> LinearPass:
    return replace(p, slots=slots, slots_out=out)


def _case(feature: str, *passes: LinearPass, **changes: object) -> LinearCase:
    base = LinearCase(feature=feature, passes=passes)
    return replace(base, **changes)  # type: ignore[arg-type]  # names and types are LinearCase's


def _in_modes(feature: str, **changes: object) -> Iterator[LinearCase]:
    """Yield a case per mode, so that a row without one of them is asked for the others."""
    for name, pass_ in (("prefill", _SHORT), ("decode", _DECODE), ("verify", _CHAIN)):
        yield _case(f"{feature}-{name}", pass_, **changes)


CASES: tuple[LinearCase, ...] = (
    _case("prefill", _PREFILL, all_states=True),
    _case("prefill-fresh", replace(_PREFILL, fresh=(0, 2, 3)), all_states=True),
    _case("prefill-padding", replace(_PREFILL, slots=(-1, 1, -1, 5, 2))),
    _case("prefill-nothing", replace(_PREFILL, query_lens=(0,) * 5, fresh=(3,))),
    _case("prefill-device-lengths", replace(_PREFILL, device_lengths=True)),
    _case("prefill-layers", _SHORT, num_layers=3),
    _case("prefill-slots-out", replace(_out(_PREFILL, (3, 1, 3, 5, 7), _OUT), fresh=(3,))),
    _case(
        "checkpoints",
        replace(_PREFILL, query_lens=(130, 64, 0, 100, 3), fresh=(1,),
                checkpoint_slots=(-1, 4, 6, 8, 0, -1, -1)),
        all_states=True,
    ),
    _case(
        "checkpoint-then-prefill",  # a prefix cache: from the checkpoint, not from the end
        replace(_PREFILL, query_lens=(130, 64), slots=(3, 1), checkpoint_slots=(4, -1, -1, 6)),
        replace(_PREFILL, query_lens=(20, 70), slots=(4, 6)),
    ),
    _case(
        "prefill-in-parts",
        *(replace(_PREFILL, query_lens=(n, m), slots=(3, 5))
          for n, m in ((64, 1), (1, 63), (65, 0), (7, 66))),
    ),
    _case("prefill-then-decode", _SHORT, *[replace(_DECODE, query_lens=(1, 1), slots=(1, 3))] * 3),
    _case("decode", _DECODE, _DECODE, all_states=True),
    _case("decode-fresh", replace(_DECODE, fresh=(0, 3)), all_states=True),
    _case("decode-padding", replace(_DECODE, slots=(-1, 1, 7, -1, 2))),
    _case("decode-slots-out", replace(_out(_DECODE, (3, 1, 3, 5, 7), _OUT), fresh=(3,))),
    _case("decode-layers", _DECODE, _DECODE, num_layers=3),
    _case(
        "decode-many",
        LinearPass(mode=DECODE, query_lens=(1,) * 67, slots=tuple(range(68, 1, -1))),
        num_slots=70,
    ),
    _case("mixed", _MIXED, all_states=True),
    _case("mixed-fresh-padding", replace(_MIXED, slots=(-1, 1, 7, -1, 2), fresh=(1, 2))),
    _case("mixed-device-lengths", replace(_MIXED, device_lengths=True)),
    _case("mixed-checkpoints", replace(_MIXED, checkpoint_slots=(4, -1, 6, -1, 8))),
    _case("verify-chain", _CHAIN, num_layers=2, all_states=True),
    _case("verify-chain-fresh", replace(_CHAIN, fresh=(0, 1, 4)), num_layers=2),
    _case("verify-chain-padding", replace(_CHAIN, slots=(-1, 1, 7, -1, 2)), num_layers=2),
    _case("verify-chain-slots-out", replace(_out(_CHAIN, (3, 1, 3, 5, 7), _OUT), fresh=(3,))),
    _case("verify-one", replace(_CHAIN, query_lens=(1,) * 5, accepted=(0, -1, 0, 0, -1))),
    _case("verify-rejected", replace(_CHAIN, accepted=(-1,) * 5), _DECODE),
    _case("verify-not-committed", replace(_CHAIN, accepted=None), _DECODE, _SHORT),
    _case("verify-then-decode", _CHAIN, _DECODE, num_layers=2),
    _case("verify-then-prefill", _CHAIN, _SHORT),
    _case("verify-again", _CHAIN, replace(_CHAIN, query_lens=(3,) * 5, accepted=(2, 0, 1, -1, 2))),
    _case("verify-tree", _TREE, num_layers=2, all_states=True),
    _case("verify-chain-as-tree", replace(_TREE, trees=((-1, 0, 1, 2, 3, 4, 5),) * 4)),
    _case("verify-tree-fresh-padding", replace(_TREE, slots=(3, -1, 5, 2), fresh=(0, 2))),
    _case(
        "verify-forest",
        replace(_TREE, query_lens=(5,) * 4, trees=FORESTS, accepted=(4, 3, 1, 0)),
        replace(_DECODE, query_lens=(1,) * 4, slots=(5, 2, 3, 1)),
    ),
    *_in_modes("gate-softplus", gate="softplus", qk_norm=True, num_layers=2),
    *_in_modes("gate-bounded", gate="bounded"),
    *_in_modes("gate-neg-eigval", gate="neg_eigval", qk_norm=True),
    *_in_modes("qk-norm", qk_norm=True),
    *_in_modes("scale", scale_by=3.0),
    *_in_modes("decay-strong", decay=20.0, constant_decay=True),
    *_in_modes("decay-none", decay=0.0),
    _case("decay-slow", replace(_SHORT, query_lens=(200, 70)), decay=0.01),
    _case("decay-mixed", _SHORT, decay=20.0),
    *_in_modes("near-equal-keys", near_equal_keys=True, decay=0.01),
    _case("near-equal-keys-no-norm", _SHORT, near_equal_keys=True, qk_norm=True, decay=0.01),
    *_in_modes("strided", strides="fused", qk_norm=True),
    *_in_modes("strided-apart", strides="apart"),
    *_in_modes("strided-heads-first", strides="heads-first"),
    *_in_modes("pages", pages=True, num_layers=2),
)  # fmt: skip
# What is put beside itself: again, captured, far away.
TWICE = {"prefill": _PREFILL, "decode": _DECODE, "verify-chain": _CHAIN, "verify-tree": _TREE}
GRAPHS = {"decode": _DECODE, "verify-chain": _CHAIN, "verify-tree": _TREE}
FAR = {"prefill": _SHORT, "decode": _DECODE}

_HEADS = ((1, 1), (4, 4), (2, 8), (3, 3), (16, 32))  # (2, 8) is Qwen3.5 on eight devices
_DIMS = ((13, 7), (24, 40), (128, 64), (64, 64), (128, 128))


def shape_cases(kind: Kind, rows: Sequence[Capabilities]) -> Iterator[LinearCase]:
    """Yield the cases of head counts and dims that the rows declare, or of some if they take any.

    Of many declared pairs of dims, those with the smallest and the largest V of each K.
    """
    pairs = {(d, d) for r in rows for d in r.head_dims}
    for r in rows:
        if r.head_dim_pairs == "any":
            pairs |= {(k, v) for k, v in _DIMS if k != v}
        else:
            for k in {k for k, _ in r.head_dim_pairs}:
                values = [v for x, v in r.head_dim_pairs if x == k]
                pairs |= {(k, min(values)), (k, max(values))}
        if not r.head_dims:
            pairs |= {(k, v) for k, v in _DIMS if k == v}
    for k, v in sorted(pairs):
        name = f"dim-{k}" if k == v else f"dim-{k}-{v}"
        shape = {"kind": kind, "dims": (k, v), "heads": (1, 2), "fixed": frozenset({"dims"})}
        yield from _in_modes(name, **shape)
    heads = {h for h in _HEADS if any(not r.q_heads or h[0] in r.q_heads for r in rows)}
    heads |= {(h, 2 * h) for r in rows for h in r.q_heads}
    for hk, hv in sorted(heads):
        shape = {"kind": kind, "heads": (hk, hv), "fixed": frozenset({"heads"})}
        yield from _in_modes(f"heads-{hk}-{hv}", **shape)


def adapted(case: LinearCase, row: Capabilities) -> LinearCase:
    """Give a case heads and dims that the row takes, where the case is not about them."""
    hk, hv = case.heads
    if "heads" not in case.fixed and row.q_heads and hk not in row.q_heads:
        hk, hv = min(row.q_heads), min(row.q_heads) * (hv // hk)
    dims = case.dims if "dims" in case.fixed else _dims(case.dims, row)
    return replace(case, heads=(hk, hv), dims=dims)


def _dims(dims: tuple[int, int], row: Capabilities) -> tuple[int, int]:
    if row.head_dim_pairs == "any" or dims in row.head_dim_pairs:
        return dims
    if row.head_dim_pairs:
        return min(row.head_dim_pairs, key=lambda d: (d[0] * d[1], d))
    head_dims = sorted(row.head_dims) or [dims[0]]
    k = next((d for d in head_dims if d >= dims[0]), head_dims[-1])
    return k, k


def points(case: LinearCase, rows: Sequence[Capabilities]) -> list[LinearPoint]:
    """List where a case runs: in the finest and the coarsest dtype, over the finest states.

    With all_states over every dtype of states.
    """
    dtypes = [d for d in FINEST_FIRST if any(d in r.dtypes for r in rows)]
    states = [d for d in FINEST_FIRST if any(d in r.kv_dtypes for r in rows)]
    options = [(d, s) for s in (states if case.all_states else states[:1])
               for d in dict.fromkeys((dtypes[0], dtypes[-1]))]  # fmt: skip
    return [LinearPoint(dtype=d, state_dtype=s) for d, s in options]
