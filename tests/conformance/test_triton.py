"""triton against the suite: on a GPU every check, in Triton's interpreter a covering selection."""

from dataclasses import replace

import pytest
import torch
from attn_core.device import parse_device
from attn_core.plugins import load_plugins
from attn_core.testing import BackendSuite
from attn_core.testing.plan import plan
from attn_core.testing.pools import ORDERS
from attn_core.testing.runner import run_check
from pairwise import covering, pairs

pytest.importorskip("triton")

SPEC = load_plugins().get("triton")
# A row that is deterministic is always run so, and cuts the keys in another way then.
FREE = replace(SPEC, capabilities=[replace(r, deterministic=False) for r in SPEC.capabilities])


def factors(check):
    """Return what a check asks of the kernels, one value of each factor."""
    needs, spec = check.needs, check.needs.speculation
    layer = needs.vision or needs.layers[0]
    phases = "-".join(phase.value for phase in check.phases)
    return {
        "kind": layer.kind,
        "mode": phases if spec is None else "chain" if spec.topk == 1 else "tree",
        "dtype": needs.dtype,
        "store": needs.kv_cache_dtype,
        "page": needs.page_size,
        "layout": check.layout,
        "order": next((order for order in ORDERS if order in check.id.split("-")), None),
        "dims": (layer.head_dim, layer.v_head_dim),
        "heads": (layer.num_q_heads, layer.num_kv_heads),
        "window": layer.sliding_window is not None,
        "cap": layer.logit_cap is not None,
        "sinks": layer.sinks,
        "cross": layer.cross,
        "encoder": layer.encoder,
    }


def interpreted():
    """Yield every check, both ways of cutting the keys; those left out by pairs marked `long`."""
    device, libraries = parse_device("cuda:sm90"), {"triton": "3.4"}
    asked = [
        (spec, planned)
        for spec in (SPEC, FREE)
        for planned in plan(spec, device, libraries, passes=12)
        if planned.row is not None
    ]
    shown = [
        {*pairs(factors(p.check) | {"fixed": p.row.deterministic}), (p.kind, p.check.feature)}
        for _, p in asked
    ]
    chosen = set(covering(shown))
    for i, (spec, planned) in enumerate(asked):
        fixed = "-fixed" if planned.row.deterministic else ""
        marks = [] if i in chosen else [pytest.mark.long]
        yield pytest.param(
            spec, planned, id=f"{planned.kind}-{planned.check.id}{fixed}", marks=marks
        )


if torch.cuda.is_available():

    class TestTriton(BackendSuite):
        name = "triton"

else:

    @pytest.mark.parametrize(("spec", "planned"), [*interpreted()])
    def test_declared_in_the_interpreter(spec, planned):
        run_check(planned, spec, torch.device("cpu"))
