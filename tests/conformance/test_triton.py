"""triton against the suite: on a GPU every check, in Triton's interpreter a covering selection."""

from dataclasses import replace

import pytest
import torch
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.plan import plan
from attn_core.testing.pools import ORDERS
from attn_core.testing.runner import run_check
from pairwise import covering, pairs

pytest.importorskip("triton")

SPEC = load_plugins().get("triton")


def fixed(planned):
    """Ask a check of the deterministic mode too, which cuts the keys in another way."""
    needs = replace(planned.check.needs, deterministic=True)
    return replace(planned, check=replace(planned.check, needs=needs))


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
    """Yield every check, both ways of cutting the keys; those left out by pairs marked `long`.

    Not those in threads, which the interpreter does not bear: all launches share its state.
    """
    device, libraries = parse_device("cuda:sm90"), {"triton": "3.4"}
    planned = plan(SPEC, device, libraries, passes=12)
    rows = [p for p in planned if p.row is not None and p.check.feature != "threads"]
    requested = rows + [fixed(p) for p in rows if not p.check.needs.deterministic]
    shown = [
        {*pairs(factors(p.check) | {"fixed": p.check.needs.deterministic})}
        | {(p.kind, p.check.feature)}
        for p in requested
    ]
    chosen = set(covering(shown))
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
