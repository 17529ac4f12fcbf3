"""Units of work that a tile counts beside its keys: `python -m benchmarks.shared_sweep`.

Shared prefixes with none and with one, beside every request alone; each result is checked. What was
faster goes into sharing_of by hand, and `python -m benchmarks.attention --phase shared` measures it
beside the peers.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from typing import NamedTuple
from unittest import mock

import torch
from attn_core.backends.triton import scheduler
from attn_core.backends.triton.shared import Sharing, sharing_of
from attn_core.backends.triton.tuning import Launch
from attn_core.costs.shared_prefix import SHARED_TILE_ROWS
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.layer import LayerGroup

from benchmarks.cases import Inputs, build
from benchmarks.contestant import Call
from benchmarks.ours import our_backend
from benchmarks.runner import tolerance
from benchmarks.suites import SHARED, cases_of
from benchmarks.timing import timer_for


class Form(NamedTuple):
    """Rows of a tile of a group, and units that a tile counts beside its keys; no rows: alone."""

    rows: int
    units: int = 0

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.units} units" if self.rows else "alone"

    def prepared(self, inputs: Inputs) -> Call:
        """Return the call of this form, whose plan is made."""

        def sharing(
            group: LayerGroup, queries: int, page: int, store_bytes: int, launch: Launch
        ) -> Sharing | None:
            result = sharing_of(group, queries, page, store_bytes, launch)
            return None if result is None else result._replace(tile_units=self.units)

        with mock.patch.object(scheduler, "sharing_of", sharing):
            ours = our_backend(
                "triton", load_plugins(), inputs.q.device, shared_prefix=self.rows > 0
            )
            return ours.prepare(inputs)


FORMS = (Form(0), *(Form(SHARED_TILE_ROWS, units) for units in (0, 1, 2, 3, 4, 5, 6, 8)))


@torch.no_grad()
def main() -> None:
    """Time the forms of each case one by one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=" p64", help="a pattern of the cases' names")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures as JSON")
    args = parser.parse_args()
    timer, result = timer_for(torch.device("cuda")), []
    print(torch.cuda.get_device_name())
    for case in (case for case in cases_of(SHARED) if re.search(args.only, case.name)):
        inputs, line = build(case, "cuda"), []
        for form in FORMS:
            call = form.prepared(inputs)
            error = inputs.error(torch.as_tensor(call()))
            us = timer.measure(call).us
            line.append(f"{form}: {us:.1f}" + ("" if error < tolerance(case) else " WRONG"))
            result.append({"case": case.name, **form._asdict(), "us": us, "rel_err": error})
        print(f"{case.name}\n  " + " | ".join(line), flush=True)
        if args.out:  # after each case: what is measured survives a time limit
            args.out.write_text(json.dumps(result, indent=1))
        del inputs, call


if __name__ == "__main__":
    main()
