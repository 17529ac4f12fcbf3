"""Write the support matrix as Markdown: the words of the documented one, marks by evidence."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from attn_core.plugins.evidence import LEVELS
from attn_core.tools.matrix import CELLS, Matrix

KINDS = {
    "mha": "MHA (standard attention)",
    "mla": "MLA (multi-head latent attention)",
    "dsa": "DSA (sparse MLA, NSA)",
    "gdn": "GDN (linear attention)",
    "kda": "KDA (linear attention)",
}
WORDS = {
    "page_sizes": "Native Page Sizes",
    "fp8_kv": "FP8 KV Cache",
    "fp4_kv": "FP4 KV Cache",
    "chunked_prefix_cache": "Chunked Prefix Cache",
    "spec_topk1": "Spec topk=1",
    "spec_topk_gt1": "Spec topk>1",
    "sliding_window": "Sliding Window",
    "multimodal": "MultiModal",
    "logit_cap": "Logit Cap",
    "sinks": "Attention Sinks",
    "cross_attention": "Cross Attention",
    "encoder": "Encoder",
    "lse": "LSE",
    "deterministic": "Deterministic",
    "shared_prefix": "Shared prefixes once",
    "cuda_graph": "CUDA Graph",
    "decode": "Decode",
    "prefill": "Prefill / Extend",
    "target_verify": "Spec Decoding (Target Verify)",
}
OURS = (
    "logit_cap",
    "sinks",
    "cross_attention",
    "encoder",
    "lse",
    "deterministic",
    "shared_prefix",
    "cuda_graph",
)
DOCUMENTED = tuple(c for c in WORDS if c not in OURS)  # the documented matrix has columns for these
MARKS = dict(zip(LEVELS, "○◔◑●", strict=True))
MEANT = {
    "declared": "there is no evidence yet",
    "emulated": "the suite passed with an emulation of the vendor's library",
    "compiled": "the kernels were compiled for the chip, but not run",
    "device-tested": "the suite passed on the hardware",
}
NO = "-"


def page(matrix: Matrix) -> str:
    """Write the reference page: every kind, every cell, and the reason for each deviation."""
    parts = [
        "---\nhide-toc: true\n---\n# Support matrix\n",
        "`python docs/generate.py` generates this page from the rows and evidence files of the "
        "installed packages.\nEach cell shows its strongest level of [evidence](evidence.md) over "
        "all devices of the backend:\n",
        legend(),
        "A `*` marks a difference from the matrix in SGLang's documentation; the reason is below "
        "the table. A backend that\nis *not implemented* can be selected for a simulated device, "
        "but 0.1 does not call its kernels.\n",
    ]
    for kind, backends in matrix.items():
        parts += [f"## {KINDS[kind]}\n", f":::{{container}} attn-matrix kind-{kind}\n"]
        parts += [table(matrix, kind, tuple(WORDS), styled=True), ":::\n"]
        reasons = [
            f"- \\* {name}, {WORDS.get(cell, cell.capitalize())}: {why}"
            for name, cells in backends.items()
            for cell, why in cells["matrix_deviations"].items()
        ]
        parts += ["\n".join(reasons) + "\n"] * bool(reasons)
    return "\n".join(parts)


def short(matrix: Matrix) -> str:
    """Write the README's part: the columns of the documented matrix."""
    parts = [f"### {KINDS[kind]}\n\n{table(matrix, kind, DOCUMENTED)}" for kind in matrix]
    return "\n".join(parts)


def legend() -> str:
    """Write what the marks mean, the strongest first."""
    lines = [f"- {mark(level, styled=True)} {level}: {MEANT[level]}" for level in reversed(LEVELS)]
    return "\n".join([*lines, f"- \\{NO} not declared, so it is refused"]) + "\n"


def table(matrix: Matrix, kind: str, columns: tuple[str, ...], *, styled: bool = False) -> str:
    """Write one kind as a Markdown table. styled: with the classes of docs/_static/attn.css."""
    has = ("page_sizes", *CELLS[kind])
    first = next(iter(matrix[kind].values()), {})
    shown = [c for c in columns if c in has and (c in first or not first)]
    rows = [["Backend", "Devices", *(WORDS[c] for c in shown)], ["---"] * (2 + len(shown))]
    for name, cells in matrix[kind].items():
        built = "" if cells["implemented"] else "<br>*not implemented*"
        listed = ["any"] if "any" in cells["devices"] else cells["devices"]
        devices = ", ".join(listed) + star(cells, "devices", styled=styled)
        line = [cell(cells, c, styled=styled) for c in shown]
        rows.append([f"**{name}**{built}{star(cells, 'backend', styled=styled)}", devices, *line])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def cell(cells: Mapping[str, Any], name: str, *, styled: bool) -> str:
    """Write one cell: its mark, its page sizes, and a star if it deviates."""
    value, level = cells[name], cells["evidence"].get(name, LEVELS[0])
    more = star(cells, name, styled=styled)
    if name == "page_sizes":
        return f"{mark(level, styled=styled)} {', '.join(map(str, value)) or 'any'}{more}"
    return (mark(level, styled=styled) if value else NO) + more


def mark(level: str, *, styled: bool) -> str:
    """Write the mark of a level of evidence."""
    if not styled:
        return MARKS[level]
    return f'<span class="mark {level}" title="{level}">{MARKS[level]}</span>'


def star(cells: Mapping[str, Any], name: str, *, styled: bool) -> str:
    """Write "*" if a cell deviates from the documented matrix, with the reason if styled."""
    why = cells["matrix_deviations"].get(name)
    if why is None:
        return ""
    return f'<span class="star" title="{html.escape(why)}">*</span>' if styled else "\\*"
