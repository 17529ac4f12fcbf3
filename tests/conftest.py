"""Make tests/support importable, run Triton in its interpreter where no GPU is, spare work."""

import gc
import os
import pathlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))

if not torch.cuda.is_available() and find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, and never again
    import interpreter

    interpreter.install()

import plugins_once
from representative import few, representative

plugins_once.install()

LISTED = {*(pathlib.Path(__file__).parent / "long.txt").read_text().splitlines()}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `long` what is listed, and what the suites ask beyond a representative part of checks.

    A module's first suite of a backend of our own kernels keeps each feature; others of it, for
    another chip or build, keep few, and so do those over emulated libraries.
    """
    suites: dict[type, list[pytest.Item]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if getattr(item, "originalname", "") != "test_declared" or "long" in marks:
            continue
        if "skip" in marks:  # no row declares it: skips.txt has these
            item.add_marker(pytest.mark.long)
        else:
            suites.setdefault(item.cls, []).append(item)
    seen = set()
    for suite, checks in suites.items():
        name = (checks[0].path, suite.name, suite.family)
        planned = [item.callspec.params["ask"].args[0] for item in checks]
        if name in seen or checks[0].path.parent.name == "emulators":
            chosen = few(planned)
        else:
            chosen = {*range(len(checks))} if suite.reduced else representative(planned)
        seen.add(name)
        for i, item in enumerate(checks):
            if i not in chosen:
                item.add_marker(pytest.mark.long)
    for item in items:
        if not LISTED.isdisjoint((item.nodeid, item.nodeid.partition("::")[0])):
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let the garbage collector pass over what lives as long as the run: some 10⁷ objects.

    Each gc.collect() took a second otherwise, and transformers' generate_batch() calls it, too.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _gradients() -> Iterator[None]:
    """Fail a test that leaves gradients off: those after it in this process would run without."""
    before = torch.is_grad_enabled()
    yield
    after = torch.is_grad_enabled()
    torch.set_grad_enabled(before)
    assert after == before, "the test leaves torch's gradients on or off"


@pytest.fixture(scope="module")
def no_printing() -> Iterator[None]:
    """Fail where a tensor is printed: a device's tensor is waited for, and a pass has no time.

    An error's text may be made before anybody knows that there is an error.
    """

    def refuse(self: torch.Tensor, *_: object, **__: object) -> str:
        raise AssertionError(f"a tensor of {tuple(self.shape)} was printed in a pass")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__repr__", refuse)
        patch.setattr(torch.Tensor, "__format__", refuse)
        yield
