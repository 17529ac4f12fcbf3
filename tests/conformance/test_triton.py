"""triton against the suite: on a GPU every check, in the interpreter a covering selection."""

from dataclasses import replace

import pytest
import torch
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.plan import plan
from attn_core.testing.runner import run_check
from representative import few

pytest.importorskip("triton")

SPEC = load_plugins().get("triton")


def fixed(planned):
    """Ask a check of the deterministic mode too, which cuts the keys in another way."""
    needs = replace(planned.check.needs, deterministic=True)
    return replace(planned, check=replace(planned.check, needs=needs))


def interpreted():
    """Yield every check, both ways of cutting the keys; most are marked `long`.

    Not those in threads, which the interpreter does not bear: all launches share its state.
    """
    device, libraries = parse_device("cuda:sm90"), {"triton": "3.4"}
    planned = plan(SPEC, device, libraries, passes=12)
    rows = [p for p in planned if p.row is not None and p.check.feature != "threads"]
    requested = rows + [fixed(p) for p in rows if not p.check.needs.deterministic]
    chosen = few(requested)
    for i, planned in enumerate(requested):
        mode = "-fixed" if planned.check.needs.deterministic else ""
        short = i in chosen and not planned.check.feature.endswith("-many")  # a launch a request
        short = short and not (mode and planned.kind == "dsa")  # four kernels a pass, seconds each
        marks = [] if short else [pytest.mark.long]
        yield pytest.param(planned, id=f"{planned.kind}-{planned.check.id}{mode}", marks=marks)


if torch.cuda.is_available():

    class TestTriton(BackendSuite):
        name = "triton"

else:

    @pytest.mark.parametrize("planned", [*interpreted()])
    def test_declared_in_the_interpreter(planned):
        run_check(planned, SPEC, torch.device("cpu"))
