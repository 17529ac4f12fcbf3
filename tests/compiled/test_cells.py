"""Sites prove the cells whose kernels they launch: all that are declared, and no others."""

import json

import pytest

pytest.importorskip("triton")

import build_fa4
import compiled_evidence
import launch_sites
from attn_core.errors import UnsupportedError
from attn_core.spec.kinds import SERVING
from attn_core.testing.plan import usable_rows
from attn_core.testing.runner import OF_TOWERS
from attn_core.tools.matrix import CELLS
from launch_site import NotDeclared
from launch_sites import SHARED

# What is no kernel of its own: a graph captures the same launches; fa4 never splits keys, and reads
# an FP4 cache in 16 bits.
NONE = {"triton": {"cuda_graph"}, "fa4": {"cuda_graph", "deterministic", "fp4_kv"}}
CHIPS = [
    *(
        pytest.param(launch_sites.chip(arch, x), launch_sites.SITES, id=f"triton-{x}-{arch}")
        for arch in SHARED
        for x in ("softmax", "linear")
    ),
    *(
        pytest.param(build_fa4.chip(arch), build_fa4.SITES, id=f"fa4-{arch}")
        for arch in build_fa4.CHIPS
    ),
]


def cells(chip, launches, kind):
    """Return the cells of the sites that some row declares."""
    result = set()
    for site in launches.values():
        if getattr(site, "kind", None) == kind:
            try:
                site.row(chip)
            except (NotDeclared, UnsupportedError):
                continue
            result |= site.cells
    return result


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(("chip", "launches"), CHIPS)
def test_every_declared_cell_has_a_site(chip, launches, kind):
    try:
        rows = usable_rows(chip.spec, kind, chip.device, chip.libraries)
    except UnsupportedError:  # of this kind nothing is declared for the chip
        rows = []
    serving = [row for row in rows if row.phases & SERVING]
    declared = {
        name
        for name, has in CELLS[kind].items()
        if any(map(has, rows if name in OF_TOWERS else serving))
    }
    if any(row.absorbed and row.family == "softmax" for row in serving):
        declared.add("page_sizes")
    assert cells(chip, launches, kind) == declared - NONE[chip.spec.name]


def test_a_site_that_does_not_compile_leaves_its_cells_unproved(tmp_path):
    def line(kind, *cells, **more):
        return {"kind": kind, "cells": list(cells), "faults": [], **more}

    lines = [
        line(None),
        line("mha", "page_sizes", "lse"),
        line("mha", "page_sizes", "sinks", faults=["spills 3 times"]),
        line("mha", "lse", "logit_cap"),
        line("mha", "fp8_kv", not_declared="kv_cache_dtype fp8_e4m3"),
        line("mla", "page_sizes"),
    ]
    chip = launch_sites.chip("gfx942")
    paths = compiled_evidence.write(chip, lines, ["triton"], tmp_path)
    assert [p.name for p in paths] == [
        "triton-mha-rocm-gfx942.compiled.json",
        "triton-mla-rocm-gfx942.compiled.json",
    ]
    written = json.loads(paths[0].read_text())
    assert written["cells"] == {
        "lse": {"level": "compiled", "cases": 2},
        "logit_cap": {"level": "compiled", "cases": 1},
    }
    assert written["device"] == "rocm:gfx942"
    assert written["versions"]["triton"] == chip.libraries["triton"]
