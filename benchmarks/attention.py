"""Measure our backends and every installed peer side by side: `python -m benchmarks.attention`."""

from __future__ import annotations

import argparse
import datetime
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import torch
from attn_core.errors import AttnError
from attn_core.formatting import near
from attn_core.plugins.registry import load_plugins

from benchmarks.cases import Case
from benchmarks.compiling import Field, compile_kernels
from benchmarks.contestant import Contestant, installed_version
from benchmarks.ours import our_backend
from benchmarks.peers import PEERS
from benchmarks.peers.sharing import SHARING
from benchmarks.regret_tune import part_of
from benchmarks.results import FOLDER, Entry, Report, command_of, default_path, load
from benchmarks.runner import DeviceLost, measure_all
from benchmarks.suites import PHASES, SHARED, cases_of
from benchmarks.timing import NARROW, measure_ceilings, timer_for

ROOT = pathlib.Path(__file__).parent.parent


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description="Measure one of our attention backends and every installed peer side by side.",
    )
    add = parser.add_argument
    add("--phase", choices=PHASES, default="all", help="all: every phase but the grids")
    add(
        "--peers",
        default="all",
        help="names with commas, none, or all that are installed",
    )
    add("--ours", help="our backend (default: triton on a GPU, torch_native on a CPU)")
    add("--device", default="cuda", help="a torch device; a CPU is timed by the host's clock")
    add("--out", type=pathlib.Path, help="the JSON (default: benchmarks/results/attention.….json)")
    add("--cases", default="", help="only cases whose name matches this pattern; needs --out")
    add("--graph", action="store_true", help="also replay each call from a CUDA graph")
    add("--clean", action="store_true", help="an L2 of lines that were read; needs --out")
    add("--compile", action="store_true", help="call everyone once, untimed, in parallel, and end")
    add("--resume", action="store_true", help="time what the file lacks, and what spread")
    add("--part", type=part_of, default=(1, 1), metavar="I/N", help="of N that write one file")
    add("--prepare-limit", type=float, metavar="SECONDS", help="of one contestant (default: none)")
    return parser.parse_args(arguments)


def offered(suite: str) -> tuple[Contestant, ...]:
    """Return the peers of a suite: those that are told of groups where requests share."""
    return (*SHARING, *PEERS) if suite == SHARED else PEERS


def chosen_peers(names: str, suite: str = "all") -> tuple[Contestant, ...]:
    """Return the peers of --peers; all: the installed. Raises SystemExit for an unknown name."""
    peers = offered(suite)
    if names in ("all", "none"):
        return tuple(p for p in peers if p.available()) if names == "all" else ()
    known = {p.name: p for p in peers}
    for name in names.split(","):
        if name not in known:
            raise SystemExit(f"--peers {name}: {near(name, known)}")
    return tuple(known[name] for name in names.split(","))


def peers_of(case: Case, peers: Sequence[Contestant]) -> list[Contestant]:
    """Return the peers that have the phase of a case."""
    return [p for p in peers if case.phase in p.phases]


def target(args: argparse.Namespace, device: str) -> pathlib.Path:
    """Return the file to write. Raises SystemExit where a part of a run would become a record.

    A record says who is the best of all peers: a run beside some of them goes elsewhere.
    """
    path: pathlib.Path = args.out or default_path(device, args.phase)
    full = {"cases": "", "peers": "all", "prepare_limit": None, "clean": False}
    partial = [f"--{n.replace('_', '-')}" for n, all_ in full.items() if vars(args)[n] != all_]
    if partial and path.resolve().parent == FOLDER.resolve():
        raise SystemExit(
            f"{' and '.join(partial)}: a record in {FOLDER} has all cases and all installed peers; "
            "name a file elsewhere with --out"
        )
    return path


