"""Write evidence of level "compiled": the cells whose every site compiles for a chip."""

import importlib.util
import pathlib

from attn_core.testing.evidence import write_evidence
from attn_core.testing.runner import CellReport


def cells_of(lines):
    """Sum sites up per kind and cell; one that does not compile leaves all its cells unproved.

    lines: what build_kernels.py or build_fa4.py prints of each site, with its "faults".
    """
    result = {}
    for line in lines:
        if "not_declared" not in line:
            for cell in line["cells"]:
                result.setdefault(line["kind"], {}).setdefault(cell, []).append(line["faults"])
    return {
        kind: {cell: _report(faults) for cell, faults in cells.items()}
        for kind, cells in result.items()
    }


def _report(faults):
    return CellReport(
        declared=True,
        cases=len(faults),
        failed=sum(map(bool, faults)),
        worst=0.0,
        budget=0.0,
        skipped={},
        problem="; ".join(fault for result in faults for fault in result),
    )


def write(chip, lines, compilers=(), folder=None):
    """Write one file per kind into the package of the chip's backend, or a folder."""
    if folder is None:
        row = next(row for row in chip.spec.capabilities if chip.spec.creator(row))
        package = importlib.util.find_spec(chip.spec.creator(row).partition(".")[0])
        folder = pathlib.Path(package.origin).parent / "evidence"
    return write_evidence(
        folder, chip.spec, chip.device, cells_of(lines), level="compiled", compilers=compilers
    )
