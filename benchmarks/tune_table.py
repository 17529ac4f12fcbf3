"""What `attn tune` took for models, as Markdown, from the records of benchmarks.tune_model."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from benchmarks.results import FOLDER

_HEAD = """
## {device}: what `attn tune` takes for a model

{versions}. Recorded in `{file}` by `python -m
benchmarks.tune_model`, first with `--compile` and then without: compiling before, what was left to
compile, and measuring with its plans and checks, which --minutes bounds. In how many passes of two
backends or more the fastest is certain: quartiles do not overlap, or medians are within 1 %.

"""
_ROWS = ("model", "passes", "points", "compiling before", "left", "measuring", "bound", "certain")


def tune_sections(folder: pathlib.Path = FOLDER) -> str:
    """Write all records of tuning, a section each; "" where there is none."""
    paths = sorted({*folder.glob("tune.*.json")} - {*folder.glob("tune.*.profile.json")})
    return "".join(section(path.name, json.loads(path.read_text())) for path in paths)


def section(file: str, record: dict[str, Any]) -> str:
    """Write the table of one record; models that were only compiled have no row."""
    done = {name: x for name, x in record.items() if "measure_s" in x}
    if not done:
        return ""
    env = next(iter(done.values()))["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in env.items() if k != "device")
    lines = ["| " + " | ".join(_ROWS) + " |", "|" + " --- |" + " ---: |" * (len(_ROWS) - 1)]
    for name, x in done.items():
        before = x.get("compiled_before", {}).get("compile_s")
        cells = [
            name,
            f"{x['passes']['measured']} of {x['passes']['listed']}",
            str(x["points"]),
            "-" if before is None else f"{before:.0f} s",
            f"{x['compile_s']:.0f} s",
            f"{x['measure_s']:.0f} s",
            f"{60 * x['minutes']:.0f} s",
            f"{x['fastest']['certain']} of {x['fastest']['passes']}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    head = _HEAD.format(device=env.get("device", "CPU"), versions=versions, file=file)
    return head + "\n".join(lines) + "\n"
