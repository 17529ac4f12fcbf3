"""The tables of many-gpus.md: every case on several GPUs, and the logprobs between them."""

import json

from benchmarks.engines import record, table
from benchmarks.engines.configurations import CONFIGURATIONS, OURS

VERSIONS = {"sglang": "0.5.16", "vllm": "0.26.0"}


def row(backend, case, ms=None, **more):
    timed = {"ms": ms, "spread_ms": [ms - 1, ms + 1]} if ms is not None else {}
    return {"backend": backend, "case": case, "round": 1, "versions": VERSIONS, **timed, **more}


def cells(page, name, case):
    title = f"{table.NAMES[CONFIGURATIONS[name].engine]}, {CONFIGURATIONS[name].title}"
    found = [x.split(" | ") for x in page.splitlines() if x.startswith(f"| {title} | {case} |")]
    assert all(line[2] == f"`{name}`" for line in found)  # what benchmarks.engines.run takes
    return [[cell.strip("| ") for cell in line[3:]] for line in found]


def test_every_case_on_several_gpus_stays_in_the_table(tmp_path):
    rows = {
        "tp2": [row(OURS, "decode 1x1024", 4.0), row("fa3", "decode 1x1024", 5.0)],
        "tp4-fp8": [row(OURS, "decode 64x4096", 6.0)],
        "tp4-eagle": [row(OURS, "decode 16x4096", error="RuntimeError: no memory")],
        "vllm-tp2": [row("FLASH_ATTN", "decode 16x8192", 9.0)],
    }
    for name, found in rows.items():
        for each in found:
            path = tmp_path / record.file_name("Some GPU", name)
            record.merge(path, each, configuration=name, device="Some GPU")
    known = [*table.load_all(tmp_path), *table.load_all(tmp_path, "vllm")]
    page = table.over_gpus(known)
    assert cells(page, "tp2", "decode 1x1024") == [
        ["Some GPU", "4.00 (3.00 … 5.00)", "fa3 5.00 (4.00 … 6.00)", "1.25", "0.97"]
    ]
    unknown = ["-", "not run", "not run", "-"]
    assert cells(page, "tp2", "decode 16x4096") == [[*unknown, "0.98"]]
    assert cells(page, "tp4-fp8", "decode 64x4096") == [
        ["Some GPU", "6.00 (5.00 … 7.00)", "not run", "-", "1.25"]
    ]
    assert cells(page, "tp4-eagle", "decode 16x4096") == [
        ["Some GPU", "failed", "not run", "-", "1.11"]
    ]
    assert cells(page, "vllm-tp2", "decode 16x8192") == [
        ["Some GPU", "not run", "FLASH_ATTN 9.00 (8.00 … 10.00)", "-", "0.98"]
    ]
    split = [c for c in CONFIGURATIONS.values() if c.gpus > 1]
    assert page.count("| decode ") == sum(len(c.cases) for c in split)


def test_logprobs_have_the_flags_the_device_and_the_day(tmp_path):
    wrong = {"kind": "tp", "arguments": {"tp_size": 2}, "peer_backend": "fa3", "wrong": ["died"]}
    whole = {
        "kind": "dp",
        "arguments": {"tp_size": 2, "enable_dp_attention": True},
        "peer_backend": "fa3",
        "ours": {"mean": 0.01234, "worst": 0.07, "compared": 3500},
        "peer": {"mean": 0.02, "worst": 0.1, "compared": 3600},
        "date": "2026-01-02",
    }
    path = tmp_path / "sglang-parallel.some-gpu.json"
    path.write_text(json.dumps({"device": "Some GPU", "rows": [wrong, whole]}))
    lines = table.logprobs(tmp_path).strip().splitlines()
    assert lines[2:] == [
        "| SGLang | `--tp-size 2 --enable-dp-attention` | Some GPU | 2026-01-02 | 0.0123 (0.07) "
        "| fa3 0.0200 (0.10) | 3500 |"
    ]
