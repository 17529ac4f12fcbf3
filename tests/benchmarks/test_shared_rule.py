"""The rule that forms groups of sharers, held against what was measured with and without them."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

pytest.importorskip("triton")

from attn_core.backends.triton.portable.arguments import Requests
from attn_core.backends.triton.shared import buffer_shape, fill_spans, sharing_of
from attn_core.backends.triton.tuning import decode_launch
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.costs.shared_prefix import fits_tile, largest_tile, shared_tile_rows
from attn_core.runtime.layer import AttentionLayer, LayerGroup

from benchmarks.cases import Case
from benchmarks.suites import shared

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks/results"
RECORDS = sorted(RESULTS.glob("shared-prefix.nvidia-h200*.json"))
MEASURED = {case["name"]: case for x in RECORDS for case in json.loads(x.read_text())["cases"]}
CASES = {case.name: case for case in shared() if case.kind == "mha" and case.name in MEASURED}
TIE = 0.02  # of a time: what two measurements of one thing differ by


def rows_of(case: Case) -> int:
    """Return the query rows of a request and KV head."""
    return case.query_lens[0] * (case.q_heads // case.kv_heads)


def groups_of(case: Case) -> int:
    """Return how many groups the plan of an H200 forms of a case."""
    queries, batch, page = case.query_lens[0], case.batch, case.page_size
    layer = AttentionLayer(
        layer_id=0,
        num_q_heads=case.q_heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        scale=case.scale,
    )
    store_bytes = TORCH_DTYPES[case.kv_dtype].itemsize
    dims = (case.head_dim, case.v_head_dim, store_bytes)
    largest = largest_tile("sm90", *dims, page, batch)
    if not fits_tile(rows_of(case), largest):
        return 0
    rows = shared_tile_rows(rows_of(case), case.v_head_dim, case.kv_dtype, case.tree, largest)
    more = {"page_size": page, "tree": case.tree, "requests": batch}
    launch = decode_launch("sm90", rows, *dims, shared=True, **more)
    sharing = sharing_of(LayerGroup.of(layer), queries, page, store_bytes, launch)
    if sharing is None:
        return 0
    table = torch.arange(batch * (case.length // page), dtype=torch.int32).view(batch, -1)
    for first, n, begin, end in (group for level in case.groups for group in level):
        pages = slice(begin // page, end // page)
        table[first : first + n, pages] = table[first, pages]
    buffer = torch.empty(buffer_shape(batch, 1), dtype=torch.int32)
    requests = Requests(
        torch.arange(0, queries * (batch + 1), queries, dtype=torch.int32),
        torch.tensor(case.seq_lens, dtype=torch.int32),
        table,
    )
    fill_spans({}, requests, buffer, torch.zeros(2, dtype=torch.int32), launch, sharing)
    units = buffer[0, : 2 * batch + 1].diff()
    return int((units[batch:] > 0).sum())


def test_no_case_is_in_two_records():
    names = [case["name"] for x in RECORDS for case in json.loads(x.read_text())["cases"]]
    assert len(names) == len(set(names))


def test_the_records_have_all_cases_of_this_rule():
    later = [case for case in shared() if case.kind == "mha" and case.name not in MEASURED]
    # chains and narrow stores join a record when it is measured again
    assert all(case.kv_dtype != case.dtype or case.phase == "verify" for case in later)
    assert not any(case.tree for case in later)
    assert any(case.tree for case in CASES.values())


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.long] * (i % 3 > 0)) for i, x in enumerate(CASES)],
)
def test_groups_are_formed_where_they_were_faster(name):
    """Groups form where their time was shorter than without, and not where it was longer."""
    measured, case = MEASURED[name], CASES[name]
    [alone] = [x["us"] for x in measured["peers"] if x["name"] == "triton-alone"]
    ratio, groups = measured["ours"]["us"] / alone, groups_of(case)
    if not case.shared or ratio > 1 + TIE:
        assert groups == 0
    elif ratio < 1 - TIE:
        assert groups == sum(len(level) for level in case.groups)
    elif groups:  # neither matters
        assert name == "decode B64 L8704 H28/4 D128 p64 shared 32x8192 of 32"