def versions(distributions: Iterable[str]) -> dict[str, str | None]:
    """Return the versions of these, of what they run on, and this checkout's commit."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if commit and _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"):
        commit += " and changes"
    versions: dict[str, str | None] = {
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        versions["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
        )
    for distribution in ("triton", *distributions):
        versions.setdefault(distribution, installed_version(distribution))
    return versions


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def settled(report: Report) -> Report:
    """Return a report without the cases in which something disturbed a measurement."""

    def narrow(entry: Entry) -> bool:
        return entry.p20 is None or entry.p80 is None or entry.p80 <= NARROW * entry.p20

    cases = tuple(m for m in report.cases if all(map(narrow, (m.ours, *m.peers))))
    return replace(report, cases=cases)


def resumed(report: Report, earlier: Report) -> Report:
    """Return what goes on with an earlier report; its cases say of which commit they are.

    Raises SystemExit where it is of another kind.
    """

    def of(each: Report) -> tuple[object, ...]:
        libraries = {k: v for k, v in each.versions.items() if k not in ("commit", "driver")}
        return each.suite, each.device, libraries

    if of(earlier) != of(report):
        raise SystemExit("--resume: the file is of another suite, device or libraries: time anew")
    commit, cases = earlier.versions.get("commit"), earlier.cases
    if commit != report.versions.get("commit"):
        cases = tuple(replace(m, commit=m.commit or commit) for m in cases)
    return replace(report, cases=cases, notes=earlier.notes)


def contestants_of(suite: str, name: str, device: str, names: str) -> tuple[Contestant, ...]:
    """Return our backend and then the peers. Raises AttnError, and SystemExit as chosen_peers."""
    peers, registry, on = chosen_peers(names, suite), load_plugins(), torch.device(device)
    ours = our_backend(name, registry, on, shared_prefix=suite == SHARED)
    if suite == SHARED:  # every request on its own, too
        alone = our_backend(name, registry, on)
        peers = (replace(alone, name=f"{name}-alone"), *peers)
    return ours, *peers


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    args = parse(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; --device cpu measures small shapes on the CPU")
    cases = [c for c in cases_of(args.phase) if re.search(args.cases, c.name)]
    if not cases:
        raise SystemExit(f"no case of {args.phase} matches {args.cases!r}")
    own = args.ours or ("triton" if device.type == "cuda" else "torch_native")
    field = Field(contestants_of, (args.phase, own, args.device, args.peers))
    try:
        ours, *peers = field.make(*field.arguments)
    except AttnError as error:
        raise SystemExit(f"--ours: {error}") from None
    path, (part, parts) = target(args, device_name(device)), args.part
    names = [c.name for c in cases]
    earlier = load(path) if args.resume and path.exists() else None
    if earlier is not None:
        done = {m.name for m in settled(earlier).cases}
        if parts > 1:  # another part may have timed a disturbed case by the time this one writes
            earlier = settled(earlier)
        cases = [c for c in cases if c.name not in done]
    if not cases:
        print(f"{path} has all cases")
        return 0
    if args.compile:
        compile_kernels(cases, field, device, lambda line: print(line, flush=True))
        return 0
    beside = f" beside {', '.join(p.name for p in peers)}" if peers else ""
    print(f"{len(cases)} cases, {ours.name}{beside}", flush=True)  # where a run that is cut off was
    timer = timer_for(device, clean=args.clean)
    ceilings = measure_ceilings(timer, device)
    print(
        f"copy {ceilings.copy_gbs:.0f} GB/s, matmul {ceilings.matmul_tflops:.0f} TFLOP/s",
        flush=True,
    )
    report = Report(
        suite=args.phase,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=device_name(device),
        versions=versions(c.distribution for c in (ours, *peers)),
        ceilings=asdict(ceilings),
        command=command_of("benchmarks.attention", argv),
    )
    if args.peers == "all" and (missing := [p.name for p in offered(args.phase) if p not in peers]):
        report = replace(report, notes=(f"not installed: {', '.join(missing)}",))
        print(report.notes[0], flush=True)
    code = 0
    if earlier is not None:
        report = resumed(report, earlier)

    def keep() -> None:
        if parts == 1:
            places = {name: i for i, name in enumerate(names)}
            order = sorted(report.cases, key=lambda m: places.get(m.name, len(places)))
            replace(report, cases=tuple(order)).save(path)
        else:
            report.join(path, names)

    try:
        for measured in measure_all(
            cases[part - 1 :: parts],
            ours,
            lambda case: peers_of(case, peers),
            device=device,
            timer=timer,
            ceilings=ceilings,
            graph=args.graph,
            prepare_limit_s=args.prepare_limit,
            say=lambda line: print(line, flush=True),
        ):
            others = [m for m in report.cases if m.name != measured.name]
            report = replace(report, cases=(*others, measured))
            keep()  # what was measured survives whatever comes next
    except DeviceLost as lost:
        report = replace(report, notes=(*report.notes, str(lost)))
        keep()
        print(lost, file=sys.stderr)
        code = 1
    for ratio, measured in report.ranked[:5]:
        best = measured.best_peer
        print(f"{ratio:.3f} of {best.name if best else '-'}: {measured.name}")
    print(f"{len(report.cases)} cases in {path}")
    return code


if __name__ == "__main__":
    sys.exit(main())
