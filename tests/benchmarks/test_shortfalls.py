"""The performance page names each case that takes longer than wanted, as it was measured last."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import pytest

from benchmarks import dual_chunk, layer_calls, shortfalls, suites
from benchmarks.results import Entry, Measured, Report
from benchmarks.shortfalls import CAUSES, limit_of, newest, shortfalls_section
from benchmarks.sparse_cases import CASES as SPARSE_CASES


def case(name: str, ours: float, peer: float, **shape: int) -> Measured:
    return Measured(
        name=name, phase=name.split()[0], shape=shape, kv_bytes=8, bytes=16, flops=32,
        floor_us=1.0, tolerance=1e-2, ours=Entry(name="triton", us=ours),
        peers=(Entry(name="fa3", us=peer),),
    )  # fmt: skip


def report(date: str, *cases: Measured, suite: str = "all") -> Report:
    ceilings = {"copy_gbs": 4000.0, "matmul_tflops": 800.0}
    return Report(
        suite=suite, date=date, device="A GPU", versions={}, ceilings=ceilings, cases=cases
    )


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    monkeypatch.setattr(shortfalls, "FOLDER", tmp_path)
    return tmp_path


def rows(page: str) -> list[str]:
    return [line for line in page.splitlines() if re.match(r"\| (?!case|---)", line)]


@pytest.mark.parametrize(
    ("name", "heads", "limit"),
    [
        ("mla B16", 16, 1.03),
        ("mla-verify B16", 16, 1.03),
        ("mla B16", 32, 1.05),
        ("prefill B1", 32, 1.02),
        ("extend B1", 32, 1.02),
        ("decode B1", 32, 1.01),
        ("verify B1", 32, 1.01),
        ("fp8 B1", 32, 1.01),
    ],
)
def test_what_is_wanted_of_a_case(
    name: str, heads: int, limit: float, folder: pathlib.Path
) -> None:
    """Just within the limit a case is not named, and just over it it is."""
    assert limit_of(case(name, 1.0, 1.0, q_heads=heads)) == limit
    for times, named in ((limit - 0.001, 0), (limit + 0.001, 1)):
        one = case(name, 1000 * times, 1000.0, q_heads=heads)
        page = shortfalls_section({"attention.g.all.json": report("2026-01-01", one)})
        assert len(rows(page)) == named, page


def test_a_case_counts_as_it_was_measured_last(folder: pathlib.Path) -> None:
    slow, fast = case("decode B1", 120.0, 100.0), case("decode B1", 90.0, 100.0)
    old, new = report("2026-01-01", slow), report("2026-01-02", fast)
    for files in ({"a": old, "b": new}, {"a": new, "b": old}):
        assert [m.ratio for _, m in newest(files)] == [0.9]
        assert "None does." in shortfalls_section(files)
    skipped = dataclasses.replace(fast, peers=(Entry(name="fa3", error="skipped: late"),))
    files = {"a": old, "b": report("2026-01-03", skipped)}
    assert [m.ratio for _, m in newest(files)] == [1.2], "the last one that has a ratio"
    assert "| decode B1 | 120 | 100 (fa3) | 1.200 | 1.01 |" in shortfalls_section(files)


def test_the_mean_of_log_normal_decode(folder: pathlib.Path) -> None:
    both = case("decode B1", 100.0, 100.0), case("decode B2", 96.0, 100.0)
    for cases, said in ((both, "is 0.980 (A GPU): met"), (both[:1], "is 1.000 (A GPU): **not")):
        files = {"a": report("2026-01-01", *cases, suite="ragged")}
        assert said in shortfalls_section(files)
    assert "which was not measured" in shortfalls_section({"a": report("2026-01-01", *both)})
    assert shortfalls_section({}) == ""


def written(folder: pathlib.Path, name: str, **record: object) -> dict[str, Report]:
    (folder / name).write_text(json.dumps({"device": "A GPU", "date": "2026-01-01"} | record))
    return {"a": report("2026-01-01")}


def test_chains_are_named_with_triton_and_with_the_fastest_of_ours(folder: pathlib.Path) -> None:
    times = {"triton_us": 130.0, "ours": "nsa", "ours_us": 112.0, "peer": "all", "peer_us": 100.0}
    parts = {"score": times, "chain bf16": times, "chain fp8_e4m3": times | {"ours_us": 105.0}}
    cases = [{"name": "decode 1x1 of 9", "parts": parts}]
    result = rows(shortfalls_section(written(folder, "sparse.g.json", cases=cases)))
    assert [row.split(" | ")[0] for row in result] == [
        "| triton: decode 1x1 of 9, chain fp8_e4m3",
        "| triton: decode 1x1 of 9, chain bf16",
        "| nsa: decode 1x1 of 9, chain bf16",
    ]
    assert "| 112 | 100 (all) | 1.120 | 1.1 |" in result[2]


def test_dual_chunk_attention_beside_plain_attention(folder: pathlib.Path) -> None:
    entries = [
        {"name": "fa3", "us": 100.0},
        {"name": "triton", "us": 104.0, "ratio": 1.04},
        {"name": "dual_chunk_flash_attn", "us": 106.0, "ratio": 1.06},
    ]
    cases = [{"name": "decode B1 L9", "entries": entries}]
    result = rows(shortfalls_section(written(folder, "dual_chunk.g.json", cases=cases)))
    assert len(result) == 1
    assert "dual_chunk_flash_attn: decode B1 L9 | 106 | 100 (fa3) | 1.060 | 1.05 |" in result[0]


@pytest.mark.parametrize(
    ("times", "said"), [(2.5, "2.50 times as fast (A GPU): met"), (1.9, "**not met**")]
)
def test_sparse_prompts(times: float, said: str, folder: pathlib.Path) -> None:
    cases = [{"name": "density 0.125", "times_as_fast": times}]
    assert said in shortfalls_section(written(folder, "vertical_slash.g.json", cases=cases))


def test_both_calls_of_a_sparse_layer_count_together_and_no_plan(folder: pathlib.Path) -> None:
    names = {"index_topk": 20.0, "attend": 15.0, "plan": 50.0, "plan and first layer": 90.0}
    calls = [{"name": f"dsa x: {name}", "us": us} for name, us in names.items()]
    calls += [{"name": "fa3 mla y", "us": 50.0}, {"name": "triton decode", "us": 30.0}]
    calls += [{"name": "gdn decode", "us": 31.0}, {"name": "kda decode", "us": 29.0}]
    files = written(folder, "layer_calls.g.json", calls=calls, limit_us=30.0)
    result = rows(shortfalls_section(files))
    assert [row.split(" | ")[:2] for row in result] == [
        ["| host, dsa x: index_topk and attend", "35.0"],
        ["| host, gdn decode", "31.0"],
    ]


def test_every_case_that_is_measured_has_a_cause_if_it_falls_short() -> None:
    cases = [c.name for phase in suites.PHASES for c in suites.cases_of(phase)]
    ours = ("triton", "nsa:fa3", "dual_chunk_flash_attn")
    cases += [f"{name}: {c.name}, chain bf16" for name in ours[:2] for c in SPARSE_CASES]
    cases += [f"{ours[i]}: {c.name}" for i in (0, 2) for c in dual_chunk.cases()]
    cases += [f"host, {layer_calls.MLA.name}"]
    used = {
        next(key for key, (pattern, _) in CAUSES.items() if re.search(pattern, name))
        for name in (*cases, "triton: decode, chain fp8_e4m3")
    }
    assert used >= set(CAUSES), "a cause that no case has"
