"""Which shapes the suite asks of rows that declare many."""

from dataclasses import replace

from attn_core.plugins.registry import load_plugins
from attn_core.testing.shapes import shape_cases

TRITON = load_plugins().backends["softmax", "triton"].capabilities


def dims_of(row):
    return {c.dims[0] for c in shape_cases(row.kind, [row]) if "dims" in c.fixed}


def test_every_one_of_few_head_dims_is_asked():
    few = replace(TRITON[0], head_dims=frozenset(range(8, 257, 8)), head_dim_pairs=frozenset())
    assert dims_of(few) == few.head_dims


def test_of_many_head_dims_both_sides_of_each_power_of_two_are_asked():
    row = next(row for row in TRITON if row.kind == "mha" and len(row.head_dims) == 512)
    asked = dims_of(row)
    assert {1, 2, 3, 13, 80, 96, 384, 512} | {
        2**i + x for i in range(2, 9) for x in (-1, 0, 1)
    } <= asked
    assert len(asked) < 48
