"""Run in a process of its own: our backend over the real torch-npu, with CPU kernels behind it.

Prints the registered schemas of the operators that we call and the checks that passed, one a line.
"""

from __future__ import annotations

import sys

import torch
import torch_npu  # registers the operators
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from npu_schemas import SCHEMAS
from wheels import VENDOR

CHECKS = (
    *("prefill-prefix-bf16", "decode-edges-fp16", "window-4-bf16", "sinks-bf16", "encoder-bf16"),
    *("mla-decode-bf16", "mla-ragged-bf16"),
)


def main() -> None:
    """Check that calls of the backend reach the real operators, and are right."""
    sys.path.append(str(VENDOR))  # for the leaf alone: torch_npu is imported already
    import npu_leaf

    kept = []
    for space, name in SCHEMAS:
        print(getattr(getattr(torch.ops, space), name).default._schema)
        library = torch.library.Library(space, "IMPL")
        library.impl(name, getattr(npu_leaf, name), "CPU")
        kept.append(library)
    spec, libraries = load_plugins().get("ascend"), {"torch-npu": torch_npu.__version__}
    found = plan(spec, parse_device("npu:910b"), libraries, passes=10)
    for wanted in CHECKS:
        planned = next(p for p in found if p.row and p.check.id.startswith(wanted))
        run_check(planned, spec, torch.device("cpu"), arch="910b")
        print("passed", planned.check.id)


if __name__ == "__main__":
    main()
