"""The support matrix, generated from the rows of a registry and its evidence files."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attn_core.plugins.evidence import LEVELS, levels
from attn_core.plugins.registry import Registry
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.kinds import SERVING, Phase

Cell = Callable[[Capabilities], bool]

SOFTMAX_CELLS: dict[str, Cell] = {
    "fp8_kv": lambda r: bool(r.kv_dtypes & {"fp8_e4m3", "fp8_e5m2"}),
    "fp4_kv": lambda r: "fp4_e2m1" in r.kv_dtypes,
    "spec_topk1": lambda r: r.max_verify_topk >= 1,
    "spec_topk_gt1": lambda r: r.max_verify_topk > 1,
    "sliding_window": lambda r: r.sliding_window,
    "multimodal": lambda r: Phase.ENCODE in r.phases,
    "logit_cap": lambda r: r.logit_cap,
    "sinks": lambda r: r.sinks,
    "cross_attention": lambda r: r.cross_attention,
    "encoder": lambda r: r.encoder,
    "lse": lambda r: r.lse,
    "deterministic": lambda r: r.deterministic,
    "shared_prefix": lambda r: r.shared_prefix,
    "cuda_graph": lambda r: r.cuda_graph != "never",
}
LATENT_CELLS: dict[str, Cell] = {
    "fp8_kv": SOFTMAX_CELLS["fp8_kv"],
    "fp4_kv": SOFTMAX_CELLS["fp4_kv"],
    "chunked_prefix_cache": lambda r: r.chunked_prefix,
    **{
        k: SOFTMAX_CELLS[k]
        for k in ("spec_topk1", "spec_topk_gt1", "lse", "deterministic", "shared_prefix")
    },
    "cuda_graph": SOFTMAX_CELLS["cuda_graph"],
}
LINEAR_CELLS: dict[str, Cell] = {
    "decode": lambda r: Phase.DECODE in r.phases,
    "prefill": lambda r: Phase.PREFILL in r.phases,
    "target_verify": lambda r: r.max_verify_topk >= 1,
}
CELLS: dict[str, dict[str, Cell]] = {
    "mha": SOFTMAX_CELLS,
    "mla": LATENT_CELLS,
    "dsa": LATENT_CELLS,
    "gdn": LINEAR_CELLS,
    "kda": LINEAR_CELLS,
}

Matrix = dict[str, dict[str, dict[str, Any]]]  # kind → backend → cell → value


def build_matrix(registry: Registry, kinds: Iterable[str] = tuple(CELLS)) -> Matrix:
    """Return kind → backend → cells; a cell is true if any row of the backend has it.

    page_sizes lists what the kernels take, [] = any. "evidence" says per cell how far it was
    proved, "matrix_deviations" why a cell differs from the documented matrix.
    A backend of linear layers has a line for each platform that it names, "triton (npu)", since
    these differ.
    """
    matrix: Matrix = {}
    for kind in kinds:
        matrix[kind] = {}
        for key, spec in registry.backends.items():
            rows = [r for r in spec.capabilities if r.kind == kind]
            for platform, part in _lines(rows).items():
                name = spec.name if platform is None else f"{spec.name} ({platform})"
                evidence = levels(registry.origins[key].module, spec.name, kind, platform=platform)
                matrix[kind][name] = _cells(spec, kind, part, evidence)
    return matrix


def _lines(rows: list[Capabilities]) -> dict[str | None, list[Capabilities]]:
    """Return the rows of each line of a table; the platform is None for a backend of one line."""
    platforms = sorted({r.device for r in rows})
    if not rows or rows[0].family == "softmax" or len(platforms) == 1 or "any" in platforms:
        return {None: rows} if rows else {}
    return {platform: [r for r in rows if r.device == platform] for platform in platforms}


def _cells(
    spec: BackendSpec, kind: str, rows: list[Capabilities], evidence: Mapping[str, str]
) -> dict[str, Any]:
    cells: dict[str, Any] = {"devices": sorted({r.device for r in rows})}
    serving = [r for r in rows if r.phases & SERVING]
    if rows[0].family == "softmax":
        any_size = not serving or any(not r.page_sizes for r in serving)
        sizes = {p for r in serving for p in r.page_sizes}
        cells["page_sizes"] = [] if any_size else sorted(sizes)
    for name, has in CELLS[kind].items():  # what a vision tower's row has is no answer for text
        cells[name] = any(has(r) for r in (rows if name == "multimodal" else serving))
    names = [c for c in cells if c != "devices"]
    cells["implemented"] = any(map(spec.creator, rows))
    cells["evidence"] = {c: evidence.get(c, LEVELS[0]) for c in names}
    prefix = f"{kind}."
    cells["matrix_deviations"] = {
        cell.removeprefix(prefix): why
        for cell, why in spec.matrix_deviations.items()
        if cell.startswith(prefix)
    }
    return cells


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "any"
    return str(value)


def _proved(cells: Mapping[str, Any]) -> list[str]:
    """List the levels of what is declared: nothing proves a cell that says no."""
    levels = {v for c, v in cells["evidence"].items() if c == "page_sizes" or cells[c]}
    return sorted(levels, key=LEVELS.index)


def table(matrix: Matrix, kind: str) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of one kind, as text; * marks a departure from the documented."""
    hidden = {"evidence", "matrix_deviations", "implemented"}
    first = next(iter(matrix[kind].values()), {})
    columns = [c for c in first if c not in hidden]
    rows = []
    for name, cells in matrix[kind].items():
        rows_shown = [
            _show(cells[c]) + ("*" if c in cells["matrix_deviations"] else "") for c in columns
        ]
        proved = _proved(cells)
        built = "" if cells["implemented"] else ", not implemented"
        rows.append([name, *rows_shown, " … ".join(proved) + built])
    return ["backend", *columns, "evidence"], rows


