"""Write evidence of level "emulated": `python tests/emulators/evidence.py [NAME ...]`.

Runs the suites of this folder, all or those of the named backends, and writes one file per
backend, kind and device into the evidence/ folder of the backend's package.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
import unittest
from collections.abc import Sequence

import pytest
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device
from attn_core.testing import BackendSuite
from attn_core.testing.evidence import write_evidence
from attn_core.testing.runner import Outcome, problems, report

HERE = pathlib.Path(__file__).parent


class Recorder:
    """A pytest plugin: runs the checks of some backends' suites alone, and keeps what came out.

    outcomes: suite → its outcomes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.outcomes = names, {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the checks of the suites; each notes what becomes of it."""
        items[:] = [item for item in items if self._is_check(item)]
        for item in items:
            ask = item.callspec.params["ask"]
            seen = self.outcomes.setdefault(item.cls, [])
            planned = ask.args[0]
            if planned.row is None:
                seen.append(Outcome(planned=planned, status="skipped", detail=planned.reason))
            else:
                item.callspec.params["ask"] = lambda a=ask, s=seen: _noted(a, s)

    def _is_check(self, item: pytest.Item) -> bool:
        suite = getattr(item, "cls", None)
        if suite is None or not issubclass(suite, BackendSuite):
            return False
        return "ask" in item.callspec.params and (not self.names or suite.name in self.names)


def _noted(ask, seen: list[Outcome]):
    try:
        measure = ask()
    except unittest.SkipTest as reason:  # far-pages ask for an accelerator's memory
        seen.append(Outcome(planned=ask.args[0], status="skipped", detail=str(reason)))
        raise
    except Exception as error:
        seen.append(Outcome(planned=ask.args[0], status="failed", detail=str(error)))
        raise
    seen.append(Outcome(planned=ask.args[0], status="passed", measure=measure))
    return measure


def main(arguments: Sequence[str] | None = None, tests: pathlib.Path = HERE) -> int:
    """Run the suites; return 1 where a declared cell is not proved, or nothing was run."""
    parser = argparse.ArgumentParser(prog="evidence.py", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="backends (default: all)")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the files (default: theirs)")
    args = parser.parse_args(arguments)
    recorder = Recorder(args.names)
    how = ["--import-mode=importlib", "--continue-on-collection-errors", "--tb=short"]
    pytest.main([str(tests), "-p", "no:cacheprovider", *how], plugins=[recorder])
    sys.path.insert(0, str(HERE / "vendor"))  # where the emulated libraries say their versions
    try:
        code = _write(recorder, args.out)
    finally:
        sys.path.remove(str(HERE / "vendor"))
    if not recorder.outcomes:
        print(f"no suite of {', '.join(args.names) or 'any backend'} in {tests}", file=sys.stderr)
    return code


def _folder(family: str, name: str) -> pathlib.Path:
    """Return the evidence/ folder of the package that declares a backend."""
    package = load_plugins().origins[family, name].module.partition(".")[0]
    module = importlib.import_module(package)
    return pathlib.Path(module.__file__).parent / "evidence"


def _write(recorder: Recorder, folder: pathlib.Path | None) -> int:
    """Sum the suites up per family, backend and device; a backend may have one per library."""
    together: dict[tuple[str, str, str], list[type]] = {}
    for suite in recorder.outcomes:
        together.setdefault((suite.family, suite.name, suite.device), []).append(suite)
    code = 0 if together else 1
    for (family, name, place), result in together.items():
        spec, device = result[0].spec(), parse_device(place)
        libraries = {}
        for suite in result:
            libraries |= suite.libraries or load_plugins().installed_libraries()
        done = [outcome for suite in result for outcome in recorder.outcomes[suite]]
        cells = report(done, spec, device, libraries)
        into = folder or _folder(family, name)
        for path in write_evidence(into, spec, device, cells, level="emulated"):
            print(f"wrote {path}")
        for problem in problems(cells):
            code = 1
            print(f"{name} on {device}: {problem}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
