"""Cases count what they move and compute, and know what is right, independently of any kernel."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
import torch
from attn_core.cache.page_table import slot_table
from attn_core.ops.kv import read_kv
from attn_core.runtime.batch import ForwardMode
from small_cases import CASES

from benchmarks.cases import Case, build, random_tree
from benchmarks.peers import PEERS
from benchmarks.suites import FIXED, GRID_KV_BYTES, PHASES, cases_of, grid


def test_bytes_and_flops_by_hand():
    decode = Case(phase="decode", batch=64, length=4096)
    assert decode.kv_bytes == 64 * 4096 * 8 * 2 * 128 * 2  # 1 GiB
    assert decode.bytes == decode.kv_bytes + 64 * 32 * 2 * 128 * 2
    assert decode.flops == 4 * 64 * 32 * 128 * 4096
    prefill = Case(phase="prefill", batch=4, length=4096, queries=None)
    assert prefill.flops == 4 * 4 * 32 * 128 * (4096 * 4097 // 2)
    assert prefill.tokens == 4 * 4096
    extend = Case(phase="extend", batch=8, length=4608, queries=512)
    assert extend.flops == 4 * 8 * 32 * 128 * (4096 * 512 + 512 * 513 // 2)
    latent = FIXED["mla"][0]
    assert (latent.q_heads, latent.batch, latent.length) == (128, 1, 4096)
    assert latent.kv_bytes == 4096 * 576 * 2  # K and V are one
    assert latent.flops == 2 * 128 * (576 + 512) * 4096
    assert FIXED["fp8"][0].kv_bytes * 2 == decode.kv_bytes


def test_the_fixed_cases_are_those_that_have_targets():
    result = {c.name for c in cases_of("all")}
    assert len(result) == len(cases_of("all")), "two cases of one name"
    assert {
        "decode B64 L4096 H32/8 D128 p64",
        "decode B256 L2048 H32/8 D128 p64",
        "decode B1 L32768 H32/8 D128 p64",
        "decode B16 L4096 H32/8 D128 p64",
        "decode B1 L1024 H32/8 D128 p64",
        "verify B16 L4096 q8 tree H32/8 D128 p1",
        "verify B64 L2048 q8 tree H32/8 D128 p1",
        "verify B1 L4096 q8 tree H32/8 D128 p1",
        "verify B16 L4096 q4 chain H32/8 D128 p64",
        "prefill B1 L4096 H32/8 D128 p64",
        "prefill B1 L16384 H32/8 D128 p64",
        "prefill B16 L1024 H32/8 D128 p64",
        *(f"extend B8 L4608 q512 H32/8 D128 p{p}" for p in (1, 16, 64, 128)),
        *(f"extend B1 L32768 q2048 H32/8 D128 p{p}" for p in (1, 16, 64, 128)),
        "mla B64 L8192 H128/1 D576/512 p64",
        "mla B16 L4096 H128/1 D576/512 p64",
        "mla B64 L8192 H16/1 D576/512 p64",
        "mla B1 L4096 H128/1 D576/512 p64",
        "mla-verify B16 L4096 q4 H128/1 D576/512 p64",
        "fp8 B64 L4096 H32/8 D128 p64 fp8_e4m3",
    } <= result


def test_the_grid_covers_what_it_promises():
    cases = grid()
    assert len(cases) >= 60
    assert len({c.name for c in cases}) == len(cases)
    assert all(c.kv_bytes <= GRID_KV_BYTES for c in cases)
    assert {c.batch for c in cases} >= {1, 4, 16, 64, 256}
    assert min(c.length for c in cases) == 128
    assert max(c.length for c in cases) == 131072
    for phase in ("decode", "verify", "prefill"):
        of = [c for c in cases if c.phase == phase]
        assert len(of) >= 15
        assert {c.q_heads // c.kv_heads for c in of} == {1, 2, 4, 8, 16}
        assert {c.head_dim for c in of} == {64, 128, 256}
        assert {c.page_size for c in of} == {1, 16, 64, 128}
        assert {c.ragged for c in of} == {True, False}
        pairs = {(c.q_heads // c.kv_heads, c.head_dim) for c in of}
        assert len(pairs) >= 11, f"{phase}: ratios meet few head dims"
    assert {c.tree for c in cases if c.phase == "verify"} == {True, False}


def test_every_phase_has_cases_and_peers():
    assert set(PHASES) == {*FIXED, "grid", "mla-grid", "ragged", "shared", "stores", "all"}
    for phase, cases in FIXED.items():
        assert {c.phase for c in cases} == {phase}
        for case in cases:
            takers = [p for p in PEERS if phase in p.phases and not p.refuses(case)]
            assert takers, f"nobody to compare with on {case.name}"
    assert {c.phase for c in grid()} == {"decode", "verify", "prefill"}


def test_ragged_lengths_are_the_same_at_every_run_and_fit():
    case = Case(phase="verify", batch=64, length=4096, queries=8, ragged=True)
    assert case.seq_lens == dataclasses.replace(case).seq_lens
    assert max(case.seq_lens) == 4096
    assert min(case.seq_lens) >= 512
    assert len(set(case.seq_lens)) > 50
    short = Case(phase="verify", batch=256, length=9, queries=8, ragged=True)
    assert min(short.seq_lens) >= 8


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_inputs_are_consistent_and_the_reference_is_softmax(case):
    inputs = build(case, "cpu")
    assert inputs.q.shape == (case.tokens, case.q_heads, case.head_dim)
    table = inputs.page_table
    owned = [
        int(page)
        for row, s in zip(table, case.seq_lens, strict=True)
        for page in row[: -(-s // case.page_size)]
    ]
    assert sorted(owned) == list(range(1, inputs.cache.num_pages)), "pages are owned once each"
    if len(owned) > 20:
        assert owned != sorted(owned), "pages are shuffled"
    # one known query of the last request, in float64, written down without any shared helper
    row, wanted = int(inputs.rows[-1]), inputs.wanted[-1]
    b = case.batch - 1
    i = row - sum(case.query_lens[:b])
    s, n = case.seq_lens[b], case.query_lens[b]
    assert 0 <= i < n
    slots = slot_table(table[b : b + 1], case.page_size, s)[0]
    k, v = read_kv(inputs.cache, slots, torch.float64)
    v = k[..., :512] if v is None else v
    seen = [j <= s - n + i for j in range(s)]
    if case.tree:
        assert inputs.batch.spec is not None
        seen[s - n :] = inputs.batch.spec.tree_mask[b, i].tolist()
    for head in range(case.q_heads):
        kv_head = head // (case.q_heads // case.kv_heads)
        scores = inputs.layer.scale * k[:, kv_head] @ inputs.q[row, head].double()
        p = scores.masked_fill(~torch.tensor(seen), -torch.inf).softmax(-1)
        torch.testing.assert_close(wanted[head].double(), p @ v[:, kv_head], rtol=1e-4, atol=1e-5)
    # the new tokens that are handed on are those in the pool
    new = inputs.batch.views["full"].out_cache_loc
    assert torch.equal(inputs.k, read_kv(inputs.cache, new, inputs.q.dtype)[0])


def test_the_same_seed_draws_the_same_inputs():
    a, b, c = (build(CASES[2], "cpu", seed) for seed in (0, 0, 1))
    assert torch.equal(a.q, b.q)
    assert torch.equal(a.page_table, b.page_table)
    assert torch.equal(a.wanted, b.wanted)
    assert not torch.equal(a.q, c.q)


def test_one_wrong_late_query_is_an_error():
    """Late queries of a prefill average many values: an error in one must not drown."""
    inputs = build(
        Case(phase="prefill", batch=1, length=600, queries=None, q_heads=2, kv_heads=1), "cpu"
    )
    out = torch.zeros(600, 2, 128)
    out[inputs.rows] = inputs.wanted
    assert inputs.error(out) == 0
    out[inputs.rows[-1]] *= 1.05
    assert inputs.error(out) > 0.04
    out[7] = torch.nan
    assert inputs.error(out) == float("inf")


def test_trees_are_trees():
    for seed in range(20):
        mask = random_tree(8, seed)
        assert mask.diagonal().all()
        assert not mask.triu(1).any()
        for i in range(8):  # who sees a draft sees all that the draft sees
            assert all((mask[i] | ~mask[j]).all() for j in range(i) if mask[i, j])
    assert len({tuple(random_tree(8, s).flatten().tolist()) for s in range(20)}) > 10


def test_modes():
    assert [c.mode for c in CASES[:5:2]] == [
        ForwardMode.DECODE,
        ForwardMode.TARGET_VERIFY,
        ForwardMode.EXTEND,
    ]


def test_ragged_lengths_are_log_normal_in_every_phase():
    cases = cases_of("ragged")
    assert len({case.name for case in cases}) == len(cases) == 96
    assert {case.phase for case in cases} == {*FIXED}
    for phase in ("decode", "verify", "prefill", "extend", "fp8"):
        assert {case.head_dim for case in cases if case.phase == phase} == {64, 128, 256}
    for case in cases:
        lengths = sorted(case.seq_lens)
        assert lengths == sorted(dataclasses.replace(case).seq_lens), "the same at every run"
        assert max(case.queries or 1, 1) <= lengths[0]
        assert lengths[-1] <= 16 * case.length
        assert case.kv_bytes <= GRID_KV_BYTES
        if case.batch == 256:
            logs = [math.log(n / case.length) for n in lengths]
            assert abs(statistics.mean(logs)) < 0.3
            assert case.sigma * 0.75 < statistics.stdev(logs) < case.sigma * 1.25


def test_every_shape_is_read_from_every_store():
    cases = cases_of("stores")
    assert len({case.name for case in cases}) == len(cases)
    assert {case.mode for case in cases} == {
        ForwardMode.DECODE,
        ForwardMode.TARGET_VERIFY,
        ForwardMode.EXTEND,
    }
    assert {case.kind for case in cases} == {"mha", "mla"}
    for plain, fp8, fp4 in zip(cases[::3], cases[1::3], cases[2::3], strict=True):
        assert dataclasses.replace(fp4, kv_dtype=plain.kv_dtype) == plain
        assert (fp8.kv_bytes * 2, fp4.kv_bytes * 32) == (plain.kv_bytes, plain.kv_bytes * 9)
        assert not any(case.phase in peer.phases for peer in PEERS for case in (plain, fp8, fp4))
