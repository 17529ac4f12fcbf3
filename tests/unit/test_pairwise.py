"""The chosen cases show every pair that all cases show, and are few."""

from itertools import product

import pytest
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import Device
from attn_core.testing.plan import plan
from hypothesis import given
from hypothesis import strategies as st
from pairwise import covering, pairs
from representative import factors, few, representative, words

CASE = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 3), max_size=5)


@given(st.lists(CASE, min_size=1, max_size=40), st.booleans())
def test_every_pair_is_shown_and_no_case_is_idle(cases, costly):
    shown = [set(pairs(case)) for case in cases]
    chosen = covering(shown, [1.0 + i for i in range(len(cases))] if costly else ())
    assert set().union(*(shown[i] for i in chosen)) == set().union(*shown)
    for i in chosen:
        assert not shown[i] <= set().union(*(shown[j] for j in chosen if j != i))


def test_pairs_are_of_values_of_two_factors():
    assert set(pairs({"a": 1, "b": 2})) == {("a", 1), ("b", 2), frozenset({("a", 1), ("b", 2)})}


@pytest.mark.parametrize(("factors", "values", "most"), [(4, 3, 15), (10, 2, 11), (3, 6, 48)])
def test_few_suffice(factors, values, most):
    names = [f"f{i}" for i in range(factors)]
    cases = [dict(zip(names, t, strict=True)) for t in product(range(values), repeat=factors)]
    assert len(covering([set(pairs(case)) for case in cases])) <= most


def test_a_dear_case_is_left_out_where_cheap_ones_show_the_same():
    shown = [{1, 2, 3}, {1, 2}, {2, 3}]
    assert covering(shown) == [0]
    assert covering(shown, (9, 1, 1)) == [1, 2]


def test_a_representative_part_shows_each_feature_and_each_pair():
    spec = load_plugins().get("torch_native")
    every = [p for p in plan(spec, Device("cpu"), {}, kinds=("mha",)) if p.row is not None]
    part = [every[i] for i in representative(every)]
    for shown in (lambda p: {p.check.feature}, lambda p: {*pairs(factors(p.check))}, words):
        assert set().union(*map(shown, part)) >= set().union(*map(shown, every)), shown
    assert len(few(every)) < len(part) < len(every) / 2
