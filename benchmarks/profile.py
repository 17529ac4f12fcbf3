"""Write what a plugin ships as measured profiles: `python -m benchmarks.profile`.

The points of a device are the timed shapes of its records of `benchmarks.attention`, and what
`attn tune --out benchmarks/results/tune.DEVICE.profile.json` measured there, and later what a draw
of `benchmarks.regret` was tuned with (DRAWS). A form of layers that was tuned has no points of
records, and one that a draw was tuned for none of before: both would not compare. A backend
that is right in some passes of a form is not listed as bad in it. `--check` fails if a file is
another.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence

from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form, Pass
from attn_core.costs.store import read_profile

from benchmarks.results import FOLDER, Measured, Report, load

PROFILES = pathlib.Path(__file__).parent.parent / "packages/attn-nvidia/src/attn_nvidia/profiles"
RECORDS = {  # of benchmarks.attention, by device
    "nvidia-h200": ("attention.nvidia-h200.grid.json", "attention.nvidia-h200.all.json"),
    "nvidia-h100-80gb-hbm3": (),
}
DRAWS = {"nvidia-h100-80gb-hbm3": "regret.nvidia-h100-80gb-hbm3.fifth.profile.json"}
SHIPPED = 8  # passes of a form and kind of pass, of a draw: every start of attn-core reads them
BACKENDS = ("fa3", "flashinfer", "triton")  # the others take too few of these shapes
VERSIONS = (
    "torch", "triton", "attn-core", "attn-nvidia", "sglang-kernel", "flashinfer-python",
)  # fmt: skip
DIGITS = 4  # of a tuned time
PHASES = {"prefill": "prefill", "extend": "prefill", "decode": "decode", "fp8": "decode"}


def size_of(case: Measured) -> Pass:
    """Return the size of a recorded case."""
    shape = case.shape
    verifies = case.phase == "verify"
    return Pass(
        phase="verify" if verifies else PHASES[case.phase],  # type: ignore[arg-type]  # its values
        requests=shape["batch"],
        kv_tokens=shape["kv_tokens"],
        longest=shape["length"],
        queries=shape["tokens"],
        drafts=shape["queries"] if verifies else 0,
        tree=shape["tree"],
    )


def form_of(case: Measured) -> Form:
    """Return the form of a recorded case."""
    shape = case.shape
    names = ("q_heads", "kv_heads", "head_dim", "v_head_dim", "page_size", "dtype")
    return Form(store=shape["kv_dtype"], **{name: shape[name] for name in names})


def costs(cases: Iterator[Measured]) -> Iterator[tuple[Key, Cost]]:
    """Yield every timed point; of a library's several kernels the fastest, which is its wrapper's.

    The records hold no time of the host.
    """
    for case in cases:
        if case.phase not in (*PHASES, "verify"):
            continue
        timed: dict[str, Cost] = {}
        for entry in (case.ours, *case.peers):
            name = entry.name.partition("-")[0]
            if not entry.counts or entry.us is None or name not in BACKENDS:
                continue
            low, high = (entry.us if x is None else x for x in (entry.p20, entry.p80))
            cost = Cost(entry.us, min(low, entry.us), max(high, entry.us), 0.0)
            timed[name] = min(cost, timed.get(name, cost))
        for name, cost in timed.items():
            yield Key(name, "", form_of(case), size_of(case)), cost


def tuned(device: str) -> Profile:
    """Return what `attn tune` measured on the device, if that is recorded."""
    paths = [FOLDER / f"tune.{device}.profile.json", FOLDER / DRAWS.get(device, "none")]
    own, draw = (read_profile(path) if path.exists() else Profile() for path in paths)
    return replaced(own, draw) if draw.costs else own


def shipped_environment(environment: Mapping[str, str | None]) -> dict[str, str]:
    """Return the part of an environment that a shipped profile names."""
    return {name: x for name in ("device", *VERSIONS) if (x := environment.get(name))}


def replaced(own: Profile, draw: Profile) -> Profile:
    """Return a draw's costs, and those of `own` for forms and kinds of pass that it lacks.

    A dispatcher picks passes of forms that were measured themselves, pages included.
    """
    before = Profile(environment=shipped_environment(own.environment))
    if differs := before.differences(shipped_environment(draw.environment)) if own.costs else []:
        raise SystemExit(f"a draw's costs are of another environment: {'; '.join(differs)}")

    def kind(key: Key) -> object:
        return key.form, key.size.phase, key.size.tree

    known = {kind(key) for key in draw.costs}
    series: dict[object, list[tuple[Form, Pass]]] = {}
    for one in sorted({key[2:] for key in draw.costs}, key=lambda x: zlib.crc32(repr(x).encode())):
        form, size = one
        series.setdefault((form, size.phase, size.drafts, size.tree), []).append(one)
    kept = {one for passes in series.values() for one in passes[:SHIPPED]}
    return Profile(
        environment=draw.environment,
        costs={
            **{key: cost for key, cost in own.costs.items() if kind(key) not in known},
            **{key: cost for key, cost in draw.costs.items() if key[2:] in kept},
        },
        bad={
            **{key: why for key, why in own.bad.items() if kind(key) not in known},
            **draw.bad,
        },
        date=max(own.date, draw.date),
    )


def profile(reports: Sequence[Report], own: Profile) -> Profile:
    """Return the profile of one device, from its records and from what was tuned there."""
    cases = {case.name: case for report in reports for case in report.cases}
    newest = max(reports, key=lambda report: report.date, default=None)
    named: Mapping[str, str | None] = own.environment
    if newest is not None:
        named = {**newest.versions, "device": newest.device}
    environment = shipped_environment(named)
    shared = {k: v for k, v in own.environment.items() if k in environment}
    if differs := Profile(environment=environment).differences(shared) if shared else []:
        raise SystemExit(f"what was tuned is of another environment: {'; '.join(differs)}")
    forms, right = {key.form for key in own.costs}, {key[:3] for key in own.costs}
    recorded = {k: c for k, c in costs(iter(cases.values())) if k.form not in forms}
    return Profile(
        environment=environment,
        costs={**recorded, **{key: rounded(cost) for key, cost in own.costs.items()}},
        bad={key: why for key, why in own.bad.items() if key[:3] not in right},
        date=max(own.date, newest.date if newest else ""),
    )


def rounded(cost: Cost) -> Cost:
    """Return a cost of few digits: every start of attn-core reads what ships."""
    measured = {name: x for name, x in cost._asdict().items() if x is not None}
    return Cost(**{name: float(f"{x:.{DIGITS}g}") for name, x in measured.items()})


def text_of(made: Profile) -> str:
    """Return what the file holds, one entry a line."""
    text = json.dumps(made.to_json(), separators=(",", ":"), sort_keys=True)
    return text.replace('{"backend"', '\n{"backend"') + "\n"


def shipped() -> Iterator[tuple[pathlib.Path, str]]:
    """Yield each profile that the records make: its path in attn-nvidia, and its text."""
    for device, names in RECORDS.items():
        made = profile([load(FOLDER / name) for name in names], tuned(device))
        if made.costs:
            yield PROFILES / f"{device}.json", text_of(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    same = True
    for path, text in shipped():
        if args.check:
            equal = path.exists() and path.read_text() == text
            print(f"{path.name} is {'what' if equal else 'not what'} the records say")
            same = same and equal
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"wrote {path}: {text.count(chr(10))} lines")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