def summary(matrix: Matrix, kind: str) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of one kind for a terminal: what a backend has, in one cell."""
    rows = []
    for name, cells in matrix[kind].items():
        supported = [c + "*" * (c in cells["matrix_deviations"]) for c in CELLS[kind] if cells[c]]
        unsupported = [
            f"no {c}*" for c in CELLS[kind] if not cells[c] and c in cells["matrix_deviations"]
        ]
        proved = _proved(cells)
        pages = _show(cells.get("page_sizes", "-"))
        built = "yes" if cells["implemented"] else "no"
        row = [
            name,
            ", ".join(cells["devices"]),
            pages,
            " ".join([*supported, *unsupported]) or "-",
            built,
        ]
        rows.append([*row, " … ".join(proved)])
    return [
        "backend",
        "devices",
        "pages",
        "has (* differs from documented)",
        "built",
        "evidence",
    ], rows


def to_markdown(matrix: Matrix, *, notes: bool = True) -> str:
    """Write every kind as a Markdown table, with `notes` the reason of each departure below."""
    parts = []
    for kind in matrix:
        header, rows = table(matrix, kind)
        rows = [header, ["---"] * len(header), *rows]
        parts.append(f"### {kind}\n\n" + "\n".join(f"| {' | '.join(r)} |" for r in rows))
        reasons = [
            f"- \\* {name}, {cell}: {why}"
            for name, cells in matrix[kind].items()
            for cell, why in cells["matrix_deviations"].items()
        ]
        if notes and reasons:
            parts.append("\n".join(reasons))
    return "\n\n".join(parts) + "\n"


def to_html(matrix: Matrix) -> str:
    """Write every kind as an HTML table of a page that stands alone."""
    body = []
    for kind in matrix:
        header, texts = table(matrix, kind)
        head = "".join(f"<th>{html.escape(c)}</th>" for c in header)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>\n" for row in texts
        )
        body.append(f"<h2>{kind}</h2>\n<table>\n<tr>{head}</tr>\n{rows}</table>")
    style = "td, th {border: 1px solid #999; padding: .2em .5em} table {border-collapse: collapse}"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>attention support "
        f"matrix</title><style>{style}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )
