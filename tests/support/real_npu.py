"""Run in a process of its own: our backend over the real torch-npu, with CPU kernels behind it.

Prints the registered schemas of the operators that we call and the checks that passed, one a line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch_npu  # registers the operators
from attn_ascend import merge
from attn_core import merge_states
from attn_core.plugins.registry import load_plugins
from attn_core.spec.capabilities import BackendSpec
from attn_core.spec.device import parse_device
from attn_core.testing.plan import PlannedCheck, plan
from attn_core.testing.runner import run_check
from npu_indexed import Indexed
from npu_schemas import SCHEMAS, leaf_of
from wheels import VENDOR

CHECKS = (
    *("prefill-prefix-bf16", "decode-edges-fp16", "window-4-bf16", "sinks-bf16", "encoder-bf16"),
    *("mla-decode-bf16", "mla-ragged-bf16"),
    *("dsa-decode-bf16", "dsa-prefill-bf16"),
)
LINEAR = ("decode-bf16", "decode-fresh-bf16", "prefill-bf16")  # of triton, for GDN


def main() -> None:
    """Check that calls of the backend reach the real operators, and are right."""
    sys.path.append(str(VENDOR))  # for the leaf alone: torch_npu is imported already
    import npu_leaf

    kept = []
    for space, name in SCHEMAS:
        packet, _, overload = name.partition(".")
        print(getattr(getattr(getattr(torch.ops, space), packet), overload or "default")._schema)
        library = torch.library.Library(space, "IMPL")
        library.impl(name, getattr(npu_leaf, leaf_of(name)), "CPU")
        kept.append(library)
    spec, libraries = load_plugins().get("ascend"), {"torch-npu": torch_npu.__version__}
    result = plan(spec, parse_device("npu:910b"), libraries, passes=10)
    for wanted in CHECKS:
        run(result, wanted, spec)
    triton, libraries = load_plugins().get("triton", "linear"), {**libraries, "attn-ascend": "0.1"}
    result = plan(triton, parse_device("npu:910b"), libraries, passes=10)
    for wanted in LINEAR:
        run(result, wanted, triton)
    outs, lses = torch.randn(3, 5, 2, 16), torch.randn(3, 5, 2)
    merged = zip(merge.merge_states(outs, lses), merge_states(outs, lses), strict=True)
    assert all(torch.allclose(*pair, atol=1e-6) for pair in merged)
    print("passed", "the merge of states")
    Indexed("dsa-decode").check()
    print("passed", "the indexer's operator")


def run(found: Sequence[PlannedCheck], wanted: str, spec: BackendSpec) -> None:
    """Run the first check of this name that a row declares."""
    planned = next(p for p in found if p.row and p.check.id.startswith(wanted))
    run_check(planned, spec, torch.device("cpu"), arch="910b")
    print("passed", planned.check.id)


if __name__ == "__main__":
    main()
